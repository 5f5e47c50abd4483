"""Products with weights that are not quantized, by whichever library is faster here."""

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

_LARGE = 1 << 21  # multiplications; for fewer, calling oneDNN costs what it gains
_FEW = 64  # most rows that are few
_GAIN = 0.9  # of torch's time, at most, that oneDNN takes where it is chosen
_TRIED = 1, 16, 128  # rows of each class
_ROUNDS = 7  # short ones: another process that takes the CPU disturbs few of them
_WEIGHTS = 8, 1024, 1024  # together more than a CPU's cache holds, as a model's weights are
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


class Products(NamedTuple):
    """Which large float32 products on a CPU oneDNN computes, by the number of rows.

    Attributes:
        one, few, many: products of one row, of 2 to 64 rows, and of more.

    """

    one: bool = False
    few: bool = False
    many: bool = False

    def use_onednn(self, rows: int) -> bool:
        """Return whether oneDNN computes a product of so many rows."""
        return self.one if rows == 1 else self.few if rows <= _FEW else self.many


# A NamedTuple cannot be changed, so all contexts may share the default that ruff warns of.
_products: ContextVar[Products] = ContextVar("products", default=Products())  # noqa: B039


@contextmanager
def products(chosen: Products) -> Iterator[None]:
    """Compute the products of this thread as ``chosen``, inside of the context."""
    token = _products.set(chosen)
    try:
        yield
    finally:
        _products.reset(token)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fastest_products(seconds: Callable[[Callable[[], object]], float] = _seconds) -> Products:
    """Time torch and oneDNN on this CPU, with torch's present threads, in less than 0.1 s.

    oneDNN is chosen for a class of rows if it takes at most 0.9 times as long: torch's library is
    at most half as fast as oneDNN on some of AMD's processors, and faster on Intel's.

    Args:
        seconds: runs what it is given and returns how long that took; a test has its own.

    """
    if not _HAS_ONEDNN or not torch.backends.mkldnn.enabled:
        return Products()
    weights = itertools.cycle(torch.ones(_WEIGHTS))
    chosen = []
    with torch.inference_mode():
        for rows in _TRIED:
            x = torch.ones(rows, _WEIGHTS[-1])
            least = dict.fromkeys((F.linear, _onednn), math.inf)
            for _ in range(_ROUNDS):  # in turns; the first compiles oneDNN's program
                for way in least:
                    least[way] = min(least[way], seconds(partial(way, x, next(weights))))
            chosen.append(least[_onednn] <= _GAIN * least[F.linear])
    return Products(*chosen)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, as ``torch.nn.functional.linear`` does.

    On a GPU, products of at most 16 rows are those of
    :mod:`~vllm_module.kernels.matmul.few_rows_matmul` where that was measured to be faster.

    Large float32 products on a CPU go to oneDNN in inference mode, inside of :func:`products`, for
    the classes of rows that it says. The precision is the same. Rows are padded, by at most an
    eighth beyond 64 rows: oneDNN compiles and keeps a program for every number of rows, in about
    0.5 ms.

    Args:
        x: ``[..., input]``.
        weight: ``[output, input]``, of the dtype of ``x``.
        bias: ``[output]``, of the same dtype, or ``None``.

    Returns:
        ``[..., output]``.

    Raises:
        ValueError: a weight on the meta device, and ``x`` on another.
        RuntimeError: shapes, dtypes or devices that do not fit each other, from torch.

    """
    if weight.is_meta and not x.is_meta:  # torch would return memory that nothing was written to
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
    """Return whether oneDNN was chosen and gives the same; torch does or refuses all else."""
    return (
        not torch.compiler.is_compiling()  # the compiler chooses libraries itself
        and x.numel() * weight.shape[0] > _LARGE
        and weight.dim() == 2
        and _products.get().use_onednn(x.numel() // max(1, x.shape[-1]))
        and torch.is_inference_mode_enabled()  # oneDNN keeps no derivatives
        and not torch.is_autocast_enabled("cpu")
        and _is_plain(x)
        and _is_plain(weight)
        and (bias is None or (_is_plain(bias) and bias.shape == weight.shape[:1]))
        and x.shape[-1:] == weight.shape[1:]
        and bool(torch.backends.mkldnn.enabled)
    )


def _is_plain(x: torch.Tensor) -> bool:
    # oneDNN fails on some strides, and ignores those of a bias.
    return (
        x.is_cpu
        and x.dtype == torch.float32
        and x.layout == torch.strided
        and not x.is_nested
        and x.is_contiguous()
    )
