"""Weights sent from rank to rank by a transfer plan, over torch.distributed.

Ranks of the source have the first numbers of the group, those of the target the next ones. All of
them go through the plan's tensors in one order, and know from the plan which messages come: a
message is what one rank sends to another of a batch of tensors. A shorter one goes before it, with
digests of the version and of the boxes: what was left of another round is no part of this one.
Messages begin in the plan's order, and each is packed and unpacked while others are under way.

In a move in place each rank is of both layouts, and its number is the group's.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist

from vllm_module.cooperative.moved import (
    HeldValues,
    Moved,
    Read,
    Values,
    boxes_on,
    held_values,
    narrowed,
    packed,
    part_of,
    write_box,
    zeros_of,
)
from vllm_module.cooperative.rank_transfer import RankTransfer, Transport
from vllm_module.layout import Layout, TransferPlan
from vllm_module.layout.messages import GATHERED, RELAYED, SENT

_Held: TypeAlias = dict[str, list[HeldValues]]  # by name


def send_boxes(
    plan: TransferPlan,
    source: Layout,
    tensors: Mapping[str, torch.Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 1 << 28,
    timeout: float = 600.0,
    weight_version: str = "",
    transport: Transport = "group",
) -> None:
    """Send what this rank holds to the ranks that keep it, as ``plan`` says.

    It takes the memory of what it sends of a batch, and of a box.

    Args:
        plan: the same on every rank.
        source: the plan's source.
        tensors: this rank's parameters, by the paths in ``source`` and of the shapes there, such as
            the state dict that ``source`` is the layout of.
        group: with ``plan.source_ranks + plan.target_ranks`` ranks, by default the world.
        bucket_bytes: most bytes of whole tensors in a batch, unless one alone has more; the same on
            every rank.
        timeout: seconds that a message may take. Within :func:`together`, ranks are told for whom
            others wait, and name the one that hangs.
        weight_version: name of the weights, the same on every rank.
        transport: ``"group"`` sends bytes over the group, ``"nixl"`` lets ranks read each other's
            memory by NIXL (the extra ``nixl``), and sends over the group only where it is; the same
            on every rank.

    Raises:
        RankError: a rank has ended or hangs, or has left in the middle; it names that rank.
        ValueError: a tensor is missing here or has another shape, or the group's size is wrong.

    """
    moving = RankTransfer(plan, group, timeout, weight_version, transport=transport)
    rank = moving.rank
    for batch in moving.batches(bucket_bytes):
        held = _held(source, batch, rank, tensors)

        def read(each: Moved, number: int, held: _Held = held) -> torch.Tensor:
            return part_of(each, number, held[each.name])

        parts = moving.stage(batch, GATHERED, read)
        for each in batch:  # what is gathered on this rank from itself
            for hop in each.hops(each.route.gathered):
                if hop.source == hop.target == rank:
                    parts[each.name, hop.box] = read(each, hop.box)

        def give(
            each: Moved, number: int, parts: Values = parts, read: Read = read
        ) -> torch.Tensor:
            if number not in each.route.parts:
                return read(each, number)
            start, size = each.box(number)
            joined = torch.empty(size, dtype=each.dtype, device="cpu")
            for part in each.route.parts[number]:
                narrowed(joined, each.box(part), start).copy_(parts[each.name, part])
            return joined

        moving.stage(batch, SENT, give)
        del held, parts, read, give  # before the next batch has its own


def receive_boxes(
    plan: TransferPlan,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 1 << 28,
    timeout: float = 600.0,
    weight_version: str = "",
    transport: Transport = "group",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of which this rank keeps a part, for ``update_weights`` of this rank.

    A tensor has its whole shape, with zeros outside of the boxes that the rank keeps, which take no
    memory of a CPU. Beside it there is what comes of a batch, and a message. Arguments are those of
    :func:`send_boxes`.

    Raises ``WeightReadError`` if a rank has ended, left or hangs, or sends weights of another
    version or plan; it names that rank. The model refuses to run if it has a mixture of old and new
    weights then.
    """
    moving = RankTransfer(plan, group, timeout, weight_version, transport=transport)
    for batch in moving.batches(bucket_bytes):
        arrived = moving.stage(batch, SENT, _nothing)

        def relay(each: Moved, number: int, arrived: Values = arrived) -> torch.Tensor:
            return arrived[each.name, number]

        arrived |= moving.stage(batch, RELAYED, relay)
        of_name: dict[str, dict[int, torch.Tensor]] = {}
        for name, number in [*arrived]:
            of_name.setdefault(name, {})[number] = arrived.pop((name, number))
        for each in batch:
            if (parts := of_name.pop(each.name, None)) is None:
                continue
            # Zeros, because values that are not kept are looked at as well, for NaN.
            whole = zeros_of(each.route.tensors[0].shape, each.dtype)
            for number in [*parts]:
                narrowed(whole.view(each.route.view), each.box(number)).copy_(parts.pop(number))
            yield each.name, whole
            del whole  # before the next one is made, or the next batch arrives


def exchange_boxes(
    plan: TransferPlan,
    source: Layout,
    target: Layout,
    tensors: Mapping[str, torch.Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
) -> Generator[None, None, int]:
    """Move what this rank and others hold from one layout to the other, in place, in steps.

    Of each parameter all boxes have arrived before one is written: it may lie where another was.
    Each box of the target is one of the source's, in another place.

    It yields when it has all memory to move a parameter, before it sends anything. A rank that goes
    on then waits for what others send: let ranks agree that all of them have come so far.

    Args:
        plan: from ``source`` to ``target``, made with ``in_place``; the same on every rank.
        source, target: where boxes are, and where they are to be.
        tensors: this rank's parameters, by the paths in the layouts and of the shapes in both.
        group: of ``plan.source_ranks`` ranks, by default the world.
        timeout: seconds that a message may take.

    Returns:
        The bytes that other ranks sent.

    Raises:
        RankError: a rank has ended or hangs, or has left in the middle; parameters are a mixture.
        ValueError: a tensor is missing here or has another shape, or the group's size is wrong.

    """
    moving = RankTransfer(plan, group, timeout, "", in_place=True)
    rank, received = moving.rank, 0
    for batch in moving.parameters():
        held = _held(source, batch, rank, tensors)

        def read(each: Moved, number: int, held: _Held = held) -> torch.Tensor:
            return part_of(each, number, held[each.name])

        of_name, own = {each.name: each for each in batch}, dict[tuple[str, int], torch.Tensor]()
        going, coming = moving.messages(batch, SENT)
        outgoing = {peer: packed(boxes, read) for peer, boxes in going.items()}
        for name, each in of_name.items():
            if boxes_on(source, each, rank) == boxes_on(target, each, rank):
                continue  # where they were
            for hop in each.hops(each.route.sent):
                if hop.source == hop.target == rank:
                    own[name, hop.box] = read(each, hop.box).clone()
        held.clear()
        yield
        arrived = moving.transfer(SENT, coming, going, outgoing.__getitem__)
        received += sum(values.nbytes for values in arrived.values())
        arrived |= own
        for (name, number), values in arrived.items():
            write_box(target, of_name[name], number, values, rank, tensors)
    return received


def _held(
    source: Layout, batch: Iterable[Moved], rank: int, tensors: Mapping[str, torch.Tensor]
) -> _Held:
    """Return what this rank holds of the tensors of a batch."""
    copies: dict[str, torch.Tensor] = {}
    return {each.name: held_values(source, each, rank, tensors, copies) for each in batch}


def _nothing(each: Moved, number: int) -> torch.Tensor:
    raise AssertionError(f"{each.name}: a rank of the target sends a box before it arrives")
