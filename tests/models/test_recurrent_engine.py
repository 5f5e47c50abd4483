"""Tiny Mamba-2, Qwen3-Next and Bamba: greedy tokens of the engine are transformers'."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import LLM, SamplingParams
from vllm_module.build.loader import get_model
from vllm_module.config import DeviceConfig, ModelConfig
from vllm_module.distributed import run_ranks
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.cache.state_cache import StateCache
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.step_inputs import StepInputs

STEPS = 32  # as in conftest.py
NAMES = ("mamba2", "bamba", "qwen3-next")
PAGE = 8
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "block_size": PAGE, "max_num_seqs": 4,
    "max_model_len": 128, "enable_prefix_caching": True,
}  # fmt: skip


class Saved(NamedTuple):
    """A checkpoint, transformers' greedy tokens of each prompt, and an engine that ran them."""

    name: str
    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    llm: LLM
    got: list[list[list[int]]]


def run(
    llm: LLM, prompts: list[list[int]], n: int = 1, count: int = STEPS
) -> list[list[list[int]]]:
    asked = SamplingParams(temperature=0, max_tokens=count, n=n, ignore_eos=True)
    got = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    assert [output.error for output in got] == [None] * len(got)
    return [[list(each.token_ids) for each in output.outputs] for output in got]


@pytest.fixture(scope="module", params=NAMES)
def saved(request: Any, tiny: Any) -> Iterator[Saved]:
    """Prompts of one token and of several chunks."""
    checkpoint = tiny(request.param)
    prompts, tokens = checkpoint.reference.prompts, checkpoint.reference.tokens
    with LLM(str(checkpoint.folder), max_num_batched_tokens=7, **OPTIONS) as llm:
        got = run(llm, prompts, 2)
        yield Saved(request.param, checkpoint.folder, prompts, tokens, llm, got)


def count_hits(llm: LLM) -> list[int]:
    """Return a list that will have the number of states that each step reads from saved ones."""
    hits: list[int] = []
    execute, rows = llm.engine.execute, llm.engine.scheduler.max_num_seqs

    def counting(inputs: StepInputs, *sampled: Any) -> torch.Tensor:
        copied = [] if inputs.states is None else inputs.states.copied
        hits.append(sum(source >= rows for source, _ in copied))
        return execute(inputs, *sampled)

    llm.engine.execute = counting
    return hits


def test_llm_gives_the_tokens_of_transformers(saved: Saved) -> None:
    """Chunks, and two samples of each; and again when all but short prompts are cached."""
    expected = [[tokens] * 2 for tokens in saved.tokens]
    assert saved.got == expected
    hits = count_hits(saved.llm)
    assert run(saved.llm, saved.prompts, 2) == expected
    assert sum(hits) >= 3


@pytest.mark.parametrize("saved", ["qwen3-next"], indirect=True)
def test_so_do_two_processes(saved: Saved) -> None:
    """A hybrid with experts, on two ranks."""
    with LLM(str(saved.folder), tensor_parallel_size=2, **OPTIONS) as llm:
        hits = count_hits(llm)
        for _ in range(2):
            got = run(llm, saved.prompts, count=12)
            assert got == [[tokens[:12]] for tokens in saved.tokens]
        assert sum(hits) >= 3


QUANTIZED = {
    "mamba2": {"in_proj", "out_proj"},
    "bamba": {"in_proj", "out_proj", "qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "qwen3-next": {
        "in_proj_qkvz", "in_proj_ba", "out_proj", "qkv_proj", "o_proj", "gate_up_proj",
        "down_proj", "w13", "w2",
    },
}  # fmt: skip


def test_fp8_and_new_weights_in_place(saved: Saved, tmp_path: Path) -> None:
    """Products alone are quantized; updated, an engine gives the tokens of a fresh one."""
    shutil.copy(saved.folder / "config.json", tmp_path)
    new = {
        name: tensor * 1.5 if name.endswith("proj.weight") else tensor
        for file in saved.folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    save_file(new, tmp_path / "model.safetensors")
    prompts, count = [saved.prompts[0], saved.prompts[2]], 10
    with LLM(str(tmp_path), quantization="fp8", **OPTIONS) as llm:
        expected = run(llm, prompts, count=count)
    with LLM(str(saved.folder), quantization="fp8", **OPTIONS) as llm:
        parameters = llm.executor.worker.model.named_parameters()
        quantized = {path.split(".")[-2] for path, each in parameters if each.itemsize == 1}
        assert quantized == QUANTIZED[saved.name]
        assert "4 states of sequences and as many saved ones" in repr(llm)
        before = run(llm, prompts, count=count)
        assert len(llm.engine.scheduler.saved)
        llm.update_weights(new)
        assert not len(llm.engine.scheduler.saved)
        for _ in range(2):
            assert run(llm, prompts, count=count) == expected != before
        llm.sleep()
        llm.wake_up()
        assert run(llm, prompts, count=count) == expected
        llm.sleep(level=2)
        llm.reload_weights()
        assert run(llm, prompts, count=count) == before


def generate(
    folder: Path,
    prompts: list[list[int]],
    pages: int,
    host: int,
    most: int,
    caching: bool,
    steps: int,
) -> Any:
    config = ModelConfig(model=str(folder), dtype="float32")
    model = get_model(model_config=config, device_config=DeviceConfig(device="cpu"))
    cpu = torch.device("cpu")
    cache = KVCache(model, pages, PAGE, cpu, torch.float32, host)
    states = StateCache(model, 8 if caching else 4, cpu, torch.float32, min(host, 3))
    runner = ModelRunner(model, cpu, 4, 16)

    hits = 0

    def execute(inputs: Any) -> torch.Tensor:
        nonlocal hits
        if inputs.pages is not None:
            cache.move(inputs.pages)
        if inputs.states is not None:
            states.move(inputs.states)
            hits += sum(source >= 4 for source, _ in inputs.states.copied)
        return runner.run(inputs)

    scheduler = Scheduler(
        PagePool(pages, PAGE), PagePool(host, PAGE), 4, most, caching, has_states=True,
        host_states=min(host, 3),
    )  # fmt: skip
    engine = Engine(execute, scheduler, 130, 128)
    requests = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=steps, n=1 + index % 3)
        requests.append(engine.add(str(index), prompt, params))
        engine.step()
        engine.step()
    while engine.requests:
        with torch.inference_mode():
            engine.step()
    cache.close()
    states.close()
    assert scheduler.pool.free_pages == pages
    return [[s.output for s in r.sequences] for r in requests], scheduler.preemptions, hits


@pytest.mark.parametrize(
    ("size", "pages", "host", "most", "caching", "steps"),
    [(1, 13, 0, 5, True, STEPS), (2, 10, 16, 16, False, 12)],
)
def test_schedules_change_no_token(
    saved: Saved, size: int, pages: int, host: int, most: int, caching: bool, steps: int
) -> None:
    """Chunks, arrivals, samples, preemptions, swaps and prefixes, on one rank and on two."""
    for got, preemptions, hits in run_ranks(
        size, lambda rank: generate(saved.folder, saved.prompts, pages, host, most, caching, steps)
    ):
        assert got == [[each[:steps]] * (1 + index % 3) for index, each in enumerate(saved.tokens)]
        assert preemptions
        assert bool(hits) == caching
