"""What ranks send each other in a transfer plan, and in which order.

A message is all that one rank sends to another in a stage. A link sends one and receives one at a
time, so which of them a rank begins with decides how long others wait.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vllm_module.layout.hops import Route

GATHERED, SENT, RELAYED = range(3)  # stages
_EACH = 1 << 22  # bytes whose time a message takes beside its own: 10 us of 8 batches at 400 Gb/s


class Message(NamedTuple):
    """What one rank sends another in a stage: bytes, and boxes of all experts' tensors."""

    source: int
    target: int
    nbytes: int
    boxes: int


def messages_of(routes: Iterable[Route]) -> tuple[tuple[Message, ...], ...]:
    """Return the messages of each stage, in the order of :func:`in_order`.

    A rank sends nothing to itself while it gathers or relays.
    """
    routes = tuple(routes)
    stages: list[tuple[Message, ...]] = []
    for stage in (GATHERED, SENT, RELAYED):
        nbytes, boxes = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for route in routes:
            tensors = len(route.tensors)
            sizes = [math.prod(size) * route.itemsize * tensors for _, size in route.boxes]
            for source, target, box, (_, experts) in route.stage(stage):
                if stage == SENT or source != target:
                    nbytes[source, target] += sizes[box] * experts
                    boxes[source, target] += tensors * experts
        stages.append(tuple(Message(*each, nbytes[each], boxes[each]) for each in in_order(nbytes)))
    return tuple(stages)


def in_order(nbytes: Mapping[tuple[int, int], int]) -> list[tuple[int, int]]:
    """Return pairs of source and target in an order in which links seldom wait for each other.

    This is an open shop: if messages could be interrupted, all would arrive in the time of the
    busiest link (Gonzalez and Sahni, 1976). Here none is. A rank that can receive takes the message
    of the free source that has most left to send; of several such ranks, the one that has most left
    to receive is the first. The same bytes give the same order everywhere.
    """
    to_send, left = Counter[int](), Counter[int]()
    for (source, target), size in nbytes.items():
        to_send[source] += size + _EACH
        left[target] += size + _EACH
    sources = sorted(to_send, key=lambda rank: (-to_send[rank], rank))
    number = {rank: at for at, rank in enumerate(sources)}
    sending = [to_send[rank] for rank in sources]
    pending = dict.fromkeys(left, 0)  # bits of a number stand for sources
    for source, target in nbytes:
        pending[target] |= 1 << number[source]
    free = [(-size, at) for at, size in enumerate(sending)]  # by what they have left to send
    waiting, able_now, now = list(left), (1 << len(sources)) - 1, 0  # bits of those in free
    under_way: list[tuple[int, int, int]] = []  # its end, the source's number, the target
    order: list[tuple[int, int]] = []
    while waiting or under_way:
        still: list[int] = []
        for target in sorted(waiting, key=lambda rank: (-left[rank], rank)):
            if able := pending[target] & able_now:
                _, at = free.pop(next(n for n, (_, at) in enumerate(free) if able >> at & 1))
                pending[target] ^= 1 << at
                able_now ^= 1 << at
                took = nbytes[sources[at], target] + _EACH
                sending[at] -= took
                left[target] -= took
                heapq.heappush(under_way, (now + took, at, target))
                order.append((sources[at], target))
            elif pending[target]:
                still.append(target)
        if under_way:
            now, at, target = heapq.heappop(under_way)
            insort(free, (-sending[at], at))
            able_now |= 1 << at
            still.append(target)
        waiting = still
    return order
