"""Placements by numbers of tokens, against all placements of a few experts."""

from __future__ import annotations

import random
from itertools import combinations, combinations_with_replacement, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.errors import ShardingError
from vllm_module.parameters import Experts
from vllm_module.parameters.balancing import balanced_placement, rank_loads


def loads(held: list[tuple[int, ...]], counts: list[float]) -> list[float]:
    """Return the tokens of each rank, whose experts are given; copies share evenly."""
    copies = [sum(expert in each for each in held) for expert in range(len(counts))]
    return [sum(counts[expert] / copies[expert] for expert in each) for each in held]


def held_by(placement: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Return the experts of each rank; if they are uneven, the first ranks have one more."""
    ranks = sorted(place % size for place in range(len(placement)))
    return [
        tuple(expert for expert, owner in zip(placement, ranks, strict=True) if owner == rank)
        for rank in range(size)
    ]


def least(counts: list[float], size: int, places: int) -> float:
    """Return the tokens of the busiest rank in the best of all placements."""
    room = [len(each) for each in held_by((0,) * places, size)]
    ways = product(*(combinations(range(len(counts)), number) for number in room))
    complete = (way for way in ways if len({e for each in way for e in each}) == len(counts))
    return min(max(loads(list(way), counts)) for way in complete)


@pytest.mark.parametrize("copied", [False, True])
def test_the_busiest_rank_has_little_more_than_it_must(copied: bool) -> None:
    """At most a third more than the best of all placements; with copies, two thirds."""
    draw, most, equal = random.Random(5), 4 / 3, 0
    for _ in range(400):
        size, number = draw.randint(1, 3), draw.randint(1, 6)
        places = number
        if copied:
            places, most = draw.randint(number, min(number * size, number + 3)), 5 / 3
        kind = draw.choice([
            lambda: float(draw.randint(0, 100)),
            lambda: draw.random() ** 4,
            lambda: draw.choice([0.0, 1, 2, 3, 5, 8, 13]),
        ])  # fmt: skip
        counts = [kind() for _ in range(number)]
        held = held_by(balanced_placement(counts, size, places=places), size)
        best = least(counts, size, places)
        assert max(loads(held, counts)) <= best * most + 1e-9, (counts, size, places)
        equal += max(loads(held, counts)) <= best + 1e-9
    assert equal > 300  # of 400


@given(st.data())
def test_a_placement_is_possible_and_never_worse(data: st.DataObject) -> None:
    """Each expert has a place and none two on a rank; the busiest rank has no more than before."""
    size = data.draw(st.integers(1, 5))
    counts = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=12))
    number = len(counts)
    order = data.draw(st.permutations(range(number)))
    places = data.draw(st.integers(number, number * size))
    before = tuple(order[place % number] for place in range(places))
    after = balanced_placement(counts, size, before)
    old, new = held_by(before, size), held_by(after, size)
    assert sorted({expert for each in new for expert in each}) == list(range(number))
    assert [len({*each}) for each in new] == [len(each) for each in old]
    assert max(loads(new, counts)) <= max(loads(old, counts)) + 1e-9
    assert rank_loads(after, counts, size) == pytest.approx(loads(new, counts))
    for rank in range(size):
        assert tuple(Experts(number, rank, size, False, after).kept) == new[rank]
        for was, now in zip(old[rank], new[rank], strict=True):
            assert was == now or was not in new[rank]  # what stays keeps its place
    assert balanced_placement(counts, size, after) == after  # and then all of it stays


def test_a_hot_expert_gets_the_copies() -> None:
    """As many as bring the tokens of a copy down to those of others; ranks are even then."""
    placement = balanced_placement([60, 10, 10, 10, 5, 5], 4, places=8)
    assert placement.count(0) == 3
    assert max(rank_loads(placement, [60, 10, 10, 10, 5, 5], 4)) == 30
    assert max(rank_loads(range(6), [60, 10, 10, 10, 5, 5], 4)) == 70


def test_little_moves() -> None:
    """Where one exchange suffices, two experts move, and each into the place of the other."""
    before = (0, 1, 2, 3, 4, 5)
    after = balanced_placement([9, 9, 9, 1, 1, 1], 2, before)
    (first, second) = (at for at in range(6) if before[at] != after[at])
    assert (after[first], after[second]) == (before[second], before[first])


def test_nothing_moves_that_does_not_help() -> None:
    """Of few experts with few different counts, many placements are equally good."""
    for number, size in product(range(1, 5), range(1, 4)):
        for counts in combinations_with_replacement([0.0, 1.0, 2.0], number):
            for before in permutations(range(number)):
                for copies in ((), before[:1] if size > 1 else ()):
                    held = before + copies
                    after = balanced_placement(counts, size, held)
                    most = [max(rank_loads(each, counts, size)) for each in (held, after)]
                    assert after == held or most[1] < most[0], (counts, size, held, after)


@pytest.mark.parametrize(
    ("counts", "size", "places", "message"),
    [
        ([1.0, -1.0], 2, 2, "not negative, got -1.0"),
        ([1.0, float("nan")], 2, 2, "got nan"),
        ([1.0, 1.0], 2, 5, "5 places of 2 experts on 2 ranks: expected 2 to 4"),
        ([1.0, 1.0], 2, 1, "1 places of 2 experts"),
        ([1.0, 1.0], 0, 2, "on 0 ranks"),
        ([1.0, float("inf")], 1, 2, "finite and not negative, got inf"),
        ([float("-inf"), 1.0], 1, 2, "finite and not negative, got -inf"),
        ([1.0, 1e-9, -1e-9], 1, 3, "finite and not negative, got -1e-09"),
    ],
)
def test_impossible_arguments_are_refused(
    counts: list[float], size: int, places: int, message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        balanced_placement(counts, size, places=places)


def test_copies_are_where_the_tokens_of_the_busiest_copy_are_fewest() -> None:
    """Of all numbers of copies, with a rank for each copy."""
    draw, places = random.Random(3), 7
    for _ in range(40):
        counts = [float(draw.randint(1, 40)) for _ in range(3)]
        ways = (way for way in product(range(1, places), repeat=3) if sum(way) == places)
        fewest = min(max(count / n for count, n in zip(counts, way, strict=True)) for way in ways)
        placement = balanced_placement(counts, places, places=places)
        assert max(rank_loads(placement, counts, places)) == fewest, counts
