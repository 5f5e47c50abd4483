"""The classes of parameters, which differ in how they count the features of their layer.

Features are counted one by one, in packed elements, groups or blocks, or as one for each slot.
``output`` and ``input`` are the layer's features as :class:`Dim`; ``tp_rank``, ``tp_size``,
``dtype``, ``experts`` and ``transposed`` are those of :class:`BasevLLMParameter`. With ``experts``,
the shapes below have one more dimension before the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypedDict

import torch

from vllm_module.parameters.dim import Dim, Experts, Slot
from vllm_module.parameters.division import Index, Narrow
from vllm_module.parameters.parameter import BasevLLMParameter, Piece
from vllm_module.weights import Weight

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class More(TypedDict, total=False):
    """Arguments of :class:`BasevLLMParameter` that most parameters do without."""

    experts: Experts | None
    transposed: bool


class Common(TypedDict):
    """The arguments that all parameters of a layer have in common."""

    experts: Experts | None
    tp_rank: int
    tp_size: int
    dtype: torch.dtype


class ModelWeightParameter(BasevLLMParameter):
    """A weight ``[output, input]``: column-parallel cuts ``output``, row-parallel ``input``."""

    def __new__(
        cls,
        output: Dim,
        input: Dim,
        *,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        **more: Unpack[More],
    ) -> Self:
        return super().__new__(
            cls, output, input, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more
        )


class ColumnvLLMParameter(BasevLLMParameter):
    """A vector ``[output]`` along the output features, such as a bias."""

    def __new__(
        cls, output: Dim, *, tp_rank: int, tp_size: int, dtype: torch.dtype, **more: Unpack[More]
    ) -> Self:
        return super().__new__(cls, output, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more)


class RowvLLMParameter(BasevLLMParameter):
    """A vector ``[input]`` along the input features, such as an activation order."""

    def __new__(
        cls, input: Dim, *, tp_rank: int, tp_size: int, dtype: torch.dtype, **more: Unpack[More]
    ) -> Self:
        return super().__new__(cls, input, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more)


class PackedvLLMParameter(BasevLLMParameter):
    """A weight ``[output, input]`` with ``packed_factor`` values an element along ``packed_dim``.

    With ``stored_unpacked``, a checkpoint has an element for each value, and a conversion packs
    them. Slots, shards and dimensions are then those of the values.

    Raises ``ShardingError`` where the edge of a slot or shard falls inside an element.
    """

    packed_dim: int
    packed_factor: int
    stored_unpacked: bool

    def __new__(
        cls,
        output: Dim,
        input: Dim,
        *,
        packed_dim: int,
        packed_factor: int,
        stored_unpacked: bool = False,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        **more: Unpack[More],
    ) -> Self:
        dims = [output, input]
        dims[packed_dim] = dims[packed_dim].in_units(packed_factor, "packed element")
        if stored_unpacked:
            dims = [output, input]
        self = super().__new__(cls, *dims, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more)
        self.packed_dim, self.packed_factor = packed_dim, packed_factor
        self.stored_unpacked = stored_unpacked
        return self._packed()

    def of_rank(self, rank: int) -> Self:
        return super().of_rank(rank)._packed()

    def region(self, slot: str | Index) -> torch.Tensor:
        if not self.stored_unpacked:
            return super().region(slot)
        view = self.data
        for narrow in self.division.region(slot):
            view = view.narrow(*self._in_elements(narrow))
        return view

    def zero_padding(self) -> None:
        if not self.stored_unpacked:
            super().zero_padding()
            return
        for narrow in self.division.padding:
            self.data.narrow(*self._in_elements(narrow)).zero_()

    def pieces(self, weight: Weight, slot: str | None) -> Iterator[Piece]:
        if not self.stored_unpacked:
            yield from super().pieces(weight, slot)
            return
        for cut in self.division.cuts(slot):
            yield Piece(cut.source(weight), self.region(cut.at), cut.at, cut.order)

    def _packed(self) -> Self:
        """Return the parameter, which is on meta, without an element for each value."""
        if not self.stored_unpacked:
            return self
        shape = list(self.shape)
        shape[self.packed_dim - 2] //= self.packed_factor
        return self._like(self.data.new_empty(shape))

    def _in_elements(self, narrow: Narrow) -> Narrow:
        """Return where packed elements are, instead of where values are."""
        dim, start, length = narrow
        if dim != len(self.dims) + self.packed_dim - 2:
            return narrow
        return dim, start // self.packed_factor, -(-length // self.packed_factor)


class PackedColumnParameter(BasevLLMParameter):
    """A vector ``[output]`` with ``packed_factor`` values an element, such as zero points.

    Raises ``ShardingError`` where the edge of a slot or shard falls inside an element.
    """

    packed_factor: int

    def __new__(
        cls,
        output: Dim,
        *,
        packed_factor: int,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        **more: Unpack[More],
    ) -> Self:
        output = output.in_units(packed_factor, "packed element")
        self = super().__new__(cls, output, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more)
        self.packed_factor = packed_factor
        return self


class PerTensorScaleParameter(BasevLLMParameter):
    """One scale for each slot of the layer's output, ``[slots]``, the same on every rank.

    A checkpoint stores a slot's scale as ``[]`` or ``[1]``. One such scale of a tensor that is
    stored fused fills all slots.
    """

    def __new__(
        cls, output: Dim, *, tp_rank: int, tp_size: int, dtype: torch.dtype, **more: Unpack[More]
    ) -> Self:
        groups = None if output.groups is None else 1
        scales = Dim(tuple(Slot(slot.name, 1) for slot in output.slots), groups)
        return super().__new__(cls, scales, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more)

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        return shape in ((), (1,)) or super().accepts(slot, shape)

    def pieces(self, weight: Weight, slot: str | None) -> Iterator[Piece]:
        if weight.shape not in ((), (1,)):
            yield from super().pieces(weight, slot)
            return
        for index in self.division.kept(self.division.index_of(slot)):
            yield Piece(weight, self.region(index).view(weight.shape), index)


class ChannelQuantScaleParameter(BasevLLMParameter):
    """One scale for each output feature, ``[output, 1]``."""

    def __new__(
        cls, output: Dim, *, tp_rank: int, tp_size: int, dtype: torch.dtype, **more: Unpack[More]
    ) -> Self:
        return super().__new__(
            cls, output, Dim.whole(1), tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more
        )


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
        **more: Unpack[More],
    ) -> Self:
        groups = input.in_units(group_size, "scale group", partial=True)
        return super().__new__(
            cls, output, groups, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more
        )


class BlockQuantScaleParameter(BasevLLMParameter):
    """One scale for each block of the weight, ``[output / block[0], input / block[1]]``.

    Counts round up, as in DeepSeek-V3's ``weight_scale_inv``. Raises ``ShardingError`` where the
    edge between two slots or shards falls inside a block: both would own its scale.
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
        **more: Unpack[More],
    ) -> Self:
        rows = output.in_units(block[0], "scale block", partial=True)
        cols = input.in_units(block[1], "scale block", partial=True)
        return super().__new__(
            cls, rows, cols, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more
        )
