"""Matmul with FP8 weights, in tiles loaded by tensor descriptors (TMA of Hopper).

This is no operation by itself: it belongs to :mod:`~vllm_module.kernels.matmul.scaled_matmul`.
"""

from __future__ import annotations

from vllm_module.kernels.matmul.matmul_configurations import MatmulConfig
from vllm_module.kernels.matmul.product_tile import added, block_scale, tile_of, written
from vllm_module.kernels.matmul.scaled_matmul_tiles import Product
from vllm_module.kernels.operators import tl, triton


def descriptors_take(product: Product) -> bool:
    """Return whether descriptors support these layouts: rows of multiples of 16 bytes."""
    return product.x_scale is not None and all(
        each.stride(1) == 1 and each.stride(0) % 16 == 0 and each.data_ptr() % 16 == 0
        for each in (product.x, product.weight)
    )


def multiply_described(product: Product, config: MatmulConfig) -> None:
    """Launch the matmul tile by tile."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, weight, scale, x_scale, (block_rows, block_columns), bias, y = product
    (M, K), N, groups = x.shape, weight.shape[0], scale.shape[1]
    assert x_scale is not None
    _multiply_described[(-(-M // config.rows) * -(-N // config.columns),)](
        TensorDescriptor.from_tensor(x, [config.rows, config.depth]),
        TensorDescriptor.from_tensor(weight, [config.columns, config.depth]),
        scale,
        x_scale,
        bias,
        y,
        M,
        N,
        K,
        scale.stride(),
        x_scale.stride(),
        1 if bias is None else bias.stride(0),
        block_rows,
        block_columns,
        STEPS=-(-block_columns // config.depth) if groups > 1 else 0,
        **config.launch(),
    )


@triton.jit(do_not_specialize=["M"])
def _multiply_described(
    x_desc,
    weight_desc,
    scale_ptr,
    x_scale_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K,
    scale_strides,
    x_scale_strides,
    bias_stride,
    block_rows,
    block_columns,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply a tile of tokens by a tile of the weight.

    STEPS is the number of steps over input features that share a scale; 0 if all share one.
    Descriptors load zeros beyond the last row or feature.
    """
    top, left = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    top, left = top * BLOCK_M, left * BLOCK_N
    m = (top + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    x_scale_ptrs = x_scale_ptr + tl.minimum(m, M - 1) * x_scale_strides[0]
    scale_ptrs = scale_ptr + tl.minimum(left, N - 1) // block_rows * scale_strides[0]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps = tl.cdiv(K, block_columns) * STEPS if STEPS else tl.cdiv(K, BLOCK_K)
    for step in range(steps):
        x = x_desc.load([top, step * BLOCK_K])
        weight = weight_desc.load([left, step * BLOCK_K])
        x_scale, scale = None, None
        if STEPS:
            group = step // STEPS
            x_scale = tl.load(x_scale_ptrs + group * x_scale_strides[1])
            scale = tl.load(scale_ptrs + group * scale_strides[1])
        sums = added(sums, x, weight, x_scale, scale, False)
    x_scale, scale = None, None
    if not STEPS:
        x_scale = tl.load(x_scale_ptrs)
        scale = block_scale(scale_ptr, left, N, scale_strides[0], block_rows, False, False, BLOCK_N)
    y_ptrs = y_ptr + m * N
    written(y_ptrs, bias_ptr, sums, x_scale, scale, m < M, left, N, bias_stride, False, BLOCK_N)
