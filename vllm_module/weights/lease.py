from __future__ import annotations

import fcntl
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ReadLease:
    """Holds off whoever wants to write to an open file, while threads touch a mapping of it.

    Touching a page that another program has just cut off a file is a SIGBUS, which ends the
    process. Under a lease (Linux, ``fcntl(2)``), that program waits until it is given back. There
    is none for a file of another user, on most network file systems, or while a writer is there.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._holders = 0  # the lease belongs to the open file, not to a thread

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Hold the lease for a few milliseconds; give whether there is one."""
        if sys.platform != "linux":
            yield False
            return
        with self._lock:
            held = self._is_held() if self._holders else self._take()
            self._holders += held
        try:
            yield held
        finally:
            with self._lock:
                self._holders -= held
                if held and not self._holders:
                    with suppress(OSError):  # closed meanwhile: it went with the file
                        fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def _take(self) -> bool:
        try:
            # Who waits is announced by a signal. Unless told otherwise that is SIGIO, which ends
            # the process; SIGURG is ignored. Giving a lease back resets it.
            fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)
            if fcntl.fcntl(self._descriptor, fcntl.F_GETSIG) != signal.SIGURG:
                return False
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            return False
        return True

    def _is_held(self) -> bool:
        """Whether nobody waits: else a new holder would keep them waiting, until it is broken."""
        return fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK
