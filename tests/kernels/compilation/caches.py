"""Rotation, and what is stored or copied in a paged cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compilation.launches import E4M3, E5M2, FP32, Cases, meta
from vllm_module.kernels.attention.copy_blocks import copy_blocks_triton
from vllm_module.kernels.attention.reshape_and_cache import reshape_and_cache_triton
from vllm_module.kernels.attention.rotary_embedding import rotary_embedding_triton
from vllm_module.kernels.attention.rotate_and_cache import rotate_and_cache_triton


def rotary(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    pairs: int,
    neox: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], object]:
    """Rotate queries and keys that are views of one projection's output."""
    sizes = [heads * head_size, kv_heads * head_size, kv_heads * head_size]

    def launch() -> None:
        query, key, _ = meta(tokens, sum(sizes), dtype=dtype).split(sizes, -1)
        query, key = query.unflatten(-1, (heads, -1)), key.unflatten(-1, (kv_heads, -1))
        cos, sin = meta(2, tokens, pairs, dtype=FP32)
        rotary_embedding_triton(query, key, cos, sin, neox)

    return launch


def stored(
    heads: int,
    head_size: int,
    page_size: int,
    cache_dtype: torch.dtype,
    scales: int = 0,
) -> Callable[[], object]:
    """Store keys and values that are views of one projection's output."""

    def launch() -> None:
        key, value = meta(8192, 6 * heads * head_size).split(heads * head_size, -1)[-2:]
        key, value = (x.unflatten(-1, (heads, head_size)) for x in (key, value))
        cache = meta(2, 4096, page_size, heads, head_size, dtype=cache_dtype)
        scale = meta(scales, dtype=FP32) if scales else None
        slots = meta(8192, dtype=torch.int64)
        reshape_and_cache_triton(key, value, *cache, slots, scale, scale)

    return launch


def rotated_and_stored(
    heads: int,
    kv_heads: int,
    head_size: int,
    pairs: int,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    scales: int = 0,
    norm: bool = True,
    offset: float | None = None,
    neox: bool = True,
) -> Callable[[], object]:
    """Normalize and rotate queries and keys of one projection's output, and store keys, values."""

    def launch() -> None:
        numbers = [heads, kv_heads, kv_heads]
        qkv = meta(8192, sum(numbers) * head_size, dtype=dtype).unflatten(-1, (-1, head_size))
        cache = meta(2, 4096, page_size, kv_heads, head_size, dtype=cache_dtype or dtype)
        weight = meta(head_size, dtype=dtype) if norm else None
        scale = meta(scales, dtype=FP32) if scales else None
        rotate_and_cache_triton(
            *qkv.split(numbers, -2), *meta(2, 8192, pairs, dtype=FP32), *cache,
            meta(8192, dtype=torch.int64), scale, scale, neox, weight, weight, 1e-6, offset,
        )  # fmt: skip

    return launch


def copied(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    return lambda: copy_blocks_triton(meta(*shape, dtype=dtype), meta(64, 2, dtype=torch.int64))


CASES: Cases = {
    "rotary 32 and 8 of 128": rotary(8192, 32, 8, 128, 64),
    "rotary of one token": rotary(1, 32, 8, 128, 64),
    "rotary of neighbours": rotary(8192, 32, 8, 128, 64, neox=False),
    "rotary 80": rotary(8192, 32, 32, 80, 40),
    "rotary of a part": rotary(8192, 32, 8, 96, 24),
    "rotary, fp32": rotary(8192, 32, 8, 128, 64, dtype=FP32),
    "store": stored(8, 128, 16, torch.bfloat16),
    "store 80": stored(8, 80, 16, torch.bfloat16),
    "store 64 on pages of 1": stored(8, 64, 1, torch.bfloat16),
    "store 256": stored(8, 256, 16, torch.bfloat16),
    "store 512": stored(4, 512, 16, torch.bfloat16),
    "store in int8": stored(8, 128, 16, torch.int8, 1),
    "store in fp32": stored(8, 128, 16, FP32),
    "norm, rotary, store": rotated_and_stored(32, 8, 128, 64),
    "rotary, store": rotated_and_stored(32, 8, 128, 64, norm=False),
    "rotary, store of neighbours": rotated_and_stored(32, 2, 128, 32, norm=False, neox=False),
    "rotary, store 80": rotated_and_stored(32, 32, 80, 40, norm=False),
    "norm, rotary, store 96, a part": rotated_and_stored(5, 1, 96, 24, 48),
    "norm, rotary, store 112": rotated_and_stored(5, 1, 112, 56),
    "norm, rotary, store 256, offset": rotated_and_stored(16, 8, 256, 128, offset=1.0),
    "norm, rotary, store 256, a part": rotated_and_stored(16, 8, 256, 32),
    "rotary, store 256, neighbours": rotated_and_stored(16, 16, 256, 32, norm=False, neox=False),
    "norm, rotary, store 512": rotated_and_stored(32, 4, 512, 256),
    "norm, rotary, store 512, a part": rotated_and_stored(16, 2, 512, 64),
    "norm, rotary, store in fp32": rotated_and_stored(32, 8, 128, 64, dtype=FP32),
    "norm, rotary, store in int8": rotated_and_stored(
        32, 8, 128, 64, cache_dtype=torch.int8, scales=1
    ),
    "copy in a layer": copied(2, 4096, 16, 8, 128),
    "copy in all layers": copied(32, 2, 4096, 16, 8, 128),
    "copy heads of 80": copied(2, 4096, 16, 1, 80),
}
HOPPER: Cases = {
    "store in e4m3": stored(8, 128, 16, E4M3, 1),
    "store in e4m3 by heads": stored(8, 128, 16, E4M3, 8),
    "store in e5m2": stored(8, 96, 48, E5M2),
    "norm, rotary, store in e4m3": rotated_and_stored(32, 8, 128, 64, cache_dtype=E4M3, scales=8),
    "norm, rotary, store 512 in e4m3": rotated_and_stored(
        16, 2, 512, 64, cache_dtype=E4M3, scales=1
    ),
    "rotary, store in e5m2, neighbours": rotated_and_stored(
        5, 1, 96, 48, 48, cache_dtype=E5M2, norm=False, neox=False
    ),
    "copy e4m3": copied(32, 2, 4096, 16, 8, 128, dtype=E4M3),
}
