"""Dtypes of kernels, and the support of a GPU for them."""

from __future__ import annotations

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
WIDE_FLOATS = (*FLOATS, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EIGHT_BITS = (*FP8, torch.int8)
# Values of the 16 codes of float4_e2m1: a sign, and 0 to 6.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def greatest(dtype: torch.dtype) -> float:
    """Return the largest number of a quantized ``dtype``: 448 for float8_e4m3fn, 127 for int8."""
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return float(info.max)


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the compute capability that decides on tiles for the tensor's GPU.

    Without a GPU it is (9, 0), that of Hopper.
    """
    if not tensor.is_cuda:
        return 9, 0
    return tiled_as(torch.cuda.get_device_capability(tensor.device))


def tiled_as(capability: tuple[int, int]) -> tuple[int, int]:
    """Return the compute capability whose tiles fit a GPU.

    GPUs of 12.0, such as GeForce RTX 50, have the shared memory and the tensor cores' instructions
    of 8.9, and not those of Hopper.
    """
    return capability if capability < (12, 0) else (8, 9)


def can_convert(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    """Return whether kernels on the tensor's device can convert to ``dtype`` and multiply by it.

    FP8 needs compute capability 8.9. Before that, Triton does not compile float8_e4m3fn, and rounds
    float8_e5m2 in software: ties away from zero, and NaN to zero.
    """
    return dtype not in FP8 or capability(tensor) >= (8, 9)
