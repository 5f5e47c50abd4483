"""Engines whose stages are processes: they give the tokens of one rank, whatever happens meanwhile.

One rank's tokens are compared with transformers' in ``tests/models`` and ``tests/runtime``.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.config import EngineConfig
from vllm_module.errors import (
    ModelNotReadyError,
    RankError,
    ShardingError,
    UnsupportedModelError,
    WeightLoadError,
)
from vllm_module.runtime.ranks.connections import processes_of_world, stage_of
from vllm_module.testing import random_weights

TESTS = Path(__file__).parents[1]
STAGES = runpy.run_path(str(TESTS / "models" / "test_stages.py"))
# Of Qwen3-Next, the first stage has states and no pages, and the last one the reverse.
HALVES = {"num_hidden_layers": 2, "layer_types": None, "full_attention_interval": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {}, "mixtral": {}, "deepseek-v3": {}, "qwen3-next": HALVES, "mamba2": {},
}  # fmt: skip
# Few pages and tokens in a step: prompts are cut into chunks, and sequences are preempted.
TIGHT = {
    "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16,
    "enable_prefix_caching": True, "swap_space": 0.0,
}  # fmt: skip


def write(folder: Path, name: str, seed: int = 3, **changed: Any) -> Path:
    """Write a small checkpoint of a kind of model."""
    folder.mkdir(exist_ok=True)
    config = STAGES["config_of"](name, **changed)
    weights = random_weights(STAGES["build"](config).expected_weights(), seed=seed)
    save_file(weights, folder / "model.safetensors")
    hf_config = AutoConfig.for_model(**(STAGES["CONFIGS"][name] | changed))
    cls = AutoModelForCausalLM._model_mapping[type(hf_config)].__name__
    hf_config.architectures = [cls]
    hf_config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("pipeline")
    return {name: write(base / name, name, **changed) for name, changed in MODELS.items()}


def engine(folder: Path | str, **settings: Any) -> LLM:
    settings = {"kv_cache_memory_bytes": 1 << 20, "dtype": "float32", "device": "cpu", **settings}
    return LLM(str(folder), skip_tokenizer_init=True, **settings)


PROMPTS = [
    {"prompt_token_ids": [(7 * at + 3 * number) % 60 for at in range(4 + 5 * number)]}
    for number in range(6)
]
PROMPTS += [{"prompt_token_ids": [*PROMPTS[5]["prompt_token_ids"][:20], at]} for at in range(3)]


def tokens(llm: LLM, most: int = 10, **params: Any) -> list[list[list[int]]]:
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": most, "ignore_eos": True, **params})
    outputs = llm.generate(PROMPTS, asked, use_tqdm=False)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def counted(llm: LLM, name: str) -> float:
    return sum(each.value for each in llm.get_metrics() if each.name == f"vllm:{name}")


def run_tight(folder: Path, stages: int, page_bytes: int) -> Any:
    """Return what happens with few pages, and the largest number of bytes of a page."""
    with engine(
        folder, pipeline_parallel_size=stages, kv_cache_memory_bytes=14 * page_bytes or 1, **TIGHT
    ) as llm:
        worker = llm.executor.worker
        first, forked = tokens(llm), tokens(llm, n=2, most=4)
        assert counted(llm, "num_preemptions") or not page_bytes
        assert llm.engine.totals.cached_tokens > 0
        asked = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2)
        (output,) = llm.generate(PROMPTS[2:3], asked, use_tqdm=False)
        logprobs = [
            {token: round(each.logprob, 3) for token, each in entry.items()}
            for entry in output.prompt_logprobs[1:]
        ]
        drawn = tokens(llm, temperature=1.5, seed=4)
        pages = max(each.page_bytes for each in (worker.kept, *worker.other_stages))
    return [first, forked, logprobs, drawn], pages


# The last two have the kinds of layers, of caches and of experts that the others have.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[] if name in ("deepseek-v3", "qwen3-next") else [pytest.mark.at_length],
        )
        for name in MODELS
    ],
)
def test_two_stages_give_the_tokens_of_one_rank(name: str, folders: dict[str, Path]) -> None:
    """With chunks, cached prefixes, preemption, samples of one prompt, and logprobs of prompts."""
    with engine(folders[name], block_size=4) as llm:
        whole, expected = llm.executor.worker.page_bytes, tokens(llm)
    assert len({token for (sample,) in expected for token in sample}) > 8
    half = whole // (1 if name == "qwen3-next" else 2)  # it has one layer with pages
    one, _ = run_tight(folders[name], 1, whole)
    two, pages = run_tight(folders[name], 2, half)
    assert one[0] == expected
    assert two == one
    assert pages == half


# In two stages of two ranks: one with whole experts on each rank, one with a part of each.
IN_FOURS = {"deepseek-v3": True, "qwen3-next": False}


def in_fours(folder: Path, spread: bool) -> LLM:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    return engine(folder, enable_expert_parallel=spread, **sizes)


@pytest.mark.at_length
@pytest.mark.parametrize("name", MODELS)
def test_two_stages_of_two_ranks_give_the_tokens_of_one(name: str, folders: Any) -> None:
    """Each kind of model, with whole experts on each rank where it has experts."""
    with engine(folders[name]) as llm:
        expected = tokens(llm)
    with in_fours(folders[name], name in ("mixtral", "deepseek-v3", "qwen3-next")) as llm:
        assert tokens(llm) == expected


@pytest.fixture(
    scope="module",
    params=["deepseek-v3", pytest.param("qwen3-next", marks=pytest.mark.at_length)],
)
def four(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[tuple[Path, LLM]]:
    """Two stages of two ranks each, which tests leave with the folder's weights."""
    folder = folders[request.param]
    with in_fours(folder, IN_FOURS[request.param]) as llm:
        yield folder, llm


@pytest.fixture(scope="session")
def expected(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By kind of model: other weights, and tokens and digests of one rank with old and new ones."""
    found = {}
    for name in IN_FOURS:
        other = write(tmp_path_factory.mktemp("other") / name, name, seed=8, **MODELS[name])
        new = load_file(other / "model.safetensors")
        with engine(folders[name]) as llm:
            old_tokens, old_digest = tokens(llm), llm.digest().tensors
            llm.update_weights(new)
            found[name] = new, old_tokens, old_digest, tokens(llm), llm.digest().tensors
    return found


def test_the_plan_is_shown(four: tuple[Path, LLM]) -> None:
    """How many ranks divide each layer, and how many divide the layers."""
    shown = dict(four[1].facts())["plan"]
    assert shown.startswith("tensor parallel 2, pipeline parallel 2: ")


def test_updates_and_sleep_are_those_of_one_rank(four: tuple[Path, LLM], expected: Any) -> None:
    """Whole and in part, streamed, refused, asleep at both levels, and loaded again."""
    folder, llm = four
    new, old_tokens, old_digest, new_tokens, new_digest = expected[folder.name]
    old = load_file(folder / "model.safetensors")
    assert tokens(llm) == old_tokens
    assert llm.digest().tensors == old_digest
    layout = llm.layout()
    assert layout.ranks == 4
    assert {name for name, _, _ in layout.names()} == set(old)
    for weights in (new, iter(old.items()), new):
        llm.update_weights(weights)
    assert (tokens(llm), llm.digest().tensors) == (new_tokens, new_digest)
    # Names of one stage alone, and a name that the first stage refuses.
    of_first = {name: old[name] for name in old if ".layers.0." in name or "embed" in name}
    llm.update_weights(of_first)
    mixed = llm.digest().tensors
    assert mixed == {n: (old_digest if n in of_first else new_digest)[n] for n in mixed}
    wrong = {
        "model.layers.0.input_layernorm.weight": torch.ones(3),
        "lm_head.weight": old["lm_head.weight"],
    }
    with pytest.raises((WeightLoadError, RankError), match=r"layers\.0\.input_layernorm"):
        llm.update_weights(wrong)
    assert llm.digest().tensors == mixed
    llm.update_weights({name: old[name] for name in old if name not in of_first})
    assert (tokens(llm), llm.digest().tensors) == (old_tokens, old_digest)
    llm.sleep(1)
    llm.wake_up()
    assert tokens(llm) == old_tokens
    llm.sleep(2)
    with pytest.raises(ModelNotReadyError, match="sleeps"):
        tokens(llm)
    llm.update_weights(new)
    assert tokens(llm) == new_tokens
    llm.reload_weights()
    assert tokens(llm) == old_tokens


def test_experts_are_whole_on_a_rank_of_their_stage(folders: dict[str, Path]) -> None:
    """Mixtral's experts are spread over the ranks of each stage, and tokens are one rank's."""
    with engine(folders["mixtral"]) as one, in_fours(folders["mixtral"], spread=True) as llm:
        assert tokens(llm) == tokens(one)
        layout, held = llm.layout(), dict[tuple[int, int], set[int]]()
        for name, entry, _ in layout.names():
            if found := re.search(r"layers\.(\d+)\..*experts\.(\d+)\.w", name):
                ends = ((0, 0), tuple(size - 1 for size in entry.shape))
                owners = {owner.rank for end in ends for owner in layout.owners(name, end)}
                held.setdefault((int(found[1]), int(found[2])), set()).update(owners)
    # Rank 0 is of the last stage. Of five experts, the first of two ranks has one more.
    expected = {(at, each): {2 - 2 * at + each // 3} for at in (0, 1) for each in range(5)}
    assert held == expected


def test_what_is_no_weight_is_refused_by_name(four: tuple[Path, LLM], expected: Any) -> None:
    """As one rank refuses it, whichever stage has the name."""
    folder, llm = four
    first, last = "model.layers.0.input_layernorm.weight", "model.norm.weight"
    for name in (first, last):
        for wrong, said in [(None, "got NoneType"), (torch.eye(2).to_sparse(), "sparse_coo")]:
            with pytest.raises((WeightLoadError, RankError), match=rf"(?s){name}.*{said}"):
                llm.update_weights({name: wrong})
    with pytest.raises(WeightLoadError, match="expected pairs of name and tensor, got 'abc'"):
        llm.update_weights(["abc"])
    assert tokens(llm) == expected[folder.name][1]


def test_an_update_between_steps_and_an_abort(four: tuple[Path, LLM], expected: Any) -> None:
    """Running requests go on with new weights, and what is aborted leaves no trace."""
    folder, llm = four
    new, old_tokens, *_ = expected[folder.name]
    old = load_file(folder / "model.safetensors")
    found = []
    with engine(folder) as one:
        for each in (one, llm):
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            requests = [
                each.engine.add(str(at), prompt["prompt_token_ids"], params)
                for at, prompt in enumerate(PROMPTS)
            ]
            while requests[0].metrics.num_generation_tokens < 3:
                each.engine.step()
            each.engine.abort("4")
            each.update_weights(new, weight_version="new")
            while each.engine.requests:
                each.engine.step()
            sequences = [request.sequences[0] for request in requests]
            assert [s.finish_reason for s in sequences] == ["length"] * 4 + ["abort"] + [
                "length"
            ] * 4
            assert {v for s in sequences for v, _ in s.weight_versions} >= {"new"}
            found.append(sequences)
            each.update_weights(old)
    for ours, theirs in zip(found[1], found[0], strict=True):
        if llm.executor.worker.has_states:
            continue  # with steps in flight, they start over with the new weights
        if ours.weight_versions == theirs.weight_versions:
            assert ours.tokens == theirs.tokens
    assert tokens(llm) == old_tokens


def test_no_stage_waits_for_a_step_when_all_requests_are_gone(four: tuple[Path, LLM]) -> None:
    """The wait of its ranks for each other would end the engine after half an hour."""
    _, llm = four
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for at, prompt in enumerate(PROMPTS[:3]):
        llm.engine.add(str(at), prompt["prompt_token_ids"], params)
    llm.engine.step()
    steps = llm.executor._in_flight._steps
    assert steps, "a step that the other stage was told of"
    for at in range(3):
        llm.engine.abort(str(at))
    assert not steps


def test_an_engine_of_stages_serves_its_weights(four: tuple[Path, LLM], monkeypatch: Any) -> None:
    """An engine that loads from it has the same digests."""
    _, llm = four
    with llm.serve_weights() as server:
        monkeypatch.setenv("VLLM_MODULE_REPLICA_TOKEN", server.token)
        with engine(server.url) as copy:
            assert copy.digest().tensors == llm.digest().tensors


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The benchmark, whose functions every rank can import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TESTS / "bench")
        yield importlib.import_module("pipeline")


def test_two_stages_work_at_the_same_time(folders: dict[str, Path], bench: Any) -> None:
    """Each step has half of the requests, and a stage computes one while the other has the next."""
    with engine(folders["qwen3"], pipeline_parallel_size=2, max_num_seqs=32) as llm:
        stages = 2
        llm.collective_rpc(bench.slow_down, args=(0.0, 0.004))
        ratios = []
        for _ in range(3):
            seconds, sizes, _ = bench.serve(llm, 32, 12)
            assert sizes == [32] * 2 + [16] * 22
            one_after_the_other = stages * 0.004 * sum(sizes)
            ratios.append(one_after_the_other / seconds)
        # Of 2, where the first step alone takes 0.13 s of 1.7 s, on a machine that does more.
        assert max(ratios) > 1.4
        assert not llm.engine.scheduler.in_flight


def test_what_cannot_work_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ShardingError, match="3 pipeline stages cannot share 2 layers"):
        engine(folders["qwen3"], pipeline_parallel_size=3)
    gpt2 = next(name for name in STAGES["CONFIGS"] if name.startswith("gpt2"))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel has no pipeline stages"):
        engine(write(tmp_path / "gpt2", gpt2), pipeline_parallel_size=2)
    for backend in ("uni", "external_launcher"):
        with pytest.raises(ValueError, match=f"pipeline_parallel_size is 2, and .*{backend}"):
            engine(folders["qwen3"], pipeline_parallel_size=2, distributed_executor_backend=backend)
    with pytest.raises(ValueError, match="async_scheduling is for one stage"):
        engine(folders["qwen3"], pipeline_parallel_size=2, async_scheduling=True)
    monkeypatch.setenv("RANK", "0")
    for world, sizes, said in [
        (3, {}, "which are not 2 stages:"),
        (6, {"tensor_parallel_size": 2}, "which are not 2 stages of 2 tensor-parallel ranks each"),
    ]:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        with pytest.raises(ValueError, match=said):
            processes_of_world(EngineConfig(pipeline_parallel_size=2, **sizes))


def test_ranks_are_counted_from_the_last_stage() -> None:
    """Rank 0 samples, so it has the head."""
    found = [stage_of(rank, 6, 3) for rank in range(6)]
    assert [(stage.rank, number) for stage, number in found] == [
        (2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1),
    ]  # fmt: skip


def test_a_stage_that_cannot_load_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    """All stages learn why, though only one misses a weight."""
    folder = write(tmp_path / "broken", "qwen3")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.o_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(RankError, match=r"(?s)rank 1 .*layers\.0\.self_attn\.o_proj\.weight"):
        engine(folder, pipeline_parallel_size=2)


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_stage_that_dies_or_is_stopped_is_named(fault: str, folders: dict[str, Path]) -> None:
    llm = engine(folders["qwen3"], pipeline_parallel_size=2, step_timeout=2.0)
    with llm:
        pid = llm.executor._ranks.processes._processes[1].pid
        os.kill(pid, getattr(signal, fault))
        begin = time.monotonic()
        how = "killed by signal 9" if fault == "SIGKILL" else "the process is stopped"
        with pytest.raises(RankError, match=rf"rank 1 \(pid {pid}\).*{how}") as caught:
            tokens(llm)
        assert caught.value.ranks == (1,)
        assert time.monotonic() - begin < 8
