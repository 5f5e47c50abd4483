"""Cases of attention to a paged cache of latents, as DeepSeek-V3 has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gpu.cases.attention import attention_inputs
from gpu.cases.case import BF16, E4M3, Case, Tensors, short
from vllm_module.kernels.attention.mla_attention import mla_attention, mla_attention_reference


def latent(small: bool) -> Iterator[Case]:
    """Yield decoding with the heads of one rank and of eight, and a prompt."""
    room, size = (64, (24, 8)) if small else (32768, (512, 64))
    works = {"64 x 4k": [(1, 4096)] * 64, "1 x 32k": [(1, 32768)], "prompt": [(2048, 2048)]}
    if small:
        works = {"2 x 40": [(1, 40)] * 2, "prompt": [(5, 5)]}
    first, *_, last = works.items()
    for name, lengths in works.items():
        yield latent_case(name, lengths, 2 if small else 16, *size, BF16, room)
    yield latent_case(*first, 4 if small else 128, *size, BF16, room)
    yield latent_case(*first, 2 if small else 16, *size, E4M3, room)
    yield latent_case(*last, 4 if small else 128, *size, BF16, room)


def latent_case(
    name: str,
    lengths: list[tuple[int, int]],
    heads: int,
    rank: int,
    rope: int,
    kv_dtype: torch.dtype,
    room: int,
) -> Case:
    most = max(new for new, _ in lengths)
    tokens = sum(new for new, _ in lengths)
    seen = sum(new * (context - new) + new * (new + 1) // 2 for new, context in lengths)
    size = rank + rope

    def make() -> Tensors:
        query, cache, _, *rest = attention_inputs(
            lengths, heads, 1, size, 16, BF16, kv_dtype, room
        )  # fmt: skip
        return query, cache.squeeze(2), *rest[:4]

    def attend(operation: Callable[..., Any], *inputs: Any) -> torch.Tensor:
        query, cache, tables, contexts, starts, scale = inputs
        return operation(query, cache, tables, contexts, starts, most, rank, size**-0.5, scale)

    def truth(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return attend(mla_attention_reference, query.float(), *rest)

    return Case(
        name=f"latent {name} h{heads} {rank}+{rope} kv {short(kv_dtype)}",
        make=make,
        ours=partial(attend, mla_attention),
        reference=partial(attend, mla_attention_reference),
        truth=truth,
        bucket="latent decode" if most == 1 else "latent prefill",
        moved=sum(context for _, context in lengths) * size * kv_dtype.itemsize
        + tokens * heads * (size + rank) * 2,
        flops=2 * seen * heads * (size + rank),
    )
