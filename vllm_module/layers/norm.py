"""RMS and layer normalization, also of tensors that are cut over ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from vllm_module.core.module import vLLMModule
from vllm_module.distributed import tensor_parallel_group
from vllm_module.kernels.rows.rms_norm import fused_add_rms_norm, rms_norm, rms_norm_quantize
from vllm_module.layers.deferred import DEFERRED, Deferred, Normed
from vllm_module.parameters import BasevLLMParameter, ColumnvLLMParameter, Dim, Slot
from vllm_module.quantization.rows import QuantizedRows, RowScheme


class RMSNorm(vLLMModule):
    """Root mean square normalization (arXiv:1910.07467), fused with the addition of a residual.

    Args:
        hidden_size: size of the last dimension, which is normalized.
        eps: added to the mean square.
        params_dtype: of the weight; torch's default dtype unless given.
        weight_offset: added to the weight in float32, and then only the result is rounded: 1 in
            Gemma, 0 in OLMo 2. ``None`` rounds before the weight multiplies, as Llama does.

    """

    output_form: RowScheme | Deferred | None = None  # what fusion asks for; None: a tensor

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        params_dtype: torch.dtype | None = None,
        weight_offset: float | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight_offset = weight_offset
        data = torch.empty(hidden_size, dtype=params_dtype, device="meta")
        self.weight = nn.Parameter(data, requires_grad=False)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | QuantizedRows | Normed | tuple[torch.Tensor | QuantizedRows, torch.Tensor]:
        """Normalize ``x [..., hidden_size]``; the arithmetic is in float32.

        With ``residual``, of the same shape, normalize ``x + residual`` and return this sum too, as
        the new residual.
        """
        rows = self.output_form
        if rows == DEFERRED:
            return Normed(x, self.weight, self.eps, self.weight_offset)
        if isinstance(rows, RowScheme) and rows.quantizes(x):
            values, scales, total = rms_norm_quantize(
                x,
                residual,
                self.weight,
                self.eps,
                rows.dtype,
                rows.group,
                rows.scale,
                self.weight_offset,
            )
            normed = x if total is None else total
            quantized = rows.rows(values, scales, torch.result_type(normed, self.weight))
            return quantized if total is None else (quantized, total)
        if residual is None:
            return rms_norm(x, self.weight, self.eps, self.weight_offset)
        return fused_add_rms_norm(x, residual, self.weight, self.eps, self.weight_offset)

    def extra_repr(self) -> str:
        given = self.weight_offset is not None
        offset = f", weight_offset={self.weight_offset}" if given else ""
        return f"{self.weight.shape[0]}, eps={self.eps}{offset}"


class ShardedRMSNorm(vLLMModule):
    """Root mean square normalization of features that are cut among the ranks.

    The mean is that of all features: the ranks add up their sums of squares. OLMo 2 normalizes the
    queries of all heads so, and the keys.

    Args:
        slot: the features, as the projection divides them; the weight is cut alike. Ranks may share
            a part, as they share KV heads.
        eps: added to the mean square.
        params_dtype: of the weight; torch's default dtype unless given.
        weight_offset: as of :class:`RMSNorm`.

    """

    def __init__(
        self,
        slot: Slot,
        eps: float = 1e-6,
        params_dtype: torch.dtype | None = None,
        weight_offset: float | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = group = tensor_parallel_group()
        self.eps = eps
        self.weight_offset = weight_offset
        # The ranks' sums of squares count each part once for each rank that keeps it.
        self.counted = slot.size * group.size // slot.parts
        self.weight = ColumnvLLMParameter(
            Dim((replace(slot, name=""),)),
            tp_rank=group.rank,
            tp_size=group.size,
            dtype=params_dtype or torch.get_default_dtype(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize this rank's features ``x [..., features]``; the arithmetic is in float32."""
        if self.tp_group.size == 1:
            return rms_norm(x, self.weight, self.eps, self.weight_offset)
        wide = x.float()
        total = self.tp_group.all_reduce(wide.pow(2).sum(-1, keepdim=True))
        normed = wide * torch.rsqrt(total / self.counted + self.eps)
        if self.weight_offset is None:  # rounded here or there as rms_norm does
            return self.weight * normed.to(x.dtype)
        result = normed * (self.weight.float() + self.weight_offset)
        return result.to(torch.result_type(x, self.weight))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(vLLMModule):
    """Layer normalization (arXiv:1607.06450), called like :class:`RMSNorm`.

    Args:
        hidden_size: size of the last dimension, which is normalized.
        eps: added to the variance.
        bias: whether there is one.
        params_dtype: of weight and bias; torch's default dtype unless given.

    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        data = torch.empty(hidden_size, dtype=params_dtype, device="meta")
        self.weight = nn.Parameter(data, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty_like(data), requires_grad=False)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalize ``x [..., hidden_size]``; the arithmetic is in float32.

        With ``residual``, of the same shape, normalize ``x + residual`` and return this sum too, as
        the new residual.
        """
        total = x if residual is None else x + residual
        y = F.layer_norm(total, self.weight.shape, self.weight, self.bias, self.eps)
        return y if residual is None else (y, total)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


class PerHeadLayerNorm(vLLMModule):
    """Layer normalization of each attention head, with a weight for each and no bias (Cohere).

    Args:
        slot: the features of all heads, as the projection divides them; the weight is cut alike, by
            heads.
        head_size: features of one head.
        eps: added to the variance.
        params_dtype: of the weight; torch's default dtype unless given.

    """

    def __init__(
        self,
        slot: Slot,
        head_size: int,
        eps: float = 1e-5,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = tensor_parallel_group()
        self.eps = eps
        self.weight = BasevLLMParameter(
            Dim.cut(slot.size // head_size, slot.parts),
            Dim.whole(head_size),
            tp_rank=group.rank,
            tp_size=group.size,
            dtype=params_dtype or torch.get_default_dtype(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize each head of ``x [..., heads, head_size]``; the arithmetic is in float32."""
        y = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight.float()
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, eps={self.eps}"
