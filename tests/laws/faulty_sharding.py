"""Functions that cut, gather and compute wrongly.

Each takes the right function as its first argument, or returns a function that does.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from vllm_module import BasevLLMParameter
from vllm_module.errors import ShardingError
from vllm_module.layers import CausalConv1d, DecayingLayer, GroupedGatedRMSNorm, RowParallelLinear
from vllm_module.parameters import Dim, Experts, Piece, Shard, Slot
from vllm_module.parameters.division import division_of

# Where a shard begins and ends


def each_shard(change: Callable[..., dict[str, int]]) -> Callable[..., Any]:
    """Replace fields of every shard by what ``change`` returns for the shard and its slot."""

    def faulty(shards: Any, dim: Dim, rank: int, size: int) -> tuple[Any, ...]:
        right = zip(shards(dim, rank, size), dim.slots, strict=True)
        return tuple(shard._replace(**change(shard, slot)) for shard, slot in right)

    return faulty


def one_too_late(shard: Any, slot: Slot) -> dict[str, int]:
    start = min(shard.start + (shard.start > 0), slot.size)
    return {"start": start, "length": min(shard.padded, slot.size - start)}


def by_modulo(shards: Any, dim: Dim, rank: int, size: int) -> tuple[Any, ...]:
    ranks = [rank % slot.parts * size // slot.parts for slot in dim.slots]  # that keep these parts
    return tuple(shards(dim, each, size)[slot] for slot, each in enumerate(ranks))


def overlapping(shards: Any, *arguments: Any) -> tuple[Any, ...]:
    right = enumerate(shards(*arguments))
    return tuple(shard._replace(offset=shard.offset - slot) for slot, shard in right)


def opposite(shards: Any, *arguments: Any) -> tuple[Any, ...]:
    right = shards(*arguments)
    end = sum(shard.padded for shard in right)
    return tuple(each._replace(offset=end - each.offset - each.padded) for each in right)


def unpadded(*, last_row_only: bool) -> Callable[..., Any]:
    """Leave padding, or its last row, as ``torch.empty`` gives it."""

    def faulty(materialize_on: Any, parameter: BasevLLMParameter, device: Any) -> Any:
        real = materialize_on(parameter, device)
        for dim, shards in enumerate(parameter.shards):
            for _, _, length, offset, room in shards:
                rows = min(room - length, 1 if last_row_only else room)
                padding = real.data.narrow(dim, offset + room - rows, rows)
                padding.copy_(torch.empty_like(padding))
        return real

    return faulty


def rounded_down(in_units: Any, dim: Dim, unit: int, *args: Any, **kwargs: Any) -> Dim:
    in_units(dim, unit, *args, **kwargs)
    return Dim(tuple(Slot(s.name, s.size // unit, s.parts, s.padded // unit) for s in dim.slots))


def to_the_first(pieces: Any, scale: Any, weight: Any, slot: str | None) -> Iterator[Piece]:
    for piece in pieces(scale, weight, slot):
        first = scale.data.view(-1)[: piece.target.numel()]
        yield piece._replace(target=first.view(piece.target.shape))


def never_cut(check: Any, slot: Slot) -> None:
    check(slot)
    if slot.parts > 1:
        raise ShardingError(f"{slot.label} cannot be divided into {slot.parts} parts")


# What is cut from a fused tensor


def of_fused(change: Callable[..., Any]) -> Callable[..., Any]:
    """Cut a tensor that a checkpoint stores fused as ``change(pieces, parameter, weight)`` does."""

    def faulty(pieces: Any, parameter: Any, weight: Any, slot: str | None) -> Any:
        if slot is None and len(parameter.slots) > 1:
            return change(pieces, parameter, weight)
        return pieces(parameter, weight, slot)

    return faulty


def by_rank(pieces: Any, parameter: Any, weight: Any) -> Iterator[Piece]:
    rows = len(parameter)
    yield Piece(weight.narrow(0, parameter.tp_rank * rows, rows), parameter.data, ())


def first_slot_for_each(pieces: Any, parameter: Any, weight: Any) -> Iterator[Piece]:
    for slot in parameter.dims[0].slots:
        yield from pieces(parameter, weight.narrow(0, 0, slot.size), slot.name)


def quantized_first_slot(jobs: Any, conversion: Any, module: Any, weight: Any, slot: Any) -> Any:
    for each in module.output.slots if slot is None else ():
        yield from jobs(conversion, module, weight.narrow(0, 0, each.size), each.name)
    if slot is not None:
        yield from jobs(conversion, module, weight, slot)


# Experts, and what is stored in another order


def one_place_too_far(shards: Any, experts: Experts) -> tuple[Shard, ...]:
    kept = len(experts.kept)
    return tuple(
        shard._replace(offset=(shard.offset + 1) % kept) if shard.length else shard
        for shard in shards(experts)
    )


def without_the_rest(kept: Any, experts: Experts) -> range:
    each = experts.count // experts.size
    return range(experts.rank * each, (experts.rank + 1) * each)


def with_all_the_rest(kept: Any, experts: Experts) -> range:
    each, is_last = experts.count // experts.size, experts.rank == experts.size - 1
    return range(experts.rank * each, experts.count if is_last else (experts.rank + 1) * each)


def as_before(table: Any, experts: Experts) -> torch.Tensor:
    """Return the table of experts in order, with as many places as there are."""
    places = tuple(place % experts.count for place in range(experts.places))
    return table(replace(experts, placement=places))


def all_turns(table: Any, experts: Experts) -> torch.Tensor:
    right = table(experts)
    return right if right.dim() == 1 else torch.stack([right[0], right[1] * 0, right[2] * 0 + 1])


def too_many_turns(table: Any, experts: Experts) -> torch.Tensor:
    right = table(experts)
    return right if right.dim() == 1 else right + torch.tensor([[0], [0], [1]], dtype=torch.int32)


def of_the_other_slot(stored_start: Any, dim: Dim, at: int, start: int) -> int:
    of_projections = len(dim.slots) == 2 and not dim.slots[0].name.isdecimal()
    return stored_start(dim, 1 - at if of_projections else at, start)


def packed_by_rank(pieces: Any, parameter: Any, weight: Any) -> Iterator[Piece]:
    if len(parameter.dims[1].slots) == 1 or parameter.transposed:
        yield from pieces(parameter, weight, None)
        return
    rows = parameter.shape[1]
    for offset, expert in enumerate(parameter.experts.kept):
        of_expert = weight.narrow(0, expert, 1)
        part = of_expert.narrow(1, parameter.tp_rank * rows % of_expert.shape[1], rows)
        yield Piece(part, parameter.data.narrow(0, offset, 1), ())


def squares_as_stored(pieces: Any, parameter: Any, weight: Any, slot: str | None) -> list[Piece]:
    division = parameter.division
    if weight.ndim > 1 and weight.shape[-1] == weight.shape[-2]:
        dims = parameter.dims[parameter.experts is not None :]
        of_rank = parameter.tp_rank, parameter.tp_size
        parameter.division = division_of(dims, *of_rank, parameter.experts, False)
    try:
        return list(pieces(parameter, weight, slot))
    finally:
        parameter.division = division


def of_equal_shares(restore: Any, order: Any, stored: torch.Tensor) -> torch.Tensor:
    if order.groups is not None:
        dim, shares, padding = order.groups
        equal = sum(shares) // len(shares)
        shares = (*[equal] * (len(shares) - 1), sum(shares) - equal * (len(shares) - 1))
        order = order._replace(groups=(dim, shares, padding))
    return restore(order, stored)


def uncorrected(forward: Any, layer: Any, *args: Any) -> torch.Tensor:
    bias = layer.e_score_correction_bias
    layer.e_score_correction_bias = None if layer.tp_group.rank else bias
    try:
        return forward(layer, *args)
    finally:
        layer.e_score_correction_bias = bias


def of_next_expert(region: Any, parameter: Any, slot: Any) -> torch.Tensor:
    if parameter.experts is not None and not isinstance(slot, str) and len(parameter):
        kept = list(parameter.experts.kept)
        slot = (kept[(kept.index(slot[0]) + 1) % len(kept)], *slot[1:])
    return region(parameter, slot)


# Packed weights


def cut_anywhere(in_units: Any, dim: Dim, unit: int, what: str, *args: Any, **kwargs: Any) -> Dim:
    """Round shards down to whole words and groups, where a word or group is of two ranks."""
    try:
        return in_units(dim, unit, what, *args, **kwargs)
    except ShardingError:
        elements = kwargs.get("elements", 1)
        slots = (
            Slot(s.name, max(s.parts, s.size // unit // s.parts * s.parts) * elements, s.parts)
            for s in dim.slots
        )
        return Dim(tuple(slots), dim.groups)


def scales_of_next_slot(pieces: Any, scales: Any, weight: Any, slot: str | None) -> Iterator[Piece]:
    names = [name for name in scales.slots if name]
    if slot in names and type(scales).__name__ == "GroupQuantScaleParameter":
        slot = names[(names.index(slot) + 1) % len(names)]
    yield from pieces(scales, weight, slot)


def absmax_of_next_slot(pieces: Any, scales: Any, weight: Any, slot: str | None) -> Iterator[Piece]:
    names = [name for name in scales.slots if name]
    if slot in names and not scales.column:
        slot = names[(names.index(slot) + 1) % len(names)]
    yield from pieces(scales, weight, slot)


def counted_from_its_own_first(cut: Any, numbers: Any, stored: Any, slot: str) -> Iterator[Any]:
    for source, target in cut(numbers, stored, slot):
        yield source - source.min(), target


def groups_in_order(groups_of_inputs: Any, method: Any, layer: Any) -> torch.Tensor | None:
    group_of = groups_of_inputs(method, layer)
    if group_of is None:
        return None
    in_order = torch.arange(group_of.shape[-1], dtype=torch.int32) // method.group_size
    return in_order.expand_as(group_of)


def one_code_higher(quantize: Any, conversion: Any, wide: Any, words: Any, scales: Any) -> None:
    quantize(conversion, wide, words, scales)
    words.add_(0x11111111)


def unpadded_if_partial(new: Any, allocation: Any, tensor: Any, device: Any) -> Any:
    real = new(allocation, tensor, device)
    typed = isinstance(real, BasevLLMParameter) and real.is_floating_point()
    if allocation._partial and typed and len(real.slots) > 1:
        real.data.fill_(torch.nan)
    return real


# What the layers compute


def unreduced(init: Any, layer: RowParallelLinear, *args: Any, **kwargs: Any) -> None:
    init(layer, *args, **kwargs)
    layer.reduce_results = False


def of_neighbour(forward: Any, layer: RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
    return forward(layer, x.roll(x.shape[-1] // layer.tp_group.size, -1))


def projected_and_gathered(forward: Any, layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.tp_group.all_gather(layer.quant_method.apply(layer, x, layer.bias))


def looked_up(*, beyond: int, masked: bool) -> Callable[..., torch.Tensor]:
    """Look tokens up as each rank does, ``beyond`` its last one, and mask those of other ranks."""

    def faulty(forward: Any, layer: Any, ids: torch.Tensor) -> torch.Tensor:
        ((_, start, length, _, _),) = layer.weight.shards[0]
        if layer.tp_group.size == 1:
            return forward(layer, ids)
        others = (ids < start) | (ids >= start + length + beyond)
        local = (ids - start).masked_fill(others, 0).clamp(max=len(layer.weight) - 1)
        rows = F.embedding(local, layer.weight)
        rows = rows.masked_fill(others.unsqueeze(-1), 0) if masked else rows
        return layer.tp_group.all_reduce(rows)

    return faulty


def without_last_rank(reduce: Any, group: Any, tensor: torch.Tensor) -> torch.Tensor:
    return reduce(group, torch.zeros_like(tensor) if 0 < group.rank == group.size - 1 else tensor)


def joined_backwards(gather: Any, group: Any, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return torch.cat(gather(group, tensor, dim).chunk(group.size, dim)[::-1], dim)


# What ranks that load together pass to each other


def never_waiting(start: Any, ring: Any, read: Any) -> None:
    ring._is_free = lambda batch: True
    start(ring, read)
    for thread in ring._threads:
        thread.join()


def own_part_alone(is_filled: Any, ring: Any, batch: int) -> bool:
    return bool(ring._filled[ring._rank] > batch)


def of_another_part(read_part: Any, reader: Any, batch: int, buffer: torch.Tensor) -> None:
    """Read an equal chunk of the same tensor in the place of this rank's, where there is one."""
    own = reader._own[batch]
    others = [chunk for _, overlaps in reader._planned for chunk, _ in overlaps]

    def another(chunk: Any) -> Any:
        sizes = [length for _, length in chunk.box]
        equal = [
            other
            for other in others
            if other.name == chunk.name
            and other.owner != chunk.owner
            and [length for _, length in other.box] == sizes
        ]
        return chunk._replace(box=equal[0].box) if equal else chunk

    reader._own[batch] = [another(chunk) for chunk in own]
    read_part(reader, batch, buffer)


def one_row_too_far(split: Any, box: Any, most: int) -> Any:
    first, *rest = split(box, most)
    if not first or not rest or not first[0][0]:
        return [first, *rest]
    (start, length), *inner = first
    return [((start - 1, length), *inner), *rest]


# Layers with recurrent state


def convolved_by_rank(init: Any, layer: CausalConv1d, channels: Dim, *others: Any) -> None:
    """Cut a convolution's channels as one slot."""
    init(layer, Dim.cut(channels.size, max(slot.parts for slot in channels.slots)), *others)


def normalized_alone(forward: Any, norm: GroupedGatedRMSNorm, *inputs: torch.Tensor) -> Any:
    """Normalize the rank's part of a group by itself."""
    norm.group_size = min(norm.group_size, len(norm.weight))
    return forward(norm, *inputs)


def added_over_groups(right: Any, norm: GroupedGatedRMSNorm, total: torch.Tensor) -> torch.Tensor:
    """Add up the sums of squares of all ranks, whatever groups they keep."""
    return norm.tp_group.all_reduce(total)


def decays_of_first_load(process: Any, layer: DecayingLayer) -> None:
    """Compute the decays once."""
    if not layer.A.any():
        process(layer)


def decays_of_first_heads(heads: Any, layer: DecayingLayer) -> torch.Tensor:
    """Return the decay of the first head for all."""
    return heads(layer)[:1].expand(len(layer.A)).contiguous()


def of_the_first_groups(groups_of: Any, dim: Dim, shards: Any) -> Any:
    """Read the first groups on every rank."""
    groups = groups_of(dim, shards)
    return groups and (0, *groups[1:])
