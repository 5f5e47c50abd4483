"""Rows that products are given, quantized or sorted by expert, and rows that are looked up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

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


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows sorted by expert, for a product with the weights of experts.

    :func:`~vllm_module.kernels.experts.grouped_matmul.grouped_matmul` says what each of them is.

    Attributes:
        x: ``[tokens, input]``.
        offsets: the first row of each expert, int32 ``[experts + 1]``.
        bias: ``[experts, output]``, if there is one.
        order: the rows of ``x`` in the order of experts, int32; ``None`` if ``x`` is in this order.
        top_k: experts of a token.

    """

    x: torch.Tensor
    offsets: torch.Tensor
    bias: torch.Tensor | None = None
    order: torch.Tensor | None = None
    top_k: int = 1

    def product(
        self, kernel: Callable[..., torch.Tensor], *weight: Any, **options: Any
    ) -> torch.Tensor:
        """Return the rows times ``weight``, by a kernel of grouped products: ``[rows, output]``.

        ``weight`` are the kernel's arguments between ``x`` and ``offsets``.
        """
        return kernel(
            self.x,
            *weight,
            self.offsets,
            bias=self.bias,
            rows=self.order,
            top_k=self.top_k,
            **options,
        )


def rows_at(table: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows ``ids [...]`` of ``table [rows, ...]``, ``[..., *table.shape[1:]]``.

    Raises ``IndexError`` for an id that is none of the first ``count`` rows (on a CUDA device, a
    device assertion).
    """
    flat = table[:count].flatten(1)
    if table.dtype.itemsize == 1:
        flat = flat.view(torch.uint8)  # torch does not look up rows of float8
    rows = F.embedding(ids, flat)
    return rows.view(table.dtype).view(*ids.shape, *table.shape[1:])
