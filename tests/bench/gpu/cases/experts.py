"""Cases of mixture-of-experts layers: the products of sorted rows with their experts' weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch.nn import functional as F

from gpu.cases.case import BF16, E4M3, FP32, Case, Peer, Tensors, short
from vllm_module.kernels.experts.grouped_matmul import grouped_matmul
from vllm_module.kernels.experts.grouped_matmul_mxfp4 import dequantize_mxfp4, grouped_matmul_mxfp4
from vllm_module.kernels.experts.grouped_matmul_packed import grouped_matmul_packed
from vllm_module.kernels.experts.sort_by_expert import sort_by_expert
from vllm_module.kernels.matmul.packed_words import Packing, dequantize_packed
from vllm_module.kernels.rows.quantize import dequantize, quantize_reference

_INT4 = Packing(4)


def experts(small: bool) -> Iterator[Case]:
    sizes = [(128, 8, 1536, 2048), (8, 2, 28672, 4096)]  # of Qwen3-30B-A3B and Mixtral
    tokens = (64, 4096)
    if small:
        sizes, tokens = [(4, 2, 48, 64)], (5,)
    for size, way, m in product(sizes, ("wide", "fp8", "mxfp4", "int4"), tokens):
        yield experts_case(way, m, *size)


def experts_case(way: str, m: int, count: int, top_k: int, n: int, k: int) -> Case:
    group = min(128, k)  # inputs that share a scale of int4

    def make() -> Tensors:
        x = torch.randn(m, k, dtype=BF16)
        chosen = torch.rand(m, count).topk(top_k).indices.int()
        order, offsets = sort_by_expert(chosen, 0, count)
        if way == "mxfp4":
            blocks = torch.randint(0, 256, (count, n, k // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, (count, n, k // 32), dtype=torch.uint8)
            return x, blocks, scales, order, offsets
        if way == "int4":
            words = torch.randint(-(2**31), 2**31 - 1, (count, n, k // 8), dtype=torch.int32)
            scales = (torch.rand(count, n, k // group) + 0.5).to(BF16) / k**0.5
            return x, words, scales, order, offsets
        weight, scale = torch.randn(count, n, k, dtype=BF16) / k**0.5, None
        if way == "fp8":
            wide, weight = weight, torch.zeros(count, n, k, dtype=E4M3)
            scale = torch.zeros(count, n, 1)
            for matrices in zip(wide, weight, scale, strict=True):
                quantize_reference(*matrices, 1, k)
        return x, weight, scale, order, offsets

    def ours(x: Any, weight: Any, scale: Any, order: Any, offsets: Any) -> torch.Tensor:
        if way == "mxfp4":
            return grouped_matmul_mxfp4(x, weight, scale, offsets, rows=order, top_k=top_k)
        if way == "int4":
            packed = weight, scale, _INT4, group, offsets
            return grouped_matmul_packed(x, *packed, rows=order, top_k=top_k)
        return grouped_matmul(x, weight, offsets, rows=order, top_k=top_k, scale=scale)

    def widened(weight: Any, scale: Any, dtype: torch.dtype) -> torch.Tensor:
        if way == "mxfp4":
            return dequantize_mxfp4(weight, scale, dtype)
        if way == "int4":
            return dequantize_packed(weight, scale, _INT4, group, dtype)
        return weight.to(dtype) if scale is None else dequantize(weight, scale, (1, k), dtype)

    def looped(x: Any, weights: Any, order: Any, bounds: list[int]) -> torch.Tensor:
        rows = x[order // top_k]
        y = torch.empty(len(rows), n, dtype=x.dtype, device=x.device)
        for expert, (first, last) in enumerate(pairwise(bounds)):
            if first < last:
                torch.matmul(rows[first:last], weights[expert].t(), out=y[first:last])
        return y

    def plain(
        dtype: torch.dtype, exact: bool, x: Any, weight: Any, scale: Any, order: Any, offsets: Any
    ) -> torch.Tensor:
        y = torch.empty(len(order), n, dtype=dtype, device=x.device)
        if way == "fp8":  # the error of rounding the input is allowed
            rounded = torch.zeros(x.shape, dtype=E4M3, device=x.device)
            scales = torch.zeros(len(x), 1, device=x.device)
            quantize_reference(x, rounded, scales, 1, k)
            x = x if exact else dequantize(rounded, scales, (1, k), dtype)
        rows = x[order // top_k].to(dtype)
        for expert, (first, last) in enumerate(pairwise(offsets.tolist())):
            if first < last:
                part = None if scale is None else scale[expert]
                y[first:last] = F.linear(rows[first:last], widened(weight[expert], part, dtype))
        return y

    def prepare(x: Any, weight: Any, scale: Any, order: Any, offsets: Any) -> Tensors:
        parts = [None] * count if scale is None else scale
        weights = [widened(*one, BF16) for one in zip(weight, parts, strict=True)]
        return x, weights, order, offsets.tolist()

    def gathered(x: Any, weight: Any, _: Any, order: Any, offsets: Any) -> Tensors:
        return x[order // top_k], weight.transpose(1, 2), offsets[1:]

    def grouped(rows: Any, weight: Any, ends: Any) -> torch.Tensor:
        return torch._grouped_mm(rows, weight, offs=ends)

    peers = {"loop of torch.matmul": Peer(looped, prepare, judged=way != "fp8")}
    if way == "wide":
        peers["_grouped_mm"] = Peer(grouped, gathered)
    met = min(count, m * top_k)  # experts that have rows, at most
    element = {"wide": 2.0, "fp8": 1.0, "mxfp4": 17 / 32, "int4": 0.5 + 2 / group}[way]
    return Case(
        name=f"experts {way} {m} x {top_k} of {count} x {n} x {k} {short(BF16)}",
        make=make,
        ours=ours,
        reference=partial(plain, BF16, False),
        truth=partial(plain, FP32, True),
        bucket=f"experts {way}, {'<' if m < 512 else '>='} 512 tokens",
        moved=int(met * n * k * element) + 2 * m * k + 2 * m * top_k * n,
        flops=2 * m * top_k * n * k,
        rate="fp8" if way == "fp8" else "bf16",
        peers=peers,
    )
