"""A watch over the other hosts of a command: one that ends or falls silent is named on all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vllm_module.cli.output import error_text
from vllm_module.cli.streams import complain

BEAT = 1.0  # seconds
SILENCE = 30.0  # seconds after which a host that says nothing is given up
GRACE = 5.0  # seconds that ranks have to tell more than that another host has ended
LINGER = 10.0  # seconds that host 0 waits at the end for the others, which its store serves


class HostWatch:
    """Says in the store that this host is there, and looks whether the others are, in a thread.

    Torch's launcher ends a host's ranks if one of them fails, and knows nothing of other hosts:
    ranks that wait for one that has never joined would wait for half an hour.

    Args:
        store: where the hosts have met; host 0 serves it.
        number: of this host.
        others: names of the other hosts, by number.

    Attributes:
        found: what is wrong with another host, for which the ranks of this one were ended; ``""``
            if nothing is.

    """

    def __init__(self, store: Any, number: int, others: Mapping[int, str]) -> None:
        self.found = ""
        self._store, self._number, self._others = store, number, others
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def end(self, code: int) -> None:
        """Stop watching, and tell the others that the command has ended here with this code.

        Host 0 waits until they have ended, too.
        """
        self._stop.set()
        self._thread.join(BEAT)
        end = time.monotonic() + LINGER
        with suppress(RuntimeError):  # host 0 has ended
            self._store.set(f"left {self._number}", str(code))
            left = [f"left {other}" for other in self._others]
            while self._number == 0 and time.monotonic() < end and not self._store.check(left):
                time.sleep(BEAT / 10)

    def _run(self) -> None:
        seen = dict.fromkeys(self._others, (0, time.monotonic()))
        problem = ""
        while not problem and not self._stop.wait(BEAT):
            try:
                self._store.add(f"beat {self._number}", 1)
                for other in self._others:
                    problem = problem or self._look_at(other, seen)
            except RuntimeError:
                problem = f"host 0 ({self._others[0]}) has ended, or cannot be reached"
        if problem and not self._stop.wait(GRACE):
            self.found = problem
            complain(error_text(problem))
            os.kill(os.getpid(), signal.SIGTERM)  # the launcher ends the ranks

    def _look_at(self, other: int, seen: dict[int, tuple[int, float]]) -> str:
        """Return what is wrong with a host, ``""`` if nothing is."""
        now, name = time.monotonic(), f"host {other} ({self._others[other]})"
        if self._store.check([f"left {other}"]):
            code = int(self._store.get(f"left {other}"))
            return f"{name} has ended with code {code}: see what it printed" if code else ""
        if (beat := int(self._store.add(f"beat {other}", 0))) != seen[other][0]:
            seen[other] = beat, now
        elif now - seen[other][1] > SILENCE:
            return f"{name} has said nothing for {SILENCE:g} s: it or its link has ended or hangs"
        return ""
