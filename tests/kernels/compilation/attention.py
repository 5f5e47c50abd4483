"""Attention to paged keys and values, and to latents."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compilation.launches import E4M3, E5M2, FP16, FP32, Cases, meta
from vllm_module.kernels.attention import mla_attention
from vllm_module.kernels.attention.concat_and_cache_mla import concat_and_cache_mla_triton
from vllm_module.kernels.attention.paged_attention_triton import paged_attention_triton
from vllm_module.kernels.attention.rotate_and_cache_mla import rotate_and_cache_mla_triton


def attention(
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    pages: int = 256,
    new: int = 512,
    everything: bool = False,
    page_size: int = 16,
) -> Callable[[], object]:
    """Launch a step of 64 sequences, on ``pages`` pages each."""
    integers = torch.int32
    cache = meta(2, 1024, page_size, kv_heads, head_size, dtype=cache_dtype or dtype)
    floats = torch.float32
    options = {
        "sliding_window": 4096,
        "softcap": 30.0,
        "alibi_slopes": meta(heads, dtype=floats),
        "sinks": meta(heads),
        "k_scale": meta(kv_heads, dtype=floats),
        "v_scale": meta(kv_heads, dtype=floats),
    }
    return lambda: paged_attention_triton(
        meta(4096, heads, head_size, dtype=dtype),
        *cache,
        meta(64, pages, dtype=integers),
        meta(64, dtype=integers),
        meta(65, dtype=integers),
        new,
        0.1,
        **(options if everything else {}),
    )


def latent_attention(
    heads: int,
    rank: int = 512,
    rope: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    pages: int = 256,
) -> Callable[[], object]:
    """Store latents and attend to them: 64 sequences of up to 4096 tokens, on pages of 16."""

    def launch() -> None:
        integers, size = torch.int32, rank + rope
        cache = meta(1024, 16, size, dtype=cache_dtype or dtype)
        scale = meta(1, dtype=FP32) if cache_dtype else None
        parts = meta(4096, size, dtype=dtype).split([rank, rope], -1)
        concat_and_cache_mla_triton(*parts, cache, meta(4096, dtype=torch.int64), scale)
        mla_attention.mla_attention_triton(
            meta(4096, heads, size, dtype=dtype),
            cache,
            meta(64, pages, dtype=integers),
            meta(64, dtype=integers),
            meta(65, dtype=integers),
            512,
            rank,
            0.1,
            scale,
        )

    return launch


def rotated_latents(
    heads: int,
    rank: int = 512,
    rope: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    neox: bool = False,
) -> Callable[[], object]:
    """Rotate queries into a buffer, and store normalized latents and rotated keys."""

    def launch() -> None:
        query = meta(8192, heads, 128 + rope, dtype=dtype)[..., 128:]
        parts = meta(8192, rank + rope, dtype=dtype).split([rank, rope], -1)
        scale = meta(1, dtype=FP32) if cache_dtype else None
        rotate_and_cache_mla_triton(
            query, *parts, *meta(2, 8192, rope // 2, dtype=FP32),
            meta(8192, heads, rank + rope, dtype=dtype)[..., rank:],
            meta(1024, 16, rank + rope, dtype=cache_dtype or dtype),
            meta(8192, dtype=torch.int64), scale, meta(rank, dtype=dtype), 1e-6, 0.0, neox,
        )  # fmt: skip

    return launch


CASES: Cases = {
    "attention 64": attention(32, 8, 64),
    "attention 80": attention(32, 32, 80),
    "attention 128": attention(32, 8, 128),
    "attention 128, fp16": attention(32, 8, 128, FP16),
    "attention 128, fp32": attention(32, 8, 128, FP32),
    "attention 128, short": attention(40, 8, 128, pages=16, new=1),
    "attention 256": attention(16, 8, 256),
    "attention 512": attention(32, 4, 512),
    "attention 512, 16 heads to one, everything": attention(16, 1, 512, everything=True),
    "attention 320, fp32": attention(5, 1, 320, FP32, everything=True),
    "attention 512, fp32": attention(16, 8, 512, FP32),
    "attention 64, 71 heads to one": attention(71, 1, 64),
    "attention 256, 48 heads to one": attention(48, 1, 256),
    "attention 64, pages of 64": attention(32, 8, 64, page_size=64),
    "attention 128, pages of 128": attention(32, 8, 128, page_size=128),
    "rotated latents, 128 heads": rotated_latents(128),
    "rotated latents, fp32": rotated_latents(16, dtype=FP32),
    "rotated latents of 500": rotated_latents(5, 500, 40, neox=True),
    "latent, 128 heads": latent_attention(128),
    "latent, 128 heads, short": latent_attention(128, pages=16),
    "latent, 16 heads": latent_attention(16),
    "latent, 71 heads": latent_attention(71),
    "latent, 16 heads, fp32": latent_attention(16, dtype=FP32),
    "latent of 500": latent_attention(16, 500, 40),
}
HOPPER: Cases = {
    "attention 128, everything": attention(40, 8, 128, everything=True),
    "attention 128, 128 heads to one": attention(128, 1, 128),
    "attention 128, e4m3, pages of 128": attention(32, 8, 128, cache_dtype=E4M3, page_size=128),
    "attention 64, e4m3": attention(32, 8, 64, cache_dtype=E4M3),
    "attention 128, e4m3": attention(32, 8, 128, cache_dtype=E4M3),
    "attention 128, e5m2, fp16": attention(32, 8, 128, FP16, E5M2),
    "attention 256, e4m3": attention(16, 8, 256, cache_dtype=E4M3),
    "attention 512, e4m3": attention(16, 2, 512, cache_dtype=E4M3),
    "attention 320, e4m3, everything": attention(16, 2, 320, cache_dtype=E4M3, everything=True),
    "attention 256, e4m3, everything": attention(40, 8, 256, cache_dtype=E4M3, everything=True),
    "rotated latents, e4m3": rotated_latents(16, cache_dtype=E4M3),
    "latent, 128 heads, e4m3": latent_attention(128, cache_dtype=E4M3),
    "latent, 16 heads, e5m2, fp16": latent_attention(16, dtype=FP16, cache_dtype=E5M2),
}
