"""Cases of products with eight-bit weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F

from gpu.cases.case import BF16, E4M3, FP16, FP32, Case, Peer, Tensors, short
from vllm_module.kernels.matmul.scaled_matmul import scaled_matmul
from vllm_module.kernels.rows.quantize import dequantize, quantize_reference

PREFILL = 512  # tokens from which a product is bound by arithmetic


def products(small: bool) -> Iterator[Case]:
    sizes = [(4096, 4096), (28672, 4096), (4096, 14336)]  # of an 8B model
    tokens = (1, 64, 512, 8192)
    if small:
        sizes, tokens = [(256, 256)], (5,)
    yield product_case("rows", 17, *sizes[0], FP16, timed=False)
    yield product_case("weight only, int8", 17, *sizes[0], BF16, timed=False)
    yield product_case("blocks from 16 bits", 17, *sizes[0], BF16, timed=False)
    for (n, k), way, m in product(sizes, ("rows", "blocks"), tokens):
        yield product_case(way, m, n, k, BF16, timed=True)
    for way, m in product(("rows from 16 bits", "weight only"), sorted({tokens[0], tokens[-1]})):
        yield product_case(way, m, *sizes[0], BF16, timed=True)


def product_case(way: str, m: int, n: int, k: int, dtype: torch.dtype, timed: bool) -> Case:
    block = (128, 128) if way.startswith("blocks") else (1, k)
    weight_only, from_wide = way.startswith("weight only"), "from" in way
    stored = torch.int8 if way.endswith("int8") else E4M3

    def make() -> Tensors:
        x = torch.randn(m, k, dtype=dtype) * (1 + torch.rand(m, 1, dtype=dtype))
        wide = torch.randn(n, k, dtype=BF16) / k**0.5
        weight = torch.zeros(n, k, dtype=stored)
        scale = torch.zeros(-(-n // block[0]), -(-k // block[1]))
        quantize_reference(wide, weight, scale, *block)
        x_scale = None
        if not (weight_only or from_wide):
            x, x_scale = rows_in_fp8(x, block[1])
        return x, weight, scale, x_scale

    def ours(x: Any, weight: Any, scale: Any, x_scale: Any) -> torch.Tensor:
        return scaled_matmul(
            x, weight, scale, block, None, x_scale, quantize_input=not weight_only, dtype=dtype
        )

    def exactly(dtype: torch.dtype, x: Any, weight: Any, scale: Any, x_scale: Any) -> torch.Tensor:
        if x_scale is not None:
            x = dequantize(x, x_scale, (1, block[1]), dtype)
        return F.linear(x.to(dtype), dequantize(weight, scale, block, dtype))

    def reference(x: Any, weight: Any, scale: Any, x_scale: Any) -> torch.Tensor:
        if from_wide:  # the error of rounding the input is allowed
            x, x_scale = rows_in_fp8(x, block[1])
        return exactly(dtype, x, weight, scale, x_scale)

    bucket = f"matmul {way}, {'<' if m < PREFILL else '>='} {PREFILL} tokens"
    moved = n * k + n * k * 4 // (block[0] * block[1])
    moved += m * k * (2 if weight_only or from_wide else 1) + m * n * dtype.itemsize
    return Case(
        name=f"matmul {way} {m} x {n} x {k} {short(dtype)}",
        make=make,
        ours=ours,
        reference=reference,
        truth=partial(exactly, FP32),
        bucket=bucket if timed else "",
        moved=moved,
        flops=2 * m * n * k,
        rate="bf16" if weight_only else "fp8",
        peers=product_peers(way) if timed else {},
    )


def rows_in_fp8(x: torch.Tensor, group: int) -> Tensors:
    quantized = torch.zeros(x.shape, dtype=E4M3, device=x.device)
    scale = torch.zeros(len(x), -(-x.shape[1] // group), device=x.device)
    quantize_reference(x, quantized, scale, 1, group)
    return quantized, scale


def product_peers(way: str) -> dict[str, Peer]:
    """Return torch's products: with scales of rows, of blocks, and one for each whole matrix."""
    if way == "weight only":
        wide = Peer(F.linear, lambda x, w, s, _: (x, dequantize(w, s, (1, w.shape[1]), x.dtype)))
        return {"bf16 linear": wide}
    if "from" in way:
        return {}

    def by_rows(x: Any, weight: Any, scale: Any, x_scale: Any) -> Tensors:
        if scale.shape[1] > 1:
            scale = torch.ones_like(scale[:1, :1]).expand(len(weight), 1)
        return x, weight.t(), x_scale[:, :1].contiguous(), scale.contiguous().t()

    def by_tensors(x: Any, weight: Any, scale: Any, x_scale: Any) -> Tensors:
        return x, weight.t(), x_scale[0, 0].clone(), scale[0, 0].clone()

    def by_blocks(x: Any, weight: Any, scale: Any, x_scale: Any) -> Tensors:
        return x, weight.t(), x_scale.t().contiguous().t(), scale.t()

    def multiply(x: Any, weight: Any, x_scale: Any, scale: Any, fast: bool = True) -> torch.Tensor:
        return torch._scaled_mm(
            x, weight, scale_a=x_scale, scale_b=scale, out_dtype=BF16, use_fast_accum=fast
        )

    exact = partial(multiply, fast=False)
    peers = {
        "_scaled_mm rows": Peer(exact, by_rows, judged=way == "rows"),
        "_scaled_mm rows fast": Peer(multiply, by_rows, judged=way == "rows"),
        "_scaled_mm tensors fast": Peer(multiply, by_tensors, judged=False),
    }
    if way == "blocks":
        peers["_scaled_mm blocks"] = Peer(exact, by_blocks)
    return peers
