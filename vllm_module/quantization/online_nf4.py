"""Quantizing weights to NF4 piece by piece while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_module.kernels.matmul.packed_words import dequantize_packed
from vllm_module.kernels.rows.quantize_nf4 import NF4, PACKING, quantize_nf4
from vllm_module.parameters import BasevLLMParameter, StoredOrder
from vllm_module.quantization.method import QuantizableLayer
from vllm_module.quantization.online import in_full_precision, in_parts
from vllm_module.weights import Destination, Weight


class NF4Region(NamedTuple):
    """The destination of some rows of a full-precision weight: it quantizes what it receives.

    Attributes:
        packed: the codes of the rows, uint8 ``[rows, columns / 2]``.
        absmax: the scales of the rows, ``[rows, columns / blocksize]``.
        blocksize: elements of a row that share a scale.
        order: how the weight is stored, if not as it is held.

    """

    packed: torch.Tensor
    absmax: torch.Tensor
    blocksize: int
    order: StoredOrder | None

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def receive(self, weight: Weight) -> None:
        wide = in_full_precision(weight, self.device, self.order).reshape(len(self.packed), -1)
        quantize_nf4(wide, self.packed, self.absmax, self.blocksize)


class QuantizeNF4:
    """The conversion of a full-precision ``weight`` into codes and ``absmax``.

    Blocks lie inside the rows of a rank's part, so the bits do not depend on the cut.
    """

    makes: Sequence[str] = ("absmax",)

    def __init__(self, blocksize: int, dtype: torch.dtype, transposed: bool) -> None:
        self.dtype, self._blocksize, self._transposed = dtype, blocksize, transposed

    def jobs(
        self, module: QuantizableLayer, weight: Weight, slot: str | None
    ) -> Iterator[tuple[Weight, Destination]]:
        absmax = module.typed_parameter("absmax", BasevLLMParameter)
        for source, target, at, order in module.weight.pieces(weight, slot):
            packed = target.flatten(0, -2)
            scales = absmax.region(at).flatten(0, -2)
            if order is not None:
                yield source, NF4Region(packed, scales, self._blocksize, order)
                continue
            for first, part in in_parts(source):
                rows = first, part.shape[-2]
                held = packed.narrow(0, *rows), scales.narrow(0, *rows)
                yield part, NF4Region(*held, self._blocksize, None)

    def restored(self, module: QuantizableLayer) -> torch.Tensor:
        """Return the weight that the codes stand for, in float32."""
        packed, absmax = module.weight, module.get_parameter("absmax")
        levels = torch.tensor(NF4, dtype=torch.float32, device=packed.device)
        words, scales = packed.flatten(0, -2), absmax.flatten(0, -2)
        wide = dequantize_packed(
            words, scales, PACKING, self._blocksize, torch.float32, codebook=levels
        )
        return wide.view(*packed.shape[:-1], 2 * packed.shape[-1])

    def error_bound(self, stored: torch.Tensor) -> torch.Tensor:
        """Return how far each number of ``stored`` is from the nearest that a code stands for.

        The rounding of float32 arithmetic may choose its neighbour where both are about as near.
        """
        held = stored.transpose(-2, -1) if self._transposed else stored
        blocks = held.float().reshape(-1, self._blocksize, 1)
        largest = blocks.abs().amax(1, keepdim=True)
        distances = (
            blocks - torch.tensor(NF4, dtype=torch.float32, device=blocks.device) * largest
        ).abs()
        bound = (distances.amin(-1) + largest[..., 0] * 2.0**-21).view(held.shape)
        return bound.transpose(-2, -1) if self._transposed else bound
