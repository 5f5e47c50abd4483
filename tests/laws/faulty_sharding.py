"""Functions that cut, gather and compute wrongly.

Each takes the right function as its first argument, or returns a function that does.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from vllm_module import BasevLLMParameter
from vllm_module.errors import ShardingError
from vllm_module.layers import RowParallelLinear
from vllm_module.parameters import Dim, Slot

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


def to_the_first(cut: Any, scale: Any, weight: Any, slot: str | None) -> Iterator[Any]:
    for source, target in cut(scale, weight, slot):
        yield source, target if target.dim() and len(target) > 1 else scale.data[0].view_as(target)


def never_cut(check: Any, slot: Slot) -> None:
    check(slot)
    if slot.parts > 1:
        raise ShardingError(f"{slot.label} cannot be divided into {slot.parts} parts")


# What is cut from a fused tensor


def of_fused(change: Callable[..., Any]) -> Callable[..., Any]:
    """Cut a tensor that a checkpoint stores fused as ``change(cut, parameter, weight)`` does."""

    def faulty(cut: Any, parameter: Any, weight: Any, slot: str | None) -> Any:
        if slot is None and len(parameter.slots) > 1:
            return change(cut, parameter, weight)
        return cut(parameter, weight, slot)

    return faulty


def by_rank(cut: Any, parameter: Any, weight: Any) -> Iterator[Any]:
    rows = len(parameter)
    yield weight.narrow(0, parameter.tp_rank * rows, rows), parameter.data


def first_slot_for_each(cut: Any, parameter: Any, weight: Any) -> Iterator[Any]:
    for slot in parameter.dims[parameter.slot_dim].slots:
        yield from cut(parameter, weight.narrow(parameter.slot_dim, 0, slot.size), slot.name)


def quantized_first_slot(jobs: Any, conversion: Any, module: Any, weight: Any, slot: Any) -> Any:
    for each in module.output.slots if slot is None else ():
        yield from jobs(conversion, module, weight.narrow(0, 0, each.size), each.name)
    if slot is not None:
        yield from jobs(conversion, module, weight, slot)


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
