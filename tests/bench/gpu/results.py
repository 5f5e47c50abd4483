"""The folder of a run: a file of lines for each part, and a summary."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Result = dict[str, Any]


class Results:
    """Keeps every result as soon as it is there, so that a run cut short still counts.

    Attributes:
        parts: the results of each part.
        failed: what was wrong; the run's exit status is 1 if there is any.
        unfinished: what there was no time for, or could not be done on this machine.

    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: dict[str, list[Result]] = {}
        self.failed: list[str] = []
        self.unfinished: list[str] = []
        self.facts: dict[str, Any] = {}
        # Checks report from several threads, and a signal may come inside.
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.jsonl"):
            old.unlink()

    def add(self, part: str, result: Result) -> None:
        """Keep a result: one line of the part's file, written at once."""
        with self._lock:
            self.parts.setdefault(part, []).append(result)
            with (self.folder / f"{part}.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")

    def rewrite(self, part: str, change: Callable[[Result], Result | None]) -> None:
        """Replace the results of a part by what ``change`` returns, without those of ``None``."""
        with self._lock:
            found = [change(each) for each in self.parts.get(part, [])]
            self.parts[part] = [each for each in found if each is not None]
            lines = "".join(json.dumps(each) + "\n" for each in self.parts[part])
            self._replace(f"{part}.jsonl", lines)

    def fail(self, what: str) -> None:
        """Keep and print what was wrong."""
        with self._lock:
            self.failed.append(what)
            print(f"FAILED {what[:400]}", flush=True)

    def leave(self, what: str) -> None:
        """Keep and print what was not done."""
        with self._lock:
            self.unfinished.append(what)
            print(f"not done: {what[:400]}", flush=True)

    def write_summary(self) -> None:
        """Write what is known so far; the file is replaced whole."""
        content = {**self.facts, "failed": self.failed, "unfinished": self.unfinished}
        self.write_json("summary.json", content)

    def write_json(self, name: str, content: object) -> None:
        """Write a file of JSON, which is replaced whole."""
        self._replace(name, json.dumps(content, indent=1, sort_keys=True) + "\n")

    def write_text(self, name: str, lines: Iterable[str]) -> None:
        """Write a file of lines, which is replaced whole."""
        self._replace(name, "".join(f"{line}\n" for line in lines))

    def _replace(self, name: str, content: str) -> None:
        partial = self.folder / f".{name}"
        partial.write_text(content)
        os.replace(partial, self.folder / name)
