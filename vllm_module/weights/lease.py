from __future__ import annotations

import fcntl
import os
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
    A SIGURG is sent to this process when a writer waits.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._holders = 0  # the lease belongs to the open file, not to a thread
        self._closed = False
        self._held = -1  # a descriptor of the lease's own, while there is one

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Hold the lease for a few milliseconds; give whether there is one."""
        if sys.platform != "linux":
            yield False
            return
        with self._lock:
            held = self._is_held() if self._holders else not self._closed and self._take()
            self._holders += held
        try:
            yield held
        finally:
            with self._lock:
                self._holders -= held
                if held and not self._holders:
                    self._give_back()

    def close(self) -> None:
        """Give no lease from now on, for the descriptor is about to be closed."""
        with self._lock:
            self._closed = True

    def _take(self) -> bool:
        try:
            # Should the file be closed meanwhile, its number may soon be another file's.
            self._held = os.dup(self._descriptor)
        except OSError:
            return False
        try:
            # Who waits is announced by a signal. Unless told otherwise that is SIGIO, which ends
            # the process; SIGURG is ignored. Giving a lease back resets it.
            fcntl.fcntl(self._held, fcntl.F_SETSIG, signal.SIGURG)
            if fcntl.fcntl(self._held, fcntl.F_GETSIG) == signal.SIGURG:
                fcntl.fcntl(self._held, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                return True
        except OSError:
            pass
        os.close(self._held)
        return False

    def _give_back(self) -> None:
        with suppress(OSError):  # broken by the kernel, or the file is gone from its server
            fcntl.fcntl(self._held, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        with suppress(OSError):
            os.close(self._held)

    def _is_held(self) -> bool:
        """Whether nobody waits: else a new holder would keep them waiting, until it is broken."""
        with suppress(OSError):  # the file is gone from its server
            return fcntl.fcntl(self._held, fcntl.F_GETLEASE) == fcntl.F_RDLCK
        return False
