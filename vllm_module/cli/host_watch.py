"""A watch over the other hosts of a command: one that ends or falls silent is named on all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

from vllm_module.cli.output import error_text
from vllm_module.cli.streams import complain

BEAT = 1.0  # seconds
SILENCE = 30.0  # seconds after which a host that says nothing is given up
GRACE = 5.0  # seconds that ranks have to tell more than that another host has ended
TELL = 2.0  # seconds in which the others read what this host said last


class HostWatch:
    """Says in the store that this host is there, and looks whether the others are, in a thread.

    Torch's launcher ends a host's ranks if one of them fails, and knows nothing of other hosts:
    ranks that wait for one that has never joined would wait for half an hour.

    Args:
        store: where the hosts have met; host 0 serves it.
        number: of this host.
        others: names of the other hosts, by number.

    Attributes:
        found: the number of the host for which the ranks of this one were ended, or ``None``.

    """

    def __init__(self, store: Any, number: int, others: Mapping[int, str]) -> None:
        self.found: int | None = None
        self._store, self._number, self._others = store, number, others
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def end(self, code: int) -> None:
        """Stop watching, and tell the others that the command has ended here with this code."""
        self._stop.set()
        self._thread.join(BEAT)
        try:
            self._store.set(f"left {self._number}", str(code))
        except RuntimeError:  # host 0 has ended
            return
        if self._number == 0 and code:
            time.sleep(TELL)  # the store ends with this process

    def _run(self) -> None:
        seen = dict.fromkeys(self._others, (0, time.monotonic()))
        problem = None
        while problem is None and not self._stop.wait(BEAT):
            try:
                self._store.add(f"beat {self._number}", 1)
                for other in self._others:
                    problem = problem or self._look_at(other, seen)
            except RuntimeError:
                self.found, problem = 0, "has ended, or cannot be reached"
        if problem is None or self._stop.wait(GRACE):
            return
        assert self.found is not None
        complain(error_text(f"host {self.found} ({self._others[self.found]}) {problem}"))
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher ends the ranks

    def _look_at(self, other: int, seen: dict[int, tuple[int, float]]) -> str | None:
        """Return what is wrong with a host, ``None`` if nothing is."""
        now, problem = time.monotonic(), None
        if self._store.check([f"left {other}"]):
            if code := int(self._store.get(f"left {other}")):
                problem = f"has ended with code {code}: see what it printed"
        elif (beat := int(self._store.add(f"beat {other}", 0))) != seen[other][0]:
            seen[other] = beat, now
        elif now - seen[other][1] > SILENCE:
            problem = f"has said nothing for {SILENCE:g} s: it has ended or hangs, or its link does"
        self.found = other if problem else self.found
        return problem
