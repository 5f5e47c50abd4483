"""CUDA graphs of steps with prompts, on a simulated device."""

from __future__ import annotations

import logging
import runpy
from array import array
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vllm_module import vLLMModule
from vllm_module.build.model_source import build_model
from vllm_module.build.registry import config_class
from vllm_module.distributed import (
    ExpertParallelGroup,
    OwnTokens,
    SimulatedGroup,
    expert_parallel,
    run_ranks,
    tensor_parallel,
)
from vllm_module.hf_config import parse_config
from vllm_module.layers import AttentionMetadata
from vllm_module.runtime import warm_up
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.step_inputs import StepInputs
from vllm_module.runtime.warm_up import captured_sizes
from vllm_module.testing.checkpoints import random_weights

CPU = torch.device("cpu")
PAGE, PAGES, HOST_PAGES = 4, 14, 6
SEQUENCES, TOKENS, MOST_PAGES = 4, 24, 9
GRAPHS = [16, 20]  # numbers of tokens; steps of 21 to 24 run without

# runpy, because pytest's importlib mode has no imports between test files.
_simulated = runpy.run_path(str(Path(__file__).with_name("simulated_device.py")))
DEVICE, SimulatedDevice = _simulated["DEVICE"], _simulated["SimulatedDevice"]
CONFIGS: dict[str, dict[str, Any]] = runpy.run_path(
    str(Path(__file__).parents[1] / "models/configurations.py")
)["CONFIGS"]
KINDS = ("qwen3-moe", "gpt-oss", "deepseek-v3", "gemma2")


class Both:
    """A model on a CPU, without graphs, and the same on a device, with graphs.

    Called with a step, it runs it on both, compares logits and caches, and returns the CPU's.

    Attributes:
        replayed: for each step, the number of tokens of its graph; ``None`` for a step without one,
            and for one that only decodes.

    """

    def __init__(
        self, model: vLLMModule, group: Any = None, shared: tuple[vLLMModule, Any] | None = None
    ) -> None:
        self.device = SimulatedDevice()
        copied, own_tokens = (deepcopy(model), None) if shared is None else shared
        self.present = self.device.present
        if group is not None:  # one of several ranks, each a thread
            self.present = self.device.taking_part
            for module in copied.modules():
                if own_tokens is not None and hasattr(module, "expert_group"):
                    module.expert_group = ExpertParallelGroup(group, own_tokens)
                elif own_tokens is None and hasattr(module, "tp_group"):
                    module.tp_group = group
        self.plain = ModelRunner(model, CPU, SEQUENCES, MOST_PAGES)
        self.cache = KVCache(model, PAGES, PAGE, CPU, torch.float32, HOST_PAGES)
        with self.present():
            self.device.take(copied)
            theirs = KVCache(copied, PAGES, PAGE, DEVICE, torch.float32)
            self.graphs = ModelRunner(copied, DEVICE, SEQUENCES, MOST_PAGES, own_tokens=own_tokens)
            self.graphs.capture(TOKENS)
        self.stored: Any = SimpleNamespace(
            _caches=[each.memory for each in theirs._caches],
            _host_caches=[each.clone() for each in self.cache._host_caches],
        )
        self.replayed: list[int | None] = []

    def __call__(self, inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        if inputs.pages is not None:
            self.cache.move(inputs.pages)
            KVCache.move(self.stored, inputs.pages)
        expected = self.plain.run(inputs, sampled)
        prompts = inputs.max_query_len > 1
        if inputs.engines_step is not None:
            prompts = not inputs.engines_step[1]
        self.replayed.append(self.graphs._graph_size(inputs, (False, False)) if prompts else None)
        with self.present():
            if sampled is not None:
                sampled = type(self.graphs._tables)(sampled)
            got = self.graphs.run(inputs, sampled).memory
        if self.replayed[-1] is not None:
            hidden = self.graphs._hidden.memory  # type: ignore[union-attr]
            assert hidden[: self.replayed[-1]].isfinite().all(), "padding may reach other rows"
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        for ours, theirs in zip(self.stored._caches, self.cache._caches, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        return expected


def built(kind: str) -> vLLMModule:
    """Return a model of an architecture of the tests, with random weights."""
    entries = AutoConfig.for_model(**CONFIGS[kind]).to_diff_dict() | {"vocab_size": 130}
    entries["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[entries["model_type"]]]
    config = parse_config(config_class(entries["architectures"]), entries, Path("config.json"))
    model = build_model(config, torch.float32, CPU)
    model.load_weights(random_weights(model.expected_weights()))
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def sizes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_up, "MOST_TOKENS", GRAPHS[-1])
        yield


@pytest.fixture(scope="module")
def both(model: vLLMModule) -> Iterator[Both]:
    made = Both(deepcopy(model))
    yield made
    made.cache.close()


@pytest.fixture(scope="module", params=KINDS)
def of_kind(request: pytest.FixtureRequest) -> Both:
    return Both(built(request.param))


@torch.inference_mode()
def serve(
    both: Both,
    asked: list[tuple[list[int], SamplingParams, int]],
    host_pages: int = 0,
    overlapped: bool = False,
) -> None:
    """Serve requests, each some steps after the one before it, and compare every step."""
    for caches in (both.cache, both.stored):
        for cache in caches._caches:
            cache.zero_()
    scheduler = Scheduler(PagePool(PAGES, PAGE), PagePool(host_pages, PAGE), SEQUENCES, TOKENS)
    engine = Engine(
        both, scheduler, 130, PAGE * MOST_PAGES, repeatable=False, async_scheduling=overlapped
    )
    requests = []
    for index, (prompt, params, steps) in enumerate(asked):
        requests.append(engine.add(str(index), prompt, params))
        for _ in range(steps):
            engine.step()
    while engine.requests:
        engine.step()
    assert [request.error for request in requests] == [None] * len(asked)


prompts = st.lists(st.integers(0, 129), min_size=1, max_size=30)
params = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    max_tokens=st.integers(1, 6),
    n=st.sampled_from([1, 1, 2]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
)
requests = st.lists(st.tuples(prompts, params, st.integers(0, 2)), min_size=1, max_size=5)


@given(requests, st.sampled_from([0, HOST_PAGES]), st.booleans())
@settings(max_examples=15)
def test_every_step_of_a_schedule_gives_the_logits_of_one_without_graphs(
    both: Both, asked: Any, host_pages: int, overlapped: bool
) -> None:
    """Prompts, chunks, mixed and preempted batches: logits, and what is stored, are equal."""
    serve(both, asked, host_pages, overlapped)


REQUESTS = [
    (list(range(13)), SamplingParams(temperature=0, max_tokens=2), 1),
    ([7, 9], SamplingParams(temperature=0, max_tokens=3), 1),  # 3 tokens with the one that decodes
    (list(range(40, 57)), SamplingParams(temperature=0, max_tokens=3), 1),  # 18
    (list(range(60, 82)), SamplingParams(temperature=0, max_tokens=3), 0),  # 24
]


def test_a_step_with_prompts_is_one_graph(both: Both) -> None:
    """Beside it the host launches a copy for each step, and the logits of chosen rows."""
    graphs = both.graphs._graphs.values()
    both.device.operators.clear()
    before = sum(graph.replays for graph in graphs)
    serve(both, REQUESTS[:1])
    assert sum(graph.replays for graph in graphs) == before + 2  # and a step that decodes
    launched = dict(both.device.operators)
    for view in ("slice", "view"):
        del launched[view]
    assert launched == {"copy_": 2, "index_copy_": 1, "index": 1, "linear": 1}


def test_every_kind_of_model(of_kind: Both) -> None:
    """With experts, sinks, latent attention, soft caps and windows, whatever the padding."""
    serve(of_kind, REQUESTS)
    assert of_kind.replayed[:4] == [16, 16, 20, None]
    of_kind.cache.close()


_library = torch.library.Library("graphs_of_ranks", "DEF")
_library.define("all_reduce(Tensor x, int rank, int size) -> Tensor")
_library.define("all_gather(Tensor x, int dim, int rank, int size) -> Tensor")
_library.impl(
    "all_reduce",
    lambda x, rank, size: SimulatedGroup(rank, size).all_reduce(x).clone(),
    "CompositeExplicitAutograd",
)
_library.impl(
    "all_gather",
    lambda x, dim, rank, size: SimulatedGroup(rank, size).all_gather(x, dim).clone(),
    "CompositeExplicitAutograd",
)


class Captured:
    """A group whose collectives a graph captures: each is one operator."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.ops.graphs_of_ranks.all_reduce(tensor, self.rank, self.size)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.ops.graphs_of_ranks.all_gather(tensor, dim, self.rank, self.size)


@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v3"])
def test_ranks_replay_together(kind: str) -> None:
    """Both ranks take the same graphs, whose collectives add up what the ranks compute."""

    def rank(number: int) -> list[int | None]:
        each = Both(built(kind), Captured(number, 2))
        serve(each, REQUESTS)
        each.cache.close()
        return each.replayed

    with SimulatedDevice().present():
        first, second = run_ranks(2, rank)
    assert first == second
    assert first[:4] == [16, 16, 20, None]


class Engines(Both):
    """One of two engines that share experts, beside one that has them all."""

    def __init__(self, kind: str, rank: int) -> None:
        group = Captured(rank, 2)
        with tensor_parallel(rank=0, size=1):
            whole = built(kind)
            with expert_parallel(rank=rank, size=2):
                part = built(kind)
        super().__init__(whole, group, (part, OwnTokens(group)))
        self.others = SimulatedGroup(rank, 2)

    def __call__(self, inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        told = torch.tensor([[len(inputs.input_ids), inputs.max_query_len == 1]])
        counts, decode = self.others.all_gather(told, 0).T
        inputs.engines_step = max(1, int(counts.max())), bool(decode.all())
        self.goes_on = bool(counts.any())
        return super().__call__(inputs, sampled) if self.goes_on else torch.empty(0)


@pytest.mark.parametrize("kind", ["qwen3-moe", "deepseek-v3"])
def test_engines_that_share_experts_replay_together(kind: str) -> None:
    """Whatever tokens each has, all replay the graph for the most, also without any."""
    asked = [REQUESTS[:2], [*REQUESTS[2:], (list(range(90, 93)), REQUESTS[3][1], 0)]]

    def engine(rank: int) -> list[int | None]:
        each = Engines(kind, rank)
        serve(each, asked[rank])
        while each.goes_on:
            each(StepInputs.nothing())
        each.cache.close()
        return each.replayed

    with SimulatedDevice().present():
        first, second = run_ranks(2, engine)
    assert first == second
    assert first[:2] == [20, None]  # of 13 and 18 tokens, and of 3 and 24
    assert len(first) > 4
    assert first[-1] is None  # only decoding


def test_sizes_are_few_and_waste_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of more than 64 tokens, at most a fifth is padding, or less than 64 tokens."""
    monkeypatch.setattr(warm_up, "MOST_TOKENS", 2048)
    sizes = captured_sizes(8192)
    assert sizes == captured_sizes(2048) == sorted(set(sizes))
    assert (sizes[:3], sizes[-1], len(sizes)) == ([16, 32, 64], 2048, 18)
    for tokens in range(65, 2049):
        padded = next(size for size in sizes if size >= tokens)
        assert padded - tokens < max(64, padded / 5)
    assert captured_sizes(100) == [16, 32, 64, 100]
    assert [captured_sizes(most) for most in (0, 1, 16, 17)] == [[], [1], [16], [16, 17]]


def faulty_parts(change: Callable[[list[Any], StepInputs], None]) -> Any:
    def parts(self: ModelRunner, inputs: StepInputs, tokens: int, *others: Any) -> Any:
        made = PARTS(self, inputs, tokens, *others)
        if len(made[0]) > len(inputs.input_ids) > 0:
            change(made, inputs)
        return made

    return parts


def stored_padding(parts: list[Any], inputs: StepInputs) -> None:
    parts[2] = array("q", [max(slot, 0) for slot in parts[2]])


def one_more_token(parts: list[Any], inputs: StepInputs) -> None:
    """The last sequence has a token of padding."""
    parts[4][len(inputs.context_lens)] += 1


def shifted_sequences(parts: list[Any], inputs: StepInputs) -> None:
    parts[6] = array("q", [*parts[6][1:], parts[6][0]])


def zero_tokens(self: ModelRunner, kind: Any, step: list[torch.Tensor], slots: Any) -> Any:
    """A graph of a prompt reads tokens that no step writes."""
    return COMPUTE(self, kind, step if kind[1] else [step[0] * 0, *step[1:]], slots)


def no_tables(self: ModelRunner, step: Any, longest: int, *rest: Any) -> Any:
    made = METADATA(self, step, longest, *rest)
    if rest or longest == 1:
        return made
    return replace(made, block_tables=made.block_tables * 0)


PARTS, METADATA, COMPUTE = ModelRunner._parts, ModelRunner._metadata, ModelRunner._compute
IN_A_STEP: dict[str, Any] = {
    "padding that is stored": faulty_parts(stored_padding),
    "a token of padding in a sequence": faulty_parts(one_more_token),
    "rows of other sequences": faulty_parts(shifted_sequences),
}
IN_A_CAPTURE: dict[str, tuple[str, Any]] = {
    "a stale input": ("_compute", zero_tokens),
    "tables of the first page": ("_metadata", no_tables),
}


@pytest.mark.parametrize("fault", IN_A_STEP.values(), ids=IN_A_STEP)
def test_faults_of_a_step_are_found(
    both: Both, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compares steps sees wrong padding and wrong rows."""
    serve(both, REQUESTS)
    monkeypatch.setattr(ModelRunner, "_parts", fault)
    with pytest.raises(Exception, match=r"not close|other rows|query_start_loc"):
        serve(both, REQUESTS)
    monkeypatch.undo()
    serve(both, REQUESTS)


@pytest.mark.parametrize(("name", "fault"), IN_A_CAPTURE.values(), ids=IN_A_CAPTURE)
def test_faults_of_a_capture_are_found(
    model: vLLMModule, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph keeps of its capture is seen in the next steps."""
    monkeypatch.setattr(ModelRunner, name, fault)
    with pytest.raises(Exception, match="not close"):
        serve(Both(deepcopy(model)), REQUESTS)


def test_a_graph_reads_no_memory_that_is_given_up(
    model: vLLMModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the settings of its first tokens were: a GPU then read what other tensors stored there."""

    def capture(self: ModelRunner, *arguments: Any) -> None:
        CAPTURE(self, *arguments)
        del self._plain

    monkeypatch.setattr(ModelRunner, "capture", capture)
    with pytest.raises(AssertionError, match=r"draw_tokens.* given up after the capture"):
        serve(Both(deepcopy(model)), REQUESTS)


CAPTURE = ModelRunner.capture


class Own:
    """A model of a user's: it calls attention as it likes, of 2 features for each token."""

    def __init__(self, body: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        self.body = body

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, metadata: Any) -> torch.Tensor:
        return self.body(torch.stack((ids, positions), 1).float(), metadata)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def slots(x: torch.Tensor, metadata: AttentionMetadata, by: float = 1.0) -> torch.Tensor:
    """Stand for attention: what depends on the layout, and zeros for padding."""
    slot_mapping = metadata.slot_mapping.unsqueeze(1)
    return (x + by * slot_mapping) * (slot_mapping >= 0)


def twice(x: torch.Tensor, metadata: Any) -> torch.Tensor:
    first = slots(x, metadata)
    return first + 10 * slots(first, metadata, by=2.0) + 100 * slots(x * 2, metadata)


def in_place(x: torch.Tensor, metadata: Any) -> torch.Tensor:
    """What attention writes to its argument is read afterwards, as rotated keys may be."""
    x = x + 1
    return x.add_(metadata.slot_mapping.unsqueeze(1)) + 10 * x


BODIES = {
    "twice": twice,
    "written": in_place,
    "never": lambda x, metadata: x * 2,
    "if": lambda x, metadata: slots(x, metadata) if len(x) > 9 else x,
}


def step(tokens: int) -> StepInputs:
    """Return a prompt of so many tokens, on cache slots that are not its positions."""
    places = list(range(tokens))
    return StepInputs(
        places, places, [7 + each for each in places], [tokens], [0, tokens], [0], [(0, 0, [1])],
        1, places, tokens,
    )  # fmt: skip


def runs(body: Any) -> tuple[Any, Any, Any]:
    """Return a runner on a CPU, and one with graphs on a device."""
    device = SimulatedDevice()
    plain = ModelRunner(Own(body), CPU, 2, 1)  # type: ignore[arg-type]
    with device.present():
        graphs = ModelRunner(Own(body), DEVICE, 2, 1)  # type: ignore[arg-type]
        graphs.capture(40)
    return plain, graphs, device


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_model_may_call_attention_as_it_likes(body: Any) -> None:
    """Twice in a row, never or under a condition; and results are kept while they are needed."""
    plain, graphs, device = runs(body)
    assert graphs._sizes[False] == GRAPHS
    for tokens in (11, 20, 16, 2, 17):
        with device.present():
            got = graphs.run(step(tokens)).memory
        if body is BODIES["if"] and tokens < 9:
            continue  # a graph of 16 tokens has taken the other way
        assert torch.equal(got, plain.run(step(tokens)))


def test_a_graph_is_of_prompts_of_any_length() -> None:
    """One sequence may have all of its tokens: kernels of prompts are launched, and for as many."""
    seen = []

    def body(x: torch.Tensor, metadata: Any) -> torch.Tensor:
        seen.append((len(x), len(metadata.context_lens), metadata.max_query_len))
        return slots(x, metadata)

    runs(body)
    assert seen[::2] == seen[1::2] == [(20, 2, 20), (16, 2, 16), (2, 2, 1), (1, 1, 1)]


def test_a_model_that_reads_numbers_runs_prompts_without(caplog: pytest.LogCaptureFixture) -> None:
    """A graph would keep them, and a capture refuses it: the log says why."""

    def body(x: torch.Tensor, metadata: Any) -> torch.Tensor:
        if metadata.max_query_len > 1:
            x = x * max(metadata.query_start_loc.tolist())
        return slots(x, metadata)

    with caplog.at_level(logging.WARNING):
        plain, graphs, device = runs(body)
    assert "steps with prompts: no CUDA graphs, because of " in caplog.text
    assert "tolist waits for the device" in caplog.text
    with device.present():
        assert torch.equal(graphs.run(step(9)).memory, plain.run(step(9)))
    assert graphs._sizes == {True: [1, 2], False: []}, "steps that only decode replay graphs"


def test_what_fails_in_a_capture_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """In the run before a capture, and in the capture of decoding; and the log has advice."""
    device = SimulatedDevice()

    def body(x: torch.Tensor, metadata: Any) -> torch.Tensor:
        if device.calls is not None:
            raise IndexError("of the model")
        return slots(x, metadata)

    with device.present():
        runner = ModelRunner(Own(body), DEVICE, 2, 1)  # type: ignore[arg-type]
        with pytest.raises(Exception, match="of the model"):
            runner.capture(40)
        assert device.calls is None
        assert "enforce_eager=True does without" in caplog.text
        wrong = ModelRunner(Own(lambda x, metadata: x[1:]), DEVICE, 2, 1)  # type: ignore[arg-type]
        with pytest.raises(Exception, match=r"should return hidden states of shape \(20, hidden"):
            wrong.capture(40)


@torch.inference_mode()
def test_new_weights_are_those_of_the_next_replay(both: Both) -> None:
    """Graphs read the memory of parameters, which an update keeps."""
    models = both.plain.model.modules(), both.graphs.model.modules()
    pairs = [
        (tensor.data, theirs._parameters[name].memory)
        for ours, theirs in zip(*models, strict=True)
        for name, tensor in ours._parameters.items()
        if tensor is not None
    ]
    before = [tensor.clone() for tensor, _ in pairs]
    try:
        for tensor, copied in pairs:
            copied.copy_(tensor.mul_(1.1))
        serve(both, REQUESTS)
    finally:
        for old, both_of_it in zip(before, pairs, strict=True):
            for tensor in both_of_it:
                tensor.copy_(old)
    assert len(pairs) > 10


def test_a_compiled_model_has_no_graphs_of_prompts() -> None:
    """torch.compile would compile a model for each number of tokens."""
    with SimulatedDevice().present():
        runner = ModelRunner(Own(BODIES["never"]), DEVICE, 2, 1)  # type: ignore[arg-type]
        runner._compiled = True
        runner.capture(40)
    assert runner._sizes == {True: [1, 2], False: []}
