"""Products on a CPU by weights in codes, which are dequantized in its cache, and in floats.

Numbers are float32, as in the products that dequantize a weight first. Only the order of sums
differs. Where the processor multiplies bfloat16, inputs of several rows in it are multiplied by
codes whose values are rounded to it, as they would be in a model that is not quantized; sums are
float32. The loops need the extra ``cpu``.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.matmul.code_rows import CodeRows, eight_bit_rows
from vllm_module.kernels.matmul.compiled_codes import INT8
from vllm_module.kernels.matmul.compiled_rows import ARGUMENTS, BYTES, STORED, compiled_multiply
from vllm_module.kernels.matmul.kept_loops import Loop
from vllm_module.kernels.matmul.products import least_seconds, products_in_use, seconds_of
from vllm_module.kernels.matmul.torch_threads import in_threads
from vllm_module.kernels.once import Once

_log = logging.getLogger(__name__)
_TRIED = 1, 8, 32, 128, 512  # numbers of rows that are timed
_GAIN = 0.9  # largest share of the time of dequantizing first that the loops may take
_ROUNDS = 5
_WEIGHTS = 8, 1024, 1024  # larger than a cache, as a model's weights are
NARROW = {torch.float32: 0, torch.bfloat16: 1}  # what the loops read and write
_NOTHING = torch.empty(0, device="cpu")
_MOST_TOLD = 1 << 14  # weights of which it is kept what the loops are told; some 500 bytes each


def takes_code_rows(x: torch.Tensor, weight: torch.Tensor, rows: int | None = None) -> bool:
    """Return whether a product with a weight in codes or floats is computed by the loops.

    They were chosen for so many rows (:class:`~vllm_module.kernels.matmul.products.Products`), all
    of ``x`` unless given, and no derivative is needed.
    """
    chosen = products_in_use.get()
    rows = x.numel() // max(1, x.shape[-1]) if rows is None else rows
    return (
        (rows in chosen.floats if weight.dtype in FLOATS else 0 < rows <= chosen.codes)
        and x.is_cpu
        and not torch.compiler.is_compiling()
        and torch.is_inference_mode_enabled()
        and x.dtype in FLOATS
        and weight.is_contiguous()
    )


def multiplied_by_codes(
    x: torch.Tensor,
    describe: Callable[..., CodeRows | None],
    *weight: Any,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Return the product of :func:`code_rows_matmul`; ``None`` if the loops do not compute it.

    What the loops are told of a weight is kept by the addresses of its tensors: to find it out
    takes longer than to multiply by a small weight. No tensor of the weight is kept.

    Args:
        x, bias, dtype: as for :func:`code_rows_matmul`.
        describe: a function of :mod:`~vllm_module.kernels.matmul.code_rows`, which describes a
            weight.
        weight: its arguments; the first one is a tensor that holds the codes or floats.

    """
    if not takes_code_rows(x, weight[0]):
        return None
    key = describe, *map(memory_of, weight)
    told = _told.get(key)
    if told is None:
        codes = describe(*weight)
        if codes is None:
            return None
        told, made = tell(codes)
        if lasts(codes, made, weight):
            if len(_told) >= _MOST_TOLD:
                _told.clear()
            _told[key] = told
    return _product(x, told, bias, dtype)


def code_rows_matmul(
    x: torch.Tensor,
    weight: CodeRows,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply by a weight in codes or floats, and add up in float32.

    Args:
        x: ``[..., input]``, bfloat16, float16 or float32, on the CPU.
        weight: the weight ``[output, input]``.
        bias: ``[output]``, or ``None``.
        dtype: dtype of the result; by default that of ``x``.

    Returns:
        ``[..., output]``. The order of sums depends on the number of rows, and so does whether the
        weight is rounded to bfloat16: for more rows than one of bfloat16, where the processor
        multiplies such numbers.

    Raises:
        ImportError: numba is not installed.

    """
    told, made = tell(weight)
    product = _product(x, told, bias, dtype)
    del made  # the loops have read it
    return product


class Told(NamedTuple):
    """What the loops are told of a weight.

    Attributes:
        kind, ordered: which loops they are.
        zero: their first number.
        numbers: address and shape of each argument but ``x`` and ``y``.
        order: the input of each number in the order of rows; ``None`` if that is their order.
        outputs: number of outputs.

    """

    kind: int
    ordered: bool
    zero: int
    numbers: tuple[int, ...]
    order: torch.Tensor | None
    outputs: int


_told: dict[object, Told] = {}


def memory_of(argument: Any) -> object:
    """Return where a tensor is and how its numbers lie there; another argument as it is."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.data_ptr(), argument.shape, argument.dtype, argument.is_contiguous()


def lasts(weight: CodeRows, made: list[torch.Tensor], given: Iterable[object]) -> bool:
    """Return whether what :func:`tell` returned depends on nothing but where tensors are.

    Args:
        weight, made: what it was given, and the tensors that it made.
        given: arguments that describe the weight.

    """
    known = {each.data_ptr() for each in given if isinstance(each, torch.Tensor)}
    tensors = weight.rows, weight.scales, weight.zeros
    used = {each.data_ptr() for each in tensors if each is not None and each.numel()}
    return weight.group_of is None and not made and used <= known


def tell(weight: CodeRows) -> tuple[Told, list[torch.Tensor]]:
    """Return what the loops are told of a weight, and tensors made for that, which they read."""
    order, place, starts = weight.order, _places(tuple(weight.places)), _places(())
    made = []
    if weight.group_of is not None:
        order, place, starts = _by_group(weight)
        made += [place, starts]
    output = weight.outputs
    given = {
        "rows": weight.rows,
        "scales": weight.scales,
        "zeros": weight.scales.new_empty(output, 0, dtype=torch.uint8)
        if weight.zeros is None
        else weight.zeros,
        "table": _NOTHING if weight.table is None else weight.table,
        "place": place,
        "starts": starts,
    }
    assert weight.rows.dtype == STORED.get(weight.kind, BYTES)[0]
    numbers: list[int] = []
    # The loops see addresses alone: another dtype would be other numbers, or other memory.
    for name, tensor in given.items():
        own = tensor.to(ARGUMENTS[name] or tensor.dtype).contiguous()
        if own is not tensor:
            made.append(own)
        numbers += own.data_ptr(), *own.shape
    ordered = weight.group_of is not None
    return Told(weight.kind, ordered, weight.zero, tuple(numbers), order, output), made


def _product(
    x: torch.Tensor, told: Told, bias: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.dtype in NARROW else rows.float()
    rows, order = rows.contiguous(), 0 if told.order is None else told.order.data_ptr()
    count, columns = rows.shape
    padded, dtype = -(-told.outputs // 8) * 8, dtype or x.dtype
    # The sum with a bias is rounded once, and so is a result of another dtype.
    written = dtype if bias is None and dtype in NARROW else torch.float32
    y = rows.new_empty(count, padded, dtype=written)
    own, result = (rows.data_ptr(), count, columns), (y.data_ptr(), count, padded)
    how = NARROW[rows.dtype], NARROW[written], order
    _multiply(told.kind, told.ordered)((told.zero, *own, *told.numbers, *result, *how), told.order)
    product = y if padded == told.outputs else y[:, : told.outputs]
    if bias is not None:
        product = product + bias
    return product.to(dtype).reshape(*x.shape[:-1], told.outputs)


def _by_group(weight: CodeRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the inputs with those of a group side by side, their places in a row, and groups.

    Of each group there is the first of its inputs, and after the last one their number.
    """
    assert weight.group_of is not None
    group_of = weight.group_of.numpy()
    if weight.order is not None:
        group_of = group_of[weight.order.numpy()]
    place = group_of.astype(np.int16).argsort(kind="stable")  # of 16 bits, in linear time
    starts = np.zeros(weight.scales.shape[1] + 1, np.int64)
    np.bincount(group_of, minlength=len(starts) - 1).cumsum(out=starts[1:])
    inputs = torch.from_numpy(place)
    order = inputs if weight.order is None else weight.order[inputs]
    return order, inputs, torch.from_numpy(starts)


@Once
def _places(places: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int64, device="cpu")


@functools.cache
def fastest_code_rows(
    threads: int, seconds: Callable[[Callable[[], object]], float] = seconds_of
) -> int:
    """Return the largest number of rows that the loops multiply faster than dequantizing first.

    Both multiply by int8 weights, the fastest to dequantize, in less than a second. Without numba
    it is 0, and the log says so. With it, the first call on a machine compiles the loops in some
    seconds, and keeps them.

    Args:
        threads: torch's number of threads; it is measured once for each number.
        seconds: function that runs its argument and returns the time it took; tests replace it.

    """
    try:
        _loops(INT8, False, threads)
    except ImportError as error:
        _log.warning(
            "each product with quantized weights dequantizes them first, which takes several times "
            "as long on a CPU as multiplying by their codes: %s",
            error,
        )
        return 0
    weights = torch.ones(_WEIGHTS, dtype=torch.int8, device="cpu")
    scale = weights.new_ones(_WEIGHTS[1], 1, dtype=torch.float32)
    turns, most = itertools.cycle(weights), 0

    def dequantized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight.float() * scale)

    def loops(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = eight_bit_rows(weight, scale, (1, _WEIGHTS[-1]))
        assert rows is not None
        return code_rows_matmul(x, rows)

    with torch.inference_mode():
        for rows in _TRIED:
            x = scale.new_ones(rows, _WEIGHTS[-1])
            loops(x, weights[0])  # compiles
            first, own = least_seconds((dequantized, loops), x, turns, _ROUNDS, seconds)
            if own > _GAIN * first:
                break
            most = rows
    return most


def _multiply(kind: int, ordered: bool) -> Callable[..., None]:
    """Return the loops for torch's number of threads. Raises ``ImportError`` without numba."""
    return _loops(kind, ordered, torch.get_num_threads())


@functools.cache
def _loops(kind: int, ordered: bool, threads: int) -> Callable[..., None]:
    return in_threads(compiled_loops(kind, ordered), threads)


def compiled_loops(kind: int, ordered: bool) -> Loop:
    """Return the loops for a kind of weights. Raises ``ImportError`` without numba."""
    try:
        return compiled_multiply(kind, ordered)
    except ModuleNotFoundError as error:
        raise ImportError(
            "multiplying codes on a CPU needs numba: pip install numba (the extra vllm-module[cpu])"
        ) from error
