"""Sampling in plain torch, and rows that ask for all of it.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import torch
from hypothesis import strategies as st

from vllm_module.runtime.sampling import sampler
from vllm_module.runtime.sampling.row import Row
from vllm_module.runtime.sampling.sampler import SampledToken
from vllm_module.runtime.sampling_params import SamplingParams

ALMOST_1 = math.nextafter(1.0, 0.0)
GREEDY = SamplingParams(temperature=0)


def sample(logits: torch.Tensor, rows: list[Row]) -> list[SampledToken]:
    """Return the tokens of rows that all have one."""
    return [token for token in sampler.sample(logits, rows).read() if token is not None]


def tokens(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    sampled = sampler.sample(logits, rows)
    ids = [token.token_id for token in sampled.read() if token is not None]
    assert ids == sampled.tokens.tolist()
    return ids


def broken(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    """Return which rows leave no token to choose."""
    sampled = sampler.sample(logits, rows)
    indices = [row for row, token in enumerate(sampled.read()) if token is None]
    on_device = sampled.tokens.tolist()
    assert [row for row, token in enumerate(on_device) if token < 0] == indices
    return indices


def shares(logits: torch.Tensor, row: Row, draws: int) -> torch.Tensor:
    """Return how many of ``draws`` evenly spaced uniforms give each token."""
    rows = [
        Row(row.params, row.token_ids, row.prompt_len, (i + 0.5) / draws, row.banned)
        for i in range(draws)
    ]
    drawn = tokens(logits.expand(draws, -1), rows)
    return torch.tensor(drawn).bincount(minlength=len(logits))


def order(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def adjust(logits: list[float], row: Row) -> list[float]:
    """Return logits after bias, penalties, bans and allowances, computed token by token."""
    x, p = list(logits), row.params
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in set(row.token_ids):
        repetition = p.repetition_penalty
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, times in Counter(row.token_ids[row.prompt_len :]).items():
        x[token] -= p.frequency_penalty * times + p.presence_penalty
    allowed = range(len(x)) if p.allowed_token_ids is None else p.allowed_token_ids
    for token in {*range(len(x))} - ({*allowed} - {*row.banned}):
        x[token] = -math.inf
    return x


def distribution(logits: list[float], row: Row) -> tuple[list[float], bool]:
    """Return each token's probability, and whether rounding cannot change which tokens have one."""
    x, p = adjust(logits, row), row.params
    first = order(x)
    if p.temperature == 0:
        return [float(token == first[0]) for token in range(len(x))], True
    part = [math.exp((value - x[first[0]]) / p.temperature) for value in x]
    edges = [value - p.min_p for value in part if p.min_p and value < 1]
    kept = [token for token in first if part[token] >= p.min_p]
    kept = kept[: p.top_k] if p.top_k > 0 else kept
    total = sum(part[token] for token in kept)
    nucleus: list[int] = []
    mass = 0.0
    for token in kept:
        if p.top_p < 1 and mass >= p.top_p:
            break
        nucleus.append(token)
        mass += part[token] / total
        edges += [mass - p.top_p] if p.top_p < 1 else []
    probabilities = [0.0] * len(x)
    for token in nucleus:
        probabilities[token] = part[token] / total / mass
    return probabilities, all(abs(edge) > 1e-9 for edge in edges)


def mixed_rows(vocab: int, count: int) -> list[Row]:
    numbers = random.Random(vocab)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7},
        {"min_p": 0.02},
        {"top_k": 5},
        {"top_k": 3000},
        {"top_p": 0.8},
        {"temperature": 5, "top_p": 0.99},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.001},
    ]
    changes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {1: 3.0}},
        {"logprobs": 3},
    ]
    return [
        Row(
            SamplingParams(**numbers.choice(kinds), **numbers.choice(changes)),
            [numbers.randrange(vocab) for _ in range(numbers.randrange(30))],
            numbers.randrange(10),
            numbers.random(),
            {0} if numbers.random() < 0.3 else (),
        )
        for _ in range(count)
    ]


HIDDEN = st.integers(0, 2**32).map(
    lambda seed: torch.randn(1, 120, generator=torch.Generator().manual_seed(seed)) * 3
)
