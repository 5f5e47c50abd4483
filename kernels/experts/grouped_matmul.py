"""Grouped matmul: products of rows, sorted by expert, with the weights of their experts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from vllm_module.kernels.dtypes import FLOATS, can_convert, capability
from vllm_module.kernels.experts.grouped_tile import grouped_tile, tiles_of
from vllm_module.kernels.matmul.code_rows import eight_bit_rows, float_rows
from vllm_module.kernels.matmul.code_rows_by_expert import multiplied_by_experts
from vllm_module.kernels.matmul.linear import linear
from vllm_module.kernels.matmul.matmul_configurations import (
    MatmulConfig,
    ScaledWeight,
    grouped_config_of,
)
from vllm_module.kernels.matmul.product_tile import added, block_scale, clamped, loaded, written
from vllm_module.kernels.matmul.scaled_matmul import (
    check_input_scale,
    dequantized_input,
    quantized_input,
    scaled_matmul_reference,
)
from vllm_module.kernels.operators import (
    checks_values,
    expect,
    next_power_of_2,
    operator,
    strides_of,
    tl,
    triton,
)
from vllm_module.kernels.recording import as_one
from vllm_module.kernels.rows.quantize import dequantize

_FP8 = torch.float8_e4m3fn


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    top_k: int = 1,
    scale: torch.Tensor | None = None,
    block: tuple[int, int] | None = None,
    input_scale: torch.Tensor | None = None,
    quantize_input: bool = True,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply each row by the weight of its expert, accumulating in float32.

    Row ``r`` of the result is ``x[rows[r] // top_k]``, or ``x[r]`` without ``rows``, times the
    weight of the expert ``e`` with ``offsets[e] <= r < offsets[e + 1]``. Rows from
    ``offsets[count]`` on are zeros. The launch depends only on shapes, so a CUDA graph can replay
    it. Eight-bit weights are multiplied as in
    :func:`~vllm_module.kernels.matmul.scaled_matmul.scaled_matmul`, and a row's bits depend on the
    bucket of the number of rows in the same way. Where the GPU does not multiply FP8, FP8 weights
    of all experts are dequantized first.

    Args:
        x: ``[tokens, input]``, bfloat16, float16 or float32; or float8_e4m3fn, already quantized.
        weight: ``[count, output, input]``, of the dtype of ``x``; with ``scale``, float8_e4m3fn or
            int8.
        offsets: int32 ``[count + 1]``, from
            :func:`~vllm_module.kernels.experts.sort_by_expert.sort_by_expert`.
        bias: ``[count, output]``, of the result's dtype.
        rows: int32 ``[tokens * top_k]``: the order from ``sort_by_expert``.
        top_k: number of experts of a token; 1 without ``rows``.
        scale: float32 ``[count, ceil(output / block[0]), ceil(input / block[1])]``.
        block: rows and columns of the weight that share a scale; by default ``(1, input)``.
        input_scale: float32. The static scale of ``x``, one element. If ``x`` is already quantized,
            its scales: one, ``[tokens, 1]`` or ``[tokens, ceil(input / block[1])]``.
        quantize_input: True if ``x`` may be quantized.
        dtype: dtype of the result; by default that of ``x``. Required if ``x`` is already
            quantized.

    Returns:
        ``[tokens * top_k, output]``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other. On values, if
            :func:`~vllm_module.kernels.operators.checks_values` is true: offsets do not ascend from
            0 to at most ``tokens * top_k``.

    """
    dtype = x.dtype if dtype is None else dtype
    if dtype not in FLOATS:
        raise ValueError(f"the output must be {' or '.join(map(str, FLOATS))}, got {dtype}")
    expect("x", x, (None, None), (*FLOATS, _FP8))
    wide = (dtype,) if scale is None else (_FP8, torch.int8)
    expect("weight", weight, (None, None, x.shape[1]), wide, x)
    count, outputs, inputs = weight.shape
    block = (1, max(1, inputs)) if block is None else block
    if block[0] < 1 or block[1] < 1:
        raise ValueError(f"a block must have rows and columns, got {block}")
    groups = -(-inputs // block[1])
    if scale is not None:
        expect("scale", scale, (count, -(-outputs // block[0]), groups), (torch.float32,), x)
    if x.dtype not in (_FP8, dtype) and scale is None:
        raise ValueError(f"x must be {dtype}, the output's dtype, got {x.dtype}")
    check_input_scale(x, weight, input_scale, groups)
    expect_groups(x, offsets, bias, rows, top_k, (count, outputs), dtype)
    return _grouped_matmul(
        x, weight, offsets, bias, rows, top_k, scale, *block, input_scale, quantize_input, dtype
    )


def expect_groups(
    x: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    top_k: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Raise ``ValueError`` unless offsets, bias and rows fit ``shape`` (count, output)."""
    expect("offsets", offsets, (shape[0] + 1,), (torch.int32,), x)
    if bias is not None:
        expect("bias", bias, shape, (dtype,), x)
    if top_k < 1 or (rows is None and top_k > 1):
        least = "at least 1" if rows is not None else "1 without rows"
        raise ValueError(f"top_k must be {least}, got {top_k}")
    if rows is not None:
        expect("rows", rows, (len(x) * top_k,), (torch.int32,), x)
    if checks_values(offsets):
        bounds, length = offsets.tolist(), rows_of(x, rows)
        if bounds[0] != 0 or bounds[-1] > length or any(a > b for a, b in pairwise(bounds)):
            raise ValueError(f"offsets must ascend from 0 to at most {length} rows, got {bounds}")


def grouped_matmul_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    top_k: int,
    scale: torch.Tensor | None,
    block_rows: int,
    block_columns: int,
    input_scale: torch.Tensor | None,
    quantize_input: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply in plain torch, an expert at a time; no input is quantized."""
    if x.dtype == _FP8:
        x = dequantized_input(x, input_scale, block_columns, dtype)

    def product(expert: int, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return linear(x, weight[expert], bias)
        block = block_rows, block_columns
        own = weight[expert], scale[expert]
        return scaled_matmul_reference(x, *own, *block, bias, None, False, dtype)

    described: tuple[Any, ...] = float_rows, weight
    if scale is not None:
        described = eight_bit_rows, weight, scale, (block_rows, block_columns)
    x, outputs = x.to(dtype), weight.shape[1]
    return by_expert(x, product, outputs, offsets, bias, rows, top_k, described)


def by_expert(
    x: torch.Tensor,
    product: Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor],
    outputs: int,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    top_k: int,
    described: tuple[Any, ...] = (),
) -> torch.Tensor:
    """Return products with the weights of the experts that have rows.

    Args:
        x, offsets, bias, rows, top_k: as for :func:`grouped_matmul`.
        product: returns that of an expert's rows, with its bias.
        outputs: number of outputs of an expert.
        described: what describes the weights of all experts to
            :func:`~vllm_module.kernels.matmul.code_rows_by_expert.multiplied_by_experts`, which
            multiplies in one call where the loops of the extra ``cpu`` take them.

    """
    if described:
        every = x if rows is None else x.index_select(0, rows // top_k)
        y = multiplied_by_experts(every, offsets, bias, *described)
        if y is not None:
            return y

    def multiply() -> torch.Tensor:
        y = x.new_empty(rows_of(x, rows), outputs)
        bounds = offsets.tolist()
        y[bounds[-1] :] = 0
        given = x if rows is None else x.index_select(0, rows[: bounds[-1]] // top_k)
        for expert, (first, last) in enumerate(pairwise(bounds)):
            if first < last:
                own_bias = None if bias is None else bias[expert]
                y[first:last] = product(expert, given[first:last], own_bias)
        return y

    product_of_all: torch.Tensor = as_one(multiply)
    return product_of_all


def grouped_matmul_triton(*arguments: Any) -> torch.Tensor:
    """Multiply by Triton kernels; see :func:`grouped_matmul`."""
    x, weight, offsets, bias, rows, top_k, scale, *block, input_scale, quantize, dtype = arguments
    block_rows, block_columns = block
    length, (count, N, K) = rows_of(x, rows), weight.shape
    if not length * count * N:
        return x.new_zeros((length, N), dtype=dtype)
    if not K:
        return grouped_matmul_reference(*arguments)
    if not can_convert(weight.dtype, x):  # all experts, because the host does not know who has rows
        if x.dtype == _FP8:
            x = dequantized_input(x, input_scale, block_columns, dtype)
        wide = torch.empty(weight.shape, dtype=dtype, device=x.device)
        for expert, own, by in zip(wide, weight, scale, strict=True):
            expert.copy_(dequantize(own, by, (block_rows, block_columns), dtype))
        x, weight, scale, input_scale, quantize = x.to(dtype), wide, None, None, False
        block_rows, block_columns = 1, K
    x_scale, groups = None, 1 if scale is None else scale.shape[2]
    if x.dtype == _FP8 or (weight.dtype == _FP8 and quantize):
        x, x_scale = quantized_input(x, input_scale, block_columns, groups)
    y = torch.empty(length, N, dtype=dtype, device=x.device)
    described = ScaledWeight(N, K, (block_rows, block_columns), x.dtype, capability(x), count)
    config = grouped_config_of(length, described, x)
    span = K if groups <= 1 else block_columns  # number of input features that steps divide
    tiles = tiles_of(length, count, config.rows) * -(-N // config.columns)
    _multiply_groups[(tiles,)](
        x,
        weight,
        _descriptor(weight, config, span),
        (scale, x_scale, bias, rows, offsets, y),
        length,
        count,
        top_k,
        N,
        K,
        strides_of(x, weight, scale, x_scale),
        (0, 0) if bias is None else bias.stride(),
        block_rows,
        block_columns,
        COUNT=next_power_of_2(count + 1),
        STEPS=-(-block_columns // config.depth) if groups > 1 else 0,
        EVEN=span % config.depth == 0 and K % span == 0,
        ONE_SCALE=block_rows % config.columns == 0 or block_rows >= N,
        SWAP=config.rows < 64 or x.dtype != weight.dtype,
        **config.launch(),
    )
    return y


@triton.jit(do_not_specialize=["length"])
def _multiply_groups(
    x_ptr,
    weight_ptr,
    weight_desc,
    tensors,
    length,
    count,
    top_k,
    N,
    K,
    strides,
    bias_strides,
    block_rows,
    block_columns,
    COUNT: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile of one expert's rows by a tile of its weight.

    STEPS is the number of steps over input features that share a scale; 0 if all share one. With
    SWAP the weight is the left operand: then it can be widened in registers, and rows may be few.
    The descriptor, if any, describes the rows of all weights.
    """
    scale_ptr, x_scale_ptr, bias_ptr, rows_ptr, offsets_ptr, y_ptr = tensors
    x_strides, weight_strides, scale_strides, x_scale_strides = strides
    expert, n, row, exist, source = grouped_tile(
        offsets_ptr, rows_ptr, length, count, top_k, N, COUNT, BLOCK_M, BLOCK_N
    )
    x_ptrs = x_ptr + source[:, None] * x_strides[0]
    if SWAP:
        row, exist, source = row[None, :], exist[None, :], source[None, :]
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        row, exist, source = row[:, None], exist[:, None], source[:, None]
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    y_ptrs = y_ptr + row * N
    if expert >= count:
        written(y_ptrs, None, sums, None, None, exist, n, N, 0, SWAP, BLOCK_N)
        return

    weight_row_of_tile = expert * N + n
    expert = expert.to(tl.int64)
    weight_ptr += expert * weight_strides[0]
    ptrs = weight_ptr + clamped(n, N, BLOCK_N).to(tl.int64)[:, None] * weight_strides[1]
    if scale_ptr is not None:
        scale_ptr += expert * scale_strides[0]
    if bias_ptr is not None:
        bias_ptr += expert * bias_strides[0]
    if x_scale_ptr is not None:
        x_scale_ptr += source * x_scale_strides[0]
    steps = tl.cdiv(K, block_columns) * STEPS if STEPS else tl.cdiv(K, BLOCK_K)
    for step in range(steps):
        if STEPS:
            group = step // STEPS
            first = group * block_columns + step % STEPS * BLOCK_K
            k = first + tl.arange(0, BLOCK_K)
            inside = (k < tl.minimum(K, (group + 1) * block_columns))[None, :]
        else:
            group, first = 0, step * BLOCK_K
            k = first + tl.arange(0, BLOCK_K)
            inside = (k < K)[None, :]
        k = k.to(tl.int64)[None, :]
        x = loaded(x_ptrs + k * x_strides[1], inside, EVEN)
        if weight_desc is None:
            weight = loaded(ptrs + k * weight_strides[2], inside, EVEN)
        else:
            # x is zero for features outside the mask; beyond the last feature, the weight is zero
            # too.
            weight = weight_desc.load([weight_row_of_tile, first])
        x_scale, scale = None, None
        if STEPS:
            if x_scale_ptr is not None:
                x_scale = tl.load(x_scale_ptr + group * x_scale_strides[1])
            scales = scale_ptr + group * scale_strides[2]
            scale = block_scale(
                scales, n, N, scale_strides[1], block_rows, ONE_SCALE, SWAP, BLOCK_N
            )
        sums = added(sums, x, weight, x_scale, scale, SWAP)

    x_scale, scale = None, None
    if not STEPS and scale_ptr is not None:
        if x_scale_ptr is not None:
            x_scale = tl.load(x_scale_ptr)
        scale = block_scale(scale_ptr, n, N, scale_strides[1], block_rows, False, SWAP, BLOCK_N)
    written(y_ptrs, bias_ptr, sums, x_scale, scale, exist, n, N, bias_strides[1], SWAP, BLOCK_N)


def _descriptor(weight: torch.Tensor, config: MatmulConfig, span: int) -> object:
    """Return a descriptor of the rows of all experts' weights; ``None`` to load by pointers.

    ``span`` is the number of input features that steps divide.
    """
    count, outputs, inputs = weight.shape
    # A descriptor has 32 bits for a row index; rows and steps are multiples of 16 bytes.
    if (
        config.way != "descriptors"
        or weight.stride(2) != 1
        or weight.stride(0) != outputs * weight.stride(1)
        or weight.stride(1) * weight.itemsize % 16
        or (span < inputs and span * weight.itemsize % 16)
        or weight.data_ptr() % 16
        or count * outputs >= 2**31
    ):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [config.columns, config.depth])


def rows_of(x: torch.Tensor, rows: torch.Tensor | None) -> int:
    """Return the number of rows of a product."""
    return len(x if rows is None else rows)


def _empty(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return an empty product."""
    _, _, rows, *_, dtype = others
    return x.new_empty((rows_of(x, rows), weight.shape[1]), dtype=dtype)


_grouped_matmul = operator(grouped_matmul_reference, grouped_matmul_triton, _empty)
