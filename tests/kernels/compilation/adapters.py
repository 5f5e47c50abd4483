"""Products with A and B of LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compilation.launches import FP16, FP32, Cases, meta
from vllm_module.kernels.adapters.lora_expand import lora_expand_triton
from vllm_module.kernels.adapters.lora_shrink import lora_shrink_triton, parts_of


def adapted(
    tokens: int,
    slots: int = 8,
    rank: int = 16,
    outputs: tuple[int, ...] = (4096, 1024, 1024),
    inputs: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], object]:
    """Add what adapters compute to an output of several slices."""

    def launch() -> None:
        slices, output = len(outputs), sum(outputs)
        rows = meta(tokens, dtype=torch.int32)
        offsets = meta(slots + 1, dtype=torch.int32)
        a = meta(slots, slices * rank, inputs, dtype=dtype)
        parts = parts_of(tokens, slots, inputs)
        low = lora_shrink_triton(meta(tokens, inputs, dtype=dtype), a, rows, offsets, parts)
        b, scale = meta(slots, output, rank, dtype=dtype), meta(slots, slices, dtype=FP32)
        ends, y = meta(slices, dtype=torch.int32), meta(tokens, output, dtype=dtype)
        lora_expand_triton(low, b, scale, ends, rows, offsets, y)

    return launch


def adapted_heads() -> None:
    """Add what adapters compute to latents, from the features of heads: A is B, transposed."""
    slots, heads, features, latent, rank = 8, 16, 128, 512, 16
    rows = meta(64 * heads, dtype=torch.int32)
    offsets = meta(slots * heads + 1, dtype=torch.int32)
    a = meta(slots, heads, 2 * features, rank)[:, :, features:].flatten(0, 1).transpose(1, 2)
    low = lora_shrink_triton(meta(64 * heads, features), a, rows, offsets, 1)
    b, ends = meta(slots, rank, latent).transpose(1, 2), meta(1, dtype=torch.int32)
    y, scale = meta(64 * heads, latent), meta(slots, 1, dtype=FP32)
    lora_expand_triton(low, b, scale, ends, rows, meta(slots + 1, dtype=torch.int32), y)


CASES: Cases = {
    "adapters, 32 tokens": adapted(32),
    "adapters, 2048 tokens": adapted(2048),
    "adapters, 2048 tokens, rank 64": adapted(2048, rank=64),
    "adapters, 32 tokens, rank 256": adapted(32, rank=256),
    "adapters, 2048 tokens, fp16": adapted(2048, dtype=FP16),
    "adapters, 32 tokens, fp32": adapted(32, dtype=FP32),
    "adapters, 2048 tokens, fp32, rank 64": adapted(2048, rank=64, dtype=FP32),
    "adapters, one slice": adapted(32, outputs=(4096,), inputs=14336),
    "adapters of 128 experts": adapted(8192, 8 * 128, 16, (768, 768), 2048),
    "adapters of 512 experts": adapted(8192, 8 * 512, 16, (512, 512), 2048),
    "adapters of heads": adapted_heads,
    "adapters of an odd size": adapted(2048, rank=48, outputs=(2052,), inputs=2052),
    "adapters of an odd size, fp32": adapted(2048, 8, 50, (2051,), 2051, FP32),
}
