"""Norms and gated activations of a few rows on a CPU, in compiled loops (the extra ``cpu``).

torch's operations take longer to begin than a row takes. The loops are used where attention is
computed in loops, too (:class:`~vllm_module.kernels.matmul.products.Products`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from vllm_module.kernels.matmul.torch_threads import bits_of, in_threads
from vllm_module.kernels.rows.compiled_few_rows import compiled_activation, compiled_norm

_MOST = 1 << 17  # numbers; torch computes more of them as fast, and in several threads
_PER_THREAD = 1 << 11  # numbers, below which a second thread begins too late
_DTYPES = torch.float32, torch.bfloat16


def takes_few_rows(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Return whether the loops take rows of ``x`` and tensors of its dtype, if they were chosen."""
    return (
        x.is_cpu
        and x.dtype in _DTYPES
        and 0 < x.numel() <= _MOST
        and x.is_contiguous()
        and torch.is_inference_mode_enabled()
        and all(
            other is None or (other.dtype == x.dtype and other.is_contiguous()) for other in others
        )
    )


def norm_few_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of ``x``, or of its sum with a residual, and the sum.

    Arguments are those of :func:`~vllm_module.kernels.rows.rms_norm.fused_add_rms_norm`. Without a
    residual, the second result is ``x``.
    """
    y, columns = torch.empty_like(x), x.shape[-1]
    total = x if residual is None else torch.empty_like(x)
    rows = x.numel() // columns
    _norm(_threads(x))((
        rows, columns, x.data_ptr(), 0 if residual is None else residual.data_ptr(),
        weight.data_ptr(), y.data_ptr(), total.data_ptr(), bits_of(eps),
        bits_of(weight_offset or 0.0), weight_offset is None, x.dtype == torch.bfloat16,
    ))  # fmt: skip
    return y, total


def activate_few_rows(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Return an activation of half of the features, times the other half.

    Args:
        x: ``[..., 2 * columns]``.
        activation: ``"silu"`` or ``"gelu_tanh"``.

    """
    columns = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], columns)
    numbers = y.numel() // columns, columns, x.data_ptr(), y.data_ptr(), x.dtype == torch.bfloat16
    _activation(activation == "gelu_tanh", _threads(y))(numbers)
    return y


def _threads(x: torch.Tensor) -> int:
    return max(1, min(torch.get_num_threads(), x.numel() // _PER_THREAD))


@functools.cache
def _norm(threads: int) -> Callable[..., None]:
    return in_threads(compiled_norm(), threads)


@functools.cache
def _activation(tanh: bool, threads: int) -> Callable[..., None]:
    return in_threads(compiled_activation(tanh), threads)


def compile_few_rows() -> None:
    """Compile the loops, which takes some seconds, once on a machine. Needs numba."""
    threads = torch.get_num_threads()
    for count in {1, threads}:
        _norm(count)
        for tanh in (False, True):
            _activation(tanh, count)
