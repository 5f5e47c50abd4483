"""Times of several calls, taken in turns, so that what changes with time changes all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu.cases.case import Case
from gpu.check import made
from gpu.device import Call, Gpu

COLD = 8  # times the L2 cache, what the inputs of one case have together at least
MOST_SETS = 64
ROUNDS = 5
SECONDS = 0.008  # of a call in a round


@dataclass
class Work:
    """What is replayed, and how many calls a replay makes."""

    replay: Call
    calls: int = 1


def replayed(
    device: Gpu, call: Callable[..., object], sets: Sequence[tuple[Any, ...]]
) -> Work:  # fmt: skip
    """Return a graph that calls an operation on each set of inputs."""
    if not device.dry:
        call(*sets[0])  # compiles, and allocates what libraries need

    def all_sets() -> list[object]:
        return [call(*inputs) for inputs in sets]  # kept: none is written where another was

    return Work(device.graph(all_sets), len(sets))


def in_turns(
    device: Gpu, works: Mapping[str, Work], rounds: int = ROUNDS, seconds: float = SECONDS
) -> dict[str, list[float]]:
    """Return the seconds of a call of each work, for each round; each round has all of them."""
    if device.dry:
        rounds = 2
    counts = dict.fromkeys(works, 1)
    for name, work in works.items() if not device.dry else ():
        once = device.seconds(work.replay, 1)
        counts[name] = max(1, min(500, math.ceil(seconds / max(once, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for first in range(rounds):  # another one begins each round
        shift = first % len(names)
        for name in names[shift:] + names[:shift]:
            took = device.seconds(works[name].replay, counts[name])
            times[name].append(took / counts[name] / works[name].calls)
    return times


def sets_of(case: Case, device: Gpu, seed: int) -> list[tuple[Any, ...]]:
    """Return inputs that are cold: together they are several times the cache."""
    count = 1 if device.dry else math.ceil(COLD * device.l2 / case.moved)
    return [made(case, device, seed + index) for index in range(max(1, min(MOST_SETS, count)))]
