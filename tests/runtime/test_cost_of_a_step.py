"""What a step on a CPU costs beside its arithmetic, in operators and calls, never in seconds."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_module import vLLMModule
from vllm_module.kernels.attention.paged_layout import PagedLayout
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.step_inputs import StepInputs

PAGE, PAGES = 16, 12
CPU = torch.device("cpu")


class Operators(TorchDispatchMode):
    """Counts the operators that run inside of it."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def within(module: vLLMModule, begin: Callable[[], Any], end: Callable[[], Any]) -> Iterator[None]:
    """Call ``begin`` and ``end`` before and after each forward pass of ``module``."""

    def before(*_: object) -> None:
        begin()

    def after(*_: object) -> None:
        end()

    with module.register_forward_pre_hook(before), module.register_forward_hook(after):
        yield


@pytest.fixture
def runner(model: vLLMModule) -> Iterator[ModelRunner]:
    cache = KVCache(model, PAGES, PAGE, CPU, torch.float32)
    yield ModelRunner(model, CPU, 4, 3)
    cache.close()


def decoding(contexts: list[int]) -> StepInputs:
    """Return a step of one token of each sequence, whose pages lie one after another."""
    tables = [[3 * index, 3 * index + 1, 3 * index + 2] for index in range(len(contexts))]
    slots = [
        pages[(context - 1) // PAGE] * PAGE + (context - 1) % PAGE
        for pages, context in zip(tables, contexts, strict=True)
    ]
    count = len(contexts)
    positions = [context - 1 for context in contexts]
    ids, rows = [5] * count, list(range(count))
    starts = list(range(count + 1))
    listed = [(row, 0, pages) for row, pages in enumerate(tables)]
    return StepInputs(ids, positions, slots, contexts, starts, rows, listed, 3, rows, 1)


@pytest.mark.parametrize(
    ("contexts", "operators", "calls"), [([40], 48, 221), ([40, 7, 33, 20], 62, 230)], ids=str
)
def test_operators_and_calls_of_a_layer(contexts, operators, calls, runner) -> None:
    """A layer of a step that decodes takes a bounded number of operators and of Python calls."""
    inputs, layer = decoding(contexts), runner.model.model.layers[-1]
    made: list[str] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            made.append(frame.f_code.co_name)

    mode = Operators()
    with within(layer, mode.__enter__, lambda: mode.__exit__(None, None, None)):
        runner.run(inputs)
    with within(layer, lambda: sys.setprofile(count), lambda: sys.setprofile(None)):
        runner.run(inputs)
    assert 0 < mode.count <= operators
    assert len(made) <= calls, Counter(made).most_common(12)


def test_layers_share_what_a_step_lays_out(runner, monkeypatch) -> None:
    """However many layers there are, a step divides its sequences and checks them once."""
    made = []
    divided = PagedLayout._divided

    def counted(self: PagedLayout, *args: Any) -> Any:
        made.append(args)
        return divided(self, *args)

    monkeypatch.setattr(PagedLayout, "_divided", counted)
    runner.run(decoding([40, 7, 33, 20]))
    assert len(made) == 1


def test_a_batch_gives_what_its_sequences_give_alone(runner) -> None:
    """Sequences that are decoded together get the logits that each gets by itself."""
    contexts = [40, 7, 33, 20]
    for layer in runner.model.modules():
        if getattr(layer, "kv_cache", None) is not None:
            layer.kv_cache.normal_(generator=torch.Generator().manual_seed(0))
    together = runner.run(decoding(contexts))
    for index in range(len(contexts)):
        inputs = decoding(contexts)
        for name in ("input_ids", "positions", "slot_mapping", "table_rows", "context_lens"):
            setattr(inputs, name, getattr(inputs, name)[index : index + 1])
        inputs.query_start_loc, inputs.rows = [0, 1], [0]
        torch.testing.assert_close(runner.run(inputs)[0], together[index], rtol=1e-5, atol=1e-5)


class Prepared:
    """A model that takes no time."""

    def __call__(self, ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return ids.unsqueeze(-1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), 8)


def host_work(sequences: int) -> tuple[Counter[str], StepInputs]:
    """Return the Python calls of an engine's decoding step, by file, and the step's inputs.

    The sequences have some 200 pages, and need no other page in this step.
    """
    most = 202
    runner = ModelRunner(Prepared(), CPU, sequences, most)  # type: ignore[arg-type]
    pool = PagePool(most * sequences, PAGE)
    steps: list[StepInputs] = []

    def execute(inputs: StepInputs) -> torch.Tensor:
        steps.append(inputs)
        return runner.run(inputs)

    engine = Engine(execute, Scheduler(pool, PagePool(0, PAGE), sequences, 1 << 20), 8, 1 << 20)
    for index in range(sequences):
        prompt = [index % 8] * (200 * PAGE)
        engine.add(str(index), prompt, SamplingParams(temperature=0, max_tokens=64))
    for _ in range(3):
        engine.step()
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[Path(frame.f_code.co_filename).stem] += 1

    sys.setprofile(count)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return calls, steps[-1]


def test_host_work_of_a_step_that_adds_no_page() -> None:
    """No call of scheduler or runner is made for each sequence, and no entry of a table written."""
    (few, _), (many, inputs) = host_work(4), host_work(16)
    for file in ("scheduler", "page_pool", "step_inputs", "model_runner", "transfers", "sequence"):
        assert many[file] == few[file] <= 12, file
    assert many["stopping"] == 16  # one for each token
    assert many["engine"] - few["engine"] <= 2 * 12
    assert inputs.new_pages == []
    assert len(pickle.dumps(inputs)) < 600 + 32 * 16  # what travels to another rank
