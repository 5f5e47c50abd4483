"""What every operation shares: two implementations under one name, and refusals by the numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch._subclasses import FakeTensor

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # it is made for Linux alone; elsewhere there is no CUDA device either

        class triton:  # noqa: D101 - stands for the module
            jit = staticmethod(lambda function=None, **_: function or (lambda inner: inner))

        tl = None

__all__ = [
    "as_rows",
    "checks_values",
    "expect",
    "expect_writable",
    "next_power_of_2",
    "nothing",
    "operator",
    "tl",
    "triton",
]

P = ParamSpec("P")
R = TypeVar("R")

_library = torch.library.Library("vllm_module", "DEF")


def operator(
    reference: Callable[P, R],
    kernel: Callable[P, R],
    fake: Callable[..., R],
    mutates: Iterable[str] = (),
) -> Callable[P, R]:
    """Register ``torch.ops.vllm_module.<name>``: one operation with two implementations.

    Args:
        reference: the operation in plain torch, called ``<name>_reference``; it serves every device
            but CUDA, and its annotations are the operator's schema.
        kernel: launches Triton kernels; it serves CUDA, with the tensors' device current.
        fake: returns empty tensors as the operation would, for meta tensors and ``torch.compile``.
        mutates: names of arguments that are written to.

    Returns:
        What calls it, or the reference where a gradient will be asked for.

    """
    name = reference.__name__.removesuffix("_reference")
    _library.define(name + torch.library.infer_schema(reference, mutates_args=tuple(mutates)))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    _library.impl(name, _on_its_device(kernel), "CUDA")
    torch.library.register_fake(f"vllm_module::{name}", fake, lib=_library)
    registered: Callable[P, R] = getattr(torch.ops.vllm_module, name).default

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled() and _requires_grad(*args, *kwargs.values()):
            return reference(*args, **kwargs)  # kernels have no backward
        return registered(*args, **kwargs)

    return call


def _requires_grad(*args: object) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


def _on_its_device(kernel: Callable[P, R]) -> Callable[P, R]:
    def launch(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor = next(arg for arg in args if isinstance(arg, torch.Tensor))
        with torch.cuda.device_of(tensor):
            return kernel(*args, **kwargs)

    return launch


def nothing(*_: object, **__: object) -> None:
    """Write nothing: the fake of what only writes to its arguments."""


def expect(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None] | None,
    dtypes: Sequence[torch.dtype] | None = None,
    beside: torch.Tensor | None = None,
) -> None:
    """Raise ``ValueError`` unless ``tensor`` has this shape, dtype and device.

    Args:
        name: what the operation calls it.
        shape: its sizes, ``None`` for any of one; ``None`` for any shape.
        dtypes: those it may have; any unless given.
        beside: a tensor on whose device it must be.

    """
    sizes = tensor.shape
    if shape is not None and sizes != shape and not _fits(sizes, shape):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have the shape [{wanted}], got {list(sizes)}")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if beside is not None and tensor.device != beside.device:
        raise ValueError(f"{name} is on {tensor.device}, and must be on {beside.device}")


def _fits(sizes: Sequence[int], shape: Sequence[int | None]) -> bool:
    if len(sizes) != len(shape):
        return False
    for want, size in zip(shape, sizes, strict=True):
        if want is not None and want != size:
            return False
    return True


def expect_writable(name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` if elements of ``tensor``, which is written, share a place in memory.

    So do those of an expanded tensor; programs would write them in any order. Nothing is checked
    where torch.compile traces, which cannot sort strides.
    """
    if torch.compiler.is_compiling() or tensor.is_contiguous():
        return
    reach = 1  # places that the dimensions of smaller strides cover
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride < reach and size > 1 and tensor.numel():
            raise ValueError(
                f"{name} is written, and elements of its {list(tensor.shape)} with the strides "
                f"{list(tensor.stride())} share memory"
            )
        reach += stride * (size - 1)


def checks_values(tensor: torch.Tensor) -> bool:
    """Whether indices that a tensor holds are to be checked before they are used.

    On the CPU they always are. On a device that means waiting for it, so only if the environment
    has ``VLLM_MODULE_CHECKS=1``, and not while a CUDA graph is captured; no kernel writes out of
    bounds either way. What has no values is not checked.
    """
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    if tensor.is_cpu:
        return True
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    return os.environ.get("VLLM_MODULE_CHECKS", "0") not in ("", "0")


def as_rows(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Return ``x [..., columns]`` as a kernel walks it, copied only where there is no other way.

    Returns:
        ``[outer, inner, columns]``, whose last stride is 1, and how to find row ``r``: at
        ``r // inner * outer_stride + r % inner * inner_stride``, as ``(inner, outer_stride,
        inner_stride)``.

    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() != 3:
        x = x.reshape(-1, x.shape[-1]).unsqueeze(1)
    return x, (max(1, x.shape[1]), x.stride(0), x.stride(1))


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is at least ``size``."""
    return 1 << max(0, size - 1).bit_length()
