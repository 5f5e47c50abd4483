"""Routing to experts, and products with their weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compilation.launches import E4M3, FP32, Cases, meta, tried
from compilation.products import AWQ
from vllm_module.kernels.experts.combine_experts import combine_experts_triton
from vllm_module.kernels.experts.grouped_matmul import grouped_matmul_triton
from vllm_module.kernels.experts.grouped_matmul_mxfp4 import grouped_matmul_mxfp4_triton
from vllm_module.kernels.experts.grouped_matmul_packed import grouped_matmul_packed_triton
from vllm_module.kernels.experts.sort_by_expert import sort_by_expert_triton
from vllm_module.kernels.experts.topk_routing import topk_routing_triton


def routed(
    experts: int, top_k: int, scoring: str = "softmax", groups: int = 1, biased: bool = False
) -> Callable[[], object]:
    """Choose experts of half of the groups."""
    bias = meta(experts, dtype=FP32) if biased else None
    logits, kept = meta(8192, experts), -(-groups // 2)
    return lambda: topk_routing_triton(logits, top_k, scoring, True, bias, groups, kept, 1.0)


def moved_to_experts() -> None:
    """Sort rows by expert, and add them up for each token."""
    order, offsets = sort_by_expert_triton(meta(8192, 8, dtype=torch.int32), 16, 16)
    combine_experts_triton(meta(65536, 2048), order, offsets, meta(8192, 8, dtype=FP32))


def grouped(
    tile: int, kind: str, rows: int = 1, dtype: torch.dtype = torch.bfloat16, k: int = 2880
) -> Callable[[], object]:
    """Multiply by 128 experts' weights, in tiles of ``tile`` rows; blocks as in `multiplied`."""
    count, n, tokens = 128, 1536, 16 * tile
    x, bias = meta(tokens, k, dtype=dtype), meta(count, n, dtype=dtype)
    order, offsets = meta(tokens * 8, dtype=torch.int32), meta(count + 1, dtype=torch.int32)
    if kind == "mxfp4":
        shape = (count, n, k // 32)
        weight = meta(*shape, 16, dtype=torch.uint8), meta(*shape, dtype=torch.uint8)
        return lambda: grouped_matmul_mxfp4_triton(x, *weight, offsets, bias, order, 8)
    block, scale = (1, k) if rows == 1 else (rows, rows), None
    if kind != "wide":
        scale = meta(count, -(-n // block[0]), -(-k // block[1]), dtype=FP32)
    held = {"wide": dtype, "int8": torch.int8}.get(kind, E4M3)
    return lambda: grouped_matmul_triton(
        x, meta(count, n, k, dtype=held), offsets, bias, order, 8, scale, *block,
        None, kind != "fp8 weight", dtype,
    )  # fmt: skip


def packed_experts(
    rows: int, kind: str, group: int = 128, bits: int = 4, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    """Multiply by 128 packed experts ``[1536, 2880]``, ``rows`` rows of each on average."""
    count, outputs, inputs = 128, 1536, 2880
    words, along, order = meta(count, outputs, inputs * bits // 32, dtype=torch.int32), 1, None
    if kind == "gptq":
        words = meta(count, inputs * bits // 32, outputs, dtype=torch.int32).mT
    elif kind == "awq":
        words, along = meta(count, inputs, outputs * bits // 32, dtype=torch.int32).mT, 0
        order = AWQ
    scales, zeros, group_of = meta(count, outputs, -(-inputs // group), dtype=FP32), None, None
    if kind != "rows":
        zeros = meta(*scales.shape, dtype=torch.uint8)
    if kind == "gptq":
        group_of = meta(count, inputs, dtype=torch.int32)
    x, offsets = meta(16 * rows, inputs, dtype=dtype), meta(count + 1, dtype=torch.int32)
    return lambda: grouped_matmul_packed_triton(
        x, words, scales, bits, along, order, group, zeros, group_of, offsets,
        meta(count, outputs, dtype=dtype), meta(128 * rows, dtype=torch.int32), 8,
    )  # fmt: skip


TILES = (16, 32, 64, 128)


CASES: Cases = {
    "route to 8": routed(8, 2),
    "route to 256 in groups": routed(256, 8, "sigmoid", 8, biased=True),
    "route to 160 in groups": routed(160, 6, groups=8),
    "route to 512": routed(512, 10),
    "experts' rows": moved_to_experts,
    **{f"grouped bf16, {tile}": grouped(tile, "wide") for tile in TILES},
    **{f"grouped mxfp4, {tile}": grouped(tile, "mxfp4") for tile in TILES},
    **{f"grouped int8, {tile}": grouped(tile, "int8") for tile in (16, 128)},
    **{f"grouped fp32, {tile}": grouped(tile, "wide", dtype=FP32) for tile in (16, 128)},
    **{f"grouped packed rows, {tile}": packed_experts(tile, "rows") for tile in TILES},
    "grouped packed gptq in no order, 64": packed_experts(64, "gptq"),
    "grouped packed awq, 128": packed_experts(128, "awq"),
    "grouped packed awq, 16, fp32": packed_experts(16, "awq", dtype=FP32),
    "grouped mxfp4, fp32": grouped(128, "mxfp4", dtype=FP32),
    "grouped int8 by blocks of 64": grouped(128, "int8", 64),
    "grouped bf16 of an odd size": grouped(128, "wide", k=2052),
}
HOPPER: Cases = {
    **{
        f"grouped {kind}, {tile}{', by block' * (rows > 1)}": grouped(tile, kind, rows)
        for tile in TILES
        for kind, rows in (("fp8", 1), ("fp8", 128), ("fp8 weight", 1), ("fp8 weight", 128))
    },
    **{
        f"grouped {kind}, {tile}{', by block' * (rows > 1)}, {name}": tried(
            "grouped_matmul", name, grouped(tile, kind, rows)
        )
        for tile, name, kind, rows in (
            (16, "wide tiles", "wide", 1),
            (32, "wide tiles", "fp8", 128),
            (32, "more stages", "fp8", 128),
            (128, "small tiles", "wide", 1),
            (128, "small tiles", "fp8", 128),
            (16, "tiles, descriptors", "fp8", 1),
            (64, "tiles, descriptors", "fp8", 128),
            (128, "tiles, descriptors", "fp8 weight", 1),
            (128, "tiles, descriptors", "fp8", 128),
            (128, "small tiles, descriptors", "fp8", 128),
            (128, "tiles, descriptors", "wide", 1),
        )
    },
}
