"""The start and the end of the program: arguments, Ctrl-C and exit codes.

Only the standard library is imported here: Ctrl-C is handled while everything else is imported.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from vllm_module.cli.streams import (
    INTERRUPTED,
    PIPE_CLOSED,
    REFUSED,
    complain,
    discard,
    open_standard_streams,
    tell_output_errors,
)

_CLEANUP_SECONDS = 2
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    An error that the user can correct is one message on standard error. A bug here keeps its
    traceback. Without ``arguments`` this is the program, whose arguments are the process's: Ctrl-C
    ends the process, and the caller has to exit with the code.
    """
    if arguments is not None:
        try:
            return _run(list(arguments))
        except KeyboardInterrupt:
            complain("error: interrupted")
            return INTERRUPTED
    try:
        # A program that was started in the background of a script ignores Ctrl-C.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
            sys.unraisablehook = _on_unraisable
        for ends in (signal.SIGTERM, signal.SIGHUP):  # nohup has the second one ignored
            if signal.getsignal(ends) is signal.SIG_DFL:
                signal.signal(ends, _terminate)
        code = _run(sys.argv[1:])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything is printed, so it is too late
        signal.setitimer(signal.ITIMER_REAL, 0)  # chat ends at Ctrl-C with success
        return code
    except BaseException as error:
        # While a module is imported, the interrupt may become another exception on its way.
        if isinstance(error, KeyboardInterrupt) or _was_interrupted():
            with suppress(Exception):
                sys.stdout.flush()
            _end_at_once()
        raise


def _run(arguments: list[str]) -> int:
    if not open_standard_streams():
        complain("error: standard output is closed: open it, or redirect it to /dev/null")
        return REFUSED
    try:
        os.getcwd()
    except OSError as error:  # torch's libraries would end the process with a message of theirs
        complain(f"error: the current folder cannot be used: {error.strerror}; change to another")
        return REFUSED
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may have no ✓
            stream.reconfigure(errors="replace")
    try:
        tell_output_errors()
        from vllm_module.cli.app import run

        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # such as `| head`
        discard(sys.stdout, 1)
        return PIPE_CLOSED
    except OSError as error:  # such as a full disk
        complain(f"error: standard output cannot be written: {error.strerror}")
        discard(sys.stdout, 1)
        return REFUSED
    return code


def _interrupt(*_: object) -> None:
    """Raise ``KeyboardInterrupt``; end the process at the second Ctrl-C, or soon by itself."""
    signal.signal(signal.SIGINT, _end_at_once)
    signal.signal(signal.SIGALRM, _end_at_once)
    signal.setitimer(
        signal.ITIMER_REAL, _CLEANUP_SECONDS
    )  # a download, for example, waits for its threads
    raise KeyboardInterrupt


def _was_interrupted() -> bool:
    return signal.getsignal(signal.SIGINT) is _end_at_once


def _end_at_once(*_: object) -> None:
    """End the process without waiting for threads or cleaning up.

    Returning the exit code would not do: Python waits for threads, and kills itself by SIGINT if
    the ``KeyboardInterrupt`` went through ``exec``.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it would print a second line
    with suppress(OSError):
        os.write(2, (b"\n" + _SHOW_CURSOR if os.isatty(2) else b"") + b"error: interrupted\n")
    _remove_folders()
    os._exit(INTERRUPTED)


def _terminate(number: int, _: object) -> None:
    """End as the signal does, without the folders for temporary files."""
    _remove_folders()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _remove_folders() -> None:
    written = sys.modules.get("vllm_module.weights.written_folder")
    if remove := getattr(written, "remove_all", None):  # none while it is imported
        with suppress(Exception):
            remove()


def _on_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """End the process if Python drops a ``KeyboardInterrupt``, as it does in a callback."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _end_at_once()
    sys.__unraisablehook__(unraisable)
