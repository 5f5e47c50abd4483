"""Cases of LoRA adapters: what several add to the output of one projection."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gpu.cases.case import BF16, FP16, FP32, Case, Peer, Tensors, short, writing
from vllm_module.kernels.adapters.lora_expand import lora_expand
from vllm_module.kernels.adapters.lora_shrink import lora_shrink
from vllm_module.kernels.experts.sort_by_expert import sort_by_expert

_SLOTS = 8


def adapters(small: bool) -> Iterator[Case]:
    qkv, down = ((4096, 1024, 1024), 4096), ((4096,), 14336)  # of Llama-3-8B
    if small:
        yield adapters_case(5, 4, (40, 9, 9), 48, BF16)
        yield adapters_case(70, 20, (17,), 33, FP32)
        return
    for tokens, rank, size in ((32, 16, qkv), (32, 64, down), (2048, 16, qkv), (2048, 64, down)):
        yield adapters_case(tokens, rank, *size, BF16)
    yield adapters_case(256, 16, *qkv, FP16)
    yield adapters_case(100, 16, (768, 300), 2050, FP32)


def adapters_case(
    tokens: int, rank: int, outputs: tuple[int, ...], inputs: int, dtype: torch.dtype
) -> Case:
    output, slices = sum(outputs), len(outputs)

    def make() -> Tensors:
        x = torch.randn(tokens, inputs, dtype=dtype)
        a = torch.randn(_SLOTS, slices * rank, inputs, dtype=dtype) / inputs**0.5
        b = torch.randn(_SLOTS, output, rank, dtype=dtype) / rank**0.5
        scale = torch.rand(_SLOTS, slices) + 0.5
        # In the order of tokens; a ninth of them is the base's.
        slot = torch.arange(tokens) * (_SLOTS + 1) // tokens - 1
        rows, offsets = sort_by_expert(slot.int().unsqueeze(1), 0, _SLOTS)
        ends = torch.tensor(outputs).cumsum(0).int()
        y = torch.randn(tokens, output, dtype=dtype)
        return x, a, b, scale, ends, rows, offsets, slot, y

    def ours(
        x: Any, a: Any, b: Any, scale: Any, ends: Any, rows: Any, offsets: Any, _: Any, y: Any
    ):
        lora_expand(lora_shrink(x, a, rows, offsets), b, scale, ends, rows, offsets, y)

    def plain(to: torch.dtype, x: Any, a: Any, b: Any, scale: Any, *others: Any) -> Tensors:
        *_, slot, y = others
        x, a, b, y = (each.to(to) for each in (x, a, b, y))
        for adapter in range(_SLOTS):
            own, first = (slot == adapter).nonzero().view(-1), 0
            for index, size in enumerate(outputs):
                low = x[own] @ a[adapter, index * rank : (index + 1) * rank].t()
                part = slice(first, first + size)
                added = (low @ b[adapter, part].t()) * scale[adapter, index].to(to)
                y[own, part] += added
                first += size
        return (y,)

    def sorted_by_slot(x: Any, a: Any, b: Any, scale: Any, *others: Any) -> Tensors:
        """Return what products of equally many rows of each adapter need."""
        most = -(-tokens // _SLOTS)
        given = x[torch.arange(_SLOTS * most, device=x.device) % tokens].view(_SLOTS, most, -1)
        parts = b.split(outputs, 1)
        return given, a.transpose(1, 2), [part.transpose(1, 2) for part in parts]

    def batched(x: Any, a: Any, parts: Any) -> torch.Tensor:
        low = torch.bmm(x, a)
        cut = low.split(rank, 2)
        return torch.cat([torch.bmm(*each) for each in zip(cut, parts, strict=True)], 2)

    weights = _SLOTS * rank * (slices * inputs + output)
    return Case(
        name=f"adapters {tokens} x {inputs}, rank {rank}, to {output} in {slices} {short(dtype)}",
        make=make,
        ours=writing(ours, 8),
        reference=partial(plain, dtype),
        truth=partial(plain, FP32),
        bucket=f"adapters, {'<' if tokens < 512 else '>='} 512 tokens" if dtype == BF16 else "",
        writes=True,
        moved=(weights + tokens * (inputs + 2 * output)) * dtype.itemsize,
        flops=2 * tokens * rank * (slices * inputs + output),
        # It multiplies, and neither gathers rows nor adds to the output.
        peers={"bmm": Peer(batched, sorted_by_slot, judged=False)},
    )
