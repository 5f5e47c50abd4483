"""Every architecture against transformers: the same logits and the same greedy tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_module.distributed import run_ranks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_and_greedy_tokens_are_those_of_transformers(
    checkpoint: Any, compute: Any, size: int
) -> None:
    """At any size, every rank computes transformers' logits and its 64 greedy tokens."""
    ranks = run_ranks(
        size, lambda rank: compute(checkpoint.folder, *checkpoint.reference.job)
    )
    checkpoint.reference.check(ranks[0])
    for other in ranks[1:]:
        assert torch.equal(other["step_logits"], ranks[0]["step_logits"])
        assert other["tokens"] == ranks[0]["tokens"]
