"""A browser without a window, which a test drives by the DevTools protocol over two pipes.

Take it with ``runpy.run_path``, as ``support.py``.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
LIMIT = 120.0  # seconds after which an answer is late


class Browser:
    """A browser with a profile of its own in ``folder``; a ``with`` block ends it."""

    def __init__(self, folder: Path) -> None:
        for name in ("commands", "answers"):
            os.mkfifo(folder / name)
        command = [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
            *(
                "--no-first-run",
                "--hide-scrollbars",
                f"--user-data-dir={folder / 'profile'}",
                "about:blank",
            ),
        ]
        # The browser reads commands from descriptor 3 and answers on 4.
        shell = ["sh", "-c", 'exec "$@" 3<commands 4>answers', "sh", *command]
        self._process = subprocess.Popen(shell, cwd=folder, stderr=subprocess.DEVNULL)
        self._commands = (folder / "commands").open("wb", buffering=0)
        self._answers = (folder / "answers").open("rb", buffering=0)
        self._received = b""
        self._ids = itertools.count()
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._commands.close()
        self._answers.close()

    def call(self, method: str, session: str | None = None, **given: Any) -> Any:
        """Call a method of the protocol; return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": given}
        if session is not None:
            message["sessionId"] = session
        self._commands.write(json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT
        while True:
            while b"\0" not in self._received:
                assert select.select([self._answers], [], [], end - time.monotonic())[0], method
                more = self._answers.read(1 << 16)
                assert more, "the browser has ended"
                self._received += more
            text, _, self._received = self._received.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, url: str, width: int = 1280) -> Tab:
        """Open a page."""
        return Tab(self, url, width)


class Tab:
    """A page that is open."""

    def __init__(self, browser: Browser, url: str, width: int) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def call(self, method: str, **given: Any) -> Any:
        """Call a method of the protocol on this page."""
        return self._browser.call(method, self._session, **given)

    def run(self, script: str) -> Any:
        """Return the value of an expression of the page; an exception is a failure."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true, and return it."""
        end = time.monotonic() + LIMIT
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"{script}\n{self.run('document.body?.innerText')}"
            time.sleep(0.02)
        return found

    def type(self, selector: str, text: str) -> None:
        """Replace what is in a field, as by a keyboard."""
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def enter(self) -> None:
        """Press Enter."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def complaints(self) -> list[Any]:
        """Return what the console has, but for answers of servers that are no 200."""
        mine = [each for each in self._browser.events if each.get("sessionId") == self._session]
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        found = [each["params"] for each in mine if each["method"] in kinds]
        return [each for each in found if each.get("entry", {}).get("source") != "network"]
