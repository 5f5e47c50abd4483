"""Graphs of what is between attention layers, for steps with prompts."""

from __future__ import annotations

import logging
import runpy
from array import array
from collections.abc import Callable, Iterator
from copy import deepcopy
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
from vllm_module.distributed import SimulatedGroup, run_ranks
from vllm_module.hf_config import parse_config
from vllm_module.layers import AttentionMetadata
from vllm_module.runtime import pieces
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.pieces import Pieces, alias, captured_sizes
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.step_inputs import StepInputs
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
    """A model on a CPU, without graphs, and the same on a device, with graphs in pieces.

    Called with a step, it runs it on both, compares logits and caches, and returns the CPU's.

    Attributes:
        replayed: for each step, the number of tokens of its graphs; ``None`` without.

    """

    def __init__(self, model: vLLMModule, group: Any = None) -> None:
        self.device, copied = SimulatedDevice(), deepcopy(model)
        self.present = self.device.present
        if group is not None:  # one of several ranks, each a thread
            self.present = self.device.taking_part
            for module in copied.modules():
                if hasattr(module, "tp_group"):
                    module.tp_group = group
        self.plain = ModelRunner(model, CPU, SEQUENCES, MOST_PAGES)
        self.cache = KVCache(model, PAGES, PAGE, CPU, torch.float32, HOST_PAGES)
        with self.present():
            self.device.take(copied)
            theirs = KVCache(copied, PAGES, PAGE, DEVICE, torch.float32)
            self.graphs = ModelRunner(copied, DEVICE, SEQUENCES, MOST_PAGES)
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
        self.replayed.append(None)
        with self.present(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.graphs._pieces, "run", self._run)
            if sampled is not None:
                sampled = type(self.graphs._tables)(sampled)
            got = self.graphs.run(inputs, sampled).memory
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        for ours, theirs in zip(self.stored._caches, self.cache._caches, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        return expected

    def _run(self, ids: Any, *others: Any) -> Any:
        self.replayed[-1] = len(ids)
        hidden = Pieces.run(self.graphs._pieces, ids, *others)
        assert hidden.memory.isfinite().all(), "padding may reach other rows"
        return hidden


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
        patch.setattr(pieces, "MOST_TOKENS", GRAPHS[-1])
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


def test_every_kind_of_model(of_kind: Both) -> None:
    """With experts, sinks, latent attention, soft caps and windows, whatever the padding."""
    serve(of_kind, REQUESTS)
    assert of_kind.replayed[:4] == [16, 16, 20, None]
    of_kind.cache.close()


_library = torch.library.Library("pieces_of_ranks", "DEF")
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
        return torch.ops.pieces_of_ranks.all_reduce(tensor, self.rank, self.size)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.ops.pieces_of_ranks.all_gather(tensor, dim, self.rank, self.size)


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


def test_sizes_are_few_and_waste_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are 16, 32 and multiples of 64 up to 512, or up to the most tokens of a step."""
    monkeypatch.setattr(pieces, "MOST_TOKENS", 512)
    assert captured_sizes(8192) == captured_sizes(512) == [16, 32, *range(64, 513, 64)]
    assert captured_sizes(100) == [16, 32, 64, 100]
    assert [captured_sizes(most) for most in (0, 1, 16, 17)] == [[], [1], [16], [16, 17]]
    made = Pieces(CPU, captured_sizes(100))
    assert [made.size_for(tokens) for tokens in (1, 16, 17, 100, 101)] == [16, 16, 32, 100, None]
    assert Pieces(CPU, []).size_for(1) is None


def test_an_alias_shares_memory_and_does_not_keep_it() -> None:
    """Of any view, it has the address, shape, strides and numbers, and another storage."""
    whole = torch.arange(24.0).to(torch.bfloat16).view(4, 6)
    for view in (whole, whole[1:, 2:5], whole.t(), whole[2], whole[:0], whole.view(2, 2, 6)[:, 1]):
        same = alias(view)
        assert torch.equal(same, view)
        assert (same.data_ptr(), same.stride(), same.dtype) == (
            view.data_ptr(), view.stride(), view.dtype,
        )  # fmt: skip
        same += 1
        assert torch.equal(same, view)
        assert same.untyped_storage()._cdata != view.untyped_storage()._cdata


def stale_input(self: Pieces, ids: Any, positions: Any, metadata: Any) -> Any:
    return RUN(self, torch.zeros_like(ids), positions, metadata)


def wrong_size(self: Pieces, ids: Any, positions: Any, metadata: Any) -> Any:
    (other,) = {*GRAPHS} - {len(ids)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(self._captured, len(ids), self._captured[other])
        return RUN(self, ids, positions, metadata)


def not_cleared(call: Any, metadata: AttentionMetadata) -> None:
    result = call.function(*call.tensors, metadata, **call.others)
    used = int(metadata.query_start_loc.memory[-1])  # type: ignore[attr-defined]
    call.output[:used].copy_(result[:used])


def a_call_too_late(call: Any, metadata: AttentionMetadata) -> None:
    """The result of a call is seen by the next step only."""
    result = call.function(*call.tensors, metadata, **call.others)
    call.output.copy_(vars(call).get("last", result))
    vars(call)["last"] = result


def stored_padding(self: ModelRunner, inputs: StepInputs, padding: int, sequences: int) -> Any:
    parts = PARTS(self, inputs, padding, sequences)
    parts[2] = array("q", [max(slot, 0) for slot in parts[2]])
    return parts


RUN, PARTS = Pieces.run, ModelRunner._parts
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a stale input": (Pieces, "run", stale_input),
    "another size": (Pieces, "run", wrong_size),
    "padding that is not cleared": (pieces._Call, "__call__", not_cleared),
    "padding that is stored": (ModelRunner, "_parts", stored_padding),
    "a result of the step before": (pieces._Call, "__call__", a_call_too_late),
    "no attention": (pieces._Call, "__call__", lambda call, metadata: None),
}


@pytest.mark.parametrize(("owner", "name", "fault"), FAULTS.values(), ids=FAULTS)
def test_faults_are_found(
    both: Both, owner: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compares steps sees a wrong input, a wrong size and padding that is not cleared."""
    serve(both, REQUESTS)
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(Exception, match=r"not close|other rows|must have the shape"):
        serve(both, REQUESTS)
    monkeypatch.undo()
    serve(both, REQUESTS)


def test_memory_that_nobody_holds_is_used_again(model: vLLMModule, monkeypatch) -> None:
    """A tensor that a model drops before attention is called would be anything in a replay."""
    attend = pieces._CaptureMetadata.attend

    def dropped(self: Any, function: Any, *tensors: Any, **others: Any) -> Any:
        copies = [each.clone() for each in tensors]
        addresses = [type(each)(each.memory) for each in copies]
        del copies
        return attend(self, function, *addresses, **others)

    monkeypatch.setattr(pieces._CaptureMetadata, "attend", dropped)
    with pytest.raises(AssertionError, match="reach"):
        serve(Both(deepcopy(model)), REQUESTS)


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
    first = metadata.attend(slots, x)
    second = metadata.attend(slots, first, by=2.0)  # no graph computes anything between them
    third = metadata.attend(slots, x * 2)
    return first + 10 * second + 100 * third


def in_place(x: torch.Tensor, metadata: Any) -> torch.Tensor:
    """What attention writes to its argument is read afterwards, as rotated keys may be."""
    x = x + 1

    def add(x: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        return x.add_(metadata.slot_mapping.unsqueeze(1))

    return metadata.attend(add, x) + 10 * x


BODIES = {
    "twice": twice,
    "written": in_place,
    "never": lambda x, metadata: x * 2,
    "if": lambda x, metadata: metadata.attend(slots, x) if len(x) > 9 else x,
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
    assert graphs._pieces.sizes == GRAPHS
    for tokens in (11, 20, 16, 2, 17):
        with device.present():
            got = graphs.run(step(tokens)).memory
        if body is BODIES["if"] and tokens < 9:
            continue  # a graph of 16 tokens has taken the other way
        assert torch.equal(got, plain.run(step(tokens)))


READS: dict[str, Callable[[Any], object]] = {
    "slot_mapping": lambda metadata: metadata.slot_mapping,
    "max_query_len": lambda metadata: metadata.max_query_len > 1,
    "block_tables": lambda metadata: getattr(metadata, "block_tables", None),
    "layout": lambda metadata: metadata.layout,
}


@pytest.mark.parametrize("name", READS)
def test_a_model_that_reads_the_layout_itself_runs_without(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph would keep what it read: so steps with prompts have none, and the log says why."""

    def body(x: torch.Tensor, metadata: Any) -> torch.Tensor:
        try:
            READS[name](metadata)
        except Exception:
            if name == "block_tables":
                return x  # what a model makes of the error changes nothing
            raise
        return x + metadata.slot_mapping.unsqueeze(1)

    with caplog.at_level(logging.WARNING):
        plain, graphs, device = runs(body)
    assert f"the model reads {name} of the step's metadata" in caplog.text
    with device.present():
        assert torch.equal(graphs.run(step(9)).memory, plain.run(step(9)))
        assert graphs._sizes == [1, 2], "steps that only decode replay graphs"


def test_what_fails_in_a_capture_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    """As in the capture of a whole step; what was captured is ended, and the log has advice."""
    device = SimulatedDevice()

    def body(x: torch.Tensor, metadata: Any) -> torch.Tensor:
        x = metadata.attend(slots, x)
        if device.calls is not None:
            raise IndexError("of the model")
        return x

    with device.present():
        runner = ModelRunner(Own(body), DEVICE, 2, 1)  # type: ignore[arg-type]
        with pytest.raises(Exception, match="of the model"):
            runner.capture(40)
        assert device.calls is None
        assert "a step of 20 tokens failed: enforce_eager=True does without" in caplog.text
        wrong = ModelRunner(Own(lambda x, metadata: x[1:]), DEVICE, 2, 1)  # type: ignore[arg-type]
        with pytest.raises(Exception, match=r"should return hidden states of shape \(20, hidden"):
            wrong.capture(40)


def test_a_torch_without_what_pieces_need(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps with prompts run without graphs, and the log says so."""
    monkeypatch.setattr(pieces, "_ALIAS", "gone")
    graphs = pieces.Pieces(torch.device("cpu"), [8])
    graphs.capture(8, lambda *_: pytest.fail("nothing is captured"), None, None)  # type: ignore[arg-type]
    assert graphs.size_for(3) is None
    assert "this torch has no gone" in caplog.text


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


def test_a_compiled_model_has_no_pieces() -> None:
    """torch.compile fuses what is between attention layers, and chooses its own graphs."""
    with SimulatedDevice().present():
        runner = ModelRunner(Own(BODIES["never"]), DEVICE, 2, 1)  # type: ignore[arg-type]
        runner._compiled = True
        runner.capture(40)
    assert runner._pieces is None
    assert runner._sizes == [1, 2]
