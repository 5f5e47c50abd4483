"""The base class of typed parameters, which cut their shard out of checkpoint tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from vllm_module.errors import ShardingError
from vllm_module.parameters.dim import Dim, Experts, Shard
from vllm_module.parameters.division import Division, Index, division_of
from vllm_module.parameters.stored_order import Reordered, StoredOrder
from vllm_module.weights import Destination, Weight

if TYPE_CHECKING:
    from typing_extensions import Self


class Piece(NamedTuple):
    """A part of a checkpoint tensor that a rank keeps, and its region of the parameter.

    Attributes:
        source: the checkpoint's tensor, narrowed; nothing is read.
        target: the view of the parameter, with the same dimensions.
        at: the slot in each dimension of the parameter; ``None`` for all slots of it.
        order: the order in which ``source`` is stored, if it is not that of ``target``.

    """

    source: Weight
    target: torch.Tensor
    at: Index
    order: StoredOrder | None = None

    @property
    def destination(self) -> Destination:
        """The destination that ``source`` is read into."""
        return self.target if self.order is None else Reordered(self.target, self.order)


class BasevLLMParameter(nn.Parameter):
    """A parameter that cuts its own shard out of checkpoint tensors.

    It is created on the meta device; :meth:`materialize_on` returns one with memory. It has the
    attributes that its constructor declares and no others.

    Args:
        dims: one :class:`Dim` for each dimension of the tensor, except that of the experts.
        tp_rank, tp_size: the parameter's place in the tensor-parallel group. They have no defaults,
            because a forgotten rank would load shard 0 everywhere: right shape, wrong values.
        dtype: the parameter's dtype; floating-point checkpoints are converted to it.
        experts: the experts that the first dimension holds, if there are any.
        transposed: True if the checkpoint stores the last two dimensions swapped.

    Attributes:
        division: the part of each slot that this rank keeps; parameters with equal arguments share
            it.

    Raises:
        ShardingError: a slot cannot be divided among ``tp_size`` ranks.

    """

    tp_rank: int
    tp_size: int
    experts: Experts | None
    transposed: bool
    division: Division

    def __new__(
        cls,
        *dims: Dim,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        experts: Experts | None = None,
        transposed: bool = False,
    ) -> Self:
        division = division_of(dims, tp_rank, tp_size, experts, transposed)
        data = torch.empty(division.shape, dtype=dtype, device="meta")
        self: Self = super().__new__(cls, data, False)
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.experts, self.transposed = experts, transposed
        self.division = division
        return self

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dimensions of the tensor, the experts' first."""
        return self.division.dims

    @property
    def shards(self) -> tuple[tuple[Shard, ...], ...]:
        """By dimension, the part of each slot that this rank keeps."""
        return self.division.shards

    @property
    def stored_dtypes(self) -> tuple[torch.dtype, ...]:
        """The only dtypes accepted from a checkpoint; empty: its own, and those that convert."""
        return ()

    @property
    def slots(self) -> Mapping[str, Index]:
        """Slots that a checkpoint may store as tensors of their own; each is filled exactly once.

        Maps a slot's name to its index in each dimension, ``None`` for all slots of it. A name has
        a component for each dimension with an index: ``"q_proj"``, ``"3.up_proj"``.
        """
        return self.division.slots

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
        """Return this parameter with uninitialized memory on ``device``; its padding is zero."""
        real = self._like(torch.empty(self.shape, dtype=self.dtype, device=device))
        real.zero_padding()
        return real

    def of_rank(self, rank: int) -> Self:
        """Return the same parameter as another rank holds it, on meta.

        ``rank`` counts all ranks of a model. Neighbouring ranks make up a tensor-parallel or an
        expert-parallel group.
        """
        experts = self.experts
        dims = self.dims if experts is None else self.dims[1:]
        if experts is not None:
            experts = replace(experts, rank=rank % experts.size)
        tp_rank = rank % self.tp_size
        division = division_of(dims, tp_rank, self.tp_size, experts, self.transposed)
        other = self._like(torch.empty(division.shape, dtype=self.dtype, device="meta"))
        other.tp_rank, other.experts, other.division = tp_rank, experts, division
        return other

    def place_experts(self, experts: Experts) -> None:
        """Declare that the first dimension holds ``experts``, from now on.

        Values stay where they are: whoever calls this moves them, or loads them again.

        Raises ``ShardingError`` if the parameter has no experts, or another number of them.
        """
        held = None if self.experts is None else len(self.experts.kept)
        if held != len(experts.kept):
            raise ShardingError(
                f"a parameter of {held or 'no'} experts cannot hold {len(experts.kept)}"
            )
        dims = self.dims[1:]
        self.experts = experts
        self.division = division_of(dims, self.tp_rank, self.tp_size, experts, self.transposed)

    def zero_padding(self) -> None:
        """Write zeros to the regions that no checkpoint tensor is read to."""
        for region in self.padding():
            region.zero_()

    def padding(self) -> Iterator[torch.Tensor]:
        """Yield each region that no checkpoint tensor is read to; it holds zeros."""
        for narrow in self.division.padding:
            yield self.data.narrow(*narrow)

    def checkpoint_shape(self, slot: str | None) -> torch.Size:
        """Return the shape of ``slot`` in a checkpoint; ``None`` means all slots as one tensor."""
        return self.division.stored_shape(slot)

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        """Return whether a checkpoint tensor of ``shape`` can fill ``slot``."""
        return shape == self.division.stored_shape(slot)

    def cut(self, weight: Weight, slot: str | None) -> Iterator[tuple[Weight, Destination]]:
        """Yield each piece of ``weight`` that this rank keeps, with its destination."""
        return ((piece.source, piece.destination) for piece in self.pieces(weight, slot))

    def pieces(self, weight: Weight, slot: str | None) -> Iterator[Piece]:
        """Yield each piece of ``weight`` that this rank keeps, with its region of the parameter.

        ``weight`` is the checkpoint's tensor for ``slot``; if that is ``None``, the tensor of all
        slots. Nothing is read. A slot of which this rank keeps nothing yields nothing.
        """
        data = self.data
        for cut in self.division.cuts(slot):
            yield Piece(cut.source(weight), cut.target(data), cut.at, cut.order)

    def region(self, slot: str | Index) -> torch.Tensor:
        """Return the view of this parameter that a slot fills, without padding at its end.

        The slot is given by its name or by its index in each dimension.
        """
        view = self.data
        for narrow in self.division.region(slot):
            view = view.narrow(*narrow)
        return view


def _rebuild(
    cls: type[BasevLLMParameter], data: torch.Tensor, requires_grad: bool, declared: dict[str, Any]
) -> BasevLLMParameter:
    """Unpickle a parameter; its constructor could create it only on meta."""
    parameter = nn.Parameter.__new__(cls, data, requires_grad)
    vars(parameter).update(declared)
    return parameter
