"""Products with weights of eight bits, and with packed weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compilation.launches import E4M3, FP16, FP32, TYPES, Cases, meta, tried
from vllm_module.kernels.matmul.packed_matmul import packed_matmul_triton
from vllm_module.kernels.matmul.scaled_matmul import scaled_matmul_triton


def multiplied(
    m: int, n: int, k: int, kind: str, rows: int = 1, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    """Multiply ``[m, k]`` by a weight ``[n, k]`` with a scale for each block of ``rows``."""
    block = (1, k) if rows == 1 else (rows, rows)
    groups = -(-k // block[1])
    scale = meta(-(-n // block[0]), groups, dtype=FP32)
    weight = meta(n, k, dtype=torch.int8 if kind == "int8" else E4M3)
    x, bias = meta(m, k, dtype=E4M3 if kind == "fp8 given" else dtype), meta(n, dtype=dtype)
    given = meta(m, groups, dtype=FP32) if kind == "fp8 given" else None
    return lambda: scaled_matmul_triton(
        x, weight, scale, *block, bias, given, kind != "fp8 weight", dtype
    )


AWQ, NF4 = (0, 4, 1, 5, 2, 6, 3, 7), (1, 0)


CODEBOOKS = "nf4", "mxfp4"  # of packed weights


def packed(
    m: int, kind: str, group: int = 128, bits: int = 4, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    """Multiply ``[m, 4096]`` by a packed weight ``[4096, 4096]``, as ``kind`` lays out its words.

    GPTQ's and AWQ's tensors are transposed views, as they are stored.
    """
    size, floats = 4096, {"nf4": FP32, "mxfp4": torch.bfloat16}.get(kind, FP16)
    few, along, order = size * bits // 32, 0 if kind == "awq" else 1, None
    words = meta(size, few, dtype=torch.int32)
    if kind in CODEBOOKS:
        words = meta(size, size // 2, dtype=torch.uint8)
        order = NF4 if kind == "nf4" else None
    elif kind != "rows":
        words = meta(few, size, dtype=torch.int32).t()
    if kind == "awq":
        words, order = meta(size, few, dtype=torch.int32).t(), AWQ
    scales, zeros, group_of, codebook = (
        meta(size, -(-size // group), dtype=floats),
        None,
        None,
        None,
    )
    if kind not in ("rows", *CODEBOOKS):
        zeros = meta(*scales.shape, dtype=torch.uint8)
    if kind == "unordered":
        group_of = meta(size, dtype=torch.int32)
    if kind in CODEBOOKS:
        codebook = meta(16, dtype=FP32)
    x, bias = meta(m, size, dtype=dtype), meta(size, dtype=dtype)
    return lambda: packed_matmul_triton(
        x, words, scales, bits, along, order, group, zeros, group_of, codebook, bias
    )


# Layouts of packed weights: kind, group, bits, dtype.
PACKED = (
    ("rows", 128, 4, torch.bfloat16),
    ("gptq", 128, 4, torch.bfloat16),
    ("awq", 128, 4, FP16),
    ("nf4", 64, 4, torch.bfloat16),
    ("unordered", 128, 4, torch.bfloat16),
    ("gptq", 48, 2, FP16),
    ("gptq", 128, 8, torch.bfloat16),
    ("gptq", 128, 4, FP32),
    ("rows", 32, 4, torch.bfloat16),
    ("rows", 4096, 8, torch.bfloat16),
    ("unordered", 128, 8, torch.bfloat16),
    ("awq", 48, 4, FP32),
    ("nf4", 64, 4, FP32),
    ("unordered", 128, 4, FP32),
    ("mxfp4", 32, 4, torch.bfloat16),
)


PACKED_TOKENS = (1, 64, 1024, 256, 1024, 32, 16, 1)  # of the first layouts: one bucket each


def packed_name(m: int, kind: str, group: int, bits: int, dtype: torch.dtype) -> str:
    return f"packed {kind}, {m}, {bits} bits, groups of {group}, {TYPES[dtype]}"


CASES: Cases = {
    "multiply int8, 1": multiplied(1, 4096, 4096, "int8"),
    "multiply int8, 64": multiplied(64, 4096, 4096, "int8"),
    "multiply int8, 256": multiplied(256, 28672, 4096, "int8"),
    **{
        packed_name(m, *layout): packed(m, *layout)
        for m, layout in zip(PACKED_TOKENS, PACKED, strict=False)
    },
}
HOPPER: Cases = {
    **{
        f"multiply {kind}, {m}{', by block' * (rows > 1)}": multiplied(m, n, 4096, kind, rows)
        for m, n in (
            (1, 4096),
            (32, 4096),
            (64, 4096),
            (128, 4096),
            (256, 6144),
            (512, 6144),
            (8192, 6144),
        )
        for kind, rows in (("fp8", 1), ("fp8", 128), ("fp8 weight", 1), ("int8", 1))
    },
    **{
        f"multiply fp8, {m}{', by block' * (rows > 1)}, {name}": tried(
            "scaled_matmul", name, multiplied(m, 6144, 4096, "fp8 given", rows)
        )
        for m, name in (
            (16, "wide tiles"),
            (64, "wide tiles"),
            (256, "small descriptors"),
            (512, "descriptors"),
        )
        for rows in (1, 128)
    },
    "multiply fp8 weight, 16, wide tiles": tried(
        "scaled_matmul", "wide tiles", multiplied(16, 6144, 4096, "fp8 weight")
    ),
    "multiply fp8 weight by block": multiplied(8192, 6144, 4096, "fp8 weight", 128),
    "multiply fp8 given, 8192": multiplied(8192, 6144, 4096, "fp8 given"),
    "multiply fp8 given, 8, by block": multiplied(8, 6144, 14336, "fp8 given", 128),
    "multiply fp8, fp16, 1": multiplied(1, 6144, 14336, "fp8", dtype=FP16),
    "multiply fp8 of an odd size": multiplied(8192, 4096, 4100, "fp8"),
    "multiply fp8 of an odd size, 8": multiplied(8, 4096, 4100, "fp8"),
}
