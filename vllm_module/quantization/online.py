"""Quantizing weights piece by piece while they are read: no layer is held in full precision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from vllm_module.kernels.rows.quantize import quantize
from vllm_module.parameters import BasevLLMParameter, Piece, StoredOrder
from vllm_module.quantization.demand import demand
from vllm_module.quantization.method import QuantizableLayer
from vllm_module.quantization.scheme import Scheme
from vllm_module.weights import Destination, Weight, read_into

_PIECE = 4 << 20  # bytes of the checkpoint read at a time; more if one scale covers more


class QuantizedRegion(NamedTuple):
    """The destination of some rows of a full-precision weight: it quantizes what it receives.

    Attributes:
        values: the quantized rows, ``[rows, ...]``.
        order: how the weight is stored, if not as ``values``.
        quantize: a function of the rows in full precision that writes ``values`` and scales.

    """

    values: torch.Tensor
    order: StoredOrder | None
    quantize: Callable[[torch.Tensor], None]

    @property
    def device(self) -> torch.device:
        return self.values.device

    def receive(self, weight: Weight) -> None:
        self.quantize(in_full_precision(weight, self.device, self.order))


def in_full_precision(
    weight: Weight, device: torch.device, order: StoredOrder | None
) -> torch.Tensor:
    """Read ``weight`` on ``device``, and put it in the order of the parameter."""
    if not isinstance(weight, torch.Tensor):
        read = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        read_into(weight, read)
        weight = read
    weight = weight.to(device)
    return weight if order is None else order.restore(weight)


def finish_online(layer: QuantizableLayer, scale_name: str) -> None:
    """Zero the padding of a weight that was quantized while it was read, and of its scales.

    Where rows are put in order, padding between them is quantized with them, to codes and scales
    that are not zero. Raises ``WeightReadError`` if the weight was not finite: its scales are not
    finite then.
    """
    scale = layer.typed_parameter(scale_name, BasevLLMParameter)
    rule = "must be finite to be quantized: train or convert it again"
    demand(scale, torch.isfinite, "weight", rule)
    layer.weight.zero_padding()
    scale.zero_padding()


def in_parts(source: Weight, block: int = 1) -> Iterator[tuple[int, Weight]]:
    """Yield the first row, and the rows, of parts of ``source`` that are read at a time.

    Parts are whole blocks of so many rows, but for the last one.
    """
    *_, rows, columns = source.shape
    step = max(1, _PIECE // max(1, block * columns * source.dtype.itemsize)) * block
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield first, source.narrow(len(source.shape) - 2, first, count)


class QuantizeGroups(ABC):
    """The conversion of a full-precision ``weight`` into codes and a scale for each group.

    A group has inputs of one rank only, so the bits do not depend on the cut.

    Args:
        group_size: inputs that share a scale.
        dtype: of the checkpoint's weight.
        transposed: whether it is stored as ``[input, output]``.

    """

    makes: Sequence[str]  # the name of the scales

    def __init__(self, group_size: int, dtype: torch.dtype, transposed: bool) -> None:
        self.group_size, self.dtype, self._transposed = group_size, dtype, transposed

    @abstractmethod
    def quantize(self, wide: torch.Tensor, words: torch.Tensor, scales: torch.Tensor) -> None:
        """Quantize ``wide [rows, columns]``; write ``words`` and ``scales [rows, groups]``."""

    @abstractmethod
    def bound(self, groups: torch.Tensor) -> torch.Tensor:
        """Return the largest error of each number of ``groups``, float32 ``[..., group_size]``."""

    def jobs(
        self, module: QuantizableLayer, weight: Weight, slot: str | None
    ) -> Iterator[tuple[Weight, Destination]]:
        scale = module.typed_parameter(self.makes[0], BasevLLMParameter)
        for source, target, at, order in module.weight.pieces(weight, slot):
            words = target.view(-1, target.shape[-1])  # of one expert, if it has that dimension
            scales = scale.region(at)
            scales = scales.view(len(words), scales.shape[-1])
            if order is not None:
                yield source, self._region(words, scales, order)
                continue
            for first, part in in_parts(source):
                rows = first, part.shape[-2]
                yield part, self._region(words.narrow(0, *rows), scales.narrow(0, *rows), None)

    def _region(
        self, words: torch.Tensor, scales: torch.Tensor, order: StoredOrder | None
    ) -> QuantizedRegion:
        def quantize(wide: torch.Tensor) -> None:
            self.quantize(wide.reshape(len(words), -1), words, scales)

        return QuantizedRegion(words, order, quantize)

    def restored(self, module: QuantizableLayer) -> torch.Tensor:
        """Return the weight that codes and scales stand for, in float32."""
        return module.quant_method.full_precision(module, torch.float32)

    def error_bound(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the largest error of each number of ``stored``, a whole tensor."""
        held = stored.transpose(-2, -1) if self._transposed else stored
        groups = held.float().reshape(*held.shape[:-1], -1, self.group_size)
        bound = self.bound(groups).flatten(-2)
        return bound.transpose(-2, -1) if self._transposed else bound


class QuantizeOnline:
    """The conversion of a full-precision ``weight`` into eight bits and scales.

    A scale is computed from this rank's part of a tensor. It depends on the cut if it covers more
    than one rank's part: per tensor, and per channel of a row-parallel layer. Each rank's scale is
    then at most the scale of the whole tensor, so the error stays within its bound
    (:meth:`Scheme.error_bound`).
    """

    def __init__(self, scheme: Scheme, dtype: torch.dtype, transposed: bool) -> None:
        self.scheme, self.dtype, self._transposed = scheme, dtype, transposed
        self.makes: Sequence[str] = (scheme.scale_name,)

    def jobs(
        self, module: QuantizableLayer, weight: Weight, slot: str | None
    ) -> Iterator[tuple[Weight, Destination]]:
        parameter: BasevLLMParameter = module.weight
        scale: BasevLLMParameter = getattr(module, self.scheme.scale_name)
        index = parameter.division.index_of(slot)
        # Where a rank has only padding, its scales are not padding nevertheless.
        if not any(shard.length for shard in parameter.shards[-1]):
            scale.region(index[: len(scale.dims)]).zero_()
        for at, shard in enumerate(parameter.shards[-2]):
            if not shard.length and len(scale.dims) < len(parameter.dims):
                scale.region((*index[:-2], at)).zero_()
        for piece in parameter.pieces(weight, slot):
            yield from self._piece(parameter, scale, piece)

    def restored(self, module: QuantizableLayer) -> torch.Tensor:
        """Return the weight multiplied by its scales, in float32."""
        return self.scheme.dequantized(module.weight, getattr(module, self.makes[0]), torch.float32)

    def error_bound(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the scheme's bound for each number of ``stored``, a whole tensor."""
        if stored.dim() > 2:  # of all experts
            return torch.stack([self.error_bound(each) for each in stored])
        if self._transposed:
            stored = stored.T
        rows, columns = stored.shape
        block_rows, block_columns = self._block(rows, columns)
        down, across = -(-rows // block_rows), -(-columns // block_columns)
        padded = stored.new_zeros(down * block_rows, across * block_columns, dtype=torch.float32)
        padded[:rows, :columns] = stored.abs()
        blocks = padded.view(down, block_rows, across, block_columns)
        largest = blocks.amax((1, 3), keepdim=True).expand_as(blocks).reshape_as(padded)
        bound = self.scheme.error_bound(stored.float(), largest[:rows, :columns])
        return bound.T if self._transposed else bound

    def _block(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns that share a scale in a slot of ``rows`` by ``columns``."""
        if self.scheme.strategy == "block":
            return self.scheme.block
        return (rows if self.scheme.strategy == "tensor" else 1), columns

    def _piece(
        self, parameter: BasevLLMParameter, scale: BasevLLMParameter, piece: Piece
    ) -> Iterator[tuple[Weight, Destination]]:
        """Yield a piece of the weight: in parts of whole blocks, unless it is to be reordered."""
        target = piece.target.flatten(0, -2)  # of one expert, if it has that dimension
        rows, columns = target.shape
        block_rows, block_columns = block = self._block(rows, columns)
        scales = scale.region(piece.at[: len(scale.dims)])
        scales = scales.view(-1, -(-columns // block_columns))
        if piece.order is not None:
            parts = [(rows, scales)]
            if len(scales) > 1 and self.scheme.strategy == "tensor":  # slots that alternate
                *others, end = parameter.shards[-2]
                counts = (*(shard.padded for shard in others), end.length)
                parts = [(count, scales[i : i + 1]) for i, count in enumerate(counts)]
            quantized = partial(_quantize, target, parts, block)
            yield piece.source, QuantizedRegion(target, piece.order, quantized)
            return
        for first, source in in_parts(piece.source, block_rows):
            count = source.shape[-2]
            part = scales.narrow(0, first // block_rows, -(-count // block_rows))
            held = target.narrow(0, first, count)
            quantized = partial(_quantize, held, [(count, part)], block)
            yield source, QuantizedRegion(held, None, quantized)


def _quantize(
    quantized: torch.Tensor,
    scales: Sequence[tuple[int, torch.Tensor]],
    block: tuple[int, int],
    wide: torch.Tensor,
) -> None:
    """Quantize rows to eight bits.

    ``scales`` has, for some of the rows in turn, their number and their scales ``[row blocks,
    column blocks]``. ``block`` is the rows and columns that share a scale, at most.
    """
    wide, first = wide.reshape(quantized.shape), 0
    for rows, scale in scales:
        size = min(rows, block[0]), block[1]
        quantize(wide.narrow(0, first, rows), quantized.narrow(0, first, rows), scale, size)
        first += rows
