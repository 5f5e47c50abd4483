"""Number formats: those that kernels take, and what a GPU can do with them."""

from __future__ import annotations

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
WIDE_FLOATS = (*FLOATS, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EIGHT_BITS = (*FP8, torch.int8)


def greatest(dtype: torch.dtype) -> float:
    """Return the greatest number of a quantized ``dtype``: 448 for float8_e4m3fn, 127 for int8."""
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return float(info.max)


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the compute capability of a GPU; elsewhere of the one that kernels are made for."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (9, 0)


def can_convert(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Whether kernels can convert to ``dtype`` where ``tensor`` is, and multiply by it.

    To FP8, GPUs can from compute capability 8.9 on. Before, Triton does not compile float8_e4m3fn;
    float8_e5m2 it rounds in software, half-way numbers away from zero and NaN to zero.
    """
    return dtype not in FP8 or capability(tensor) >= (8, 9)
