"""A watch over the other hosts of a command: one that ends or falls silent is named on all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from vllm_module.cli.output import error_text
from vllm_module.cli.streams import complain

BEAT = 1.0  # seconds
SILENCE = 30.0  # seconds after which a host that says nothing is given up
GRACE = 5.0  # seconds that ranks have to tell more than that another host has ended
_HOSTS_A_BEAT = 128  # of more hosts each asks less often: host 0 answers all
_CUT_OFF = (
    "this host does not reach its own store, in which the hosts meet (--master-addr): its link is "
    "down, or the process of the command hangs"
)
LINGER = 10.0  # seconds that ranks have to end, and for which host 0's store serves at the end


class HostWatch:
    """Says in the store that this host is there, and looks whether the others are, in threads.

    Torch's launcher ends a host's ranks if one of them fails, and knows nothing of other hosts:
    ranks that wait for one that has never joined would wait for half an hour.

    Args:
        store: where the hosts have met, each with a beat; host 0 serves it.
        number: of this host.
        others: names of the other hosts, by number.

    Attributes:
        found: what is wrong with another host, for which the ranks of this one were ended; ``""``
            if nothing is.
        ranks: function that returns the process ids of this host's ranks.

    """

    ranks: Callable[[], Iterable[int]] = tuple

    def __init__(self, store: Any, number: int, others: Mapping[int, str]) -> None:
        self.found = ""
        self._store, self._number, self._others = store, number, others
        self._stop = threading.Event()
        self._problem = ""
        self._answered = time.monotonic()  # when the store has last answered all requests
        self._threads = [
            threading.Thread(target=each, name="hosts", daemon=True)
            for each in (self._ask, self._judge)
        ]
        for thread in self._threads:
            thread.start()

    def end(self, code: int) -> None:
        """Stop watching, and tell the others that the command has ended here with this code.

        Host 0 waits until they have ended, too.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join(BEAT)
        telling = threading.Thread(target=self._tell, args=(code,), daemon=True)
        telling.start()
        telling.join(LINGER)  # a store whose process is stopped never answers

    def _tell(self, code: int) -> None:
        with suppress(RuntimeError):  # host 0 has ended
            self._store.set(beat_of(self._number), f"left {code}")
            while self._number == 0 and not all(each.startswith("left") for each in self._beats()):
                time.sleep(BEAT / 10)

    def _beats(self) -> list[str]:
        """Return what each other host has last said: a number that grows, or that it has left."""
        keys = [beat_of(other) for other in self._others]
        return [value.decode() for value in self._store.multi_get(keys)]

    def _ask(self) -> None:
        """Ask the store about the others; its requests have no limit of time."""
        seen = {other: ("", time.monotonic()) for other in self._others}
        interval = min(BEAT * max(1, len(seen) / _HOSTS_A_BEAT), SILENCE / 3)
        count = 0
        while not self._problem and not self._stop.wait(interval):
            count += 1
            try:
                self._store.set(beat_of(self._number), str(count))
                for other, beat in zip(self._others, self._beats(), strict=True):
                    self._problem = self._problem or self._problem_of(other, beat, seen)
            except RuntimeError:
                self._problem = f"{self._name(0)} has ended, or cannot be reached"
            self._answered = time.monotonic()

    def _judge(self) -> None:
        """End the ranks of this host if another one ends or falls silent."""
        while not self._stop.wait(BEAT):
            problem = self._problem
            if not problem and time.monotonic() - self._answered > SILENCE:
                problem = _silent(self._name(0)) if self._number else _CUT_OFF
            if not problem or self._stop.wait(GRACE):
                continue
            # All hosts, or this one alone, may have been stopped and go on.
            if self._problem or time.monotonic() - self._answered > SILENCE:
                self.found = problem
                complain(error_text(problem))
                os.kill(os.getpid(), signal.SIGTERM)  # the launcher ends the ranks
                if not self._stop.wait(LINGER):  # as if one of them is stopped
                    for pid in self.ranks():
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                    if not self._stop.wait(LINGER):  # it waits outside of Python, for a store
                        os._exit(1)
                return

    def _name(self, other: int) -> str:
        return f"host {other} ({self._others[other]})" if other in self._others else "this host"

    def _problem_of(self, other: int, beat: str, seen: dict[int, tuple[str, float]]) -> str:
        """Return what is wrong with a host, ``""`` if nothing is."""
        now, name = time.monotonic(), self._name(other)
        if beat.startswith("left"):
            code = int(beat.removeprefix("left"))
            return f"{name} has ended with code {code}: see what it printed" if code else ""
        if beat != seen[other][0]:
            seen[other] = beat, now
        elif now - seen[other][1] > SILENCE:
            return _silent(name)
        return ""


def beat_of(number: int) -> str:
    """Return the key under which a host says in the store that it is there."""
    return f"beat {number}"


def _silent(name: str) -> str:
    return f"{name} has said nothing for {SILENCE:g} s: it or its link has ended or hangs"
