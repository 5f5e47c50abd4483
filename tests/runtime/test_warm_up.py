"""No step of a served model uses the host, and none compiles a kernel."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vllm_module import vLLMModule
from vllm_module.config import EngineConfig
from vllm_module.layers.lora_rows import AdapterRows
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.ranks import worker as workers
from vllm_module.runtime.ranks.worker import Worker
from vllm_module.runtime.step_inputs import Moves
from vllm_module.runtime.warm_up import largest_steps, warm_up_batches, warm_up_steps

HERE = Path(__file__).parent
ARCHITECTURES = runpy.run_path(str(HERE.parent / "models" / "configurations.py"))
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
LARGE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
}
HEADS = {"head_dim": 64, "moe_intermediate_size": 256, "mlp_only_layers": []}
# Architecture, and how it is quantized and cached.
SERVED = {
    "dense": ("qwen3", {}),
    "FP8 cache": ("qwen3", {"cache_dtype": "float8_e4m3fn"}),
    **{f"FP8 per {by}": ("qwen3", {"quantization": f"fp8_per_{by}"}) for by in ("tensor", "block")},
    "experts": ("qwen3-moe", {}),
    "experts, FP8 per channel": ("qwen3-moe", {"quantization": "fp8_per_channel"}),
    "latent": ("deepseek-v3", {}),
    "recurrent": ("mamba2", {}),
    "recurrent hybrid": ("bamba", {}),
    "recurrent hybrid, experts": ("qwen3-next", {}),
    "encoder, FP8 per channel": ("bert", {"quantization": "fp8_per_channel"}),
}
FAULTS = 11


def entries(name: str) -> dict[str, Any]:
    """Return the config.json of an architecture of the tests."""
    config = ARCHITECTURES["CONFIGS"][name]
    made = AutoConfig.for_model(**config).to_diff_dict()
    made["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    return {**made, **ARCHITECTURES["FILES"].get(name, {})}


@pytest.fixture(scope="module")
def on_meta(
    run_with_torch: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """Run every architecture on meta tensors, in another process: in this one Triton interprets."""
    names = {"llama", *ARCHITECTURES["DISTINCT"], *(name for name, _ in SERVED.values())} - {"bert"}
    if "AT_LENGTH" in os.environ:
        names |= ARCHITECTURES["CONFIGS"].keys()
    configurations = {name: entries(name) for name in sorted(names)}
    rope = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    configurations["proportional"] = configurations["llama"] | {"rope_parameters": rope}
    bert = AutoConfig.for_model("bert", vocab_size=130, num_attention_heads=4, **SMALL)
    configurations["bert"] = bert.to_diff_dict() | {"architectures": ["BertModel"]}
    models = {}
    for name, (architecture, options) in SERVED.items():
        config = configurations[architecture]
        if name.startswith("recurrent"):  # whose sizes depend on each other
            models[name] = config | {"max_position_embeddings": 2048}, options
            continue
        config = config | LARGE
        models[name] = config | (HEADS if architecture.startswith("qwen3") else {}), options
    given = {"configurations": configurations, "models": models}
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = tmp_path_factory.mktemp("on_meta") / "given.json"
    path.write_text(json.dumps(given))
    code = f"import runpy, sys; sys.stdin = open({str(path)!r})\n"
    code += f"runpy.run_path({str(HERE / 'on_meta.py')!r}, run_name='__main__')"
    done = run_with_torch(code, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_step_uses_the_host(on_meta: Any) -> None:
    """A step of a rank of any architecture makes no tensor of the host, and waits for none."""
    assert on_meta["hosts"] == {}


def test_any_use_of_the_host_is_found(on_meta: Any) -> None:
    """Tensors of the host, copies and waits are found where a layer is made to use them."""
    assert len(on_meta["faults"]) == FAULTS
    assert [name for name, found in on_meta["faults"].items() if found == "nothing"] == []


@pytest.mark.parametrize("name", SERVED)
def test_nothing_is_compiled_while_serving(on_meta: Any, name: str) -> None:
    """Random steps launch no variant of a kernel that the warm-up has not launched."""
    variants = on_meta["variants"][name]
    assert variants["later"] == []
    assert variants["left"] > 1, "one long prompt compiles everything: the test shows nothing"
    assert variants["replays"] or name.startswith("encoder")


def test_memory_is_measured_without_the_scores_of_all_pairs(on_meta: Any) -> None:
    """Tensors of the largest steps grow with the tokens of a prompt, not with their square.

    Some of the models have soft caps, slopes, sinks or latent attention.
    """
    growth = on_meta["growth"]
    assert growth.keys() >= {"gemma2", "gpt-oss", "deepseek-v3", "mamba2"}
    assert {name: ratio for name, ratio in growth.items() if ratio > 2} == {}


def test_alignment_makes_another_variant(on_meta: Any) -> None:
    """Variants differ if a tensor does not begin at a multiple of 16 bytes, as Triton's do."""
    assert on_meta["alignment"]


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 50), st.integers(1, 20), st.booleans())
def test_a_warm_up_stays_within_the_limits(
    tokens: int, sequences: int, length: int, page: int, swaps: bool
) -> None:
    """For any limits, steps have as many tokens, sequences and positions as are allowed."""
    steps = list(warm_up_steps(tokens, sequences, length, page, 3, 2 * swaps))
    for step in steps:
        assert 1 <= len(step.input_ids) == len(step.positions) <= tokens
        assert 1 <= len(step.context_lens) == len(step.table_rows) <= sequences
        assert step.new_pages == []
        assert step.num_table_pages * page >= max(step.context_lens)
        assert max(step.positions) < max(step.context_lens) <= length
        assert step.query_start_loc[-1] == len(step.input_ids)
        assert step.max_query_len == max(
            after - start
            for start, after in zip(step.query_start_loc, step.query_start_loc[1:], strict=False)
        )
        assert len(step.rows) <= max(sequences, 1)
    most_tokens, most_rows = min(tokens, sequences * length), min(tokens, sequences)
    # A number between two powers of two has the variant of the upper one, or of the largest.
    decoding = {len(step.context_lens) for step in steps if step.max_query_len == 1}
    prompts = {len(step.input_ids) for step in steps}
    cached = {step.num_table_pages for step in steps if len(step.input_ids) == 1}
    for met, most in (
        (decoding, most_rows), (prompts, most_tokens), (cached, -(-length // page))
    ):  # fmt: skip
        powers = {(number - 1).bit_length() for number in met}
        assert powers >= {(number - 1).bit_length() for number in range(1, most + 1)}
    assert max(len(step.input_ids) for step in steps) == most_tokens
    prompts, decoding = largest_steps(tokens, sequences, length, page)
    assert len(prompts.input_ids) == most_tokens
    assert decoding.context_lens == [1] * len(decoding.rows) == [1] * most_rows
    for step in (prompts, decoding):
        assert len(step.context_lens) <= sequences
        assert max(step.context_lens) <= length <= step.num_table_pages * page
        assert max(len(each.rows) for each in steps) <= sequences
    assert steps[0].pages == Moves([(0, 0)] * swaps, [(0, 1)], [(0, 0)] * swaps)
    assert not any(step.pages for step in steps[1:])
    batches = list(warm_up_batches(tokens, sequences, length))
    for batch in batches:
        assert sum(batch.lengths) == len(batch.input_ids)
        assert len(batch.lengths) <= sequences
        assert max(batch.lengths) <= length


def test_a_warm_up_stores_nothing(model: vLLMModule) -> None:
    """The steps run, and the cache holds what it held before, except for the copied page."""
    device = torch.device("cpu")
    cache = KVCache(model, 3, 4, device, torch.float32, host_pages=2)
    runner = ModelRunner(model, device, 3, 8)
    layers = [layer for layer in model.modules() if getattr(layer, "kv_cache", None) is not None]
    for layer in layers:
        layer.kv_cache.fill_(1)
    for step in (*largest_steps(20, 3, 30, 4), *warm_up_steps(20, 3, 30, 4, 3, 2)):
        if step.pages is not None:
            cache.move(step.pages)
        assert runner.run(step).isfinite().all()
    assert all(bool((layer.kv_cache == 1).all()) for layer in layers)
    cache.close()


@pytest.mark.parametrize("eager", [False, True])
def test_a_gpu_is_warmed_up_before_graphs_are_captured(
    monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """A worker runs the steps within its limits and then captures; after sleep it only captures."""
    calls: list[Any] = []

    def move(moves: Moves) -> None:
        calls.append(moves)

    def run(inputs: Any, sampled: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(inputs.input_ids))
        return torch.empty(len(inputs.rows), 7)

    cache = SimpleNamespace(move=move)
    runner = SimpleNamespace(run=run, capture=lambda *given: calls.append(("capture", *given)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(workers, "KVCache", lambda *_: cache)
    monkeypatch.setattr(workers, "StateCache", lambda *_: None)
    monkeypatch.setattr(workers, "ModelRunner", lambda *_: runner)
    worker = Worker.__new__(Worker)  # a model would have to be on the GPU
    worker._adapter_rows = AdapterRows()
    worker.config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=9, enforce_eager=eager)
    worker.device, worker.model, worker.cache_dtype = torch.device("cuda:0"), None, torch.float32
    worker.source = SimpleNamespace(config=SimpleNamespace(vocab_size=7), dtype=torch.float32)
    worker._shape, worker.state_bytes, worker._unchecked = None, 0, {}
    worker.start(num_pages=2, host_pages=1, max_model_len=40)
    assert calls[:2] == [Moves([(0, 0)], [(0, 1)], [(0, 0)]), 1]
    assert 9 in calls
    captured = [call for call in calls if isinstance(call, tuple) and call[0] == "capture"]
    assert captured == ([] if eager else [("capture", 9)])
    assert eager or calls[-1] == captured[0]
    calls.clear()
    worker.start(num_pages=2, host_pages=1, max_model_len=40)
    assert calls == captured, "kernels are compiled already, and graphs have to be captured"
