"""Matmuls with weights that are not quantized, by the faster library on this machine."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from vllm_module.kernels.matmul.few_rows_matmul import config_of, few_rows_matmul
from vllm_module.kernels.operators import next_power_of_2

_LARGE = 1 << 21  # multiplications below which calling oneDNN gains nothing
_FEW = 64  # largest number of rows in the class "few"
_GAIN = 0.9  # largest share of torch's time that oneDNN may take to be chosen
_TRIED = 1, 16, 128  # number of rows timed for each class
_ROUNDS = 7  # short rounds, so that another busy process disturbs few of them
_WEIGHTS = 8, 1024, 1024  # shape of weights larger than a CPU's cache, as a model's are
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


class Products(NamedTuple):
    """What multiplies on a CPU, by number of rows.

    Attributes:
        one, few, many: True for oneDNN with one row, with 2 to 64 rows, and with more; for large
            float32 matmuls.
        codes: largest number of rows that are multiplied by the codes of quantized weights, instead
            of dequantizing a weight first (:mod:`~vllm_module.kernels.matmul.code_rows_matmul`).
        pages: True for attention of single tokens that reads a cache's pages where they are
            (:mod:`~vllm_module.kernels.attention.attention_on_pages`).

    """

    one: bool = False
    few: bool = False
    many: bool = False
    codes: int = 0
    pages: bool = False

    def use_onednn(self, rows: int) -> bool:
        """Return whether oneDNN computes a matmul of ``rows`` rows."""
        return self.one if rows == 1 else self.few if rows <= _FEW else self.many


# A NamedTuple is immutable, so all contexts may share the default that ruff warns of.
products_in_use: ContextVar[Products] = ContextVar("products", default=Products())  # noqa: B039


@contextmanager
def products(chosen: Products) -> Iterator[None]:
    """Use the libraries of ``chosen`` for this thread's matmuls inside the block."""
    token = products_in_use.set(chosen)
    try:
        yield
    finally:
        products_in_use.reset(token)


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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
            least = dict.fromkeys((F.linear, _onednn), math.inf)
            for _ in range(_ROUNDS):  # take turns; the first turn compiles oneDNN's kernel
                for way in least:
                    least[way] = min(least[way], seconds(partial(way, x, next(weights))))
            chosen.append(least[_onednn] <= _GAIN * least[F.linear])
    return Products(*chosen)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, as ``torch.nn.functional.linear`` does.

    On a GPU, matmuls of at most 16 rows use :mod:`~vllm_module.kernels.matmul.few_rows_matmul` if
    that was measured to be faster.

    Large float32 matmuls on a CPU use oneDNN in inference mode, inside a :func:`products` block,
    for the classes of rows chosen there. The precision is the same. Rows are padded, by at most an
    eighth beyond 64 rows, because oneDNN compiles and caches a kernel for every number of rows, in
    about 0.5 ms.

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
    if x.is_cuda and (config := config_of(x, weight, bias)) is not None:
        return few_rows_matmul(x, weight, bias, config)
    if not _is_for_onednn(x, weight, bias):
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


def _is_for_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether to use oneDNN: it was chosen and supports these dtypes and shapes."""
    return (
        not torch.compiler.is_compiling()  # the compiler chooses libraries itself
        and x.numel() * weight.shape[0] > _LARGE
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
