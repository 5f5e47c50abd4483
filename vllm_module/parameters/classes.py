"""Classes of parameters, by the unit in which they count the features of their layer.

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
from vllm_module.parameters.division import Index
from vllm_module.parameters.parameter import BasevLLMParameter, Piece
from vllm_module.parameters.stored_order import StoredOrder
from vllm_module.weights import Weight

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class More(TypedDict, total=False):
    """Optional arguments of :class:`BasevLLMParameter`."""

    experts: Experts | None
    transposed: bool


class Common(TypedDict):
    """Arguments that all parameters of a layer share."""

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
    """A weight ``[output, input]`` with ``packed_factor`` values per element along ``packed_dim``.

    Values may cross the edges of elements. Then ``packed_factor`` values take ``packed_elements``
    elements: 32 values of 3 bits are 3 words.

    Raises ``ShardingError`` if the edge of a slot or shard falls inside an element.
    """

    packed_dim: int
    packed_factor: int

    def __new__(
        cls,
        output: Dim,
        input: Dim,
        *,
        packed_dim: int,
        packed_factor: int,
        packed_elements: int = 1,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        **more: Unpack[More],
    ) -> Self:
        what = "packed element" if packed_elements == 1 else f"run of {packed_elements} elements"
        dims = [output, input]
        dims[packed_dim] = dims[packed_dim].in_units(packed_factor, what, elements=packed_elements)
        self = super().__new__(cls, *dims, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more)
        self.packed_dim, self.packed_factor = packed_dim, packed_factor
        return self


class PackedModelWeightParameter(BasevLLMParameter):
    """A weight ``[output, input]`` that a checkpoint stores unpacked, in full precision.

    It is held as ``[output, input / packed_factor]``, with ``packed_factor`` neighbours along the
    input in an element. A conversion packs the values as they are read. Dimensions, slots and
    shards count values.

    Raises ``ShardingError`` if the edge of a slot or shard falls inside an element.
    """

    packed_factor: int

    def __new__(
        cls,
        output: Dim,
        input: Dim,
        *,
        packed_factor: int,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        **more: Unpack[More],
    ) -> Self:
        input.in_units(packed_factor, "packed element")
        self = super().__new__(
            cls, output, input, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more
        )
        self.packed_factor = packed_factor
        return self._packed()

    def _packed(self) -> Self:
        """Return the parameter on meta, in its packed shape."""
        *shape, inputs = self.division.shape
        held = torch.empty((*shape, inputs // self.packed_factor), dtype=self.dtype, device="meta")
        return self._like(held)

    def of_rank(self, rank: int) -> Self:
        return super().of_rank(rank)._packed()

    def padding(self) -> Iterator[torch.Tensor]:
        for narrow in self.division.padding:
            yield self.data.narrow(*self._in_elements(*narrow))

    def pieces(self, weight: Weight, slot: str | None) -> Iterator[Piece]:
        data, factor = self.data, self.packed_factor
        for cut in self.division.cuts(slot):
            held = cut._replace(
                starts=(*cut.starts[:-1], cut.starts[-1] // factor),
                shape=torch.Size((*cut.shape[:-1], cut.shape[-1] // factor)),
            )
            yield Piece(cut.source(weight), held.target(data), cut.at, cut.order)

    def region(self, slot: str | Index) -> torch.Tensor:
        view = self.data
        for narrow in self.division.region(slot):
            view = view.narrow(*self._in_elements(*narrow))
        return view

    def _in_elements(self, dim: int, start: int, length: int) -> tuple[int, int, int]:
        factor = self.packed_factor if dim == len(self.dims) - 1 else 1
        return dim, start // factor, length // factor


class PackedColumnParameter(BasevLLMParameter):
    """A vector ``[output]`` with ``packed_factor`` values per element, such as zero points.

    Raises ``ShardingError`` if the edge of a slot or shard falls inside an element.
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

    A checkpoint stores a slot's scale as ``[]`` or ``[1]``. A single scale of a fused tensor fills
    all slots.
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
    """One scale for each output feature, ``[output, 1]``.

    With ``or_tensor``, a checkpoint may store one scale for all features of a slot, as ``[]`` or
    ``[1]``.
    """

    or_tensor: bool

    def __new__(
        cls,
        output: Dim,
        *,
        or_tensor: bool = False,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        **more: Unpack[More],
    ) -> Self:
        self = super().__new__(
            cls, output, Dim.whole(1), tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more
        )
        self.or_tensor = or_tensor
        return self

    def accepts(self, slot: str | None, shape: torch.Size) -> bool:
        return (self.or_tensor and shape in ((), (1,))) or super().accepts(slot, shape)

    def pieces(self, weight: Weight, slot: str | None) -> Iterator[Piece]:
        if weight.shape not in ((), (1,)):
            yield from super().pieces(weight, slot)
            return
        for index in self.division.kept(self.division.index_of(slot)):
            region = self.region(index)
            yield Piece(weight, region, index, StoredOrder(repeated=tuple(region.shape)))


class GroupQuantScaleParameter(BasevLLMParameter):
    """One scale for each output feature and group of inputs, ``[output, input / group_size]``.

    Raises ``ShardingError`` if a shard of the input ends inside a group.
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

    Counts round up, as in DeepSeek-V3's ``weight_scale_inv``. Raises ``ShardingError`` if the edge
    between two slots or shards falls inside a block, because both would own its scale.

    ``stored_dtypes`` may contain uint8 and float8_e8m0fnu: such a scale is stored as its exponent
    of two plus 127. With ``apart``, one number is after each dimension, as in NVIDIA ModelOpt's
    files: ``[output / block[0], 1, input / block[1], 1]``.
    """

    scale_dtypes: tuple[torch.dtype, ...]

    def __new__(
        cls,
        output: Dim,
        input: Dim,
        *,
        block: tuple[int, int],
        apart: bool = False,
        stored_dtypes: tuple[torch.dtype, ...] = (),
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        **more: Unpack[More],
    ) -> Self:
        rows = output.in_units(block[0], "scale block", partial=True)
        cols = input.in_units(block[1], "scale block", partial=True)
        dims = (rows, Dim.whole(1), cols, Dim.whole(1)) if apart else (rows, cols)
        self = super().__new__(cls, *dims, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, **more)
        self.scale_dtypes = stored_dtypes
        return self

    @property
    def stored_dtypes(self) -> tuple[torch.dtype, ...]:
        return self.scale_dtypes

    def pieces(self, weight: Weight, slot: str | None) -> Iterator[Piece]:
        for piece in super().pieces(weight, slot):
            if weight.dtype.itemsize > 1:
                yield piece
            else:
                order = (piece.order or StoredOrder())._replace(exponents=True)
                yield piece._replace(order=order)
