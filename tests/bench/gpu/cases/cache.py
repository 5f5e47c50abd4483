"""Cases of the KV cache: storing tokens, copying pages, and swapping them with the host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from gpu.cases.case import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    Case,
    Peer,
    Tensors,
    fused_qkv,
    short,
    writing,
)
from vllm_module.kernels.attention.copy_blocks import copy_blocks, copy_blocks_reference
from vllm_module.kernels.attention.reshape_and_cache import (
    reshape_and_cache,
    reshape_and_cache_reference,
)
from vllm_module.kernels.attention.swap_blocks import swap_blocks


def cache_inputs(
    tokens: int, kv_heads: int, size: int, page: int, dtype: torch.dtype, kv_dtype: torch.dtype,
    padded: bool,
) -> Tensors:  # fmt: skip
    _, key, value = fused_qkv(tokens, 4 * kv_heads, kv_heads, size, dtype)
    pages = -(-2 * tokens // page)
    caches = torch.zeros(2, pages, page, kv_heads, size, dtype=kv_dtype)
    slots = torch.randperm(pages * page)[:tokens]
    if padded:
        slots[:: max(2, tokens // 7)] = -1
    scales = (torch.tensor([0.03]), torch.rand(kv_heads) + 0.01) if kv_dtype.itemsize == 1 else ()
    return key, value, *caches, slots, *scales


def index_copy(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, *_: Any) -> Tensors:
    k_cache.flatten(0, 1).index_copy_(0, slots, key)
    v_cache.flatten(0, 1).index_copy_(0, slots, value)
    return k_cache, v_cache


def cache_writes(small: bool) -> Iterator[Case]:
    kinds = [(8, 128, BF16, BF16), (8, 128, BF16, E4M3), (2, 80, FP16, FP16), (3, 112, FP16, E5M2),
             (5, 96, BF16, E4M3), (1, 128, FP32, BF16)]  # fmt: skip
    for (kv_heads, size, dtype, kv_dtype), tokens in product(kinds, (9,) if small else (77, 8192)):
        timed = (kv_heads, size) == (8, 128) and tokens != 77
        moved = tokens * (2 * kv_heads * size * (dtype.itemsize + kv_dtype.itemsize) + 8)
        dtypes = f"{short(dtype)} to {short(kv_dtype)}"
        yield Case(
            name=f"reshape_and_cache {tokens} h{kv_heads} d{size} {dtypes}",
            make=partial(cache_inputs, tokens, kv_heads, size, 16, dtype, kv_dtype, not timed),
            ours=writing(reshape_and_cache, 2, 3),
            reference=writing(reshape_and_cache_reference, 2, 3),
            bucket=f"reshape_and_cache, {tokens} tokens" if timed else "",
            writes=True,
            moved=moved,
            peers={"index_copy_": Peer(index_copy)} if kv_dtype == dtype else {},
        )
    for kv_dtype, layers in product((BF16, E4M3), (2,) if small else (8,)):
        pages, pairs = (8, 3) if small else (512, 200)
        shape = (layers, 2, pages, 16, 8, 128)
        yield Case(
            name=f"copy_blocks {pairs} pages of {2 * layers} planes {short(kv_dtype)}",
            make=partial(copy_inputs, shape, pairs, kv_dtype),
            ours=writing(copy_blocks, 0),
            reference=writing(copy_blocks_reference, 0),
            bucket="copy_blocks",
            writes=True,
            moved=2 * pairs * 2 * layers * 16 * 8 * 128 * kv_dtype.itemsize,
            peers={"index": Peer(writing(index_pages, 0))},
        )
        for to_host in (True, False):
            yield Case(
                name=f"swap_blocks {'to' if to_host else 'from'} the host {short(kv_dtype)}",
                make=partial(swap_inputs, shape, pairs, kv_dtype, to_host),
                ours=writing(swap_and_wait, 1),
                reference=writing(swap_reference, 1),
                writes=True,
            )


def copy_inputs(shape: tuple[int, ...], pairs: int, kv_dtype: torch.dtype) -> Tensors:
    order = torch.randperm(shape[2])
    mapping = torch.stack([order[:pairs], order[pairs : 2 * pairs]], 1)
    return torch.randn(shape, dtype=BF16).to(kv_dtype), mapping


def index_pages(cache: torch.Tensor, mapping: torch.Tensor) -> None:
    cache[:, :, mapping[:, 1]] = cache[:, :, mapping[:, 0]]


def swap_inputs(
    shape: tuple[int, ...], pairs: int, kv_dtype: torch.dtype, to_host: bool
) -> Tensors:
    pages, run = shape[2], pairs // 2
    sources = torch.cat([torch.arange(run) + 1, torch.randint(pages, (pairs - run,))])
    destinations = torch.cat([torch.arange(run), run + torch.randperm(pages - run)[: pairs - run]])
    device = torch.randn(shape, dtype=BF16).to(kv_dtype)
    host = torch.randn(shape, dtype=BF16, device="cpu").to(kv_dtype)
    if torch.cuda.is_available():
        host = host.pin_memory()
    caches = (device, host) if to_host else (host, device)
    return *caches, torch.stack([sources, destinations], 1).cpu()


def swap_and_wait(*inputs: torch.Tensor) -> None:
    swap_blocks(*inputs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def swap_reference(source: torch.Tensor, destination: torch.Tensor, mapping: torch.Tensor) -> None:
    for first, onto in mapping.tolist():
        destination[:, :, onto] = source[:, :, first]
