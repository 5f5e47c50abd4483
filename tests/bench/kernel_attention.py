"""Cases of paged attention: decoding, prefill, and every option in odd sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from kernel_case import BF16, E4M3, E5M2, FP16, FP32, Case, Peer, Tensors, short
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm_module.kernels.paged_attention import paged_attention
from vllm_module.kernels.paged_attention_reference import paged_attention_reference


def attention_inputs(
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    page: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> Tensors:
    """Return sequences of (new tokens, context) on random pages; past each context lies NaN."""
    counts = [-(-context // page) for _, context in lengths]
    pages = torch.randperm(sum(counts) + 3)
    caches = [torch.randn(len(pages), page, kv_heads, size, dtype=dtype) for _ in range(2)]
    caches = [cache.to(kv_dtype) for cache in caches]
    tables = torch.full((len(lengths), max(counts)), 2**30, dtype=torch.int32)
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
    flex: bool = False,
    **extras: Callable[[torch.Tensor], Any],
) -> Case:
    kv_dtype = kv_dtype or dtype
    most = max(new for new, _ in lengths)
    tokens = sum(new for new, _ in lengths)
    seen = sum(new * (context - new) + new * (new + 1) // 2 for new, context in lengths)
    cached = sum(context for _, context in lengths) * heads[1] * size * 2 * kv_dtype.itemsize
    peers = {}
    # Torch has neither pages nor an eight-bit cache, so one page size and the wide cache suffice.
    if bucket and len(set(lengths)) == 1 and kv_dtype == dtype and (most > 1 or page == 16):
        new, context = lengths[0]
        prepare = partial(dense, new, context)
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
            call = partial(sdpa, getattr(SDPBackend, backend), new, context)
            peers[f"sdpa {backend.split('_')[0].lower()}"] = Peer(call, prepare)
        if flex:
            peers["flex"] = Peer(flex_call(new, context), prepare, compiled=True)
    dtypes = f"{short(dtype)} kv {short(kv_dtype)}"
    return Case(
        name=f"{name} h{heads[0]}/{heads[1]} d{size} page {page} {dtypes}",
        make=partial(attention_inputs, lengths, *heads, size, page, dtype, kv_dtype),
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


def flex_call(new: int, context: int) -> Callable[..., torch.Tensor]:
    made: list[Any] = []  # the compiled function and its mask, made on the first call

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not made:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            mask = None
            if new > 1:
                past = context - new
                mask = create_block_mask(
                    lambda b, h, q, k: q + past >= k, None, None, new, context, str(query.device)
                )
            torch.compiler.reset()
            made.extend([torch.compile(flex_attention, dynamic=False), mask])
        y = made[0](query, key, value, block_mask=made[1], enable_gqa=True)
        return y.transpose(1, 2).flatten(0, 1)

    return call


def each_head(query: torch.Tensor) -> torch.Tensor:
    return torch.arange(query.shape[1], dtype=FP32, device=query.device)


def attention_checks(small: bool) -> Iterator[Case]:
    """Yield every option, dtype and odd size, with decoding and prefill in one batch."""
    lengths = [(1, 1), (1, 0), (5, 5), (1, 40)]
    if not small:
        lengths = [(1, 1), (1, 1025), (300, 300), (17, 700), (1, 64), (1, 0), (129, 4000)]
    options: list[dict[str, Any]] = [
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
    ]
    for option in options[:: 6 if small else 1]:
        extra = ", ".join(name for name, value in option.items() if callable(value))
        if small:
            option.setdefault("heads", (4, 2))
        yield attention(f"check {extra}".strip(), "", lengths, **option)


def decode(small: bool) -> Iterator[Case]:
    yield from attention_checks(small)
    batches, contexts = ((2,), (40,)) if small else ((1, 8, 32, 128), (1024, 4096, 16384))
    shared = [(4, 2), (8, 2)] if small else [(32, 8), (64, 8)]
    grid = product(batches, contexts, shared, (16, 64), (BF16, E4M3))
    for batch, context, heads, page, kv_dtype in list(grid)[:: 5 if small else 1]:
        bucket = f"decode, batch {batch}"
        if batch >= 32:
            bucket = f"decode, batch >= 32, context {'>=' if context >= 4096 else '<'} 4k"
        flex = (batch, heads, page, kv_dtype) == (32, (32, 8), 16, BF16) and context == 4096
        name = f"decode {batch} x {context}"
        yield attention(
            name, bucket, [(1, context)] * batch, heads, 128, page, BF16, kv_dtype, flex
        )


def prefill(small: bool) -> Iterator[Case]:
    works = {
        "prefill 1 x 8192": [(8192, 8192)],
        "prefill 8 x 1024": [(1024, 1024)] * 8,
        "chunk of 512 over 8192": [(512, 8704)],
        "mixed: 64 decode 4k, 2 chunks": [(1, 4096)] * 64 + [(512, 4608)] * 2,
    }
    if small:
        works = {"prefill": [(20, 20)] * 2, "chunk": [(4, 24)], "mixed": [(1, 24), (5, 24)]}
    shared = {16: (4, 2)} if small else {16: (32, 8), 64: (64, 8)}
    caches = (BF16,) if small else (BF16, E4M3)
    for (name, lengths), (page, heads), kv_dtype in product(works.items(), shared.items(), caches):
        bucket = "mixed" if name.startswith("mixed") else f"prefill, {short(kv_dtype)} kv"
        flex = page == 16 and kv_dtype == BF16 and len(lengths) < 8
        yield attention(name, bucket, lengths, heads, 128, page, BF16, kv_dtype, flex)
