"""Weights of four bits whose codes have values of their own, such as NF4 and FP4."""

from __future__ import annotations

import torch

from vllm_module.kernels.matmul.packed_matmul import packed_matmul
from vllm_module.kernels.matmul.packed_words import Packing, dequantize_packed
from vllm_module.kernels.rows.quantize_nf4 import PACKING
from vllm_module.quantization.method import QuantizableLayer, QuantizeMethod


class CodebookMethod(QuantizeMethod):
    """A weight of bytes ``[output, input / 2]``, a scale for each block, and a value for each code.

    The buffer ``codebook`` has the values.

    Attributes:
        packing: which half of a byte has the first of two codes.
        blocksize: inputs in a row that share a scale.

    """

    packing: Packing
    blocksize: int

    def words(self, layer: QuantizableLayer) -> torch.Tensor:
        """Return the codes, uint8 ``[output, input / 2]``."""
        return layer.weight

    def scales(self, layer: QuantizableLayer) -> torch.Tensor:
        """Return the scale of each block, float32 ``[output, input / blocksize]``."""
        raise NotImplementedError

    def full_precision(
        self, layer: QuantizableLayer, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        words, scales = self.words(layer), self.scales(layer)
        weight = dequantize_packed(
            words.flatten(0, -2),
            scales.flatten(0, -2),
            self.packing,
            self.blocksize,
            dtype or layer.params_dtype,
            codebook=layer.get_buffer("codebook"),
        )
        return weight.view(*words.shape[:-1], 2 * words.shape[-1])

    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        words, scales = self.words(layer), self.scales(layer)
        codebook = layer.get_buffer("codebook")
        return packed_matmul(
            x, words, scales, self.packing, self.blocksize, codebook=codebook, bias=bias
        )


class AbsmaxMethod(CodebookMethod):
    """A codebook's codes with the scales ``absmax``, in blocks that divide each rank's rows."""

    packing = PACKING

    def __init__(self, blocksize: int = 64) -> None:
        self.blocksize = blocksize

    def scales(self, layer: QuantizableLayer) -> torch.Tensor:
        return layer.get_parameter("absmax")
