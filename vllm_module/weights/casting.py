from __future__ import annotations

import math
from functools import cache

import torch

from vllm_module.errors import MisshapenWeightError, WeightReadError


def copy_checked(source: torch.Tensor, destination: torch.Tensor, what: object) -> None:
    """Copy ``source`` into ``destination`` of the same shape, refusing what a cast would lose.

    ``what`` is how messages call the source. Another shape, a destination on the meta device, or
    a dtype of another kind (floats into integers) is a MisshapenWeightError; a finite value
    beyond the range of the destination's dtype is a WeightReadError, and nothing is copied.
    """
    check_destination(source.shape, destination, what)
    if source.dtype != destination.dtype:
        _check_cast(source, destination.dtype, what)
    destination.copy_(source.detach())


def check_destination(shape: torch.Size, destination: torch.Tensor, what: object) -> None:
    """Refuse a destination that would broadcast (another shape) or swallow (meta) the values."""
    if shape != destination.shape:
        raise MisshapenWeightError(
            f"{what} has shape {list(shape)}, its destination {list(destination.shape)}; "
            "narrow both to the same region"
        )
    if destination.is_meta:
        raise MisshapenWeightError(
            f"{what} cannot be read into the meta device; materialize the destination first"
        )


def _check_cast(source: torch.Tensor, dtype: torch.dtype, what: object) -> None:
    if _kind(source.dtype) > _kind(dtype):
        raise MisshapenWeightError(
            f"{what} is {source.dtype}, its destination {dtype}, which would cut its values; "
            f"make the destination {source.dtype}"
        )
    low, high = _range(dtype)
    source_low, source_high = _range(source.dtype)
    if source.numel() == 0 or (low <= source_low and source_high <= high):
        return
    values = source.detach()
    if source.dtype.itemsize == 1 or not source.dtype.is_signed:
        values = values.double()  # float8 and wide unsigned integers cannot be reduced
    least, most = (bound.item() for bound in values.aminmax())
    if low <= least and most <= high:
        return
    # NaN and infinities also come here; they are the checkpoint's own, and stay. In float64,
    # because the bounds would round up in the source's dtype.
    exact = values.double()
    outside = exact[exact.isfinite() & ((exact < low) | (exact > high))]
    if outside.numel():
        raise WeightReadError(
            f"{what} holds {outside.numel()} finite values beyond the range of {dtype} "
            f"({low:g} to {high:g}), the first {outside[0].item():g}; "
            f"load it as {source.dtype} or another dtype that can hold them"
        )


def _kind(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return 0 if dtype == torch.bool else 1


@cache
def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Give the least and the greatest value that stays finite when rounded to the dtype."""
    if dtype == torch.bool:
        return 0, 1
    if not dtype.is_floating_point and not dtype.is_complex:
        integers = torch.iinfo(dtype)
        return integers.min, integers.max
    floats = torch.finfo(dtype)
    # Up to half a unit in the last place beyond the greatest value still rounds down to it;
    # the tie itself rounds to even, which is up.
    half_ulp = math.ldexp(floats.eps, math.frexp(floats.max)[1] - 2)
    high = math.nextafter(floats.max + half_ulp, 0.0)
    return (0.0 if floats.min >= 0 else -high), high
