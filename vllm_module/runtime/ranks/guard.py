"""A small process that kills others when this one ends, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

# The process reads process ids until its input closes, or until its parent changes: a fork of the
# parent may keep the input open. It holds a descriptor of each process, because the id of one that
# has ended may be another's later.
_SCRIPT = """
import os, select, signal, sys
parent, rest, held = int(sys.argv[1]), b"", []
while True:
    if select.select([0], [], [], 0.5)[0]:
        read = os.read(0, 4096)
        if not read:
            break
        *lines, rest = (rest + read).split(b"\\n")
        for line in lines:
            try:
                held.append((os.pidfd_open(int(line)), True))
            except ProcessLookupError:
                pass
            except OSError:  # not in this sandbox
                held.append((int(line), False))
    elif os.getppid() != parent:
        break
for number, is_descriptor in held:
    try:
        kill = signal.pidfd_send_signal if is_descriptor else os.kill
        kill(number, signal.SIGKILL)
    except OSError:
        pass
"""


class Guard:
    """Kills processes when this process ends, even if it is stopped or importing modules then."""

    def __init__(self) -> None:
        # A new session, so that a terminal's Ctrl-C does not reach it. Isolated and without site
        # packages, it starts in about 20 ms.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SCRIPT, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, pid: int) -> None:
        """Kill ``pid`` too when this process ends."""
        assert self._process.stdin is not None
        with suppress(OSError):  # the guard was ended from outside
            self._process.stdin.write(b"%d\n" % pid)
            self._process.stdin.flush()

    def end(self) -> None:
        """End the guard without killing anything."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
