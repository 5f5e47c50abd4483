"""What the ranks of a group know of each other's failures, and to which ranks each sends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ENDED = "ended, or left: its connection is closed"


def neighbours(rank: int, size: int) -> list[dict[int, list[int]]]:
    """Return the ranks at a distance of 1, 2, 4, ..., on both sides, until these reach all.

    Each comes with the ranks whose results it gets from this one: as many as the distance, on the
    other side.
    """
    rounds = []
    for distance in _distances(size):
        sides: dict[int, list[int]] = {}
        for side in (1, -1):
            of = [(rank - side * each) % size for each in range(distance)]
            sides.setdefault((rank + side * distance) % size, of)
        rounds.append(sides)
    return rounds


def _distances(size: int) -> list[int]:
    return [2**power for power in range(size.bit_length()) if 2 ** (power + 1) - 1 < size]


def _next_to(rank: int, size: int) -> set[int]:
    return {(rank + each) % size for far in _distances(size) for each in (far, -far)}


class News:
    """What one rank knows. It grows by what others know, in any order and any number of times.

    Attributes:
        failures: ranks that failed, and how.
        over: a rank has stopped waiting for others, because of failures.
        question: how often it was asked who has finished. A failure is the first question.
        asked_at: when this rank heard the last question.
        finished: ranks that have answered the last question. Only a rank that waits answers, and
            so its process is not stopped.
        has_finished: this rank answers.
        waits: how often a rank has said for which one it waits, which that is, or -1 for none, and
            for what.

    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.failures: dict[int, str] = {}
        self.over = self.has_finished = False
        self.question, self.asked_at = 0, 0.0
        self.finished: set[int] = set()
        self.waits: dict[int, tuple[int, int, str]] = {}
        self._before: set[int] = set()  # who answered the question before, which may be very new

    def add(
        self,
        failures: Mapping[int, str],
        over: bool = False,
        question: int = 0,
        finished: Iterable[int] = (),
        waits: Mapping[int, tuple[int, int, str]] | None = None,
    ) -> bool:
        """Add what another rank knows; return whether any of it is new."""
        before = self.written()
        for rank, how in failures.items():
            self.failures[rank] = max(how, self.failures.get(rank, how), key=_weight)
        for rank, told in (waits or {}).items():
            self.waits[rank] = max(told, self.waits.get(rank, told))
        self.over = self.over or over
        latest = max(question, 1 if self.failures else 0)
        if latest > self.question:
            self.question, self.asked_at = latest, time.monotonic()
            self._before = self.finished
            self.finished = {self._rank} if self.has_finished else set()
        if question == self.question or not question:
            self.finished |= set(finished)
        return self.written() != before

    def silent(self) -> list[int]:
        """Return the ranks that have neither failed nor answered one of the last two questions."""
        answered = self.finished | self._before | self.failures.keys()
        return [rank for rank in range(self._size) if rank not in answered]

    def awaited(self, rank: int, what: str) -> tuple[int, str]:
        """Return the rank that ``rank`` waits for, or that this one waits for, and so on.

        With it comes what is awaited of it, which is ``what`` of ``rank``.
        """
        seen = {self._rank}
        while rank not in seen and (told := self.waits.get(rank)) and told[1] >= 0:
            seen.add(rank)
            _, rank, what = told
        return rank, what

    def hanging(self, silent: Sequence[int]) -> list[int]:
        """Return the silent ranks, without those that told that they wait for another of them."""
        ends = {rank: self.awaited(rank, "")[0] for rank in silent}
        return [rank for rank, end in ends.items() if end == rank or end not in silent]

    def beyond(self) -> set[int]:
        """Return the ranks that are next to this one, but for those that failed in between.

        If each sends to these, those that are left stay connected.
        """
        seen, through = {self._rank}, [self._rank]
        for rank in through:  # which grows
            found = _next_to(rank, self._size) - seen
            seen |= found
            through += found & self.failures.keys()
        return seen - self.failures.keys()

    def written(self) -> bytes:
        """Return all of it as a message, alike on ranks that know the same."""
        told = sorted(self.failures.items()), self.over, self.question, sorted(self.finished)
        return json.dumps((*told, sorted(self.waits.items()))).encode()

    @staticmethod
    def read(written: bytes) -> dict[str, Any]:
        """Return the arguments for :meth:`add`."""
        failures, over, question, finished, waits = json.loads(written)
        return {
            "failures": dict(failures),
            "over": over,
            "question": question,
            "finished": finished,
            "waits": {rank: tuple(told) for rank, told in waits},
        }


def _weight(how: str) -> tuple[bool, bool, str]:
    """Order what is said of a rank that failed, so that all ranks keep the same of it."""
    return how.startswith(("failed", "stopped")), how != ENDED, how
