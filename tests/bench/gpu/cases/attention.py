"""Cases of paged attention: decoding, prefill, and every option in odd sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.cases.case import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    Case,
    Peer,
    Tensors,
    short,
)
from vllm_module.kernels.attention.paged_attention import paged_attention
from vllm_module.kernels.attention.paged_attention_reference import paged_attention_reference


def attention_inputs(
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    page: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    room: int,
) -> Tensors:
    """Return sequences of (new tokens, context) on random pages; past each context lies NaN.

    Tables have the width of contexts of ``room`` tokens, as those of a graph have.
    """
    counts = [-(-context // page) for _, context in lengths]
    pages = torch.randperm(sum(counts) + 3)
    caches = [torch.randn(len(pages), page, kv_heads, size, dtype=dtype) for _ in range(2)]
    caches = [cache.to(kv_dtype) for cache in caches]
    tables = torch.full((len(lengths), max(-(-room // page), *counts)), 2**30, dtype=torch.int32)
    begin = 0
    for sequence, ((_, context), count) in enumerate(zip(lengths, counts, strict=True)):
        tables[sequence, :count] = pages[begin : begin + count]
        if context % page:
            for cache in caches:  # 255 in every byte is NaN in every dtype
                cache.view(torch.uint8)[pages[begin + count - 1], context % page :] = 255
        begin += count
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), heads, size, dtype=dtype)
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    scales = (torch.tensor([0.7]), torch.tensor([1.9])) if kv_dtype.itemsize == 1 else (None, None)
    return query, *caches, tables, contexts, starts, *scales


def attend(operation: Callable[..., Any], most: int, extras: dict[str, Any], *inputs: Any) -> Any:
    query, k_cache, v_cache, tables, contexts, starts, k_scale, v_scale = inputs
    options = {name: make(query) for name, make in extras.items()}
    return operation(
        query, k_cache, v_cache, tables, contexts, starts, max_query_len=most,
        scale=query.shape[-1] ** -0.5, k_scale=k_scale, v_scale=v_scale, **options,
    )  # fmt: skip


def attend_plainly(most: int, extras: dict[str, Any], *inputs: Any) -> torch.Tensor:
    """Attend in plain torch, head by head for long prompts, whose scores take much memory."""
    if most <= 1024:
        return attend(paged_attention_reference, most, extras, *inputs)
    query, k_cache, v_cache, *rest = inputs
    queries = query.chunk(k_cache.shape[2], 1)
    caches = (cache.split(1, 2) for cache in (k_cache, v_cache))
    heads = [attend(paged_attention_reference, most, extras, *qkv, *rest)
             for qkv in zip(queries, *caches, strict=True)]  # fmt: skip
    return torch.cat(heads, 1)


def attention(
    name: str,
    bucket: str,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int] = (32, 8),
    size: int = 128,
    page: int = 16,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    room: int = 0,
    **extras: Callable[[torch.Tensor], Any],
) -> Case:
    kv_dtype = kv_dtype or dtype
    most = max(new for new, _ in lengths)
    tokens = sum(new for new, _ in lengths)
    seen = sum(new * (context - new) + new * (new + 1) // 2 for new, context in lengths)
    cached = sum(context for _, context in lengths) * heads[1] * size * 2 * kv_dtype.itemsize
    peers = {}
    # Torch has neither pages nor an eight-bit cache.
    if bucket and len(set(lengths)) == 1 and kv_dtype == dtype:
        new, context = lengths[0]
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            call = partial(sdpa, getattr(SDPBackend, backend), new, context)
            peers[f"sdpa {backend.split('_')[0].lower()}"] = Peer(
                call, partial(dense, new, context)
            )
    dtypes = f"{short(dtype)} kv {short(kv_dtype)}"
    return Case(
        name=f"{name} h{heads[0]}/{heads[1]} d{size} page {page} {dtypes}",
        make=partial(attention_inputs, lengths, *heads, size, page, dtype, kv_dtype, room),
        ours=partial(attend, paged_attention, most, extras),
        reference=partial(attend_plainly, most, extras),
        truth=lambda query, *rest: attend_plainly(most, extras, query.float(), *rest),
        bucket=bucket,
        moved=cached + 2 * tokens * heads[0] * size * dtype.itemsize,
        flops=4 * seen * heads[0] * size,
        peers=peers,
    )


def dense(new: int, context: int, query: torch.Tensor, *rest: Any) -> Tensors:
    """Return queries, keys and values of sequences of one length, in torch's layout."""
    k_cache, v_cache, tables = rest[:3]
    tables = tables[:, : -(-context // k_cache.shape[1])]  # past these, there is no page
    query = query.view(len(tables), new, *query.shape[1:]).transpose(1, 2).contiguous()
    gathered = (cache[tables].flatten(1, 2)[:, :context] for cache in (k_cache, v_cache))
    return query, *(x.transpose(1, 2).contiguous() for x in gathered)


def sdpa(backend: SDPBackend, new: int, context: int, *qkv: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which is slow

    mask = causal_lower_right(new, context) if 1 < new < context else None
    with sdpa_kernel(backend):
        y = F.scaled_dot_product_attention(
            *qkv, attn_mask=mask, is_causal=1 < new == context, enable_gqa=True
        )
    return y.transpose(1, 2).flatten(0, 1)


def each_head(query: torch.Tensor) -> torch.Tensor:
    return torch.arange(query.shape[1], dtype=FP32, device=query.device)


def options(small: bool) -> Iterator[Case]:
    """Yield every option, dtype and odd size, with decoding and prefill in one batch."""
    lengths = [(1, 1), (1, 0), (5, 5), (1, 40)]
    if not small:
        lengths = [(1, 1), (1, 1025), (300, 300), (17, 700), (1, 64), (1, 0), (129, 4000)]
    settings: list[dict[str, Any]] = [
        {},
        {"dtype": FP16},
        {"dtype": FP16, "kv_dtype": E4M3},
        {"kv_dtype": E4M3},
        {"kv_dtype": E5M2, "page": 64},
        {"size": 80, "heads": (10, 2)},
        {"size": 96, "page": 24},
        {"size": 112, "heads": (8, 1), "kv_dtype": E4M3},
        {"size": 64, "heads": (64, 8)},
        {"size": 256, "heads": (8, 4)},
        {"sliding_window": lambda query: 33},
        {"softcap": lambda query: 20.0},
        {"alibi_slopes": lambda query: 2.0 ** -(each_head(query) / 4 + 1)},
        {"sinks": lambda query: each_head(query) / 8 - 2},
        {"size": 512, "heads": (16, 2)},
        {"size": 320, "heads": (16, 2), "kv_dtype": E4M3},
    ]
    for option in settings[:: 6 if small else 1]:
        extra = ", ".join(name for name, value in option.items() if callable(value))
        if small:
            option.setdefault("heads", (4, 2))
        yield attention(f"check {extra}".strip(), "", lengths, **option)


def spread(count: int, least: int, most: int) -> list[int]:
    """Return contexts of different lengths, each longer than the last by the same factor."""
    return [round(least * (most / least) ** (index / (count - 1))) for index in range(count)]


def decode(small: bool) -> Iterator[Case]:
    """Yield batches of one new token, in tables with room for contexts of 131072 tokens."""
    works = {
        "1 x 4k": [4096],
        "1 x 32k": [32768],
        "1 x 128k": [131072],
        "8 of 1k to 128k": spread(8, 1024, 131072),
        "64 x 4k": [4096] * 64,
        "64 of 256 to 128k": spread(64, 256, 131072),
        "256 x 1k": [1024] * 256,
    }
    room = 131072
    if small:
        works, room = {"3 of 1 to 40": spread(3, 1, 40), "2 x 40": [40] * 2}, 96

    def of(name: str, contexts: list[int], **entries: Any) -> Case:
        batch = len(contexts)
        bucket = f"decode, batch {batch if batch < 64 else '>= 64'}"
        entries = {"room": room} | ({"heads": (4, 2)} if small else {}) | entries
        return attention(f"decode {name}", bucket, [(1, each) for each in contexts], **entries)

    for name, contexts in works.items():
        yield of(name, contexts)
    name, contexts = list(works.items())[1 if small else 4]
    yield of(f"{name}, kv", contexts, kv_dtype=E4M3)
    if small:
        return
    yield of(f"{name}, narrow tables", contexts, room=0)
    yield of(f"{name}, pages of 64", contexts, heads=(64, 8), page=64)
    yield of(f"{name}, as Qwen3-0.6B", contexts, heads=(16, 8))
    yield of("64 of 256 to 128k, kv", works["64 of 256 to 128k"], kv_dtype=E4M3)


def prefill(small: bool) -> Iterator[Case]:
    """Yield prompts, chunks of prompts, and chunks beside decoding."""
    works = {
        "prefill 1 x 8192": [(8192, 8192)],
        "prefill 8 x 1024": [(1024, 1024)] * 8,
        "chunk of 512 over 8192": [(512, 8704)],
        "mixed: 64 decode 4k, 2 chunks": [(1, 4096)] * 64 + [(512, 4608)] * 2,
    }
    if small:
        works = {"prefill": [(20, 20)] * 2, "chunk": [(4, 24)], "mixed": [(1, 24), (5, 24)]}
    heads = (4, 2) if small else (32, 8)
    for name, lengths in works.items():
        bucket = "mixed" if name.startswith("mixed") else "prefill, bf16 kv"
        yield attention(name, bucket, lengths, heads)
    name, lengths = next(iter(works.items()))
    yield attention(name, "prefill, e4m3 kv", lengths, heads, kv_dtype=E4M3)
