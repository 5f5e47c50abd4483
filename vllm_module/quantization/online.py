"""Quantizing weights piece by piece while they are read: no layer is held in full precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_module.kernels.quantize import dequantize, quantize
from vllm_module.parameters import BasevLLMParameter
from vllm_module.quantization.method import QuantizableLayer
from vllm_module.quantization.scheme import Scheme
from vllm_module.weights import Destination, Weight, read_into

_PIECE = 4 << 20  # bytes of the checkpoint read at a time; more if one scale covers more


@dataclass(frozen=True)
class QuantizedRegion:
    """The destination of some rows of a full-precision weight: it quantizes what it receives.

    Attributes:
        quantized: the rows in eight bits, ``[rows, columns]``.
        scale: their scales, ``[row blocks, column blocks]``.
        block: the rows and columns that share a scale.

    """

    quantized: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]

    def receive(self, weight: Weight) -> None:
        if not isinstance(weight, torch.Tensor):
            device = self.quantized.device
            full_precision = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            read_into(weight, full_precision)
            weight = full_precision
        quantize(weight.to(self.quantized.device), self.quantized, self.scale, self.block)


class QuantizeOnline:
    """The conversion of a full-precision ``weight`` into eight bits and scales.

    A scale is computed from this rank's part of a tensor. It depends on the cut if it covers more
    than one rank's part: per tensor, and per channel of a row-parallel layer. Each rank's scale is
    then at most the scale of the whole tensor, so the error stays within its bound
    (:meth:`Scheme.error_bound`).
    """

    def __init__(self, scheme: Scheme, dtype: torch.dtype) -> None:
        self.scheme, self.dtype = scheme, dtype
        self.makes: Sequence[str] = (scheme.scale_name,)

    def jobs(
        self, module: QuantizableLayer, weight: Weight, slot: str | None
    ) -> Iterator[tuple[Weight, Destination]]:
        parameter, scale = module.weight, getattr(module, self.scheme.scale_name)
        first = 0
        for declared in module.output.slots:
            if slot is None or slot == declared.name:
                stored = weight if slot is not None else weight.narrow(0, first, declared.size)
                yield from self._slot(parameter, scale, stored, declared.name)
            first += declared.size

    def restored(self, module: QuantizableLayer) -> torch.Tensor:
        """Return the weight multiplied by its scales, in float32."""
        scale, block = self.scheme.for_matmul(module.weight, getattr(module, self.makes[0]))
        return dequantize(module.weight, scale, block, torch.float32)

    def error_bound(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the scheme's bound for each number of ``stored``, a whole tensor."""
        rows, columns = stored.shape
        block_rows, block_columns = self._block(rows, columns)
        down, across = -(-rows // block_rows), -(-columns // block_columns)
        padded = stored.new_zeros(down * block_rows, across * block_columns, dtype=torch.float32)
        padded[:rows, :columns] = stored.abs()
        blocks = padded.view(down, block_rows, across, block_columns)
        largest = blocks.amax((1, 3), keepdim=True).expand_as(blocks).reshape_as(padded)
        return self.scheme.error_bound(stored.float(), largest[:rows, :columns])

    def _block(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns that share a scale in a slot of ``rows`` by ``columns``."""
        if self.scheme.strategy == "block":
            return self.scheme.block
        return (rows if self.scheme.strategy == "tensor" else 1), columns

    def _slot(
        self,
        parameter: BasevLLMParameter,
        scale: BasevLLMParameter,
        stored: Weight,
        slot: str,
    ) -> Iterator[tuple[Weight, Destination]]:
        """Yield this rank's part of one slot's tensor, in pieces of whole blocks."""
        scales = scale.region(slot)
        kept = next(parameter.cut(stored, slot), None)
        if kept is None:  # this rank has only padding
            scales.zero_()
            return
        source, target = kept
        rows, columns = target.shape
        block_rows, block_columns = self._block(rows, columns)
        scales = scales.view(-1, -(-columns // block_columns))
        step = max(1, _PIECE // (block_rows * columns * source.dtype.itemsize)) * block_rows
        for top in range(0, rows, step):
            count = min(step, rows - top)
            region = QuantizedRegion(
                target.narrow(0, top, count),
                scales.narrow(0, top // block_rows, -(-count // block_rows)),
                (min(block_rows, count), block_columns),
            )
            yield source.narrow(0, top, count), region
