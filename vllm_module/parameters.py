"""Typed parameters: where a rank's shard of a checkpoint tensor goes.

A parameter's dimensions are described once, for all ranks, by :class:`Dim`; the parameter, which
owns its rank and size, works out which part of each slot it keeps. Everything else (shapes, the
checkpoint shape a slot expects, the pieces to copy, padding) follows from that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from vllm_module.errors import ShardingError
from vllm_module.weights import Weight

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Slot:
    """A named part of a dimension, as the checkpoint stores it.

    Args:
        name: the checkpoint's component (``"q_proj"``), or ``""`` for a dimension of one slot.
        size: features in the checkpoint.
        parts: distinct parts the slot is cut into. 1: every rank keeps it whole; the
            tensor-parallel size: each rank its own; between: groups of ranks share a part.
        padded: features after padding with zeros; ``size`` unless given.

    """

    name: str
    size: int
    parts: int = 1
    padded: int = -1

    def __post_init__(self) -> None:
        if self.padded == -1:
            object.__setattr__(self, "padded", self.size)
        if self.size < 1 or self.parts < 1 or self.padded < self.size:
            raise ShardingError(f"impossible slot {self!r}: sizes and parts must be positive")
        if self.padded % self.parts:
            raise ShardingError(
                f"{self.label} of {self.padded} features cannot be divided into {self.parts} "
                f"equal parts ({self.padded} % {self.parts} = {self.padded % self.parts}): "
                "choose a tensor-parallel size that divides it"
            )

    @property
    def label(self) -> str:
        return f"slot {self.name!r}" if self.name else "a dimension"


class Shard(NamedTuple):
    """What one rank keeps of one slot, in elements along one dimension.

    ``start`` and ``length`` lie in the checkpoint's tensor, ``offset`` and ``room`` in the rank's
    parameter; where ``room`` exceeds ``length`` the rest is padding.
    """

    name: str
    start: int
    length: int
    offset: int
    room: int


@dataclass(frozen=True)
class Dim:
    """One dimension of features: its slots in order, the same description on every rank.

    Several slots all have names; one may do without.
    """

    slots: tuple[Slot, ...]
    size: int = field(init=False)  # in the checkpoint, all slots together

    def __post_init__(self) -> None:
        names = [slot.name for slot in self.slots]
        if not names or (len(names) > 1 and (not all(names) or len(set(names)) < len(names))):
            raise ValueError(f"the slots of a dimension need distinct names, got {names}")
        object.__setattr__(self, "size", sum(slot.size for slot in self.slots))

    @classmethod
    def whole(cls, size: int) -> Dim:
        """Return a dimension that every rank keeps whole."""
        return cls((Slot("", size),))

    @classmethod
    def cut(cls, size: int, parts: int, *, padded: int = -1) -> Dim:
        """Return a dimension of ``size`` features cut into ``parts``."""
        return cls((Slot("", size, parts, padded),))

    def shards(self, tp_rank: int, tp_size: int) -> tuple[Shard, ...]:
        """Return what rank ``tp_rank`` of ``tp_size`` keeps of each slot."""
        shards = []
        offset = 0
        for slot in self.slots:
            if tp_size % slot.parts:
                raise ShardingError(
                    f"{slot.label} has {slot.parts} parts, which {tp_size} tensor-parallel "
                    "ranks cannot share evenly"
                )
            # Division, not modulo: neighbours share a part, as their query heads need.
            part = tp_rank * slot.parts // tp_size
            room = slot.padded // slot.parts
            start = min(part * room, slot.size)
            length = min(room, slot.size - start)
            shards.append(Shard(slot.name, start, length, offset, room))
            offset += room
        return tuple(shards)

    def in_units(self, unit: int, what: str, *, partial: bool = False) -> Dim:
        """Return this dimension counted in units of ``unit`` features, such as scale groups.

        Every slot and shard edge must fall between units; with ``partial``, the end of the last
        slot may fall inside one where that slot is not cut (block scales round up there).
        Raises ``ShardingError`` otherwise: a unit shared by two shards has no one owner.
        """
        slots = []
        for slot in self.slots:
            last = slot is self.slots[-1] and slot.parts == 1
            part = slot.padded // slot.parts
            if part % unit and not (partial and last):
                advice = f"choose a tensor-parallel size that leaves a multiple of {unit}"
                if slot.padded % unit:
                    advice = "no tensor-parallel size can change that"
                raise ShardingError(
                    f"{slot.label}: its shard of {part} features ({slot.padded} in {slot.parts} "
                    f"parts) ends inside a {what} of {unit}: {advice}"
                )
            size, padded = -(-slot.size // unit), -(-slot.padded // unit)
            slots.append(Slot(slot.name, size, slot.parts, padded))
        return Dim(tuple(slots))


class BasevLLMParameter(nn.Parameter):
    """A parameter that cuts its own shard out of checkpoint tensors.

    Born on the meta device; :meth:`materialize_on` makes it real. Its attributes are those its
    constructor declares, and nothing else is ever hung on it.

    Args:
        dims: one :class:`Dim` for each dimension of the tensor; at most one has named slots.
        tp_rank, tp_size: this parameter's place in the tensor-parallel group. No defaults: a
            forgotten rank would load shard 0 everywhere, right in shape and wrong in value.
        dtype: of the parameter; floating-point checkpoints are converted to it.

    Attributes:
        shards: what this rank keeps of every slot of every dimension.
        slot_dim: the one dimension that can have named slots.
        slots: names of the parts that must be filled, each exactly once.

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
        shape = [sum(shard.room for shard in of_dim) for of_dim in shards]
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
                if padding := shard.room - shard.length:
                    data.narrow(dim, shard.offset + shard.length, padding).zero_()
        return self._like(data)

    def checkpoint_shape(self, slot: str | None) -> tuple[int, ...]:
        """Return the shape of ``slot`` in a checkpoint; of the whole fused tensor for ``None``."""
        shape = [dim.size for dim in self.dims]
        if slot is not None:
            declared = self.dims[self.slot_dim].slots[self.slots.index(slot)]
            shape[self.slot_dim] = declared.size
        return tuple(shape)

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        """Tell whether a checkpoint tensor of ``shape`` can fill ``slot``."""
        return shape == self.checkpoint_shape(slot)

    def cut(self, weight: Weight, slot: str | None) -> Iterator[tuple[Weight, torch.Tensor]]:
        """Yield what this rank keeps of ``weight`` and the view of this parameter it belongs in.

        ``weight`` is the checkpoint's tensor for ``slot``, or for ``None`` the whole fused tensor,
        which is cut by slot first and only then by rank. Nothing is read. A slot of which this
        rank has padding alone yields nothing.
        """
        stored, room, data = weight.shape, self.shape, self.data
        first = 0  # where the slot begins in a tensor that is stored fused
        for declared, kept in zip(
            self.dims[self.slot_dim].slots, self.shards[self.slot_dim], strict=True
        ):
            if slot is None or slot == declared.name:
                source, target = weight, data
                for dim, of_dim in enumerate(self.shards):
                    _, start, length, offset, _ = kept if dim == self.slot_dim else of_dim[0]
                    if length != stored[dim]:
                        begin = first if dim == self.slot_dim and slot is None else 0
                        source = source.narrow(dim, begin + start, length)
                    if length != room[dim]:
                        target = target.narrow(dim, offset, length)
                if target.numel():
                    yield source, target
            first += declared.size

    def region(self, slot: str) -> torch.Tensor:
        """Return the view of this parameter that ``slot`` fills, without the padding."""
        view = self.data
        for dim, of_dim in enumerate(self.shards):
            kept = of_dim[self.slots.index(slot)] if dim == self.slot_dim else of_dim[0]
            view = view.narrow(dim, kept.offset, kept.length)
        return view


def _rebuild(
    cls: type[BasevLLMParameter], data: torch.Tensor, requires_grad: bool, declared: dict[str, Any]
) -> BasevLLMParameter:
    """Unpickle: a parameter's constructor makes meta tensors only."""
    parameter = nn.Parameter.__new__(cls, data, requires_grad)
    vars(parameter).update(declared)
    return parameter


class ModelWeightParameter(BasevLLMParameter):
    """A weight ``[output, input]``: column-parallel cuts ``output``, row-parallel ``input``."""

    def __new__(
        cls, output: Dim, input: Dim, *, tp_rank: int, tp_size: int, dtype: torch.dtype
    ) -> Self:
        return super().__new__(cls, output, input, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype)


class ColumnvLLMParameter(BasevLLMParameter):
    """A vector ``[output]`` along the output features, such as a bias."""

    def __new__(cls, output: Dim, *, tp_rank: int, tp_size: int, dtype: torch.dtype) -> Self:
        return super().__new__(cls, output, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype)


class RowvLLMParameter(BasevLLMParameter):
    """A vector ``[input]`` along the input features, such as an activation order."""

    def __new__(cls, input: Dim, *, tp_rank: int, tp_size: int, dtype: torch.dtype) -> Self:
        return super().__new__(cls, input, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype)


class PackedvLLMParameter(BasevLLMParameter):
    """A weight ``[output, input]`` whose ``packed_dim`` holds ``packed_factor`` values an element.

    Raises ``ShardingError`` where a slot's or a shard's edge falls inside an element.
    """

    def __new__(
        cls,
        output: Dim,
        input: Dim,
        *,
        packed_dim: int,
        packed_factor: int,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
    ) -> Self:
        dims = [output, input]
        dims[packed_dim] = dims[packed_dim].in_units(packed_factor, "packed element")
        self = super().__new__(cls, *dims, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype)
        self.packed_dim, self.packed_factor = packed_dim, packed_factor
        return self

    packed_dim: int
    packed_factor: int


class PackedColumnParameter(BasevLLMParameter):
    """A vector ``[output]`` with ``packed_factor`` values an element, such as zero points."""

    def __new__(
        cls,
        output: Dim,
        *,
        packed_factor: int,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
    ) -> Self:
        output = output.in_units(packed_factor, "packed element")
        self = super().__new__(cls, output, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype)
        self.packed_factor = packed_factor
        return self

    packed_factor: int


class PerTensorScaleParameter(BasevLLMParameter):
    """One scale for each slot of the layer's output, ``[slots]``, the same on every rank.

    A checkpoint stores a slot's scale as ``[]`` or ``[1]``; one such scale given for a fused
    tensor serves all of its slots.
    """

    def __new__(cls, output: Dim, *, tp_rank: int, tp_size: int, dtype: torch.dtype) -> Self:
        scales = Dim(tuple(Slot(slot.name, 1) for slot in output.slots))
        return super().__new__(cls, scales, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype)

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        return shape in ((), (1,)) or super().accepts(slot, shape)

    def cut(self, weight: Weight, slot: str | None) -> Iterator[tuple[Weight, torch.Tensor]]:
        if weight.shape not in ((), (1,)):
            yield from super().cut(weight, slot)
            return
        for index, name in enumerate(self.slots):
            if slot in (None, name):
                yield weight, self.data[index].view(weight.shape)


class ChannelQuantScaleParameter(BasevLLMParameter):
    """One scale for each output feature, ``[output, 1]``."""

    def __new__(cls, output: Dim, *, tp_rank: int, tp_size: int, dtype: torch.dtype) -> Self:
        one = Dim.whole(1)
        return super().__new__(cls, output, one, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype)


class GroupQuantScaleParameter(BasevLLMParameter):
    """One scale for each output feature and group of inputs, ``[output, input / group_size]``.

    Raises ``ShardingError`` where a shard of the input ends inside a group.
    """

    def __new__(
        cls,
        output: Dim,
        input: Dim,
        *,
        group_size: int,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
    ) -> Self:
        groups = input.in_units(group_size, "scale group", partial=True)
        return super().__new__(cls, output, groups, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype)


class BlockQuantScaleParameter(BasevLLMParameter):
    """One scale for each block of the weight, ``[output / block[0], input / block[1]]``.

    Counts round up, as in DeepSeek-V3's ``weight_scale_inv``. Raises ``ShardingError`` where an
    edge between slots or shards falls inside a block: its scale would belong to both.
    """

    def __new__(
        cls,
        output: Dim,
        input: Dim,
        *,
        block: tuple[int, int],
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
    ) -> Self:
        rows = output.in_units(block[0], "scale block", partial=True)
        cols = input.in_units(block[1], "scale block", partial=True)
        return super().__new__(cls, rows, cols, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype)
