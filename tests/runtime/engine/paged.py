"""An engine whose model's next token depends on what is really stored on the pages.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.step_inputs import Moves, StepInputs

VOCAB = 50


def key_of(token: int, before: list[int | None], window: int | None) -> int:
    """Return what is cached for a token: like a real key, it depends on all earlier tokens."""
    seen = before if window is None else before[max(0, len(before) - window + 1) :]
    assert None not in seen
    return hash((token, *seen))


def keys_of(tokens: list[int], window: int | None = None) -> list[int]:
    keys: list[int] = []
    for token in tokens:
        keys.append(key_of(token, keys, window))
    return keys


@dataclass
class Pages:
    """A model with its cache, which holds one number per token in place of key and value.

    Like a rank, it keeps the block tables and is told their changes. Rows of ``choices`` are its
    logits.
    """

    size: int
    window: int | None = None
    device: dict[int, list[int | None]] = field(default_factory=dict)
    host: dict[int, list[int | None]] = field(default_factory=dict)
    steps: list[StepInputs] = field(default_factory=list)
    tables: dict[int, dict[int, int]] = field(default_factory=dict)
    choices: torch.Tensor = field(default_factory=lambda: torch.eye(VOCAB))

    def __call__(self, inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        self.steps.append(inputs)
        assert inputs.num_sampled == (0 if sampled is None else len(sampled))
        tokens = inputs.input_ids
        if sampled is not None:
            tokens = sampled[tokens].tolist()
        assert inputs.max_query_len == max(b - a for a, b in pairwise(inputs.query_start_loc))
        moves = inputs.pages or Moves()
        for source, target in moves.swapped_out:
            self.host[target] = list(self.device[source])
        for source, target in moves.copied:
            self.device[target] = list(self.device[source])
        for source, target in moves.swapped_in:
            self.device[target] = list(self.host[source])
        assert len(set(inputs.slot_mapping)) == len(inputs.slot_mapping), (
            "two tokens share a cache slot"
        )
        for row, first, pages in inputs.new_pages:
            self.tables.setdefault(row, {}).update(enumerate(pages, start=first))
        assert len(set(inputs.table_rows)) == len(inputs.table_rows), "two sequences share a row"
        logits = torch.zeros(len(inputs.input_ids), VOCAB)
        for table, context, begin, end in zip(
            map(self.tables.__getitem__, inputs.table_rows),
            inputs.context_lens,
            inputs.query_start_loc,
            inputs.query_start_loc[1:],
            strict=False,
        ):
            for row in range(begin, end):
                position, slot = inputs.positions[row], inputs.slot_mapping[row]
                assert position == context - (end - row)
                first = 0 if self.window is None else max(0, position - self.window + 1)
                seen = range(first, position)
                before = [self.device[table[p // self.size]][p % self.size] for p in seen]
                key = key_of(tokens[row], before, None)
                page = self.device.setdefault(slot // self.size, [None] * self.size)
                page[slot % self.size] = key
                assert table[position // self.size] == slot // self.size
                logits[row] = self.choices[key % len(self.choices)]
        return logits[inputs.rows]


def expected(prompt: list[int], count: int, window: int | None = None) -> list[int]:
    tokens, keys = list(prompt), keys_of(prompt, window)
    while len(tokens) < len(prompt) + count:
        tokens.append(keys[-1] % VOCAB)
        keys.append(key_of(tokens[-1], keys, window))
    return tokens[len(prompt) :]


@dataclass
class Setup:
    """An engine with a cache so small that pages run out."""

    num_pages: int
    size: int = 4
    host_pages: int = 0
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    prefix_caching: bool = True
    window: int | None = None
    async_scheduling: bool = False
    batches: int = 1

    def __post_init__(self) -> None:
        self.pool = PagePool(self.num_pages, self.size)
        self.host = PagePool(self.host_pages, self.size)
        self.scheduler = Scheduler(
            self.pool,
            self.host,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.prefix_caching,
            self.window,
            batches=self.batches,
        )
        self.pages = Pages(self.size, self.window)
        overlapped = self.async_scheduling and self.batches == 1  # never both
        self.engine = Engine(
            self.pages, self.scheduler, VOCAB, max_model_len=1000, async_scheduling=overlapped
        )

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.engine.requests:
                break
            self.engine.step()
        assert not self.engine.requests, "requests never end"
        self.assert_all_free()

    def assert_all_free(self) -> None:
        """Check that no page has references and no sequence is scheduled."""
        assert self.pool.free_pages == self.num_pages
        assert self.host.free_pages == self.host_pages
        assert not any(self.pool.reference_count(page) for page in range(self.num_pages))
        assert not self.scheduler.running
        assert not self.scheduler.waiting


def greedy(count: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, **params)


def computed_by(setup: Setup, prompt: list[int]) -> int:
    """Return how many tokens of ``prompt`` are computed, because no cached page has them."""
    steps = len(setup.pages.steps)
    setup.engine.add("probe", prompt, greedy(1))
    setup.run()
    return sum(len(step.input_ids) for step in setup.pages.steps[steps:])
