"""Fixtures for kernel tests: an interpreter with correct casts, and one rule of accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter

# numpy has none of these types: the interpreter keeps them as integers and converts them wrongly
# (it cuts bfloat16 instead of rounding it, and loses e4m3's carry and NaN).
STORED = {
    tl.bfloat16: (np.uint16, torch.int16, torch.bfloat16),
    tl.float8e4nv: (np.uint8, torch.uint8, torch.float8_e4m3fn),
    tl.float8e5: (np.uint8, torch.uint8, torch.float8_e5m2),
}


def widened(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Return numbers that are stored as integers as float32, and others unchanged."""
    if dtype not in STORED:
        return data
    _, integers, floats = STORED[dtype]
    signed = torch.from_numpy(np.ascontiguousarray(data).view(integers_of(integers)))
    return signed.view(floats).float().numpy()


def integers_of(dtype: torch.dtype) -> type:
    return np.int16 if dtype == torch.int16 else np.uint8


def narrowed(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Round float32 to even; as on the device, FP8 saturates and keeps NaN."""
    if dtype not in STORED:
        return data.astype(interpreter._get_np_dtype(dtype))
    stored, integers, floats = STORED[dtype]
    values = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32))
    if floats.itemsize == 1:
        values = values.clamp(torch.finfo(floats).min, torch.finfo(floats).max)
    return values.to(floats).view(integers).numpy().view(stored)


def cast(builder: object, source: object, target: tl.dtype, *_: object) -> object:
    wide, dtype = widened(source.data, source.dtype.scalar), target.scalar
    return interpreter.TensorHandle(narrowed(wide, dtype), dtype)


def dot(builder: object, a: object, b: object, d: object, *_: object) -> object:
    left, right = (widened(x.data, x.dtype.scalar).astype(np.float32) for x in (a, b))
    return interpreter.TensorHandle(np.matmul(left, right) + d.data, d.dtype.scalar)


def arithmetic(original: Callable[..., object]) -> Callable[..., object]:
    def operate(builder: object, *args: object) -> object:
        for argument in args:
            dtype = getattr(argument, "dtype", None)
            if dtype is not None and dtype.scalar in STORED:
                raise AssertionError(f"arithmetic in {dtype}: the kernel must widen it first")
        return original(builder, *args)

    return operate


def indexed(original: Callable[..., None]) -> Callable[..., None]:
    """Let a tensor of one element be an index: Triton 3.6 asks numpy for it as 2.4 has no more."""

    def patch(tensor: type, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


@pytest.fixture(autouse=True, scope="session")
def _interpreter() -> Iterator[None]:
    """Make the interpreter cast and multiply as the device does."""
    builder = interpreter.InterpreterBuilder
    # numpy warns of infinities that a device computes with in silence.
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for name in ("create_fp_to_fp", "create_fp_trunc", "create_fp_ext", "cast_impl"):
            patch.setattr(builder, name, cast)
        patch.setattr(builder, "create_dot", dot)
        patch.setattr(interpreter, "_patch_lang_tensor", indexed(interpreter._patch_lang_tensor))
        for name in ("binary_op", "unary_op"):
            patch.setattr(builder, name, arithmetic(getattr(builder, name)))
        yield


@pytest.fixture(scope="session")
def as_accurate() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Allow a kernel at most twice the error, in norm, of torch in the same precision."""

    def check(output: torch.Tensor, exact: torch.Tensor, low: torch.Tensor) -> None:
        assert output.shape == exact.shape == low.shape
        assert exact.dtype == torch.float64
        assert output.isfinite().all(), "the kernel's output is not finite"
        error, allowed = (x.double() - exact for x in (output, low))
        rounding = torch.finfo(output.dtype).eps  # of the output, which torch may be spared by luck
        # One number's error is more a matter of chance than their norm.
        for times, size in ((2, torch.Tensor.norm), (4, lambda x: x.abs().max())):
            if exact.numel():
                most = times * size(allowed) + rounding * size(exact)
                assert size(error) <= most, f"error {size(error):.3g}, torch's {size(allowed):.3g}"

    return check
