"""What a step launches on a simulated device, and what it copies."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from vllm_module import LLM, SamplingParams
from vllm_module.runtime.sampling import sampler
from vllm_module.runtime.sampling.row import Row
from vllm_module.runtime.sampling.token_counts import TokenCounts

# Pytest's importlib mode has no imports between test files.
ENGINES: Any = runpy.run_path(str(Path(__file__).with_name("engines_on_device.py")))
folders, on_device, PROMPTS = (ENGINES[name] for name in ("folders", "on_device", "PROMPTS"))
SimulatedDevice = ENGINES["SimulatedDevice"]

# Operators that launch nothing.
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like",
    "expand", "lift_fresh", "new_empty", "select", "slice", "split", "split_with_sizes", "squeeze",
    "transpose", "unbind", "unfold", "unsqueeze", "view",
}  # fmt: skip
EVERYTHING = {
    "top_k": 5, "top_p": 0.9, "min_p": 0.1, "temperature": 0.7, "repetition_penalty": 1.3,
    "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {3: 5.0}, "logprobs": 4,
    "allowed_token_ids": list(range(0, 500, 3)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def interpreter_stays() -> Iterator[None]:
    """Tests replace how kernels run where a device has replaced it, which ends before they do."""
    before = GridExecutor.__call__
    yield
    GridExecutor.__call__ = before


def counted(device: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return what counts a simulated device's launches: operators, and kernels of ours."""
    launched: Counter[str] = Counter()

    def run(kernel: Any, *_: Any, **__: Any) -> None:
        launched[kernel.fn.__name__] += 1

    monkeypatch.setattr(GridExecutor, "__call__", run)
    return launched


def launches_of(device: Any, kernels: Counter[str]) -> int:
    ours = set(device.launched)
    others = {n: count for n, count in device.operators.items() if n not in VIEWS | ours}
    return sum(others.values()) + sum(kernels.values())


@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"temperature": 0}, 5),
        ({"min_p": 0.1, "temperature": 0.7}, 4),
        ({"top_k": 5}, 9),
        ({"top_p": 0.9}, 9),
        ({"top_k": 5, "top_p": 0.9}, 11),
        ({"repetition_penalty": 1.3, "frequency_penalty": 0.2}, 6),
        ({"temperature": 0, "logit_bias": {3: 5.0}}, 5),
        ({"logprobs": 4}, 9),
        ({"temperature": 0, "logprobs": 0}, 8),
        (EVERYTHING, 18),
    ],
)
def test_sampling_launches_little(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], most: int, count: int
) -> None:
    """A batch of any size takes at most 20 launches, copies included, whatever is asked.

    Half of the rows ask for nothing, and others get a token since the last step.
    """
    plain = SamplingParams(temperature=0)
    steps = [
        [
            Row(plain if row % 2 else SamplingParams(**given), range(step + 5), 3, 0.5, (), row)
            for row in range(count)
        ]
        for step in range(3)
    ]
    logits = torch.randn(count, 500).bfloat16()
    counts = TokenCounts()
    expected = [sampler.sample(logits, rows, counts).read() for rows in steps]
    device, counts = SimulatedDevice(launches=True), TokenCounts()
    with device.present():
        kernels = counted(device, monkeypatch)
        logits = logits.to("cuda")
        for rows, wanted in zip(steps, expected, strict=True):
            device.operators.clear()
            kernels.clear()
            found = sampler.sample(logits, rows, counts).read()
            assert [each.token_id for each in found] == [each.token_id for each in wanted]
            for one, other in zip(found, wanted, strict=True):
                assert (one.logprobs is None) == (other.logprobs is None)
                for token, entry in (one.logprobs or {}).items():
                    assert entry.rank == other.logprobs[token].rank
                    assert entry.logprob == pytest.approx(other.logprobs[token].logprob, abs=2e-6)
        assert launches_of(device, kernels) <= most


@pytest.mark.parametrize(
    ("in_graph", "overlapped"),
    [
        (True, False),
        (False, True),
        *(pytest.param(each, each, marks=pytest.mark.at_length) for each in (False, True)),
    ],
)
def test_a_greedy_step_is_one_graph_and_two_copies(
    folders: Any, monkeypatch: pytest.MonkeyPatch, in_graph: bool, overlapped: bool
) -> None:
    """Launches outside of the graph that the sampler would make: four less than without its tokens.

    What is left are the copy of the step's numbers and that of the tokens. A step that is launched
    early takes its tokens from the device, in two launches.
    """
    longer = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with on_device() as device:
        kernels = counted(device, monkeypatch)
        with LLM(
            folders("qwen3"), skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4,
            dtype="float32", block_size=32, device="cuda", async_scheduling=overlapped,
        ) as llm:  # fmt: skip
            if not in_graph:
                llm.engine.first_tokens = sampler.first_tokens
            for index, prompt in enumerate(PROMPTS):
                llm.engine.add(str(index), prompt, longer)
            for _ in range(3):
                llm.engine.step()
            graphs = llm.executor.worker.runner._graphs.values()
            replays = sum(graph.replays for graph in graphs)
            device.operators.clear()
            kernels.clear()
            llm.engine.step()
            assert sum(graph.replays for graph in graphs) == replays + 1
    assert launches_of(device, kernels) == 2 + 2 * overlapped + (0 if in_graph else 4)
