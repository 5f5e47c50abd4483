"""Cases of products with four-bit weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F

from gpu.cases.case import BF16, FP32, Case, Peer, Tensors, short
from gpu.cases.matmul import PREFILL
from vllm_module.kernels.matmul.packed_matmul import packed_matmul
from vllm_module.kernels.matmul.packed_words import Packing, dequantize_packed, unpack

# How codes lie in words, and the inputs of a group.
WAYS = {
    "rows": (Packing(4), 128),
    "gptq": (Packing(4), 128),
    "awq": (Packing(4, 0, (0, 4, 1, 5, 2, 6, 3, 7)), 128),
    "nf4": (Packing(4, 1, (1, 0)), 64),
    "unordered": (Packing(4), 128),
    "gptq 8 bits": (Packing(8), 128),
    "gptq 3 bits": (Packing(3), 128),
}
TIMED = ("rows", "gptq", "awq", "nf4")


def packed_products(small: bool) -> Iterator[Case]:
    size, tokens = (28672, 4096), (1, 64, 512, 8192)  # of an 8B model
    if small:
        size, tokens = (96, 256), (5,)
    for way in WAYS:
        if way not in TIMED:
            yield packed_case(way, 17, *size, timed=False)
    for way, m in product(TIMED, tokens):
        yield packed_case(way, m, *size, timed=True)


def packed_case(way: str, m: int, n: int, k: int, timed: bool) -> Case:
    packing, group = WAYS[way]
    groups = k // group

    def make() -> Tensors:
        x = torch.randn(m, k, dtype=BF16)
        scales = (torch.rand(n, groups) + 0.5).to(BF16) / k**0.5
        zeros, group_of, codebook = None, None, None
        if way == "nf4":
            words = torch.randint(256, (n, k // 2), dtype=torch.uint8)
            scales, codebook = scales.float(), torch.linspace(-1, 1, 16)
        else:
            few = (n, k * packing.bits // 32) if packing.along else (n * packing.bits // 32, k)
            words = torch.randint(-(2**31), 2**31 - 1, few, dtype=torch.int32)
        if way not in ("rows", "nf4"):  # stored transposed, and with zeros
            words, scales = words.t().contiguous().t(), scales.t().contiguous().t()
            zeros = torch.randint(1 << packing.bits, (n, groups), dtype=torch.uint8)
        if way == "unordered":
            group_of = (torch.randperm(k) // group).int()
        return x, words, scales, zeros, group_of, codebook

    def ours(x: Any, words: Any, scales: Any, zeros: Any, group_of: Any, codebook: Any) -> Any:
        return packed_matmul(
            x, words, scales, packing, group, zeros=zeros, group_of=group_of, codebook=codebook
        )

    def widened(dtype: torch.dtype, x: Any, words: Any, scales: Any, *options: Any) -> Tensors:
        return x.to(dtype), dequantize_packed(words, scales, packing, group, dtype, *options)

    def exactly(dtype: torch.dtype, *inputs: Any) -> torch.Tensor:
        return F.linear(*widened(dtype, *inputs))

    def in_torch(x: Any, words: Any, scales: Any, *_: Any) -> Tensors:
        codes = unpack(words, packing)
        both = torch.stack((scales, torch.zeros_like(scales)), -1).transpose(0, 1).contiguous()
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        return x, torch.ops.aten._convert_weight_to_int4pack(pairs, 8), both

    def int4(x: Any, weight: Any, both: Any) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, weight, group, both)

    peers = {"bf16 linear": Peer(F.linear, partial(widened, BF16))} if timed else {}
    if way == "rows" and timed:
        peers["_weight_int4pack_mm"] = Peer(int4, in_torch)
    of_a_group = 4 if way == "nf4" else 2 if way == "rows" else 3  # bytes: a scale, and a zero
    return Case(
        name=f"packed {way} {m} x {n} x {k} {short(BF16)}",
        make=make,
        ours=ours,
        reference=partial(exactly, BF16),
        truth=partial(exactly, FP32),
        bucket=f"packed {way}, {'<' if m < PREFILL else '>='} {PREFILL} tokens" if timed else "",
        moved=n * k * packing.bits // 8 + of_a_group * n * groups + 2 * (m * k + m * n),
        flops=2 * m * n * k,
        peers=peers,
    )
