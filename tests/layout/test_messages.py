"""The messages of a plan: what is in them, counted by hand, and their order.

The order is compared with the bound of an open shop, and with orders without a search.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.layout.hops import Hop, Route, itemsize_of
from vllm_module.layout.messages import in_order, messages_of

MEBIBYTE = 1 << 20
Pair = tuple[int, int]


def makespan(order: Iterable[Pair], nbytes: Mapping[Pair, int]) -> int:
    """Return when the last message ends, if each begins as soon as both ends are free."""
    out, into = defaultdict[int, int](int), defaultdict[int, int](int)
    for source, target in order:
        out[source] = into[target] = max(out[source], into[target]) + nbytes[source, target]
    return max(into.values(), default=0)


def busiest(nbytes: Mapping[Pair, int]) -> int:
    """Return the bytes of the busiest link, which no order ends before."""
    total = Counter[tuple[str, int]]()
    for (source, target), size in nbytes.items():
        total["out", source] += size
        total["in", target] += size
    return max(total.values(), default=0)


@given(st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.integers(0, 1 << 34)))
def test_every_message_is_there_and_no_rank_waits_long(nbytes: dict[Pair, int]) -> None:
    """Nobody idles while both ends of a message do, so the time is below twice the bound's."""
    order = in_order(nbytes)
    assert sorted(order) == sorted(nbytes)
    with_latency = {pair: size + 4 * MEBIBYTE for pair, size in nbytes.items()}
    assert makespan(order, with_latency) <= 2 * busiest(with_latency)
    assert order == in_order(dict(reversed(nbytes.items())))


def test_gathered_boxes_come_from_few_ranks_and_all_links_are_busy() -> None:
    """A quarter of the sources sends to each target, and links wait if ranks begin by distance."""
    nbytes: dict[Pair, int] = {}
    for target in range(32):
        for group in range(16):
            nbytes[group * 4 + (target // 8 + group) % 4, target] = 64 * MEBIBYTE
    by_distance = sorted(nbytes, key=lambda pair: ((pair[1] - pair[0]) % 64, pair))
    assert makespan(by_distance, nbytes) > 1.3 * busiest(nbytes)
    assert makespan(in_order(nbytes), nbytes) < 1.1 * busiest(nbytes)


def test_large_and_small_messages() -> None:
    """Small messages from everybody fill the time between large ones from some."""
    nbytes = {
        (source, to): 1 << (source * 7 + to * 3) % 8 for source in range(24) for to in range(12)
    }
    nbytes = {pair: size * 16 * MEBIBYTE for pair, size in nbytes.items()}
    assert makespan(in_order(nbytes), nbytes) < 1.1 * busiest(nbytes)


@pytest.mark.parametrize("size", [random.Random.random, lambda r: r.expovariate(1)])
def test_busy_links_seldom_wait(size: Callable[[random.Random], float]) -> None:
    """On average the order takes less than 2% longer than the busiest link alone."""
    numbers, ratios = random.Random(0), list[float]()
    for _ in range(200):
        sources, targets = numbers.randint(2, 8), numbers.randint(2, 8)
        nbytes = {
            pair: int(size(numbers) * 64 * MEBIBYTE)
            for pair in product(range(sources), range(targets))
            if not pair[0] + pair[1] or numbers.random() < 0.8
        }
        ratios.append(makespan(in_order(nbytes), nbytes) / busiest(nbytes))
    assert sum(ratios) / len(ratios) < 1.02


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """Return a route of some tensors, whose hops each carry one of two boxes of some experts."""
    hop = st.builds(
        Hop,
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 1),
        st.tuples(st.integers(0, 3), st.integers(1, 3)),
    )
    gathered, sent, relayed = (tuple(draw(st.lists(hop, max_size=4))) for _ in range(3))
    sizes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=2, max_size=2))
    entry: Any = object()  # of which the messages need the number alone
    return Route(
        tensors=(entry,) * draw(st.integers(1, 3)),
        experts=(0, 6),
        view=(9, 9),
        boxes=tuple(((0, 0), size) for size in sizes),
        gathered=gathered,
        parts={},
        sent=sent,
        relayed=relayed,
        dtype=draw(st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"])),
    )


@given(st.lists(routes(), max_size=3))
def test_a_message_has_the_boxes_of_every_tensor_and_expert(given_routes: list[Route]) -> None:
    """Boxes and bytes are those of a list in which each stands by itself."""
    for number, messages in enumerate(messages_of(given_routes)):
        listed = [
            (source, target, math.prod(route.boxes[box][1]) * getattr(torch, route.dtype).itemsize)
            for route in given_routes
            for source, target, box, (_, experts) in route.stage(number)
            for _ in route.tensors
            for _ in range(experts)
            if number == 1 or source != target  # what a rank sends to itself counts only as sent
        ]
        nbytes, boxes = Counter[Pair](), Counter[Pair]()
        for source, target, size in listed:
            nbytes[source, target] += size
            boxes[source, target] += 1
        assert {each[:2]: each.nbytes for each in messages} == nbytes
        assert {each[:2]: each.boxes for each in messages} == boxes


DTYPES = sorted({str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)})


@pytest.mark.parametrize("dtype", [name.removeprefix("torch.") for name in DTYPES])
def test_bytes_of_an_element_are_those_of_torch(dtype: str) -> None:
    """A layout has dtypes by their names, those of less than a byte too."""
    assert itemsize_of(dtype) == getattr(torch, dtype).itemsize
