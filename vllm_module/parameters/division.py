"""The part of a parameter that one rank keeps, and where each slot lies in a checkpoint tensor.

Layers repeat. A division is computed once, and parameters with equal arguments share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from operator import mul
from typing import Any, NamedTuple, TypeAlias

import torch

from vllm_module.parameters.dim import Dim, Experts
from vllm_module.parameters.stored_order import StoredOrder
from vllm_module.weights import Weight

# Index of a slot in each dimension; None means all slots of the dimension.
Index: TypeAlias = tuple[int | None, ...]
Narrow: TypeAlias = tuple[int, int, int]  # dimension, start, length

_AS_HELD, _TRANSPOSED = StoredOrder(), StoredOrder(transposed=True)


class Cut(NamedTuple):
    """The place of one piece in a checkpoint tensor and in the parameter.

    Attributes:
        stored: ranges to narrow the checkpoint's tensor to, one dimension after the other; one is
            skipped if the dimension already has that length.
        starts: begin of the piece in each dimension of the parameter.
        shape: shape of the piece in the parameter. It lacks the first dimension if the checkpoint's
            tensor is for one expert, without a dimension of experts.
        at: the slot in each dimension of the parameter; ``None`` for all slots of it.
        is_whole: True if the piece is the whole parameter.
        order: the order in which the piece is stored, if it is not the parameter's.

    """

    stored: tuple[Narrow, ...]
    starts: tuple[int, ...]
    shape: torch.Size
    at: Index
    is_whole: bool
    order: StoredOrder | None

    def source(self, weight: Weight) -> Weight:
        """Return the piece of ``weight``, the checkpoint's tensor."""
        shape = weight.shape  # may differ from the usual shape, if a subclass accepts it
        for dim, start, length in self.stored:
            if length != shape[dim]:
                weight = weight.narrow(dim, start, length)
        return weight

    def target(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view of ``parameter`` that the piece fills."""
        if self.is_whole:
            return parameter
        # One as_strided view: for many small tensors, a chain of narrow takes longer than the copy.
        strides = parameter.stride()
        offset = parameter.storage_offset() + sum(map(mul, self.starts, strides))
        kept = strides[len(strides) - len(self.shape) :]
        return parameter.as_strided(self.shape, kept, offset)


class Division:
    """The part of the dimensions ``dims`` and of ``experts`` that rank ``tp_rank`` keeps.

    Attributes:
        dims: one for each dimension of the parameter, the experts' first.
        shards: the part of each slot that the rank keeps, by dimension.
        shape: the shape of the parameter.
        padding: regions of the parameter that no checkpoint tensor is read to.
        slots: index of each slot in each dimension, by the slot's name.

    """

    def __init__(
        self,
        dims: tuple[Dim, ...],
        tp_rank: int,
        tp_size: int,
        experts: Experts | None,
        transposed: bool,
    ) -> None:
        self._arguments = dims, tp_rank, tp_size, experts, transposed
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"tensor-parallel rank {tp_rank} is outside of range({tp_size})")
        if transposed and len(dims) < 2:
            raise ValueError("a vector cannot be stored transposed")
        paired = [dim for dim in dims if any(slot.pairs for slot in dim.slots)]
        if len(paired) > 1 or sum(dim.alternates for dim in dims) > 1:
            raise ValueError("one dimension at most can be stored as pairs, and one in groups")
        shards = tuple(dim.shards(tp_rank, tp_size) for dim in dims)
        if experts is not None:
            dims, shards = (experts.dim, *dims), (experts.shards, *shards)
        self.dims, self.shards = dims, shards
        self.shape = torch.Size(sum(shard.padded for shard in each) for each in shards)
        self.padding = [
            (dim, shard.offset + shard.length, shard.padded - shard.length)
            for dim, dim_shards in enumerate(shards)
            for shard in dim_shards
            if shard.padded > shard.length
        ]
        self.slots = _slots(tuple(dim.names for dim in dims))
        self._has_experts, self._transposed = experts is not None, transposed
        self._stored_shapes: dict[str | None, torch.Size] = {}
        self._cuts: dict[str | None, tuple[Cut, ...]] = {}

    def __reduce__(self) -> Any:
        return division_of, self._arguments

    def index_of(self, slot: str | None) -> Index:
        """Return the index of ``slot`` in each dimension; ``None`` is all slots as one tensor."""
        return self.slots[slot] if slot is not None else (None,) * len(self.dims)

    def stored_shape(self, slot: str | None) -> torch.Size:
        """Return the shape of ``slot`` in a checkpoint; ``None`` means all slots as one tensor."""
        shape = self._stored_shapes.get(slot)
        if shape is None:
            shape = self._stored_shapes[slot] = torch.Size(self._shape_of(self.index_of(slot)))
        return shape

    def _shape_of(self, index: Index) -> list[int]:
        shape = [
            dim.size if at is None else dim.slots[at].size
            for dim, at in zip(self.dims, index, strict=True)
        ]
        if self._lacks_experts(index):
            del shape[0]
        if self._transposed:
            shape[-2:] = reversed(shape[-2:])
        return shape

    def _lacks_experts(self, index: Index) -> bool:
        """Return whether a checkpoint's tensor has one expert, without a dimension for experts."""
        return self._has_experts and index[0] is not None

    def cuts(self, slot: str | None) -> tuple[Cut, ...]:
        """Return a cut for each piece of ``slot`` that the rank keeps; ``None`` is all slots.

        A tensor of all slots is cut by slot first and then by rank: cutting it by rank alone would
        put rows of Q into K.
        """
        cuts = self._cuts.get(slot)
        if cuts is None:
            index = self.index_of(slot)
            cuts = tuple(self._cut(index, chosen) for chosen in self.kept(index))
            self._cuts[slot] = cuts
        return cuts

    def kept(self, index: Index) -> product[Index]:
        """Return the indices of the slots at ``index`` of which the rank keeps anything."""
        return product(*[self._kept(dim, at) for dim, at in enumerate(index)])

    def _kept(self, dim: int, at: int | None) -> Index:
        shards = self.shards[dim]
        if at is not None or len(shards) == 1:
            return (at or 0,) if shards[at or 0].length else ()
        declared = self.dims[dim]
        kept = tuple(at for at, shard in enumerate(shards) if shard.length)
        if kept and declared.alternates and declared.groups_of(shards) is not None:
            return (None,)  # the slots are stored in the parameter's order
        return kept

    def _cut(self, index: Index, chosen: Index) -> Cut:
        """Return the cut of the slots ``chosen`` out of the tensor that is stored at ``index``."""
        order = _TRANSPOSED if self._transposed else _AS_HELD
        stored: list[Narrow] = []
        starts, shape = [], []  # start and shape of the target
        dropped = 0
        if self._lacks_experts(index):
            starts, dropped = [self.shards[0][index[0] or 0].offset], 1
        last = len(chosen) - dropped - 1
        for dim in range(dropped, len(chosen)):
            declared, at = self.dims[dim], chosen[dim]
            source_dim = dim - dropped
            if self._transposed and source_dim >= last - 1:
                source_dim = 2 * last - 1 - source_dim
            if at is None:
                groups = declared.groups_of(self.shards[dim])
                assert groups is not None
                first, count, shares = groups
                stored.append((source_dim, first * sum(shares), count * sum(shares)))
                *others, end = self.shards[dim]
                padding = (*(shard.padded - shard.length for shard in others), 0)
                order = order._replace(groups=(source_dim, shares, padding))
                starts.append(0)
                shape.append(end.offset + end.length)
                continue
            _, start, length, offset, _ = self.shards[dim][at]
            if index[dim] is None:
                start = declared.stored_start(at, start)
            stored.append((source_dim, start, length))
            starts.append(offset)
            shape.append(length)
            if pairs := declared.slots[at].pairs:
                order = order._replace(pairs=(source_dim, pairs))
        kept_as = None if order is _AS_HELD else order
        size = torch.Size(shape)
        return Cut(tuple(stored), tuple(starts), size, chosen, size == self.shape, kept_as)

    def region(self, slot: str | Index) -> tuple[Narrow, ...]:
        """Return the ranges that narrow a parameter to a slot, without padding at its end."""
        narrows = []
        for dim, at in enumerate(self.slots[slot] if isinstance(slot, str) else slot):
            shards = self.shards[dim]
            if at is not None:
                narrows.append((dim, shards[at].offset, shards[at].length))
            else:  # experts may lie in any order
                end = max(shard.offset + shard.length for shard in shards)
                narrows.append((dim, 0, end))
        return tuple(narrows)


@lru_cache(maxsize=256)  # a model has tens of divisions; each caches the cuts of its slots
def division_of(
    dims: tuple[Dim, ...], tp_rank: int, tp_size: int, experts: Experts | None, transposed: bool
) -> Division:
    """Return the division for these arguments, which all such parameters share."""
    return Division(dims, tp_rank, tp_size, experts, transposed)


@lru_cache(maxsize=64)  # all layers of a model share the result
def _slots(names: tuple[tuple[str, ...], ...]) -> Mapping[str, Index]:
    """Return the slots of a parameter, by name; dimensions without names are taken whole."""
    indices = product(*[range(len(each)) if each else (None,) for each in names])
    slots: dict[str, Index] = {}
    for index in indices:
        name = ".".join(each[at] for each, at in zip(names, index, strict=True) if at is not None)
        slots[name] = index
    return slots
