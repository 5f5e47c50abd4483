"""Compile kernels as they would be launched, on a machine without the GPU.

``python tests/kernels/compiling.py 90`` compiles every case below for compute capability 9.0 and
prints, as JSON, what each compiled kernel needs. With ``--candidates``, it compiles every candidate
of attention and of products, too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_module.kernels import (
    choices,
    dtypes,
    grouped_matmul_configurations,
    grouped_matmul_mxfp4,
    mla_attention,
    paged_attention_decode,
    paged_attention_prefill,
    scaled_matmul_configurations,
)
from vllm_module.kernels.act_and_mul import (
    act_and_mul_quantize_triton,
    act_and_mul_triton,
    swiglu_oai_and_mul_triton,
)
from vllm_module.kernels.causal_conv1d import causal_conv1d_triton
from vllm_module.kernels.choices import trying
from vllm_module.kernels.combine_experts import combine_experts_triton
from vllm_module.kernels.concat_and_cache_mla import concat_and_cache_mla_triton
from vllm_module.kernels.copy_blocks import copy_blocks_triton
from vllm_module.kernels.gated_delta_rule import gated_delta_rule_triton
from vllm_module.kernels.grouped_matmul import grouped_matmul_triton
from vllm_module.kernels.grouped_matmul_configurations import grouped_configurations
from vllm_module.kernels.grouped_matmul_mxfp4 import grouped_matmul_mxfp4_triton
from vllm_module.kernels.grouped_matmul_packed import grouped_matmul_packed_triton
from vllm_module.kernels.mamba2_scan import mamba2_scan_triton
from vllm_module.kernels.packed_matmul import packed_matmul_triton
from vllm_module.kernels.packed_matmul_configurations import PackedWeight, packed_configurations
from vllm_module.kernels.paged_attention_triton import paged_attention_triton
from vllm_module.kernels.quantize import quantize_static_triton, quantize_triton
from vllm_module.kernels.reshape_and_cache import reshape_and_cache_triton
from vllm_module.kernels.rms_norm import (
    fused_add_rms_norm_triton,
    rms_norm_quantize_triton,
    rms_norm_triton,
)
from vllm_module.kernels.rotary_embedding import rotary_embedding_triton
from vllm_module.kernels.rotate_and_cache import rotate_and_cache_triton
from vllm_module.kernels.rotate_and_cache_mla import rotate_and_cache_mla_triton
from vllm_module.kernels.scaled_matmul import scaled_matmul_triton
from vllm_module.kernels.scaled_matmul_configurations import configurations
from vllm_module.kernels.sort_by_expert import sort_by_expert_triton
from vllm_module.kernels.topk_routing import topk_routing_triton

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Of PTX: disassembling the machine code takes far longer than compiling it.
_COUNTED = (
    "wgmma.mma_async",
    "mma.sync",
    "cp.async.cg",
    "cp.async.bulk.tensor",
    "ld.global.v4",
    "st.global.v4",
)
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


@dataclass
class Compiled:
    """What one configuration of a kernel needs of the GPU, and some instructions it has."""

    case: str
    kernel: str
    capability: int
    warps: int
    stages: int
    shared: int
    registers: int
    spilled: int  # bytes a thread
    instructions: dict[str, int] = field(default_factory=dict)


def specialized(jit: JITFunction, arguments: dict[str, Any]) -> ASTSource:
    """Return the source that a launch with these arguments compiles, as Triton specializes it."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(jit.params):
        value, name = arguments[parameter.name], parameter.name
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            unaligned = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            if value % 16 == 0 and not unaligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(jit, signature, constants, attributes)


def compiled(jit: JITFunction, arguments: dict[str, Any], options: dict[str, Any], capability: int):
    source = specialized(jit, arguments)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [_CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    resources = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return Compiled(
        case="",
        kernel=jit.__name__,
        capability=capability,
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        shared=kernel.metadata.shared,
        registers=int(resources["REG"]),
        spilled=int(resources["STACK"]) + int(resources["LOCAL"]),
        instructions={n: count for n in _COUNTED if (count := kernel.asm["ptx"].count(n))},
    )


@contextmanager
def launching(instead: Callable[[JITFunction, dict[str, Any], dict[str, Any]], None]) -> Iterator:
    """Call ``instead`` with kernel, arguments and options, in place of each launch."""
    run = JITFunction.run

    def launch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [parameter.name for parameter in self.params]
        options = {name: kwargs.pop(name) for name in list(kwargs) if name not in names}
        arguments = self.signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        instead(self, arguments.arguments, options)

    JITFunction.run = launch
    try:
        yield
    finally:
        JITFunction.run = run


@contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Compile the kernels that are launched in this context, in place of running them."""
    done: list[Compiled] = []
    with launching(lambda *launch: done.append(compiled(*launch, capability))):
        yield done


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


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


E4M3, E5M2, FP16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32


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


def norm(
    rows: int,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    residual: bool = False,
    group: int | None = None,
    offset: float = 0.0,
) -> Callable[[], object]:
    """Normalize rows, with or without a residual, and quantize by groups (0: by a static scale)."""

    def launch() -> None:
        x, weight = meta(2, rows, columns, dtype=dtype)[0], meta(columns, dtype=dtype)
        added = x if residual else None
        if group is not None:
            scale = meta(1, dtype=FP32) if group == 0 else None
            rms_norm_quantize_triton(x, added, weight, 1e-6, E4M3, group, scale, offset)
        elif added is not None:
            fused_add_rms_norm_triton(x, added, weight, 1e-6, offset)
        else:
            rms_norm_triton(x, weight, 1e-6, offset)

    return launch


def norm_of_heads() -> object:
    query = meta(8192, 6144)[:, :4096].unflatten(-1, (32, 128))
    return rms_norm_triton(query, meta(128), 1e-6)


def gated(columns: int, activation: str, group: int | None = None) -> Callable[[], object]:
    """Multiply by an activated gate, and quantize by groups (0: by a static scale)."""

    def launch() -> object:
        x = meta(8192, 2 * columns)
        if group is None:
            return act_and_mul_triton(x, activation)
        scale = meta(1, dtype=FP32) if group == 0 else None
        return act_and_mul_quantize_triton(x, activation, E4M3, group, scale)

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
    offset: float = 0.0,
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


def quantized(
    rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype, static: bool = False
) -> Callable[[], object]:
    """Quantize by blocks, with computed or given scales."""
    scale = meta(-(-rows // block[0]), -(-columns // block[1]), dtype=FP32)
    quantize = quantize_static_triton if static else quantize_triton
    return lambda: quantize(meta(rows, columns), meta(rows, columns, dtype=dtype), scale, *block)


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


def tried(kernel: str, candidate: str, launch: Callable[[], object]) -> Callable[[], object]:
    """Launch a candidate of a kernel, whatever was chosen."""

    def launches() -> None:
        with trying({kernel: candidate}):
            launch()

    return launches


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


AWQ, NF4 = (0, 4, 1, 5, 2, 6, 3, 7), (1, 0)


_CODEBOOKS = "nf4", "mxfp4"  # of packed weights


def packed(
    m: int, kind: str, group: int = 128, bits: int = 4, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    """Multiply ``[m, 4096]`` by a packed weight ``[4096, 4096]``, as ``kind`` lays out its words.

    GPTQ's and AWQ's tensors are transposed views, as they are stored.
    """
    size, floats = 4096, {"nf4": FP32, "mxfp4": torch.bfloat16}.get(kind, FP16)
    few, along, order = size * bits // 32, 0 if kind == "awq" else 1, None
    words = meta(size, few, dtype=torch.int32)
    if kind in _CODEBOOKS:
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
    if kind not in ("rows", *_CODEBOOKS):
        zeros = meta(*scales.shape, dtype=torch.uint8)
    if kind == "unordered":
        group_of = meta(size, dtype=torch.int32)
    if kind in _CODEBOOKS:
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


def packed_name(m: int, kind: str, group: int, bits: int, dtype: torch.dtype) -> str:
    return f"packed {kind}, {m}, {bits} bits, groups of {group}, {_TYPES[dtype]}"


def placed(shape: tuple[int, ...], longest: int) -> tuple[torch.Tensor | int, ...]:
    """Return states of 65 places, 64 sequences, and the tokens of the longest one."""
    integers = torch.int32
    return (
        meta(65, *shape, dtype=FP32), meta(64, dtype=torch.int64), meta(65, dtype=integers),
        meta(64, dtype=integers), longest,
    )  # fmt: skip


def convolved(longest: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """Convolve 8192 channels, which are a part of a projection's output."""
    x = meta(4096, 12288, dtype=dtype)[:, :8192]
    weight, bias = meta(8192, 4, dtype=dtype), meta(8192, dtype=dtype)
    return lambda: causal_conv1d_triton(x, weight, bias, *placed((8192, 3), longest), True)


def scanned(
    longest: int, features: int = 64, n: int = 128, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    """Compute Mamba-2's recurrence with 64 heads in 8 groups."""
    x, dt = meta(4096, 64, features, dtype=dtype), meta(4096, 64, dtype=dtype)
    b, head = meta(4096, 8, n, dtype=dtype), meta(64, dtype=FP32)
    state = placed((64, features, n), longest)
    return lambda: mamba2_scan_triton(x, dt, head, b, b, head, head, *state, 0.0, 1e9)


def replaced(
    longest: int, dk: int = 128, dv: int = 128, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], object]:
    """Compute the gated delta rule with 16 heads of keys and 32 of values."""
    q, v = meta(4096, 16, dk, dtype=dtype), meta(4096, 32, dv, dtype=dtype)
    g, beta = meta(4096, 32, dtype=FP32), meta(4096, 32, dtype=dtype)
    state = placed((32, dk, dv), longest)
    return lambda: gated_delta_rule_triton(q, q, v, g, beta, *state, 0.1, True)


TILES = (16, 32, 64, 128)

# What is launched, by name; for architectures of 8.0 only what needs no FP8.
CASES: dict[str, Callable[[], object]] = {
    "attention 64": attention(32, 8, 64),
    "attention 80": attention(32, 32, 80),
    "attention 128": attention(32, 8, 128),
    "attention 128, fp16": attention(32, 8, 128, FP16),
    "attention 128, fp32": attention(32, 8, 128, FP32),
    "attention 128, short": attention(40, 8, 128, pages=16, new=1),
    "attention 256": attention(16, 8, 256),
    "attention 64, 71 heads to one": attention(71, 1, 64),
    "attention 256, 48 heads to one": attention(48, 1, 256),
    "attention 64, pages of 64": attention(32, 8, 64, page_size=64),
    "attention 128, pages of 128": attention(32, 8, 128, page_size=128),
    "norm 4096": norm(8192, 4096),
    "norm 1024": norm(8192, 1024),
    "norm 5120": norm(8192, 5120),
    "norm 32768": norm(64, 32768),
    "norm of heads": norm_of_heads,
    "add-norm 4096": norm(8192, 4096, residual=True),
    "add-norm 3584, offset": norm(8192, 3584, residual=True, offset=1.0),
    "norm 65536, fp32, offset": norm(64, 65536, FP32, offset=1.0),
    "add-norm 65536, fp32": norm(64, 65536, FP32, residual=True),
    "rotary 32 and 8 of 128": rotary(8192, 32, 8, 128, 64),
    "rotary of one token": rotary(1, 32, 8, 128, 64),
    "rotary of neighbours": rotary(8192, 32, 8, 128, 64, neox=False),
    "rotary 80": rotary(8192, 32, 32, 80, 40),
    "rotary of a part": rotary(8192, 32, 8, 96, 24),
    "rotary, fp32": rotary(8192, 32, 8, 128, 64, dtype=FP32),
    "silu 14336": gated(14336, "silu"),
    "silu 768": gated(768, "silu"),
    "gelu 14336": gated(14336, "gelu"),
    "gelu_tanh 14336": gated(14336, "gelu_tanh"),
    "store": stored(8, 128, 16, torch.bfloat16),
    "store 80": stored(8, 80, 16, torch.bfloat16),
    "store 64 on pages of 1": stored(8, 64, 1, torch.bfloat16),
    "store 256": stored(8, 256, 16, torch.bfloat16),
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
    "norm, rotary, store in fp32": rotated_and_stored(32, 8, 128, 64, dtype=FP32),
    "norm, rotary, store in int8": rotated_and_stored(
        32, 8, 128, 64, cache_dtype=torch.int8, scales=1
    ),
    "copy in a layer": copied(2, 4096, 16, 8, 128),
    "copy in all layers": copied(32, 2, 4096, 16, 8, 128),
    "copy heads of 80": copied(2, 4096, 16, 1, 80),
    "quantize to int8 by token": quantized(4096, 4096, (1, 4096), torch.int8),
    "quantize to int8 by tensor": quantized(4096, 4096, (4096, 4096), torch.int8),
    "multiply int8, 1": multiplied(1, 4096, 4096, "int8"),
    "multiply int8, 64": multiplied(64, 4096, 4096, "int8"),
    "multiply int8, 256": multiplied(256, 28672, 4096, "int8"),
    "swiglu of gpt-oss": lambda: swiglu_oai_and_mul_triton(meta(8192, 5760), 1.702, 7.0),
    "convolve, prompts": convolved(512),
    "convolve, single tokens": convolved(1),
    "convolve, fp32": convolved(512, FP32),
    "scan, prompts": scanned(512),
    "scan, single tokens": scanned(1),
    "scan, 256 numbers": scanned(512, n=256),
    "scan, 16 numbers": scanned(512, 128, 16),
    "scan, fp32": scanned(512, dtype=FP32),
    "delta rule, prompts": replaced(512),
    "delta rule, single tokens": replaced(1),
    "delta rule, 64": replaced(512, 64, 64),
    "delta rule, 256": replaced(512, 256, 256),
    "delta rule, fp32": replaced(512, dtype=FP32),
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
    **{
        packed_name(m, *layout): packed(m, *layout)
        for m, layout in zip(PACKED_TOKENS, PACKED, strict=False)
    },
}
HOPPER: dict[str, Callable[[], object]] = {
    "attention 128, everything": attention(40, 8, 128, everything=True),
    "attention 128, 128 heads to one": attention(128, 1, 128),
    "attention 128, e4m3, pages of 128": attention(32, 8, 128, cache_dtype=E4M3, page_size=128),
    "attention 64, e4m3": attention(32, 8, 64, cache_dtype=E4M3),
    "attention 128, e4m3": attention(32, 8, 128, cache_dtype=E4M3),
    "attention 128, e5m2, fp16": attention(32, 8, 128, FP16, E5M2),
    "attention 256, e4m3": attention(16, 8, 256, cache_dtype=E4M3),
    "attention 256, e4m3, everything": attention(40, 8, 256, cache_dtype=E4M3, everything=True),
    "add-norm to FP8 by token": norm(8192, 4096, residual=True, group=4096),
    "add-norm to FP8 by group": norm(8192, 7168, residual=True, group=128),
    "add-norm to FP8 by token, 8192": norm(64, 8192, residual=True, group=8192),
    "add-norm to FP8 by token, offset": norm(8192, 3584, residual=True, group=4096, offset=1.0),
    "norm to FP8, static": norm(8192, 4096, group=0),
    "silu to FP8 by token": gated(14336, "silu", 14336),
    "silu to FP8 by token, 29568": gated(29568, "silu", 29568),
    "gelu to FP8 by token, 16384": gated(16384, "gelu", 16384),
    "gelu to FP8 by token, 32768": gated(32768, "gelu", 32768),
    "gelu_tanh to FP8 by token, 32768": gated(32768, "gelu_tanh", 32768),
    "silu to FP8 by group": gated(14336, "silu", 128),
    "silu to FP8, static": gated(14336, "silu", 0),
    "store in e4m3": stored(8, 128, 16, E4M3, 1),
    "store in e4m3 by heads": stored(8, 128, 16, E4M3, 8),
    "store in e5m2": stored(8, 96, 48, E5M2),
    "norm, rotary, store in e4m3": rotated_and_stored(32, 8, 128, 64, cache_dtype=E4M3, scales=8),
    "rotary, store in e5m2, neighbours": rotated_and_stored(
        5, 1, 96, 48, 48, cache_dtype=E5M2, norm=False, neox=False
    ),
    "copy e4m3": copied(32, 2, 4096, 16, 8, 128, dtype=E4M3),
    "quantize by token": quantized(4096, 4096, (1, 4096), E4M3),
    "quantize by token, 28672": quantized(4096, 28672, (1, 28672), E4M3),
    "quantize by token, 100000": quantized(1, 100000, (1, 100000), E4M3),
    "quantize by group": quantized(4096, 4096, (1, 128), E4M3),
    "quantize by block": quantized(4096, 4096, (128, 128), E4M3),
    "quantize by tensor": quantized(4096, 4096, (4096, 4096), E4M3),
    "quantize, static": quantized(4096, 4096, (4096, 4096), E4M3, static=True),
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
        f"grouped {kind}, {tile}{', by block' * (rows > 1)}": grouped(tile, kind, rows)
        for tile in TILES
        for kind, rows in (("fp8", 1), ("fp8", 128), ("fp8 weight", 1), ("fp8 weight", 128))
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
            (8192, "persistent"),
        )
        for rows in (1, 128)
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


CASES |= {
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
HOPPER |= {
    "rotated latents, e4m3": rotated_latents(16, cache_dtype=E4M3),
    "latent, 128 heads, e4m3": latent_attention(128, cache_dtype=E4M3),
    "latent, 16 heads, e5m2, fp16": latent_attention(16, dtype=FP16, cache_dtype=E5M2),
}


def candidates_of_products() -> dict[str, Callable[[], object]]:
    """Return every candidate of products with a weight of an 8B model, and with experts' weights.

    They are more than a test has time for.
    """
    found = {}
    for kind, rows in product(("fp8 given", "fp8 weight"), (1, 128)):
        multiplied_in = E4M3 if kind == "fp8 given" else torch.bfloat16
        block = (1, 4096) if rows == 1 else (128, 128)
        for each in configurations(6144, 4096, block, multiplied_in):
            if each.config.way != "torch":
                launch = multiplied(each.tokens, 6144, 4096, kind, rows)
                name = f"multiply {kind}, {each.tokens}, {rows} x {rows}, {each.name}"
                found[name] = tried("scaled_matmul", each.name, launch)
    for kind, rows in (("fp8", 1), ("fp8", 128), ("fp8 weight", 1), ("int8", 1), ("wide", 1)):
        multiplied_in = E4M3 if kind == "fp8" else torch.bfloat16
        block = (1, 2880) if rows == 1 else (128, 128)
        for each in grouped_configurations((128, 1536, 2880), block, multiplied_in):
            launch = grouped(each.rows // 128, kind, rows)
            name = f"grouped {kind}, {each.rows // 128}, {rows} x {rows}, {each.name}"
            found[name] = tried("grouped_matmul", each.name, launch)
    for kind, group, bits, dtype in PACKED:
        along, ordered = 0 if kind == "awq" else 1, 0 if kind == "unordered" else group
        weight = PackedWeight(4096, 4096, bits, along, ordered, kind in _CODEBOOKS, dtype)
        for each in packed_configurations(weight):
            if each.config.way != "torch":
                launch = packed(each.tokens, kind, group, bits, dtype)
                name = f"{packed_name(each.tokens, kind, group, bits, dtype)}, {each.name}"
                found[name] = tried("packed_matmul", each.name, launch)
    return found


ATTENTION = mla_attention, paged_attention_decode, paged_attention_prefill
OF_EACH_KIND = "attention 128, pages of 128", "latent, 128 heads"
# Kernels that have candidates, and the Triton kernels that each launches.
LAUNCHED = {
    "paged_attention_decode": ("_decode", "_combine"),
    "paged_attention_prefill": ("_prefill",),
    "mla_attention_decode": ("_decode_latent", "_combine"),
    "mla_attention_prefill": ("_prefill_latent",),
}


def candidates_of_attention(launch: Callable[[], object]) -> dict[str, list[str]]:
    """Return the names of the candidates of the kernels in ``LAUNCHED`` that ``launch`` chooses."""
    found: dict[str, list[str]] = {}

    def note(kernel: str, case: str, named: dict[str, Any], device: torch.device) -> Any:
        found[kernel] = list(named)
        return choices.choose(kernel, case, named, device)

    with launching(lambda *_: None):
        for module in ATTENTION:
            module.choose = note
        launch()
        for module in ATTENTION:
            module.choose = choices.choose
    return found


def compile_candidates(launch: Callable[[], object], capability: int) -> Iterator[dict[str, Any]]:
    """Compile the kernels of ``launch`` by every candidate but the first."""
    for kernel, names in candidates_of_attention(launch).items():
        for name in names[1:]:
            done: list[Compiled] = []

            def note(jit: JITFunction, *rest: Any, done: Any = done, kernel: Any = kernel) -> None:
                if jit.__name__ in LAUNCHED[kernel]:
                    done.append(compiled(jit, *rest, capability))

            with choices.trying({kernel: name}), launching(note):
                launch()
            yield from (asdict(one) | {"candidate": name} for one in done)


def main(capability: int, *, every_candidate: bool) -> None:
    """Compile every case and print a list with an entry for each kernel.

    Candidates of attention are compiled for a model of each kind, unless all are.
    """
    # The choice of tiles depends on the capability, and a meta tensor's device has none.
    products = (
        scaled_matmul_configurations,
        grouped_matmul_configurations,
        grouped_matmul_mxfp4,
    )
    for module in (dtypes, *ATTENTION, *products):
        module.capability = lambda _: divmod(capability, 10)
    cases = CASES | HOPPER if capability == 90 else CASES
    if every_candidate:
        cases = cases | candidates_of_products()
    results = []
    for name, launch in cases.items():
        with compiling(capability) as done:
            launch()
        results += [asdict(one) | {"case": name} for one in done]
        attends = name.startswith(("attention", "latent"))
        if attends and (every_candidate or (capability == 90 and name in OF_EACH_KIND)):
            found = compile_candidates(launch, capability)
            results += [one | {"case": f"{name}: {one['candidate']}"} for one in found]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), every_candidate="--candidates" in sys.argv)
