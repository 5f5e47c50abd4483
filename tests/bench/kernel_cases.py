"""What tests/bench/kernels.py checks and times: each operation on inputs of many sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

if "vllm_module" not in sys.modules:  # kernels import no other room: none of its needs is theirs
    package = ModuleType("vllm_module")
    package.__path__ = [str(Path(__file__).parents[2] / "vllm_module")]
    sys.modules["vllm_module"] = package

from vllm_module.kernels.act_and_mul import (
    act_and_mul_quantize_reference,
    act_and_mul_reference,
    gelu_and_mul,
    silu_and_mul,
    silu_and_mul_quantize,
)
from vllm_module.kernels.copy_blocks import copy_blocks, copy_blocks_reference
from vllm_module.kernels.dtypes import greatest
from vllm_module.kernels.paged_attention import paged_attention, paged_attention_reference
from vllm_module.kernels.quantize import dequantize, quantize, quantize_reference
from vllm_module.kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_reference
from vllm_module.kernels.rms_norm import (
    fused_add_rms_norm,
    fused_add_rms_norm_reference,
    rms_norm,
    rms_norm_quantize,
    rms_norm_quantize_reference,
    rms_norm_reference,
)
from vllm_module.kernels.rotary_embedding import rotary_embedding, rotary_embedding_reference
from vllm_module.kernels.scaled_matmul import scaled_matmul
from vllm_module.kernels.swap_blocks import swap_blocks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-6
Tensors = tuple[Any, ...]


@dataclass
class Peer:
    """Torch's own way of an operation."""

    call: Callable[..., Any]
    prepare: Callable[..., Tensors] = lambda *inputs: inputs  # not timed
    compiled: bool = False
    judged: bool = True  # whether it gives what the operation gives, to a few percent


@dataclass
class Case:
    """An operation on inputs of one size."""

    name: str
    make: Callable[[], Tensors]  # fresh random inputs, on torch's default device
    ours: Callable[..., Any]
    reference: Callable[..., Any]  # in plain torch and the same precision
    truth: Callable[..., Any] | None = None  # in float32; without it, the reference's bits are due
    meaning: Callable[[Any], Any] = lambda result: result  # of what is compared with the truth
    bucket: str = ""  # what it is summed up with; a case without one is checked and not timed
    writes: bool = False  # whether inputs are written to
    moved: int = 0  # bytes
    flops: int = 0
    rate: str = "bf16"
    peers: dict[str, Peer] = field(default_factory=dict)


def short(dtype: torch.dtype) -> str:
    names = {BF16: "bf16", FP16: "fp16", FP32: "fp32", E4M3: "e4m3", E5M2: "e5m2"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def writing(operation: Callable[..., Any], *written: int) -> Callable[..., Tensors]:
    """Return an operation that also returns those of its arguments that it writes."""

    def call(*inputs: Any) -> Tensors:
        operation(*inputs)
        return tuple(inputs[index] for index in written)

    return call


def fused_qkv(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> Tensors:
    """Return queries, keys and values that are parts of one projection's output."""
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size, dtype=dtype)
    return qkv.split([heads, kv_heads, kv_heads], 1)


# Attention


def attention_inputs(
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    page: int,
    dtype: torch.dtype,
    held: torch.dtype,
) -> Tensors:
    """Sequences of (new tokens, context) in random pages; what is past a context is NaN."""
    counts = [-(-context // page) for _, context in lengths]
    pages = torch.randperm(sum(counts) + 3)
    caches = [torch.randn(len(pages), page, kv_heads, size, dtype=dtype) for _ in range(2)]
    caches = [cache.to(held) for cache in caches]
    tables = torch.full((len(lengths), max(counts)), 2**30, dtype=torch.int32)
    begin = 0
    for sequence, ((_, context), count) in enumerate(zip(lengths, counts, strict=True)):
        tables[sequence, :count] = pages[begin : begin + count]
        if context % page:
            for cache in caches:  # the bytes of a NaN in every type
                cache.view(torch.uint8)[pages[begin + count - 1], context % page :] = 255
        begin += count
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), heads, size, dtype=dtype)
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    scales = (torch.tensor([0.7]), torch.tensor([1.9])) if held.itemsize == 1 else (None, None)
    return query, *caches, tables, contexts, starts, *scales


def attend(operation: Callable[..., Any], most: int, extras: dict[str, Any], *inputs: Any) -> Any:
    query, k_cache, v_cache, tables, contexts, starts, k_scale, v_scale = inputs
    options = {name: make(query) for name, make in extras.items()}
    return operation(
        query, k_cache, v_cache, tables, contexts, starts, max_query_len=most,
        scale=query.shape[-1] ** -0.5, k_scale=k_scale, v_scale=v_scale, **options,
    )  # fmt: skip


def attend_plainly(most: int, extras: dict[str, Any], *inputs: Any) -> torch.Tensor:
    """Attend in plain torch; of long prompts, whose scores are large, to a head at a time."""
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
    held: torch.dtype | None = None,
    flex: bool = False,
    **extras: Callable[[torch.Tensor], Any],
) -> Case:
    held = held or dtype
    most = max(new for new, _ in lengths)
    tokens = sum(new for new, _ in lengths)
    seen = sum(new * (context - new) + new * (new + 1) // 2 for new, context in lengths)
    cached = sum(context for _, context in lengths) * heads[1] * size * 2 * held.itemsize
    peers = {}
    # Torch has no such cache in eight bits, nor pages: those of one size are enough.
    if bucket and len(set(lengths)) == 1 and held == dtype and (most > 1 or page == 16):
        new, context = lengths[0]
        prepare = partial(dense, new, context)
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
            call = partial(sdpa, getattr(SDPBackend, backend), new, context)
            peers[f"sdpa {backend.split('_')[0].lower()}"] = Peer(call, prepare)
        if flex:
            peers["flex"] = Peer(flex_call(new, context), prepare, compiled=True)
    return Case(
        name=f"{name} h{heads[0]}/{heads[1]} d{size} page {page} {short(dtype)} kv {short(held)}",
        make=partial(attention_inputs, lengths, *heads, size, page, dtype, held),
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
    mask = causal_lower_right(new, context) if 1 < new < context else None
    with sdpa_kernel(backend):
        y = F.scaled_dot_product_attention(
            *qkv, attn_mask=mask, is_causal=1 < new == context, enable_gqa=True
        )
    return y.transpose(1, 2).flatten(0, 1)


def flex_call(new: int, context: int) -> Callable[..., torch.Tensor]:
    made: list[Any] = []  # on the first call, when there is a device

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not made:
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
    """Every option, type and odd size, decoding and not, in one batch."""
    lengths = [(1, 1), (1, 0), (5, 5), (1, 40)]
    if not small:
        lengths = [(1, 1), (1, 1025), (300, 300), (17, 700), (1, 64), (1, 0), (129, 4000)]
    options: list[dict[str, Any]] = [
        {},
        {"dtype": FP16},
        {"dtype": FP16, "held": E4M3},
        {"held": E4M3},
        {"held": E5M2, "page": 64},
        {"size": 80, "heads": (10, 2)},
        {"size": 96, "page": 24},
        {"size": 112, "heads": (8, 1), "held": E4M3},
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
    for batch, context, heads, page, held in list(grid)[:: 5 if small else 1]:
        bucket = f"decode, batch {batch}"
        if batch >= 32:
            bucket = f"decode, batch >= 32, context {'>=' if context >= 4096 else '<'} 4k"
        flex = (batch, heads, page, held) == (32, (32, 8), 16, BF16) and context == 4096
        name = f"decode {batch} x {context}"
        yield attention(name, bucket, [(1, context)] * batch, heads, 128, page, BF16, held, flex)


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
    for (name, lengths), (page, heads), held in product(works.items(), shared.items(), caches):
        bucket = "mixed" if name.startswith("mixed") else f"prefill, {short(held)} kv"
        flex = page == 16 and held == BF16 and len(lengths) < 8
        yield attention(name, bucket, lengths, heads, 128, page, BF16, held, flex)


# The cache


def cache_inputs(
    tokens: int, kv_heads: int, size: int, page: int, dtype: torch.dtype, held: torch.dtype,
    padded: bool,
) -> Tensors:  # fmt: skip
    _, key, value = fused_qkv(tokens, 4 * kv_heads, kv_heads, size, dtype)
    pages = -(-2 * tokens // page)
    caches = torch.zeros(2, pages, page, kv_heads, size, dtype=held)
    slots = torch.randperm(pages * page)[:tokens]
    if padded:
        slots[:: max(2, tokens // 7)] = -1
    scales = (torch.tensor([0.03]), torch.rand(kv_heads) + 0.01) if held.itemsize == 1 else ()
    return key, value, *caches, slots, *scales


def index_copy(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, *_: Any) -> Tensors:
    k_cache.flatten(0, 1).index_copy_(0, slots, key)
    v_cache.flatten(0, 1).index_copy_(0, slots, value)
    return k_cache, v_cache


def cache_writes(small: bool) -> Iterator[Case]:
    kinds = [(8, 128, BF16, BF16), (8, 128, BF16, E4M3), (2, 80, FP16, FP16), (3, 112, FP16, E5M2),
             (5, 96, BF16, E4M3), (1, 128, FP32, BF16)]  # fmt: skip
    for (kv_heads, size, dtype, held), tokens in product(kinds, (9,) if small else (77, 128, 8192)):
        timed = (kv_heads, size) == (8, 128) and tokens != 77
        moved = tokens * (2 * kv_heads * size * (dtype.itemsize + held.itemsize) + 8)
        yield Case(
            name=f"reshape_and_cache {tokens} h{kv_heads} d{size} {short(dtype)} to {short(held)}",
            make=partial(cache_inputs, tokens, kv_heads, size, 16, dtype, held, not timed),
            ours=writing(reshape_and_cache, 2, 3),
            reference=writing(reshape_and_cache_reference, 2, 3),
            bucket=f"reshape_and_cache, {tokens} tokens" if timed else "",
            writes=True,
            moved=moved,
            peers={"index_copy_": Peer(index_copy)} if held == dtype else {},
        )
    for held, layers in product((BF16, E4M3), (2,) if small else (8,)):
        pages, pairs = (8, 3) if small else (512, 200)
        shape = (layers, 2, pages, 16, 8, 128)
        yield Case(
            name=f"copy_blocks {pairs} pages of {2 * layers} planes {short(held)}",
            make=partial(copy_inputs, shape, pairs, held),
            ours=writing(copy_blocks, 0),
            reference=writing(copy_blocks_reference, 0),
            bucket="copy_blocks",
            writes=True,
            moved=2 * pairs * 2 * layers * 16 * 8 * 128 * held.itemsize,
            peers={"index": Peer(writing(index_pages, 0))},
        )
        for to_host in (True, False):
            yield Case(
                name=f"swap_blocks {'to' if to_host else 'from'} the host {short(held)}",
                make=partial(swap_inputs, shape, pairs, held, to_host),
                ours=writing(swap_and_wait, 1),
                reference=writing(swap_reference, 1),
                writes=True,
            )


def copy_inputs(shape: tuple[int, ...], pairs: int, held: torch.dtype) -> Tensors:
    order = torch.randperm(shape[2])
    mapping = torch.stack([order[:pairs], order[pairs : 2 * pairs]], 1)
    return torch.randn(shape, dtype=BF16).to(held), mapping


def index_pages(cache: torch.Tensor, mapping: torch.Tensor) -> None:
    cache[:, :, mapping[:, 1]] = cache[:, :, mapping[:, 0]]


def swap_inputs(shape: tuple[int, ...], pairs: int, held: torch.dtype, to_host: bool) -> Tensors:
    pages, run = shape[2], pairs // 2
    sources = torch.cat([torch.arange(run) + 1, torch.randint(pages, (pairs - run,))])
    destinations = torch.cat([torch.arange(run), run + torch.randperm(pages - run)[: pairs - run]])
    device = torch.randn(shape, dtype=BF16).to(held)
    host = torch.randn(shape, dtype=BF16, device="cpu").to(held)
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


# Around attention


def norms(small: bool) -> Iterator[Case]:
    shapes = [(64, 4096), (8192, 1024), (8192, 4096), (8192, 8192)]
    for tokens, hidden in [(5, 96)] if small else shapes:
        for dtype in (BF16, FP16):
            timed = f"rms_norm, {tokens} tokens" if dtype == BF16 else ""
            size = tokens * hidden * dtype.itemsize
            name = f"{tokens} x {hidden} {short(dtype)}"
            yield Case(
                name=f"rms_norm {name}",
                make=partial(norm_inputs, tokens, hidden, dtype, False),
                ours=rms_norm,
                reference=rms_norm_reference,
                truth=widely(rms_norm_reference),
                bucket=timed,
                moved=2 * size,
                peers={
                    "F.rms_norm": Peer(lambda x, w, eps: F.rms_norm(x, w.shape, w, eps)),
                    "compiled": compiled(rms_norm_reference),
                },
            )
            yield Case(
                name=f"fused_add_rms_norm {name}",
                make=partial(norm_inputs, tokens, hidden, dtype, True),
                ours=fused_add_rms_norm,
                reference=fused_add_rms_norm_reference,
                truth=widely(fused_add_rms_norm_reference),
                bucket=timed,
                moved=4 * size,
                peers={"compiled": compiled(fused_add_rms_norm_reference)},
            )
    for tokens, dtype in product((5,) if small else (64, 8192), (BF16, FP16)):
        yield Case(
            name=f"rms_norm per head {tokens} x 32 x 128 of qkv {short(dtype)}",
            make=lambda tokens=tokens, dtype=dtype: (
                fused_qkv(tokens, 32, 8, 128, dtype)[0], torch.randn(128, dtype=dtype), EPS
            ),
            ours=rms_norm,
            reference=rms_norm_reference,
            truth=widely(rms_norm_reference),
            bucket=f"rms_norm, {tokens} tokens" if dtype == BF16 else "",
            moved=2 * tokens * 32 * 128 * dtype.itemsize,
            peers={"compiled": compiled(rms_norm_reference)},
        )  # fmt: skip


def norm_inputs(tokens: int, hidden: int, dtype: torch.dtype, residual: bool) -> Tensors:
    rows = [torch.randn(tokens, hidden, dtype=dtype) for _ in range(1 + residual)]
    return *rows, 1 + torch.randn(hidden, dtype=dtype) / 4, EPS


def compiled(function: Callable[..., Any]) -> Peer:
    made: list[Callable[..., Any]] = []

    def call(*inputs: Any) -> Any:
        if not made:
            torch.compiler.reset()  # or the same code of other sizes would soon be too much
            made.append(torch.compile(function, dynamic=False))
        return made[0](*inputs)

    return Peer(call, compiled=True)


def widely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of inputs that are widened to float32."""

    def call(*inputs: Any) -> Any:
        return function(*(x.float() if isinstance(x, torch.Tensor) else x for x in inputs))

    return call


def rotary(small: bool) -> Iterator[Case]:
    grid = product((5,) if small else (64, 8192), (BF16, FP16), (True, False), (64, 32))
    for tokens, dtype, neox, pairs in grid:
        timed = dtype == BF16 and pairs == 64
        turned = writing(partial(rotary_embedding, is_neox_style=neox), 0, 1)
        reference = writing(partial(rotary_embedding_reference, is_neox_style=neox), 0, 1)
        yield Case(
            name=f"rotary {'neox' if neox else 'gpt-j'} {tokens} x (32 + 8) x {2 * pairs} of 128 "
            f"{short(dtype)}",
            make=partial(rotary_inputs, tokens, dtype, pairs),
            ours=turned,
            reference=reference,
            truth=widely(reference),
            bucket=f"rotary, {tokens} tokens" if timed else "",
            writes=True,
            moved=2 * tokens * 40 * 2 * pairs * dtype.itemsize + 2 * tokens * pairs * 4,
            peers={"compiled": compiled(reference)},
        )


def rotary_inputs(tokens: int, dtype: torch.dtype, pairs: int) -> Tensors:
    angles = torch.rand(tokens, pairs) * 6.28
    return *fused_qkv(tokens, 32, 8, 128, dtype)[:2], angles.cos(), angles.sin()


def activations(small: bool) -> Iterator[Case]:
    for tokens, dtype in product((5,) if small else (64, 8192), (BF16, FP16)):
        columns = 40 if small else 14336
        for name, ours, activation in (
            ("silu", silu_and_mul, "silu"),
            ("gelu", gelu_and_mul, "gelu"),
            ("gelu tanh", partial(gelu_and_mul, approximate="tanh"), "gelu_tanh"),
        ):
            reference = partial(act_and_mul_reference, activation=activation)
            timed = dtype == BF16 and name != "gelu tanh"
            yield Case(
                name=f"{name}_and_mul {tokens} x {columns} {short(dtype)}",
                make=lambda tokens=tokens, columns=columns, dtype=dtype: (
                    torch.randn(tokens, 2 * columns, dtype=dtype),
                ),
                ours=ours,
                reference=reference,
                truth=widely(reference),
                bucket=f"act_and_mul, {tokens} tokens" if timed else "",
                moved=3 * tokens * columns * dtype.itemsize,
                peers={"compiled": compiled(reference)},
            )


# Eight bits


def quantizers(small: bool) -> Iterator[Case]:
    shapes = [(5, 256)] if small else [(64, 4096), (300, 4097), (8192, 4096)]
    for (tokens, columns), dtype in product(shapes, (E4M3, E5M2)):
        for way, block in {
            "tensor": (tokens, columns), "token": (1, columns), "group": (1, 128),
            "block": (128, 128),
        }.items():  # fmt: skip
            scales = -(-tokens // block[0]), -(-columns // block[1])
            timed = dtype == E4M3 and tokens != 300
            yield Case(
                name=f"quantize per {way} {tokens} x {columns} to {short(dtype)}",
                make=partial(quantizer_inputs, (tokens, columns), scales, dtype, block),
                ours=writing(quantize, 1, 2),
                reference=writing(lambda *x: quantize_reference(*x[:3], *x[3]), 1, 2),
                bucket=f"quantize, {tokens} tokens" if timed else "",
                writes=True,
                moved=3 * tokens * columns + 4 * scales[0] * scales[1],
                peers={
                    "compiled": compiled(
                        lambda x, *rest, dtype=dtype: plain_quantize(x, rest[2], dtype)
                    )
                },
            )


def quantizer_inputs(
    shape: tuple[int, int], scales: tuple[int, int], dtype: torch.dtype, block: tuple[int, int]
) -> Tensors:
    wide = torch.randn(shape, dtype=BF16) * torch.rand(shape[0], 1, dtype=BF16)
    return wide, torch.zeros(shape, dtype=dtype), torch.zeros(scales), block


def plain_quantize(x: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensors:
    """Quantize by blocks that divide the rows and columns, as torch.compile fuses it well."""
    rows, columns = min(block[0], x.shape[0]), min(block[1], x.shape[1])
    wide = x.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = wide.abs().amax((1, 3), keepdim=True) / greatest(dtype)
    return (wide / scale).to(dtype).view(x.shape), scale.view(len(scale), -1)


def dequantized(group: int, result: Tensors) -> Tensors:
    """Return what rows in eight bits stand for, and what else there is."""
    y, scale, *others = result
    wide = dequantize(y.view(-1, y.shape[-1]), scale, (1, group), FP32)
    return wide, *others


def fused_quantizers(small: bool) -> Iterator[Case]:
    hidden, columns = (256, 384) if small else (4096, 14336)
    grid = product((5,) if small else (64, 8192), (False, True), (BF16, FP16))
    for tokens, grouped, dtype in grid:
        bucket = f"fused quantize, {tokens} tokens" if dtype == BF16 else ""
        name = f"{'group' if grouped else 'token'} {tokens} x"
        for residual in (False, True):
            group = 128 if grouped else hidden
            plain = fused_add_rms_norm_reference if residual else rms_norm_reference
            yield Case(
                name=f"{'add_' * residual}rms_norm_quantize per {name} {hidden} {short(dtype)}",
                make=partial(norm_inputs, tokens, hidden, dtype, residual),
                ours=partial(norm_quantize, rms_norm_quantize, group),
                reference=partial(norm_quantize, rms_norm_quantize_reference, group),
                truth=widely(plain),
                meaning=partial(dequantized, group),
                bucket=bucket,
                moved=tokens * (hidden * (3 + 4 * residual) + 4 * hidden // group),
                peers={"compiled": compiled(norm_then_quantize(plain, group))},
            )
        group = 128 if grouped else columns
        yield Case(
            name=f"silu_and_mul_quantize per {name} {columns} {short(dtype)}",
            make=lambda tokens=tokens, dtype=dtype: (
                torch.randn(tokens, 2 * columns, dtype=dtype),
            ),
            ours=partial(silu_and_mul_quantize, group=group if grouped else None),
            reference=lambda x, group=group: act_and_mul_quantize_reference(
                x, "silu", E4M3, group, None
            ),
            truth=widely(lambda x: act_and_mul_reference(x, "silu")),
            meaning=partial(dequantized, group),
            bucket=bucket,
            moved=tokens * (columns * 5 + 4 * columns // group),
            peers={
                "compiled": compiled(
                    lambda x, group=group: plain_quantize(
                        act_and_mul_reference(x, "silu"), (1, group), E4M3
                    )
                )
            },
        )


def norm_quantize(operation: Callable[..., Any], group: int, x: torch.Tensor, *rest: Any) -> Any:
    residual, weight, eps = rest if len(rest) == 3 else (None, *rest)
    # The public function wants powers of two, and means the whole row by None.
    whole = operation is rms_norm_quantize and group == x.shape[-1]
    static = () if operation is rms_norm_quantize else (None,)
    return operation(x, residual, weight, eps, E4M3, None if whole else group, *static)


def norm_then_quantize(norm: Callable[..., Any], group: int) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        y, *total = norm(*inputs) if len(inputs) == 4 else (norm(*inputs),)
        return *plain_quantize(y, (1, group), E4M3), *total

    return call


# Matrix products

PREFILL = 512  # tokens from which a product is bound by arithmetic


def products(small: bool) -> Iterator[Case]:
    sizes = [(4096, 4096), (14336, 4096), (4096, 14336)]
    tokens = (1, 8, 64, 2048, 8192)
    if small:
        sizes, tokens = [(256, 384)], (5,)
    yield product_case("rows", 17, *sizes[0], FP16, timed=False)
    yield product_case("weight only, int8", 17, *sizes[0], BF16, timed=False)
    yield product_case("blocks from 16 bits", 17, *sizes[0], BF16, timed=False)
    for way, (n, k), m in product(("rows", "blocks", "weight only"), sizes, tokens):
        yield product_case(way, m, n, k, BF16, timed=True)
    for m in tokens:
        yield product_case("rows from 16 bits", m, *sizes[0], BF16, timed=True)


def product_case(way: str, m: int, n: int, k: int, dtype: torch.dtype, timed: bool) -> Case:
    block = (128, 128) if way.startswith("blocks") else (1, k)
    weight_only, from_wide = way.startswith("weight only"), "from" in way
    stored = torch.int8 if way.endswith("int8") else E4M3

    def make() -> Tensors:
        x = torch.randn(m, k, dtype=dtype) * (1 + torch.rand(m, 1, dtype=dtype))
        wide = torch.randn(n, k, dtype=BF16) / k**0.5
        weight = torch.zeros(n, k, dtype=stored)
        scale = torch.zeros(-(-n // block[0]), -(-k // block[1]))
        quantize(wide, weight, scale, block)
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
        if from_wide:  # what rounding it costs is allowed
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
    quantize(x, quantized, scale, (1, group))
    return quantized, scale


def product_peers(way: str) -> dict[str, Peer]:
    """Return torch's products: by rows in FP8 also beside blocks, for which it has no scales."""
    if way == "weight only":
        wide = Peer(F.linear, lambda x, w, s, _: (x, dequantize(w, s, (1, w.shape[1]), x.dtype)))
        return {"bf16 linear": wide}

    def prepare(x: Any, weight: Any, scale: Any, x_scale: Any) -> Tensors:
        by_rows = (
            scale if scale.shape[1] == 1 else torch.ones_like(scale[:1, :1]).expand(len(weight), 1)
        )
        one_each = x_scale if x_scale is None else x_scale[:, :1].contiguous()
        return x, weight.t(), one_each, by_rows.contiguous().t()

    def multiply(x: Any, weight: Any, x_scale: Any, scale: Any, fast: bool = True) -> torch.Tensor:
        return torch._scaled_mm(
            x, weight, scale_a=x_scale, scale_b=scale, out_dtype=BF16, use_fast_accum=fast
        )

    def from_wide(x: Any, weight: Any, _: Any, scale: Any) -> torch.Tensor:
        rows, x_scale = plain_quantize(x, (1, x.shape[1]), E4M3)
        return multiply(rows, weight, x_scale, scale)

    if way == "rows from 16 bits":
        call = compiled(from_wide).call
        return {"compiled, _scaled_mm": Peer(call, prepare, compiled=True)}
    judged = way == "rows"
    return {
        "_scaled_mm": Peer(partial(multiply, fast=False), prepare, judged=judged),
        "_scaled_mm fast": Peer(multiply, prepare, judged=judged),
    }


OPERATIONS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "decode": decode,
    "prefill": prefill,
    "cache": cache_writes,
    "matmul": products,
    "norm": norms,
    "rotary": rotary,
    "activation": activations,
    "quantize": quantizers,
    "fused_quantize": fused_quantizers,
}
