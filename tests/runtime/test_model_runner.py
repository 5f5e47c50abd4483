"""Running steps: replayed graphs give the same logits, and the largest steps store nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module import vLLMModule
from vllm_module.runtime.kv_cache import KVCache
from vllm_module.runtime.model_runner import ModelRunner, StepInputs

CPU = torch.device("cpu")
PAGE, PAGES = 4, 24


class Graph:
    """A stand-in for a CUDA graph: calls the recorded model again with the same tensors."""

    recorded: Recorder

    def replay(self) -> None:
        arguments, output = self.call
        output.copy_(self.recorded.model(*arguments))

    def pool(self) -> str:
        return "pool"


class Recorder:
    """A model that remembers its last call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.compute_logits = model.compute_logits
        self.calls: list[tuple[Any, torch.Tensor]] = []

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.calls.append((arguments, self.model(*arguments)))
        return self.calls[-1][1]


@pytest.fixture(scope="module")
def cached(model: vLLMModule) -> Iterator[torch.Tensor]:
    """Return the cache of the model's layers."""
    cache = KVCache(model, PAGES, PAGE, CPU, torch.float32)
    (pages,) = cache._caches
    yield pages
    cache.close()


@pytest.fixture(scope="module")
def runners(model: vLLMModule, cached: torch.Tensor) -> tuple[ModelRunner, ModelRunner, list]:
    """Return a runner without graphs, and one with graphs of 1, 2, 4 and 8 sequences."""
    recorder = Recorder(model)
    Graph.recorded = recorder
    captured = []

    @contextmanager
    def graph(it: Graph, pool: str | None, stream: object) -> Iterator[None]:
        assert pool == ("pool" if captured else None)
        yield
        it.call = recorder.calls[-1]
        captured.append(len(it.call[0][0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", graph)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        runner = ModelRunner(recorder, CPU)  # type: ignore[arg-type]
        runner.capture(9, 5)
    recorder.calls.clear()
    return ModelRunner(model, CPU), runner, [captured, recorder.calls]


def test_the_largest_graph_is_captured_first(runners) -> None:
    *_, (captured, _) = runners
    assert captured == [8, 4, 2, 1]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare logits of up to about 20, from products with different numbers of rows."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@st.composite
def decoding(draw: st.DrawFn) -> StepInputs:
    """Draw a step of 1 to 10 decoding sequences of up to 20 tokens, without shared pages."""
    contexts = draw(st.lists(st.integers(1, 5 * PAGE), min_size=1, max_size=10))
    free = draw(st.permutations(range(PAGES)))
    tables, fits = [], []
    for context in contexts:
        needed = -(-context // PAGE)
        if len(free) >= needed:
            tables.append(free[:needed])
            free = free[needed:]
            fits.append(context)
    ids = draw(st.lists(st.integers(0, 129), min_size=len(fits), max_size=len(fits)))
    last = [context - 1 for context in fits]
    slot_mapping = [
        pages[position // PAGE] * PAGE + position % PAGE
        for pages, position in zip(tables, last, strict=True)
    ]
    rows = draw(st.lists(st.sampled_from(range(len(fits))), unique=True))
    starts = list(range(len(fits) + 1))
    return StepInputs(ids, last, slot_mapping, tables, fits, starts, rows, 1, [], [], [])


@given(st.lists(decoding(), min_size=1, max_size=4))
@settings(suppress_health_check=["function_scoped_fixture"], max_examples=30)
def test_a_replayed_graph_gives_the_logits_of_a_step_without_graphs(runners, cached, steps) -> None:
    """The logits and the cache are equal, whatever the last step left in the static tensors."""
    plain, graphs, (_, calls) = runners
    cached.normal_()
    for step in steps:
        before = cached.clone()
        expected = plain.run(step)
        stored = cached.clone()
        cached.copy_(before)
        close(graphs.run(step), expected)
        close(cached, stored)
    assert len(calls) == sum(len(step.input_ids) > 8 for step in steps)  # others were replayed
    calls.clear()


def test_prompts_are_not_replayed(runners, cached) -> None:
    """A step with a sequence of several tokens runs without a graph."""
    plain, graphs, (_, calls) = runners
    step = StepInputs(
        [5, 6, 7], [0, 1, 0], [0, 1, 4], [[0], [1]], [2, 1], [0, 2, 3], [1, 2], 2, [], [], []
    )
    expected = plain.run(step)
    close(graphs.run(step), expected)
    assert len(calls) == 1
    calls.clear()


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_the_largest_steps_store_nothing(runners, cached, tokens) -> None:
    """With more tokens than sequences and with fewer, the cache does not change."""
    before = cached.clone()
    runners[0].largest_steps(tokens, 9, 5)
    assert torch.equal(cached, before)
