"""How long a transfer plan takes on given links, and which of several plans is the fastest.

A rank has a link to the network and one to the ranks of its host, each of which sends one message
and receives one at a time, in the order of the plan. A message is all that one rank sends to
another in a stage of a batch.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from vllm_module.base.garbage import paused_gc
from vllm_module.layout.layout import Layout
from vllm_module.layout.messages import RELAYED, SENT, Message
from vllm_module.layout.transfer import TransferPlan

_End: TypeAlias = tuple[str, int]  # "source" or "target", and the rank
_Link: TypeAlias = tuple[_End, bool, bool]  # of the network, and whether it is the way out


class Links(NamedTuple):
    """What was measured of the links: bytes a second of a rank's, and seconds.

    Attributes:
        network: bandwidth of a rank to ranks of other hosts, in each direction.
        host: the same to ranks on its host.
        latency: seconds of a message beside its bytes.
        box: seconds of each box of a message, for packing it at its source and for unpacking it at
            its target. Neither takes a link's time, and a rank packs and unpacks one at a time.

    """

    network: float
    host: float
    latency: float = 0.0
    box: float = 0.0


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
    """Return how long ``plan`` takes: the messages of each batch and stage, in the plan's order.

    Args:
        plan: the plan.
        links: as above. Hops that are gathered or relayed use the host's.
        batches: equal parts that follow each other; stages of one overlap with those of others.
        slow: factors of stragglers, by ``("source", rank)`` or ``("target", rank)``: their
            messages take so many times as long, by the slower of both ends.

    """
    speeds = links.host, links.network  # by whether a message goes through the network
    ends = ("source", "source"), ("source", "target"), ("target", "target")  # by stage
    busy = Counter[_Link]()  # bytes of a rank's link, out or in
    messages: list[tuple[int, Message, _End, _End]] = []
    for stage, (one, other) in enumerate(ends):
        for each in plan.messages[stage]:
            source, target = (one, each.source), (other, each.target)
            busy[source, stage == SENT, True] += each.nbytes
            busy[target, stage == SENT, False] += each.nbytes
            messages.append((stage, each, source, target))
    bound = max((n / speeds[network] for (_, network, _), n in busy.items()), default=0.0)
    free: dict[_Link, float] = defaultdict(float)
    packed: dict[tuple[_End, bool], float] = defaultdict(float)  # by whether a message goes out
    last, factors = 0.0, dict(slow or {})
    arrived: dict[tuple[_End, int], float] = defaultdict(float)  # of a stage of this batch
    for _ in range(batches):
        arrived.clear()
        for stage, each, source, target in messages:
            network = stage == SENT
            packing = each.boxes * links.box / batches
            begin, late = factors.get(source, 1.0), factors.get(target, 1.0)
            # Packing waits for what is gathered or was sent to the rank.
            ready = max(packed[source, True], arrived[source, stage - 1]) + begin * packing
            packed[source, True] = ready
            out, into = (source, network, True), (target, network, False)
            end = max(free[out], free[into], ready)
            end += max(begin, late) * (links.latency + each.nbytes / speeds[network] / batches)
            free[out] = free[into] = end
            done = max(packed[target, False], end) + late * packing
            packed[target, False] = done
            arrived[target, stage] = max(arrived[target, stage], done)
            last = max(last, done)
    return Simulated(last, bound)


@paused_gc()
def fastest_plan(
    source: Layout, target: Layout, links: Links, *, source_node: int = 1, target_node: int = 1
) -> tuple[TransferPlan, Simulated]:
    """Return the plan that is simulated as the fastest, and its times.

    Tried are boxes that go directly, those gathered on the source's hosts of ``source_node`` ranks,
    and those relayed on the target's of ``target_node``. What cannot be faster is not planned:
    without relays all that a rank keeps comes over its link to the network.
    """
    found: list[tuple[TransferPlan, Simulated]] = []
    for nodes in sorted({(a, b) for a in (1, source_node) for b in (1, target_node)}, reverse=True):
        fastest = min((times.makespan for _, times in found), default=math.inf)
        if found and nodes[1] == 1 and _most_kept(found[0][0]) / links.network >= fastest:
            continue
        plan = TransferPlan(source, target, source_node=nodes[0], target_node=nodes[1])
        found.append((plan, simulate(plan, links)))
    return min(found, key=lambda each: each[1].makespan)


def _most_kept(plan: TransferPlan) -> int:
    """Return the bytes that arrive at the rank of the target that keeps most."""
    kept = Counter[int]()
    for each in (*plan.messages[SENT], *plan.messages[RELAYED]):
        kept[each.target] += each.nbytes
    return max(kept.values(), default=0)
