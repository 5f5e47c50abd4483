"""Registering operations with a reference and a kernel, and checking their arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch._subclasses import FakeTensor

from vllm_module.kernels.lazy_triton import real
from vllm_module.kernels.recording import recording_in_use

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    from vllm_module.kernels.lazy_triton import tl, triton

__all__ = [
    "as_rows",
    "begin_early",
    "checks_values",
    "expect",
    "expect_writable",
    "launched_early",
    "next_power_of_2",
    "nothing",
    "operator",
    "strides_of",
    "tl",
    "triton",
]

P = ParamSpec("P")
R = TypeVar("R")

_library = torch.library.Library("vllm_module", "DEF")


def operator(
    reference: Callable[P, R],
    kernel: Callable[..., R],
    fake: Callable[..., R],
    mutates: Iterable[str] = (),
) -> Callable[P, R]:
    """Register ``torch.ops.vllm_module.<name>``: one operation with two implementations.

    Args:
        reference: the operation in plain torch, called ``<name>_reference``. It runs on every
            device but CUDA, and its annotations are the operator's schema.
        kernel: a function of the same arguments that launches Triton kernels. It runs on CUDA, with
            the tensors' device current.
        fake: a function that returns empty outputs, for meta tensors and ``torch.compile``.
        mutates: names of the arguments that are written.

    Returns:
        A function that calls the operator. It calls the reference directly if a gradient is needed,
        and in inference mode on a CPU, where torch's dispatcher takes as long as a small operation.

    """
    name = reference.__name__.removesuffix("_reference")
    _library.define(name + torch.library.infer_schema(reference, mutates_args=tuple(mutates)))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    _library.impl(name, _on_its_device(kernel), "CUDA")
    torch.library.register_fake(f"vllm_module::{name}", fake, lib=_library)
    registered: Callable[P, R] = getattr(torch.ops.vllm_module, name).default

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            first = args[0]
            if type(first) is torch.Tensor and first.is_cpu:
                return reference(*args, **kwargs)
        if torch.is_grad_enabled() and _requires_grad(*args, *kwargs.values()):
            return reference(*args, **kwargs)  # kernels have no backward
        return registered(*args, **kwargs)

    return call


def _requires_grad(*args: object) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


def _on_its_device(kernel: Callable[..., R]) -> Callable[..., R]:
    def launch(*args: object, **kwargs: object) -> R:
        tensor = next(arg for arg in args if isinstance(arg, torch.Tensor))
        with torch.cuda.device_of(tensor):
            return kernel(*args, **kwargs)

    return launch


def nothing(*_: object, **__: object) -> None:
    """Do nothing: the fake of an operation that only writes its arguments."""


def empty_like(first: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Return an empty result, contiguous, of the shape and dtype of the first argument."""
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def expect(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None] | None,
    dtypes: Sequence[torch.dtype] | None = None,
    beside: torch.Tensor | None = None,
) -> None:
    """Raise ``ValueError`` unless ``tensor`` has this shape, dtype and device.

    Args:
        name: name of the operation's argument.
        tensor: the argument.
        shape: expected sizes, ``None`` for any size; ``None`` for any shape.
        dtypes: allowed dtypes; by default any.
        beside: a tensor on the expected device.

    """
    if shape is not None and tensor.shape != shape and not _fits(tensor.shape, shape):
        sizes = tensor.shape
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
    """Raise ``ValueError`` if elements of ``tensor`` share memory, as an expanded tensor's do.

    Programs would write them in any order. Nothing is checked while torch.compile traces, because
    it cannot sort strides.
    """
    if torch.compiler.is_compiling() or tensor.is_contiguous():
        return
    reach = 1  # elements of memory covered by the dimensions of smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride < reach and size > 1 and tensor.numel():
            raise ValueError(
                f"{name} is written, and elements of its {list(tensor.shape)} with the strides "
                f"{list(tensor.stride())} share memory"
            )
        reach += stride * (size - 1)


def checks_values(tensor: torch.Tensor) -> bool:
    """Return whether to check the indices in a tensor before they are used.

    On the CPU they are always checked. On a device the host would have to wait, so they are checked
    only with ``VLLM_MODULE_CHECKS=1`` in the environment. While a CUDA graph is captured or a step
    is recorded, they are not: such a step is computed before. No kernel writes out of bounds on a
    device. Tensors without values are not checked.
    """
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    if tensor.is_cpu:
        return recording_in_use.get() is None
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    return os.environ.get("VLLM_MODULE_CHECKS", "0") not in ("", "0")


def launched_early(kernel: object, wanted: bool) -> dict[str, bool]:
    """Return the options of a launch of ``kernel``, which has the argument EARLY.

    Triton's interpreter runs one program after the other, and does not know the instructions.
    """
    if wanted and isinstance(real(kernel), triton.JITFunction):
        return {"EARLY": True, "launch_pdl": True}  # an option that other GPUs do not know
    return {"EARLY": False}


@triton.jit
def begin_early(EARLY: tl.constexpr):
    """Wait for the kernel before this one, if this one was launched early; allow the next to begin.

    With EARLY, a kernel's programs start while the one before still runs: programmatic dependent
    launch, of Hopper. Each program calls this before it loads or stores anything, even if it has
    nothing to do: the next kernel relies on all kernels before this one having ended.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def strides_of(*tensors: torch.Tensor | None) -> tuple[tuple[int, ...] | None, ...]:
    """Return the strides of each tensor, as an argument of a kernel."""
    return tuple(None if tensor is None else tensor.stride() for tensor in tensors)


def as_rows(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Return ``x [..., columns]`` as rows for a kernel, copied only if strides require it.

    Returns:
        ``[outer, inner, columns]``, whose last stride is 1; and ``(inner, outer_stride,
        inner_stride)``: row ``r`` is at ``r // inner * outer_stride + r % inner * inner_stride``.

    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() != 3:
        x = x.reshape(-1, x.shape[-1]).unsqueeze(1)
    return x, (max(1, x.shape[1]), x.stride(0), x.stride(1))


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is at least ``size``."""
    return 1 << max(0, size - 1).bit_length()
