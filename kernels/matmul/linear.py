"""Matmuls with weights that are not quantized, by the faster library on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from vllm_module.kernels.matmul.code_rows import float_rows
from vllm_module.kernels.matmul.code_rows_matmul import multiplied_by_codes
from vllm_module.kernels.matmul.products import (
    Products,
    least_seconds,
    products,
    products_in_use,
    seconds_of,
)
from vllm_module.kernels.operators import next_power_of_2
from vllm_module.kernels.recording import Recording

_LARGE = 1 << 21  # multiplications below which calling oneDNN gains nothing
_LARGE_WEIGHT = 1 << 10  # numbers of a weight below which the loops gain nothing in a recording
_WORTHWHILE = 8 << 20  # bytes of weights
_GAIN = 0.9  # largest share of the other's time that a way may take to be chosen
_TRIED = 1, 16, 128  # number of rows timed for each class
_TRIED_IN_LOOPS = 1, 3, 8, 32, 128
_ROUNDS = 7  # short rounds, so that another busy process disturbs few of them
_WEIGHTS = 8, 1024, 1024  # shape of weights larger than a CPU's cache, as a model's are
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def fastest_products(seconds: Callable[[Callable[[], object]], float] = seconds_of) -> Products:
    """Time torch and oneDNN on this CPU, with torch's current threads, in less than 0.1 s.

    oneDNN is chosen for a class of rows if it takes at most 0.9 times as long. Torch's library is
    at most half as fast as oneDNN on some AMD processors, and faster on Intel's.

    Args:
        seconds: function that runs its argument and returns the time it took; tests replace it.

    """
    if not _HAS_ONEDNN or not torch.backends.mkldnn.enabled:
        return Products()
    weights = itertools.cycle(torch.ones(_WEIGHTS, dtype=torch.float32, device="cpu"))
    chosen = []
    with torch.inference_mode():
        for rows in _TRIED:
            x = torch.ones(rows, _WEIGHTS[-1], dtype=torch.float32, device="cpu")
            # The first round compiles oneDNN's kernel.
            torchs, onednns = least_seconds((F.linear, _onednn), x, weights, _ROUNDS, seconds)
            chosen.append(onednns <= _GAIN * torchs)
    one, few, many = chosen
    return Products(one, few, many)


def are_loops_worthwhile(model: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether a model has 8 MiB of weights of a dtype.

    To measure the loops takes some 0.2 s. Steps that run in them are recorded, so a model of a few
    million parameters regains it in some hundred steps.
    """
    weights = (each for each in model.parameters() if each.dtype == dtype and each.dim() > 1)
    return sum(each.nbytes for each in weights) >= _WORTHWHILE


def fastest_float_rows(
    dtype: torch.dtype,
    chosen: Products,
    seconds: Callable[[Callable[[], object]], float] = seconds_of,
) -> range:
    """Return the numbers of rows that the loops multiply faster than the chosen library.

    Without numba there is none. With it, the first call on a machine compiles the loops in some
    seconds.

    Args:
        dtype: of weights and inputs.
        chosen: what multiplies otherwise.
        seconds: function that runs its argument and returns the time it took; tests replace it.

    """
    weights = list(torch.ones(_WEIGHTS, dtype=dtype, device="cpu"))
    faster = range(0)
    with torch.inference_mode():
        for rows in _TRIED_IN_LOOPS:
            x = torch.ones(rows, _WEIGHTS[-1], dtype=dtype, device="cpu")
            in_loops = chosen._replace(floats=range(rows, rows + 1))
            try:
                recorded = _recorded(x, weights, chosen), _recorded(x, weights, in_loops)
            except ImportError:
                return faster

            def library(x: torch.Tensor, weight: torch.Tensor, recorded: Any = recorded) -> None:
                recorded[0][weight.data_ptr()].again()

            def loops(x: torch.Tensor, weight: torch.Tensor, recorded: Any = recorded) -> None:
                recorded[1][weight.data_ptr()].again()

            turns = itertools.cycle(weights)
            least, own = least_seconds((library, loops), x, turns, _ROUNDS, seconds)
            if own < least:
                faster = range(faster.start or rows, rows + 1)
            elif faster:
                break
    return faster


def _recorded(
    x: torch.Tensor, weights: Iterable[torch.Tensor], chosen: Products
) -> dict[int, Recording]:
    """Return the product with each weight, as steps do it again, by the weight's address."""
    recordings = {weight.data_ptr(): Recording([x, weight]) for weight in weights}
    for weight in weights:
        with products(chosen), recordings[weight.data_ptr()].running():
            linear(x, weight)
    return recordings


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, as ``torch.nn.functional.linear`` does.

    On a CPU, in inference mode and inside a :func:`~vllm_module.kernels.matmul.products.products`
    block, a few rows are multiplied by large weights in the loops of
    :mod:`~vllm_module.kernels.matmul.code_rows_matmul`, whose sums are float32 for any dtype, and
    large float32 matmuls use oneDNN, as far as they were chosen there. Rows for oneDNN are padded,
    by at most an eighth beyond 64 rows, because it compiles and caches a kernel for every number
    of rows, in about 0.5 ms.

    Args:
        x: ``[..., input]``.
        weight: ``[output, input]``, of the dtype of ``x``.
        bias: ``[output]``, of the same dtype, or ``None``.

    Returns:
        ``[..., output]``.

    Raises:
        ValueError: the weight is on the meta device, and ``x`` on another.
        RuntimeError: shapes, dtypes or devices do not fit each other (from torch).

    """
    if weight.is_meta and not x.is_meta:  # torch would return uninitialized memory
        raise ValueError(f"weight is on meta, and must be on {x.device}")
    compiling = torch.compiler.is_compiling()  # then the compiler chooses libraries itself
    if not compiling and products_in_use.get().floats and _is_for_loops(x, weight, bias):
        product = multiplied_by_codes(x, float_rows, weight, bias=bias)
        if product is not None:
            return product
    if compiling or not _is_for_onednn(x, weight, bias):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if (padded := _padded(count)) > count:
        rows = F.pad(rows, (0, 0, 0, padded - count))
    return _onednn(rows, weight, bias)[:count].view(*x.shape[:-1], len(weight))


def _onednn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def _padded(rows: int) -> int:
    power = next_power_of_2(rows)
    step = max(8, power // 16)
    return power if rows <= 8 else -(-rows // step) * step


def _is_for_loops(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether the loops, if they were chosen, gain and support these dtypes and shapes."""
    return (
        weight.numel() >= _LARGE_WEIGHT
        and weight.dim() == 2
        and weight.is_cpu
        and x.dtype == weight.dtype
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
        and not torch.is_autocast_enabled("cpu")
    )


def _is_for_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether to use oneDNN: it was chosen and supports these dtypes and shapes."""
    return (
        x.numel() * weight.shape[0] > _LARGE
        and weight.dim() == 2
        and products_in_use.get().use_onednn(x.numel() // max(1, x.shape[-1]))
        and torch.is_inference_mode_enabled()  # oneDNN keeps no derivatives
        and not torch.is_autocast_enabled("cpu")
        and _is_plain(x)
        and _is_plain(weight)
        and (bias is None or (_is_plain(bias) and bias.shape == weight.shape[:1]))
        and x.shape[-1:] == weight.shape[1:]
        and bool(torch.backends.mkldnn.enabled)
    )


def _is_plain(x: torch.Tensor) -> bool:
    # oneDNN fails for some strides, and ignores those of a bias.
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and x.layout == torch.strided
        and not x.is_nested
        and x.is_contiguous()
    )
