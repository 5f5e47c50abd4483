"""The order of a plan's messages, beside the bound of an open shop and orders without a search."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from vllm_module.layout.messages import in_order

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
