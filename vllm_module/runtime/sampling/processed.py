"""Logits of the distribution that tokens are drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_module.runtime.sampling.block_ops import batches


def processed_logits(logits: Tensor, settings: Tensor) -> Tensor:
    """Divide by temperature, and take out the tokens that ``min_p``, top_k and top_p exclude.

    What may be drawn is decided by the integer masses of
    :func:`~vllm_module.kernels.rows.draw_tokens.draw_tokens`, so a drawn token is never excluded.
    Greedy rows stay as they are, as vLLM's do.

    Args:
        logits: float32 ``[n, vocab]``, after biases, penalties and bans.
        settings: float64 ``[n, 5]``, of :func:`~vllm_module.runtime.sampling.ops.settings_array`.

    Returns:
        float32 ``[n, vocab]``; -inf for tokens that cannot be drawn.

    """
    vocab = logits.shape[1]
    parts = [
        _processed(logits[rows], settings[rows])
        for rows in batches(len(logits), vocab, logits.device)
    ]
    return torch.cat(parts) if parts else logits.new_empty(0, vocab)


def _processed(logits: Tensor, settings: Tensor) -> Tensor:
    vocab = logits.shape[1]
    temperature, min_p, top_k, top_p, _ = (each.unsqueeze(1) for each in settings.unbind(1))
    greedy = temperature == 0
    temperature = torch.where(greedy, 1.0, temperature)
    wide = logits.double()
    below = wide - wide.amax(-1, keepdim=True)
    ratio = (below / temperature).exp()
    possible = ratio >= min_p
    order = logits.argsort(dim=-1, descending=True, stable=True)
    mass = torch.where(possible, ratio, 0.0) * 2.0 ** (62 - vocab.bit_length())
    mass = mass.long().gather(1, order)
    place = torch.arange(vocab, device=logits.device)
    kept = (top_k <= 0) | (place < top_k)
    sums = torch.where(kept, mass, 0).cumsum(1)
    total = sums[:, -1:]
    needed = (total * top_p).ceil().long().clamp(min=1).minimum(total)
    kept &= (top_p >= 1) | (sums - mass < needed)
    kept = torch.empty_like(kept).scatter_(1, order, kept) & possible
    # Of the differences to the largest one, no quotient is infinite but where nothing is drawn.
    scaled = torch.where(greedy, logits, (below / temperature).float())
    return torch.where(kept | greedy, scaled, -torch.inf)
