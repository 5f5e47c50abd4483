"""Which rank should have which expert, by the number of tokens that each expert gets.

As DeepSeek's EPLB does: the expert with most tokens for a copy gets the next copy, then copies go
to the rank with least to do, those with most tokens first. Then experts are exchanged between ranks
while that helps the busiest one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from vllm_module.errors import ShardingError
from vllm_module.parameters.dim import places_of

_LESS = 1 - 2**-20  # of the busiest rank's tokens; a gain by rounding would go back and forth


def rank_loads(placement: Sequence[int], counts: Sequence[float], size: int) -> list[float]:
    """Return the tokens that each of ``size`` ranks computes, if an expert's copies share evenly.

    Args:
        placement: the expert at each place, on all ranks in their order.
        counts: tokens of each expert.
        size: number of ranks.

    """
    copies = Counter(placement)
    owns = (places_of(rank, size, len(placement)) for rank in range(size))
    return [sum(counts[e] / copies[e] for e in placement[own.start : own.stop]) for own in owns]


def balanced_placement(
    counts: Sequence[float], size: int, before: Sequence[int] | None = None, *, places: int = 0
) -> tuple[int, ...]:
    """Return a placement in which the busiest rank has as few tokens as is found.

    Few experts move: those that stay on a rank keep their places, and nothing moves if the busiest
    rank would have as much to do as before.

    Args:
        counts: tokens of each expert, in one layer.
        size: number of ranks.
        before: the placement as it is; by default experts are in order.
        places: number of places, if ``before`` is not given; by default one for each expert.

    Raises:
        ShardingError: counts are negative or not finite, or copies of an expert outnumber ranks.

    """
    if wrong := [each for each in counts if not (math.isfinite(each) and each >= 0)]:
        raise ShardingError(f"counts of tokens must be finite and not negative, got {wrong[0]}")
    number = len(counts)
    if before is None:
        before = [place % number for place in range(places or number)]
    if size < 1 or not number <= len(before) <= number * size:
        raise ShardingError(
            f"{len(before)} places of {number} experts on {size} ranks: expected {number} to "
            f"{number * size}"
        )
    copies = _copies(counts, size, len(before))
    loads = [count / copy for count, copy in zip(counts, copies, strict=True)]
    ranks = _packed(loads, copies, [len(places_of(r, size, len(before))) for r in range(size)])
    _exchange(ranks, loads)
    found = tuple(_kept_in_place(ranks, before))
    helps = max(rank_loads(found, counts, size)) < max(rank_loads(before, counts, size))
    return found if helps else tuple(before)


def _copies(counts: Sequence[float], size: int, places: int) -> list[int]:
    """Return how often each expert is held: at most once on a rank."""
    copies = [1] * len(counts)
    for _ in range(places - len(counts)):
        more = (expert for expert, copy in enumerate(copies) if copy < size)
        copies[max(more, key=lambda expert: counts[expert] / copies[expert])] += 1
    return copies


def _packed(loads: Sequence[float], copies: Sequence[int], room: Sequence[int]) -> list[set[int]]:
    """Return the experts of each rank, which has room for so many."""
    ranks: list[set[int]] = [set() for _ in room]
    total = [0.0] * len(room)

    def put(expert: int, rank: int) -> None:
        ranks[rank].add(expert)
        total[rank] += loads[expert]

    for expert in sorted(range(len(loads)), key=lambda expert: -loads[expert]):
        for _ in range(copies[expert]):
            others = [rank for rank, held in enumerate(ranks) if expert not in held]
            free = [rank for rank in others if len(ranks[rank]) < room[rank]]
            if free:
                put(expert, min(free, key=lambda rank: total[rank]))
                continue
            # All ranks with room have the expert. A full one has as many experts, and not this one,
            # so it has one that can go there.
            full = min(others, key=lambda rank: total[rank])
            last = min(r for r, held in enumerate(ranks) if len(held) < room[r])
            moved = min(ranks[full] - ranks[last], key=lambda each: loads[each])
            ranks[full].remove(moved)
            total[full] -= loads[moved]
            put(moved, last)
            put(expert, full)
    return ranks


def _exchange(ranks: list[set[int]], loads: Sequence[float]) -> None:
    """Exchange two experts between the busiest rank and another one, while that helps."""
    total = [math.fsum(loads[expert] for expert in held) for held in ranks]

    def helpful(busiest: int) -> Iterator[tuple[float, int, int, int]]:
        for rank, held in enumerate(ranks):
            for given in ranks[busiest] - held:
                for taken in held - ranks[busiest]:
                    less = loads[given] - loads[taken]
                    most = max(total[busiest] - less, total[rank] + less)
                    if less > 0 and most < total[busiest] * _LESS:
                        yield most, rank, given, taken

    while (best := min(helpful(busiest := total.index(max(total))), default=None)) is not None:
        _, rank, given, taken = best
        for at, old, new in ((busiest, given, taken), (rank, taken, given)):
            ranks[at] = ranks[at] - {old} | {new}
            total[at] = math.fsum(loads[expert] for expert in ranks[at])


def _kept_in_place(ranks: Sequence[set[int]], before: Sequence[int]) -> Iterator[int]:
    """Yield the expert of each place: ranks have what is most like before, in the same places."""
    owns = [places_of(rank, len(ranks), len(before)) for rank in range(len(ranks))]
    held = [before[own.start : own.stop] for own in owns]
    alike = sorted(
        (-len(wanted.intersection(held[rank])), rank, at)
        for at, wanted in enumerate(ranks)
        for rank in range(len(ranks))
        if len(wanted) == len(held[rank])
    )
    given: dict[int, int] = {}
    for _, rank, at in alike:
        if rank not in given and at not in given.values():
            given[rank] = at
    for rank, old in enumerate(held):
        wanted = ranks[given[rank]]
        new = iter(sorted(wanted.difference(old)))
        yield from (expert if expert in wanted else next(new) for expert in old)
