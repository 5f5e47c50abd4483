"""A process that runs chat templates, with limits of time and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_module.base.messages import printable, shorten

SECONDS = 5.0  # limit for one request; a template takes milliseconds
NBYTES = 512 << 20  # bytes of the process's address space, of which Python takes about 60 MB
_MOST_TEXT = 1 << 20  # bytes of an answer beyond those of the variables; all are tokenized
_MOST_SHOWN = 300  # characters of a template's own error message

# The script's folder is not on the path, where its files would hide modules of other packages.
_RUN = """
import sys
script, sys.path[:] = sys.argv[1], sys.argv[4:]
sys.argv[1:] = sys.argv[2:4]
exec(compile(open(script, encoding="utf-8").read(), script, "exec"))
"""


class TemplateProcess:
    """Compiles and runs templates in another process, which starts with the first request.

    It ends with :meth:`close`, with this object, or with this process. Threads may share it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # id of the process that started it, which a fork differs from
        self._end: Callable[[], object] = lambda: None

    def names(self, template: str) -> set[str]:
        """Return the variables that ``template`` reads.

        Raises ``SyntaxError`` if it cannot be parsed.
        """
        return set(self._ask(template, None)["names"])

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Return the text of ``template``.

        Raises ``ValueError`` if the template refuses the variables, fails, or reaches a limit.
        """
        text: str = self._ask(template, variables)["text"]
        return text

    def close(self) -> None:
        """End the process; a later request starts another."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._end()
        self._process = None

    def _ask(self, template: str, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            values = json.dumps(variables, default=_plain, skipkeys=False)
            request = f'{{"template": {json.dumps(template)}, "variables": {values}}}'
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"messages and variables should be text, numbers, lists and "
                f"mappings with keys of text: {error}"
            ) from None
        most = _MOST_TEXT + len(values)
        with self._lock:
            if self._owner != os.getpid() or self._process is None:
                self._start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                # The process has ended, and its exit code is read below.
                with suppress(BrokenPipeError):
                    process.stdin.write(request.encode() + b"\n")
                    process.stdin.flush()
                line = process.stdout.readline(most)
                if not line.endswith(b"\n"):
                    reason = self._why_it_ended(process, len(line) >= most)
                    self._close()
                    raise ValueError(f"the chat template {reason}")
            except BaseException:  # an interrupt: the next request would read this one's answer
                self._close()
                raise
        return _checked(json.loads(line))

    def _start(self) -> None:
        self._close()
        script = Path(__file__).with_name("template_script.py")
        process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _RUN, str(script)),
                *(str(SECONDS), str(NBYTES), *filter(None, sys.path)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C does not reach a new session
            env={"LANG": "C.UTF-8"}
            | {name: os.environ[name] for name in _KEPT if name in os.environ},
        )
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _end, process, os.getpid())

    def _why_it_ended(self, process: subprocess.Popen[bytes], full: bool) -> str:
        if full:
            return f"writes more than {_MOST_TEXT >> 20} MiB of text besides the messages"
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = 0
        if code == -signal.SIGALRM:
            return f"runs longer than {SECONDS:g} s"
        return f"ended the process that runs it, with exit code {code}"


_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ")


def _end(process: subprocess.Popen[bytes], pid: int) -> None:
    if os.getpid() != pid:
        return  # the process belongs to the parent of a fork
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(OSError):
            stream.close()


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "unreadable" in answer:
        raise SyntaxError(_shown(answer["unreadable"]))
    if "memory" in answer:
        raise ValueError(f"the chat template needs more than {NBYTES >> 20} MiB of memory")
    if "refusal" in answer:
        why = _shown(answer["refusal"])
        raise ValueError(f"the chat template refuses the messages: {why}")
    if "failure" in answer:
        why = _shown(answer["failure"])
        raise ValueError(f"the chat template cannot format the messages: {why}")
    return answer


def _shown(text: str) -> str:
    """Return a message from outside as one line of about 300 characters at most."""
    lines = map(str.strip, text[:_MOST_SHOWN].splitlines())
    return " ".join(map(printable, lines)) + ("..." if len(text) > _MOST_SHOWN else "")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"got {shorten(value)}")
