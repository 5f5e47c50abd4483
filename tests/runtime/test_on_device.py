"""Engines that start and serve on a simulated device: no step uses the host; tokens are right."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3 as modeling_qwen3  # sees the real torch.cuda
from triton.runtime.interpreter import GridExecutor

from vllm_module import LLM, SamplingParams
from vllm_module.kernels.matmul.code_rows import fastest_code_rows
from vllm_module.kernels.rows import act_and_mul
from vllm_module.layers import RMSNorm
from vllm_module.layers.placed_experts import PlacedExperts
from vllm_module.runtime import engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.ranks.worker_experts import WorkerExperts
from vllm_module.runtime.sampling import sampler
from vllm_module.runtime.sampling.row import Row
from vllm_module.runtime.sampling.token_counts import TokenCounts

HERE = Path(__file__).parent
_simulated = runpy.run_path(str(HERE / "simulated_device.py"))
DEVICE, SimulatedDevice = _simulated["DEVICE"], _simulated["SimulatedDevice"]
HostError = _simulated["HostError"]
CONFIGS: dict[str, dict[str, Any]] = runpy.run_path(str(HERE.parent / "models/configurations.py"))[
    "CONFIGS"
]
WIDE = CONFIGS["llama"] | {"hidden_size": 128, "intermediate_size": 256}  # whole groups of 128
MEMORY = 1 << 30
PROMPTS = [[5, 9, 3], [7] * 21, [11, 4], [2, 8, 6, 1, 30]]


@contextmanager
def on_device() -> Iterator[Any]:
    """Have a simulated device that refuses what a step may not do."""
    device = SimulatedDevice(launches=True)

    def stepping(function: Any) -> Any:
        def called(*arguments: Any, **others: Any) -> Any:
            with device.stepping():
                return function(*arguments, **others)

        return called

    with device.serving(MEMORY), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "run", stepping(ModelRunner.run))
        patch.setattr(engine, "sample", stepping(sampler.sample))
        yield device


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves a small model of an architecture, once."""
    saved: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in saved:
            torch.manual_seed(0)
            saved[name] = tmp_path_factory.mktemp(name)
            config = AutoConfig.for_model(**CONFIGS.get(name, WIDE))
            AutoModelForCausalLM.from_config(config).save_pretrained(saved[name])
        return saved[name]

    return folder


def generated(folder: Path, params: Any, **options: Any) -> list[Any]:
    """Return tokens and logprobs of all prompts, some of which are computed in chunks."""
    with LLM(
        folder, skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, dtype="float32",
        max_num_batched_tokens=16, block_size=4, **options,
    ) as llm:  # fmt: skip
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [each.error for each in outputs] == [None] * len(PROMPTS)
    return [
        (each.outputs[0].token_ids, [list(x) for x in each.outputs[0].logprobs or []])
        for each in outputs
    ]


GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "dense, eager": ("qwen3", {"enforce_eager": True}),
    "soft caps, windows": ("gemma2", {}),
    "sinks, experts": ("gpt-oss", {}),
    "experts": ("qwen3-moe", {}),
    "latent": ("deepseek-v3", {}),
    "mamba2": ("mamba2", {}),
    "delta rule": ("qwen3-next", {}),
    "FP8 cache": ("qwen3", {"kv_cache_dtype": "fp8"}),
    "latent, FP8 cache": ("deepseek-v3", {"kv_cache_dtype": "fp8"}),
    "FP8 weights": ("qwen3", {"quantization": "fp8_per_channel"}),
    "FP8 experts": ("qwen3-moe", {"quantization": "fp8_per_tensor"}),
    "int4 weights": ("wide", {"quantization": "int4_per_group"}),
}


@pytest.mark.parametrize("name", SERVED)
def test_an_engine_starts_and_serves(folders: Any, name: str) -> None:
    """Without a given memory for pages, it measures its largest steps, and gives a CPU's tokens."""
    architecture, options = SERVED[name]
    folder = folders(architecture)
    expected = generated(folder, GREEDY, device="cpu", kv_cache_memory_bytes=1 << 20, **options)
    with on_device():
        assert generated(folder, GREEDY, device="cuda", **options) == expected


@pytest.mark.parametrize(
    ("architecture", "options"), [("qwen3", {}), ("wide", {"quantization": "bitsandbytes"})]
)
def test_the_default_device_is_not_that_of_an_engine(
    folders: Any, architecture: str, options: dict[str, Any]
) -> None:
    """An engine on a CPU makes nothing on the device that a program has set for its own tensors."""
    folder = folders(architecture)
    run = partial(generated, folder, GREEDY, device="cpu", kv_cache_memory_bytes=1 << 20, **options)
    expected = run()
    fastest_code_rows.cache_clear()
    with torch.device("meta"):
        assert run() == expected


BEFORE_FP8: dict[str, tuple[str, dict[str, Any]]] = {
    "FP8 cache": ("qwen3", {"kv_cache_dtype": "fp8_e5m2"}),
    "latent, FP8 cache": ("deepseek-v3", {"kv_cache_dtype": "fp8_e5m2"}),
    "FP8 weights": ("qwen3", {"quantization": "fp8_per_channel"}),
    "FP8 experts": ("qwen3-moe", {"quantization": "fp8_per_tensor"}),
}


@pytest.mark.parametrize("name", BEFORE_FP8)
def test_an_engine_on_a_gpu_without_fp8(
    folders: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 8.9 torch converts FP8; the host does not wait for it, and graphs capture it."""
    architecture, options = BEFORE_FP8[name]
    folder = folders(architecture)
    expected = generated(folder, GREEDY, device="cpu", kv_cache_memory_bytes=1 << 20, **options)
    with on_device():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        assert generated(folder, GREEDY, device="cuda", **options) == expected


def test_tokens_of_captures_are_not_counted(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' counts begin with requests, and stay while the engine sleeps."""

    def layers(worker: Any) -> dict[str, Any]:  # though they are on one rank
        named = worker.model.named_modules()
        return {path: each for path, each in named if isinstance(each, PlacedExperts)}

    monkeypatch.setattr(WorkerExperts, "_layers", layers)
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "dtype": "float32"}
    with (
        on_device(),
        LLM(folders("qwen3-moe"), skip_tokenizer_init=True, enable_eplb=True, **options) as llm,
    ):
        counts = llm.expert_counts()
        assert {sum(each) for each in counts.values()} == {0}
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY, use_tqdm=False)
        counts = llm.expert_counts()
        assert all(sum(each) for each in counts.values())
        llm.sleep()
        llm.wake_up()
        assert llm.expert_counts() == counts


def test_every_operation_is_launched(folders: Any) -> None:
    """The engines here and the benchmark's cases launch every operation of kernels/."""
    launched: set[str] = set()
    kernels = runpy.run_path(str(HERE.parent / "kernels/test_on_device.py"))
    for architecture in ("qwen3-moe", "deepseek-v3", "gpt-oss"):
        folder = folders(architecture)
        with on_device() as device:
            device.launched = launched
            generated(folder, GREEDY, device="cuda")
    with kernels["bench_cases"]() as cases:
        launched |= kernels["launched_by"](cases)
    assert kernels["operations"]() - launched == set()


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "wide top_p": {"top_p": 0.99},
    "min_p": {"min_p": 0.1},
    "all three": {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {3: 5.0, 7: -100.0}},
    "allowed": {"allowed_token_ids": [5, 6, 7], "logprobs": 2, "frequency_penalty": 1.0},
    "banned": {"min_tokens": 3, "stop_token_ids": [1, 2, 3]},
    "logprobs": {"logprobs": 4},
    "greedy with logprobs": {"temperature": 0, "logprobs": 0},
}


def test_sampling_with_every_option(folders: Any) -> None:
    """Requests of all kinds in one batch, and in turns, get a CPU's tokens and logprobs."""
    common = {"seed": 3, "max_tokens": 4, "ignore_eos": True}
    kinds = [SamplingParams(**{**common, **each}) for each in SAMPLED.values()]
    for first in range(0, len(kinds), 4):
        params = (kinds[first:] + kinds)[:4]
        expected = generated(folders("qwen3"), params, device="cpu", kv_cache_memory_bytes=1 << 20)
        with on_device():
            assert generated(folders("qwen3"), params, device="cuda") == expected


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


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("in_graph", [True, False])
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


def later(function: Any) -> Any:
    """Return a fault of a layer's forward pass: ``function`` is called with its hidden states."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        forward = RMSNorm.forward

        def faulty(self: Any, x: torch.Tensor, *others: Any) -> Any:
            function(x)
            return forward(self, x, *others)

        patch.setattr(RMSNorm, "forward", faulty)

    return plant


def positional_scale(patch: pytest.MonkeyPatch) -> None:
    """Pass attention's scale by position, as no step without pages may."""

    def fused(query: Any, keys: Any, values: Any, seen: Any, scale: float, **_: Any) -> Any:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, keys, values, seen, 0.0, False, scale)

    def forward(self: Any, *arguments: Any) -> Any:
        return fused(*torch.zeros(3, 1, 2, 3, 4, device=self.device), None, 0.1)

    patch.setattr(ModelRunner, "_forward", forward)


def unpinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def table_of_host(patch: pytest.MonkeyPatch) -> None:
    made = ModelRunner.__init__

    def init(self: Any, *arguments: Any, **others: Any) -> None:
        made(self, *arguments, **others)
        self._tables = torch.zeros(self._tables.shape, dtype=torch.int32)

    patch.setattr(ModelRunner, "__init__", init)


def sampler_of_host(patch: pytest.MonkeyPatch) -> None:
    draw = sampler.draw_tokens
    one = torch.ones(1, dtype=torch.int64)
    patch.setattr(sampler, "draw_tokens", lambda *arguments: draw(*arguments) * one)


def sampler_that_reads(patch: pytest.MonkeyPatch) -> None:
    draw = sampler.draw_tokens

    def read(*arguments: Any) -> Any:
        found = draw(*arguments)
        found.max().item()
        return found

    patch.setattr(sampler, "draw_tokens", read)


def launch_of_host(patch: pytest.MonkeyPatch) -> None:
    """Have the host's part of a launch make a tensor on the host that it adds."""
    launch = act_and_mul.act_and_mul_triton

    def faulty(x: torch.Tensor, *others: Any) -> Any:
        return launch(x + torch.zeros(x.shape), *others)

    patch.setattr(act_and_mul, "act_and_mul_triton", faulty)


FAULTS: dict[str, tuple[Any, str]] = {
    "a tensor of the host in a layer": (
        later(lambda x: x + torch.ones(x.shape)), "of the device and of the host",
    ),
    "a number for the host": (later(lambda x: x.sum().item()), "waits for the device"),
    "a decision": (later(lambda x: bool((x > 0).all())), "waits for the device"),
    "a list": (later(lambda x: x.sum(-1).tolist()), "waits for the device"),
    "places": (later(lambda x: x.nonzero()), "waits for the device"),
    "a mask as index": (later(lambda x: x[x > 0]), "waits for the device"),
    "a copy to the host": (later(lambda x: x.cpu()), "copies to the host, which waits"),
    "numbers copied to the device": (
        later(lambda x: torch.tensor([1.0], device=x.device)), "copies between host and device",
    ),
    "a tensor moved to the device": (
        later(lambda x: torch.ones(3).to(x.device)), "copies between host and device",
    ),
    "an operator of a CPU": (
        later(
            lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *x.expand(3, 1, 1, *x.shape).unbind()
            )
        ),
        "is an operator of a CPU",
    ),
    "a scale by position": (positional_scale, "positional arguments"),
    "a step that is not pinned": (unpinned, "copies between host and device"),
    "block tables on the host": (table_of_host, "block_tables is on cpu"),
    "a sampler with a tensor of the host": (sampler_of_host, "of the device and of the host"),
    "a sampler that reads a number": (sampler_that_reads, "waits for the device"),
    "a launch with a tensor of the host": (launch_of_host, "makes a tensor on the host"),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "message"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found(folders: Any, plant: Any, message: str) -> None:
    """A mixed device, a wait or a wrong call ends the start or the request, and is named."""
    folder = folders("qwen3")
    with on_device(), pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(Exception, match=message):  # what fails is not of one kind
            generated(folder, GREEDY, device="cuda", enforce_eager=True)
