"""Multiplying by a weight that is not quantized."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vllm_module.kernels.operators import next_power_of_2

_LARGE = 1 << 19  # multiplications; of fewer, a call of oneDNN costs what it gains
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, as ``torch.nn.functional.linear`` does.

    In float32 on a CPU, torch itself multiplies by MKL, which on AMD's processors reaches half or
    less of what oneDNN does (``tests/bench/engine.py``); in inference mode the larger products go
    to oneDNN here, as torch's own bfloat16 does. Both are as precise. Rows are padded, where there
    are more than 64 by an eighth at most: oneDNN makes and keeps a program for every number of
    them, in some 0.5 ms.

    Args:
        x: ``[..., input]``.
        weight: ``[output, input]``, of the dtype of ``x``.
        bias: ``[output]``, of the same dtype, or ``None``.

    Returns:
        ``[..., output]``.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit each other, from torch.

    """
    if not _is_for_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if (padded := _padded(count)) > count:
        rows = F.pad(rows, (0, 0, 0, padded - count))
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return y[:count].view(*x.shape[:-1], len(weight))


def _padded(rows: int) -> int:
    most = next_power_of_2(rows)
    step = max(8, most // 16)
    return most if rows <= 8 else -(-rows // step) * step


def _is_for_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether oneDNN would be faster, and may: the rest is for torch to do, or to refuse."""
    return (
        _HAS_ONEDNN
        and not torch.compiler.is_compiling()  # which chooses libraries by itself
        and weight.dim() == 2
        and x.numel() * weight.shape[0] > _LARGE
        and torch.is_inference_mode_enabled()  # or derivatives would be lost, of all kinds
        and not torch.is_autocast_enabled("cpu")
        and _is_plain(x)
        and _is_plain(weight)
        and (bias is None or (_is_plain(bias) and bias.shape == weight.shape[:1]))
        and x.shape[-1:] == weight.shape[1:]
        and bool(torch.backends.mkldnn.enabled)
    )


def _is_plain(x: torch.Tensor) -> bool:
    # It fails on some strides, and those of a bias it ignores.
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and x.layout == torch.strided
        and not x.is_nested
        and x.is_contiguous()
    )
