"""Pooling a batch on one rank: from token ids to pooled hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vllm_module.base.messages import shorten
from vllm_module.build.registry import blamed_on
from vllm_module.errors import UnsupportedModelError

Pooling = Literal["cls", "mean", "last"]


@dataclass
class EmbeddingInputs:
    """The numbers of a batch to pool, which one message carries to all ranks.

    Attributes:
        input_ids: tokens of all sequences, one after another.
        lengths: number of tokens of each sequence.
        pooling: ``"cls"`` for the first token's hidden state, ``"last"`` for the last one's,
            ``"mean"`` for the mean of all, ``"tokens"`` for all, ``"classes"`` for the logits of
            the model's head on the first.
        token_type_ids: one for each of ``input_ids``; empty for a model that takes none.

    """

    input_ids: list[int]
    lengths: list[int]
    pooling: Pooling | Literal["tokens", "classes"]
    token_type_ids: list[int] = field(default_factory=list)


@torch.inference_mode()
def embed(model: Any, device: torch.device, inputs: EmbeddingInputs) -> torch.Tensor:
    """Return the pooled result of each sequence, float32 ``[sequences, numbers]``.

    For ``"tokens"`` it is ``[tokens, hidden_size]``. Raises ``UnsupportedModelError`` if the model
    does not return a row for each token, and, from the original error, if a model from outside
    fails.
    """
    count = len(inputs.input_ids)
    positions = torch.cat([torch.arange(length) for length in inputs.lengths])
    ids = torch.tensor(inputs.input_ids, dtype=torch.int64, device=device)
    types = {}
    if inputs.token_type_ids:
        types["token_type_ids"] = torch.tensor(inputs.token_type_ids, device=device)
    with blamed_on(type(model)):
        hidden = model(ids, positions.to(device), inputs.lengths, **types)
    if not isinstance(hidden, torch.Tensor) or hidden.ndim != 2 or len(hidden) != count:
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward should return hidden states of shape "
            f"({count}, hidden_size), and returned {described_result(hidden)}"
        )
    if inputs.pooling == "tokens":
        return hidden.float()
    sequences = torch.split(hidden, inputs.lengths)
    if inputs.pooling == "classes":
        with blamed_on(type(model)):
            logits: torch.Tensor = model.classify(torch.stack([each[0] for each in sequences]))
        return logits.float()
    if inputs.pooling == "mean":
        return torch.stack([sequence.float().mean(0) for sequence in sequences])
    at = 0 if inputs.pooling == "cls" else -1
    return torch.stack([sequence[at].float() for sequence in sequences])


def described_result(value: object) -> str:
    """Return the shape of a tensor, or another value."""
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shorten(value)
