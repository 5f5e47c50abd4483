"""Rows that are quantized where they are computed, for the one layer that multiplies them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_module.kernels.matmul.scaled_matmul import quantizes_inputs


@dataclass(frozen=True, slots=True)
class RowScheme:
    """How a product quantizes the rows of its input.

    Attributes:
        dtype: float8_e4m3fn.
        group: columns that share a scale, a power of two; ``None`` for a whole row.
        scale: the static scale, float32 ``[]``; ``None`` where scales are computed from the rows.

    """

    dtype: torch.dtype
    group: int | None = None
    scale: torch.Tensor | None = None

    def quantizes(self, x: torch.Tensor) -> bool:
        """Return whether the product would quantize ``x``: if not, it is to be given ``x``."""
        return quantizes_inputs(x)

    def rows(self, values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> QuantizedRows:
        """Return rows that an operation has quantized so; a static scale is kept as it is."""
        return QuantizedRows(values, scales if self.scale is None else self.scale, dtype)


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Quantized rows and their scales. It is no tensor, so nothing but a product can take it.

    Attributes:
        values: ``[..., columns]``, float8_e4m3fn.
        scales: float32 ``[rows, groups]``, or the static one ``[]``.
        dtype: of the rows before, which is that of the product.

    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype
