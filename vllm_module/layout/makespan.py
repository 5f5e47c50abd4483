"""How long a transfer plan takes on given links, and which of several plans is the fastest.

A rank has a link to the network and one to the ranks of its host, each of which sends one message
and receives one at a time. A message is all that one rank sends to another in a stage of a batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from vllm_module.layout.layout import Layout
from vllm_module.layout.transfer import Hop, Route, TransferPlan

_End: TypeAlias = tuple[str, int]  # "source" or "target", and the rank


class Links(NamedTuple):
    """What was measured of the links: bytes a second of a rank's, and seconds.

    Attributes:
        network: bandwidth of a rank to ranks of other hosts, in each direction.
        host: the same to ranks on its host.
        latency: seconds of a message beside its bytes.
        box: seconds of each box of a message, for packing it.

    """

    network: float
    host: float
    latency: float = 0.0
    box: float = 0.0


class _Message(NamedTuple):
    """What one rank sends another in a stage: of all batches together."""

    stage: int
    source: _End
    target: _End
    nbytes: int
    boxes: int


class Simulated(NamedTuple):
    """The times of a plan, in seconds.

    Attributes:
        makespan: until the last message has arrived.
        bound: what the busiest link needs for its bytes alone; no plan of these bytes is faster.

    """

    makespan: float
    bound: float


def simulate(
    plan: TransferPlan,
    links: Links,
    *,
    batches: int = 8,
    slow: Mapping[tuple[str, int], float] | None = None,
) -> Simulated:
    """Return how long ``plan`` takes: the messages of each batch and stage, as links get free.

    Args:
        plan: the plan.
        links: as above. Hops that are gathered or relayed use the host's.
        batches: equal parts that follow each other; stages of one overlap with those of others.
        slow: factors of stragglers, by ``("source", rank)`` or ``("target", rank)``: their
            messages take so many times as long, by the slower of both ends.

    """
    messages = _messages(plan)
    speeds = links.host, links.network  # by whether a message goes through the network
    busy = Counter[tuple[_End, bool, bool]]()  # bytes of a rank's link, out or in
    for each in messages:
        busy[each.source, each.stage == 1, True] += each.nbytes
        busy[each.target, each.stage == 1, False] += each.nbytes
    bound = max((n / speeds[network] for (_, network, _), n in busy.items()), default=0.0)
    free: dict[tuple[_End, bool, bool], float] = defaultdict(float)
    last, factors = 0.0, dict(slow or {})
    arrived: dict[tuple[_End, int], float] = defaultdict(float)  # of a stage of this batch
    for _ in range(batches):
        arrived.clear()
        for each in messages:
            network = each.stage == 1
            late = max(factors.get(each.source, 1.0), factors.get(each.target, 1.0))
            # Packing waits for what is gathered or was sent to the rank, and is the sender's work.
            ready = arrived[each.source, each.stage - 1]
            out, into = (each.source, network, True), (each.target, network, False)
            begin = max(free[out], free[into], ready)
            work = each.boxes * links.box + each.nbytes / speeds[network]
            end = begin + late * (links.latency + work / batches)
            free[out] = free[into] = end
            place = each.target, each.stage
            arrived[place] = max(arrived[place], end)
            last = max(last, end)
    return Simulated(last, bound)


def fastest_plan(
    source: Layout, target: Layout, links: Links, *, source_node: int = 1, target_node: int = 1
) -> tuple[TransferPlan, Simulated]:
    """Return the plan that is simulated as the fastest, and its times.

    Tried are boxes that go directly, those gathered on the source's hosts of ``source_node`` ranks,
    and those relayed on the target's of ``target_node``.
    """
    found: list[tuple[TransferPlan, Simulated]] = []
    for nodes in sorted({(1, 1), (source_node, 1), (1, target_node), (source_node, target_node)}):
        plan = TransferPlan(source, target, source_node=nodes[0], target_node=nodes[1])
        found.append((plan, simulate(plan, links)))
    return min(found, key=lambda each: each[1].makespan)


def _messages(plan: TransferPlan) -> list[_Message]:
    """Return the messages in an order in which each rank begins with another one."""
    stages: Sequence[tuple[Callable[[Route], Iterable[Hop]], str, str]] = (
        (lambda route: route.gathered, "source", "source"),
        (lambda route: route.sent, "source", "target"),
        (lambda route: route.relayed, "target", "target"),
    )
    messages: list[_Message] = []
    for stage, (hops, one, other) in enumerate(stages):
        nbytes, boxes = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for route, hop in _hops(plan, hops):
            if one == other and hop.source == hop.target:
                continue
            nbytes[hop.source, hop.target] += route.nbytes(hop)
            boxes[hop.source, hop.target] += hop.experts[1] * len(route.tensors)
        ranks = max(plan.source_ranks, plan.target_ranks)
        messages += [
            _Message(stage, (one, source), (other, target), nbytes[source, target], number)
            for (source, target), number in sorted(
                boxes.items(), key=lambda pair: ((pair[0][1] - pair[0][0]) % ranks, pair[0])
            )
        ]
    return messages


def _hops(
    plan: TransferPlan, hops: Callable[[Route], Iterable[Hop]]
) -> Iterator[tuple[Route, Hop]]:
    return ((route, hop) for route in plan.routes for hop in hops(route))
