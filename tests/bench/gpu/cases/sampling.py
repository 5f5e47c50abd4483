"""Cases of drawing tokens, beside torch's sorted ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from gpu.cases.case import BF16, FP32, Case, Peer, Tensors, short
from vllm_module.kernels.draw_tokens import draw_tokens, draw_tokens_reference

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


def sampling(small: bool) -> Iterator[Case]:
    """Yield batches of one row and of many, in both dtypes that logits have."""
    sizes = [(3, 300)] if small else [(1, 151936), (64, 151936)]
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
