"""Cases of drawing tokens, beside torch's sorted ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from gpu.cases.case import BF16, FP32, Case, Peer, Tensors, short
from vllm_module.kernels.rows.adjust_logits import (
    adjust_logits,
    adjust_logits_reference,
    count_tokens,
    count_tokens_reference,
)
from vllm_module.kernels.rows.draw_tokens import draw_tokens, draw_tokens_reference
from vllm_module.kernels.rows.token_logprobs import token_logprobs, token_logprobs_reference

SETTINGS = {  # temperature, min_p, top_k, top_p
    "greedy": (0.0, 0.0, 0, 1.0),
    "temperature": (0.8, 0.0, 0, 1.0),
    "top_k": (1.0, 0.0, 50, 1.0),
    "top_p": (1.0, 0.0, 0, 0.9),
    "top_k and top_p": (1.0, 0.02, 50, 0.9),
}


def inputs(count: int, vocab: int, dtype: torch.dtype, chosen: tuple[float, ...]) -> Tensors:
    logits = (torch.randn(count, vocab) * 3).to(dtype)
    same = torch.tensor(chosen, dtype=torch.float64).expand(count, 4)
    settings = torch.cat([same, torch.rand(count, 1, dtype=torch.float64)], 1)
    return logits, torch.arange(count), settings


def sorted_draw(logits: torch.Tensor, rows: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
    """Draw from sorted probabilities in float32, as is common; other tokens than ours."""
    temperature, _, top_k, top_p, _ = settings.float().unbind(1)
    x, ids = (logits.float() / temperature.clamp(min=1e-3)[:, None]).sort(-1, descending=True)
    places = torch.arange(x.shape[1], device=x.device)
    x = x.masked_fill((top_k > 0)[:, None] & (places >= top_k[:, None]), -torch.inf)
    share = x.softmax(-1)
    share = share.masked_fill(share.cumsum(-1) - share >= top_p[:, None], 0)
    return ids.gather(1, share.multinomial(1))


def penalized(count: int, vocab: int, width: int) -> Tensors:
    """Return logits of sequences of ``width`` distinct tokens, each with a new one and a bias."""
    logits = (torch.randn(count, vocab) * 3).to(BF16)
    rows = torch.arange(count)
    ids = torch.stack([torch.randperm(vocab)[:width] for _ in range(count)])
    table = torch.stack([ids, torch.randint(0, 4, ids.shape).to(ids.device)]).int()
    none = torch.full_like(rows, -1)
    counted = torch.stack([rows, ids[:, 0], none * 0, none, none], 1)
    ends = torch.stack([rows, rows + 1, rows * 0, rows * 0, none, none], 1)
    plan = torch.cat([torch.stack([rows, rows], 1), ends], 1)
    penalties = torch.tensor([1.2, 0.3, 0.1], dtype=torch.float64).expand(count, 3).contiguous()
    biases = torch.ones(count, dtype=torch.float64)
    return logits, table, counted, plan, penalties, biases, rows % vocab


def count_and_adjust(
    count: Callable[..., None], adjust: Callable[..., torch.Tensor], *given: torch.Tensor
) -> torch.Tensor:
    logits, table, counted, plan, penalties, biases, tokens = given
    table = table.clone()
    count(table, counted, tokens[:0], tokens[:0])
    return adjust(logits, plan, penalties, biases, tokens, table)


def ranked(count: int, vocab: int) -> Tensors:
    rows = torch.arange(count)
    return (torch.randn(count, vocab) * 3).to(BF16), rows, rows * 7 % vocab


def sampling(small: bool) -> Iterator[Case]:
    """Yield batches of one row and of many, in both dtypes that logits have."""
    sizes = [(3, 300)] if small else [(1, 151936), (64, 151936)]
    for count, vocab in sizes:
        width = min(vocab // 2, 1024)
        yield Case(
            name=f"adjust_logits {count} x {vocab} bf16",
            make=partial(penalized, count, vocab, width),
            ours=partial(count_and_adjust, count_tokens, adjust_logits),
            reference=partial(count_and_adjust, count_tokens_reference, adjust_logits_reference),
            bucket="sampling",
            moved=count * vocab * 6,
        )
        yield Case(
            name=f"token_logprobs 20 of {count} x {vocab} bf16",
            make=partial(ranked, count, vocab),
            ours=partial(token_logprobs, width=20),
            reference=partial(token_logprobs_reference, width=20),
            truth=partial(token_logprobs_reference, width=20),
            bucket="sampling",
            moved=count * vocab * 2,
        )
    for name, chosen in SETTINGS.items():
        for count, vocab in sizes:
            for dtype in (BF16, FP32) if name == "top_p" else (BF16,):
                searches = chosen[2] > 0, chosen[3] < 1
                yield Case(
                    name=f"draw_tokens {name} {count} x {vocab} {short(dtype)}",
                    make=partial(inputs, count, vocab, dtype, chosen),
                    ours=lambda *given, searches=searches: draw_tokens(*given, *searches),
                    reference=lambda *given, searches=searches: draw_tokens_reference(
                        *given, *searches
                    ),
                    bucket="sampling",
                    moved=count * vocab * dtype.itemsize,
                    peers={"sorted": Peer(sorted_draw, judged=False)},
                )
