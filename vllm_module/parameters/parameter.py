"""A parameter that knows its shard: its shape, what it expects, and where checkpoint tensors go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_module.parameters.dim import Dim, Shard
from vllm_module.weights import Weight

if TYPE_CHECKING:
    from typing_extensions import Self


class BasevLLMParameter(nn.Parameter):
    """A parameter that cuts its own shard out of checkpoint tensors.

    It is created on the meta device; :meth:`materialize_on` returns one with memory. It has the
    attributes that its constructor declares and no others.

    Args:
        dims: one :class:`Dim` for each dimension of the tensor; at most one has named slots.
        tp_rank, tp_size: the parameter's place in the tensor-parallel group. They have no defaults,
            because a forgotten rank would load shard 0 everywhere: right shape, wrong values.
        dtype: of the parameter; floating-point checkpoints are converted to it.

    Attributes:
        shards: by dimension, what this rank keeps of each slot.
        slot_dim: the dimension that has named slots; 0 if none has.
        slots: names of the slots, each of which must be filled exactly once.

    Raises:
        ShardingError: a slot cannot be divided among ``tp_size`` ranks.

    """

    tp_rank: int
    tp_size: int
    dims: tuple[Dim, ...]
    shards: tuple[tuple[Shard, ...], ...]
    slot_dim: int
    slots: tuple[str, ...]

    def __new__(cls, *dims: Dim, tp_rank: int, tp_size: int, dtype: torch.dtype) -> Self:
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"tensor-parallel rank {tp_rank} is outside of range({tp_size})")
        if sum(bool(dim.slots[0].name) for dim in dims) > 1:
            raise ValueError("only one dimension of a parameter can have named slots")
        shards = tuple(dim.shards(tp_rank, tp_size) for dim in dims)
        shape = [sum(shard.padded for shard in dim_shards) for dim_shards in shards]
        self: Self = super().__new__(cls, torch.empty(shape, dtype=dtype, device="meta"), False)
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.dims, self.shards = dims, shards
        self.slot_dim = next((i for i, dim in enumerate(dims) if dim.slots[0].name), 0)
        self.slots = tuple(slot.name for slot in dims[self.slot_dim].slots)
        return self

    def _like(self, data: torch.Tensor) -> Self:
        new: Self = nn.Parameter.__new__(type(self), data, self.requires_grad)
        new.__dict__.update(self.__dict__)
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.data, self.requires_grad, vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = self._like(self.data.clone(memory_format=torch.preserve_format))
        return memo[id(self)]

    def materialize_on(self, device: torch.device | str) -> Self:
        """Return this parameter with uninitialized memory on ``device``; padding is zero."""
        data = torch.empty(self.shape, dtype=self.dtype, device=device)
        for dim, shards in enumerate(self.shards):
            for shard in shards:
                if padding := shard.padded - shard.length:
                    data.narrow(dim, shard.offset + shard.length, padding).zero_()
        return self._like(data)

    def checkpoint_shape(self, slot: str | None) -> tuple[int, ...]:
        """Return the shape of ``slot`` in a checkpoint; ``None`` means all slots as one tensor."""
        shape = [dim.size for dim in self.dims]
        if slot is not None:
            declared = self.dims[self.slot_dim].slots[self.slots.index(slot)]
            shape[self.slot_dim] = declared.size
        return tuple(shape)

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        """Tell whether a checkpoint tensor of ``shape`` can fill ``slot``."""
        return shape == self.checkpoint_shape(slot)

    def cut(self, weight: Weight, slot: str | None) -> Iterator[tuple[Weight, torch.Tensor]]:
        """Yield each piece of ``weight`` that this rank keeps, and the view that it belongs in.

        ``weight`` is the checkpoint's tensor for ``slot``. For ``None`` it is the whole fused
        tensor, which is cut by slot first and then by rank: cutting it by rank alone would put rows
        of Q into K. Nothing is read. A slot of which this rank has only padding yields nothing.
        """
        stored_shape, local_shape, data = weight.shape, self.shape, self.data
        slot_start = 0  # in the checkpoint's fused tensor
        for declared, slot_shard in zip(
            self.dims[self.slot_dim].slots, self.shards[self.slot_dim], strict=True
        ):
            if slot is None or slot == declared.name:
                source, target = weight, data
                for dim, shards in enumerate(self.shards):
                    _, start, length, offset, _ = slot_shard if dim == self.slot_dim else shards[0]
                    if length != stored_shape[dim]:
                        if slot is None and dim == self.slot_dim:
                            start += slot_start
                        source = source.narrow(dim, start, length)
                    if length != local_shape[dim]:
                        target = target.narrow(dim, offset, length)
                if target.numel():
                    yield source, target
            slot_start += declared.size

    def region(self, slot: str) -> torch.Tensor:
        """Return the view of this parameter that ``slot`` fills, without the padding."""
        view = self.data
        for dim, shards in enumerate(self.shards):
            shard = shards[self.slots.index(slot) if dim == self.slot_dim else 0]
            view = view.narrow(dim, shard.offset, shard.length)
        return view


def _rebuild(
    cls: type[BasevLLMParameter], data: torch.Tensor, requires_grad: bool, declared: dict[str, Any]
) -> BasevLLMParameter:
    """Unpickle a parameter; its constructor could create it only on meta."""
    parameter = nn.Parameter.__new__(cls, data, requires_grad)
    vars(parameter).update(declared)
    return parameter
