"""Quantizing weights as they arrive, a part at a time: no layer is ever held in full precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_module.kernels.quantize import dequantize, quantize
from vllm_module.parameters import BasevLLMParameter
from vllm_module.quantization.method import QuantizableLayer
from vllm_module.quantization.scheme import Scheme
from vllm_module.weights import Destination, Weight, read_into

_PIECE = 4 << 20  # bytes of the checkpoint taken at a time, where a scale does not span more


@dataclass(frozen=True)
class QuantizedRegion:
    """Where part of a weight goes, and its scales: both are made of what is received.

    Shapes: quantized ``[rows, columns]``, scale ``[row blocks, column blocks]``.
    """

    quantized: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]

    def receive(self, weight: Weight) -> None:
        if not isinstance(weight, torch.Tensor):
            device = self.quantized.device
            wide = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            read_into(weight, wide)
            weight = wide
        quantize(weight.to(self.quantized.device), self.quantized, self.scale, self.block)


class QuantizeOnline:
    """Turns a full-precision ``weight`` into one of eight bits and its scales.

    A scale is made of what this rank keeps of a tensor, and so depends on the cut where it spans
    one: per tensor, and per channel of a row-parallel layer. Each rank's scale is then at most the
    unsharded one, and so is the error (:meth:`Scheme.error_bound`).
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
        """Return the bound of the scheme, by scales of the whole tensor."""
        (rows, columns), (tall, wide) = stored.shape, self._block(*stored.shape)
        down, across = -(-rows // tall), -(-columns // wide)
        padded = stored.new_zeros(down * tall, across * wide, dtype=torch.float32)
        padded[:rows, :columns] = stored.abs()
        blocks = padded.view(down, tall, across, wide)
        largest = blocks.amax((1, 3), keepdim=True).expand_as(blocks).reshape_as(padded)
        return self.scheme.error_bound(stored.float(), largest[:rows, :columns])

    def _block(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns that share a scale of a slot's ``rows`` and ``columns``."""
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
        scales = scale.region(slot)
        kept = next(parameter.cut(stored, slot), None)
        if kept is None:
            scales.zero_()  # of padding alone
            return
        source, target = kept
        rows, columns = target.shape
        tall, wide = self._block(rows, columns)
        scales = scales.view(-1, -(-columns // wide))
        step = max(1, _PIECE // (tall * columns * source.dtype.itemsize)) * tall
        for top in range(0, rows, step):
            count = min(step, rows - top)
            region = QuantizedRegion(
                target.narrow(0, top, count),
                scales.narrow(0, top // tall, -(-count // tall)),
                (min(tall, count), wide),
            )
            yield source.narrow(0, top, count), region
