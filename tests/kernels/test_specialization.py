"""How often kernels are compiled: once for each bucket of sizes, whatever divides the numbers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

# Variants of each kernel that the steps of one model may need, for any number of tokens.
BUCKETS = {
    "_held_rows": 3,  # the norm of the hidden state, that of heads, and the one that quantizes
    "_tiles": 3,  # two activations, and one that quantizes
    "_rotate_both": 1,
    "_rotate_and_store": 1,
    "_rotate_and_store_latent": 1,
    "_store": 1,
    "_copy": 1,
    "_decode": 2,  # contexts in one part or in several
    "_prefill": 1,
    "_decode_latent": 2,
    "_prefill_latent": 1,
    "_store_latent": 1,
    "_multiply": 5 + 5,  # up to 16, 32, 64, 128 and 256 tokens; by row or by block
    "_multiply_described": 1 + 1,  # beyond
    "_multiply_packed": 6,  # up to 16, 32, 64, 256, 1023 tokens and beyond
    "_add_splits": 2 + 1,  # by row and by block, and of packed weights
    "_route": 1,
    "_sort": 1,
    "_find": 1,
    "_combine": 2 + 1,  # of attention's splits, of values and of latents, and of experts
    "_multiply_groups": 4 * 3,  # tiles of 16, 32, 64 and 128 rows; bfloat16, by row and by block
    "_multiply_mxfp4": 4,
    "_shrink": 2,  # tiles of 16 and of 64 rows
    "_expand": 2,
    # By token, by groups, by given scales; by tensor, whole tiles of 2, 4 and 8 rows, and parts.
    "_quantize_tiles": 3 + 4,
    "_largest": 1,
}

PROGRAM = """
import json, random, sys
from collections import defaultdict

sys.path.insert(0, sys.argv[1])
import torch
from compilation.adapters import adapted
from compilation.configurations import (
    grouped_configurations, packed_configurations, scaled_configurations
)
from compiling import E4M3, FP32, launching, meta, specialized
from vllm_module.kernels.rows.act_and_mul import (
    act_and_mul_quantize_triton, act_and_mul_triton, swiglu_oai_and_mul_triton
)
from vllm_module.kernels.experts.combine_experts import combine_experts_triton
from vllm_module.kernels.attention.copy_blocks import copy_blocks_triton
from vllm_module.kernels.experts.grouped_matmul import grouped_matmul_triton
from vllm_module.kernels.experts.grouped_matmul_mxfp4 import grouped_matmul_mxfp4_triton
from vllm_module.kernels.matmul.packed_matmul import packed_matmul_triton
from vllm_module.kernels.matmul.matmul_configurations import PackedWeight, ScaledWeight
from vllm_module.kernels.attention.concat_and_cache_mla import concat_and_cache_mla_triton
from vllm_module.kernels.attention.mla_attention import mla_attention_triton
from vllm_module.kernels.attention.paged_attention_triton import paged_attention_triton
from vllm_module.kernels.rows.quantize import quantize_static_triton, quantize_triton
from vllm_module.kernels.attention.reshape_and_cache import reshape_and_cache_triton
from vllm_module.kernels.rows.rms_norm import rms_norm_quantize_triton, rms_norm_triton
from vllm_module.kernels.attention.rotary_embedding import rotary_embedding_triton
from vllm_module.kernels.attention.rotate_and_cache import rotate_and_cache_triton
from vllm_module.kernels.attention.rotate_and_cache_mla import rotate_and_cache_mla_triton
from vllm_module.kernels.choices import trying
from vllm_module.kernels.matmul.scaled_matmul import scaled_matmul_triton
from vllm_module.kernels.experts.sort_by_expert import sort_by_expert_triton
from vllm_module.kernels.experts.topk_routing import topk_routing_triton

variants = defaultdict(set)

def note(jit, arguments, options):
    source = specialized(jit, arguments)
    key = source.signature, source.constants, source.attrs, options
    variants[jit.__name__].add(repr(key))

cache, latents = meta(2, 64, 16, 8, 128), meta(64, 16, 40)
weight, eight, hidden = meta(4096), meta(4096, 4096, dtype=E4M3), 4096
ints, longs = torch.int32, torch.int64

BLOCKS = ((1, hidden), (128, 128))

def product(x, block):
    scale = meta(hidden // block[0], hidden // block[1], dtype=FP32)
    # From 512 rows on torch's own product is the first, and compiles nothing.
    with trying({"scaled_matmul": "small descriptors"} if len(x) > 256 else {}):
        scaled_matmul_triton(x, eight, scale, *block, None, None, True, torch.bfloat16)

words, factors = meta(4096, 512, dtype=ints), meta(4096, 32)

def packed_product(x):
    packed_matmul_triton(x, words, factors, 4, 1, None, 128, None, None, None, None)

def mixture(x, tokens):
    bias = meta(64, dtype=FP32)
    scores, experts = topk_routing_triton(meta(tokens, 64), 8, "sigmoid", True, bias, 8, 4, 1.0)
    order, offsets = sort_by_expert_triton(experts, 16, 32)
    wide = grouped_matmul_triton(
        x, meta(32, 256, hidden), offsets, None, order, 8, None, 1, hidden, None, True, x.dtype
    )
    swiglu_oai_and_mul_triton(wide, 1.702, 7.0)
    for block in ((1, hidden), (128, 128)):
        scale = meta(32, 256 // block[0], hidden // block[1], dtype=FP32)
        grouped_matmul_triton(
            x, meta(32, 256, hidden, dtype=E4M3), offsets, None, order, 8, scale, *block,
            None, True, x.dtype,
        )
    blocks = meta(32, 256, hidden // 32, 16, dtype=torch.uint8)
    grouped_matmul_mxfp4_triton(x, blocks, blocks[..., 0], offsets, None, order, 8)
    combine_experts_triton(wide, order, offsets, scores)

def step(sequences, tokens, pages):
    qkv = meta(tokens, 6144)
    q, k, v = (x.unflatten(-1, (-1, 128)) for x in qkv.split([4096, 1024, 1024], -1))
    x = meta(tokens, hidden)
    tables, lengths = meta(sequences, pages, dtype=ints), meta(sequences, dtype=ints)
    starts = meta(sequences + 1, dtype=ints)
    longest = 1 if tokens == sequences else tokens
    paged_attention_triton(q, *cache, tables, lengths, starts, longest, 0.1)
    rows = meta(tokens, 64, 40)
    mla_attention_triton(rows, latents, tables, lengths, starts, longest, 32, 0.1)
    parts = rows[:, 0].split([32, 8], -1)
    concat_and_cache_mla_triton(*parts, latents, meta(tokens, dtype=longs))
    rms_norm_triton(x, weight, 1e-6)
    rms_norm_triton(q, meta(128), 1e-6)
    rms_norm_quantize_triton(x, None, weight, 1e-6, E4M3, 128, None)
    cos = meta(tokens, 64, dtype=FP32)
    rotary_embedding_triton(q, k, cos, cos, True)
    slots, norms = meta(tokens, dtype=longs), (meta(128), meta(128), 1e-6, 0.0)
    rotate_and_cache_triton(q, k, v, cos, cos, *cache, slots, None, None, True, *norms)
    angles, tail = (cos[:, :4], cos[:, :4]), rows[..., 32:]
    rotate_and_cache_mla_triton(
        tail, *parts, *angles, tail, latents, slots, None, meta(32), 1e-6, 0.0, False
    )
    act_and_mul_triton(meta(tokens, 2 * hidden), "silu")
    act_and_mul_quantize_triton(meta(tokens, 2 * hidden), "silu", E4M3, 128, None)
    reshape_and_cache_triton(k, v, *cache, meta(tokens, dtype=longs), None, None)
    copy_blocks_triton(cache, meta(2, sequences, dtype=longs).t())
    for block in BLOCKS:
        product(x, block)
    packed_product(x)
    mixture(x, tokens)
    adapted(tokens)()
    narrow, one = meta(tokens, hidden, dtype=E4M3), meta(1, 1, dtype=FP32)
    quantize_triton(x, narrow, one, tokens, hidden)
    quantize_static_triton(x, narrow, one.expand(tokens, 1), 1, hidden)

def counted():
    return {name: len(found) for name, found in variants.items()}

with launching(note):  # what is listed, before anything else
    for block in BLOCKS:
        for each in scaled_configurations(ScaledWeight(hidden, hidden, block, E4M3)):
            product(meta(each.tokens, hidden), block)
        for each in grouped_configurations(ScaledWeight(256, hidden, block, E4M3, experts=32)):
            mixture(meta(each.tokens // 8, hidden), each.tokens // 8)
    packed_weight = PackedWeight(hidden, hidden, 4, 1, 128, False, torch.bfloat16)
    for each in packed_configurations(packed_weight):
        packed_product(meta(each.tokens, hidden))
listed = counted()

random.seed(0)
powers = [2**power for power in range(13)]
random_tokens = [random.randint(1, 5000) for _ in range(int(sys.argv[2]))]
with launching(note):
    for tokens in [*powers, *random_tokens]:
        sequences = random.choice([1, tokens, random.randint(1, tokens)])
        step(sequences, tokens, random.choice([1, 16, random.randint(1, 600)]))
json.dump([listed, counted()], sys.stdout)
"""


@pytest.fixture(scope="module")
def counts(run_with_torch: Callable[..., subprocess.CompletedProcess[str]]) -> list[dict[str, int]]:
    """Count what would be compiled, in another process: in this one Triton interprets."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = run_with_torch(PROGRAM, str(Path(__file__).parent), "100", environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def variants(counts: list[dict[str, int]]) -> dict[str, int]:
    return counts[1]


@pytest.mark.parametrize("kernel", BUCKETS)
def test_variants_do_not_grow_with_tokens(variants: dict[str, int], kernel: str) -> None:
    """A hundred steps of any number of tokens need no more variants than there are buckets."""
    assert 1 <= variants[kernel] <= BUCKETS[kernel]


def test_every_kernel_that_is_launched_is_counted(variants: dict[str, int]) -> None:
    """No kernel of a step is missing from the table."""
    assert variants.keys() == BUCKETS.keys()


@pytest.mark.parametrize(
    "kernel",
    ["_multiply", "_multiply_described", "_add_splits", "_multiply_groups", "_multiply_packed"],
)
def test_products_that_are_listed_are_all_there_are(
    counts: list[dict[str, int]], kernel: str
) -> None:
    """After one call for each listed configuration, no number of tokens needs another variant."""
    listed, all_of_them = counts
    assert listed[kernel] == all_of_them[kernel]
