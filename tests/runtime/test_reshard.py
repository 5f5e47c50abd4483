"""Engines whose number of ranks changes: the same tokens as transformers, and nothing half done."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
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
from vllm_module.runtime import replica, resharding
from vllm_module.runtime.async_llm import AsyncLLM
from vllm_module.runtime.ranks import group
from vllm_module.runtime.sequence import Request
from vllm_module.runtime.text.prompts import Tokenization
from vllm_module.weights.stores import store

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [9], [30, 31, 32, 33], [9, 8]]
STEPS = 14
_SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "mamba2": {
        "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16,
        "hidden_size": 32, "vocab_size": 60, "num_hidden_layers": 2,
    },
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
DRAWN = SamplingParams(temperature=1, seed=1, n=2, max_tokens=STEPS, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Checkpoints whose weights give clear differences between logits, and transformers' models."""
    made = {}
    for kind, entries in FAMILIES.items():
        sizes = {} if kind == "mamba2" else _SIZES
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | entries))
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in name:
                parameter.data.normal_(0, 1 if "embed" in name else 0.3)
        folder = tmp_path_factory.mktemp("reshard") / kind
        model.eval().save_pretrained(folder)
        made[kind] = folder, model
    return made


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_num_seqs=4,
        **{"kv_cache_memory_bytes": 1 << 20, "max_model_len": 32, "block_size": 4} | options,
    )  # fmt: skip


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(STEPS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def tokens(llm: LLM) -> list[list[int]]:
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(asked, GREEDY, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def add(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> Request:
    request = llm._add({"prompt_token_ids": prompt}, params, Tokenization(), streamed=False)
    assert isinstance(request, Request)
    return request


def finish(llm: LLM, *requests: Request) -> list[list[list[int]]]:
    while llm.engine.requests:
        llm.engine.step()
    return [[list(each.output) for each in request.sequences] for request in requests]


@contextmanager
def goes_on(llm: LLM) -> Iterator[None]:
    """Check that an engine computes what it did, on the ranks that it had."""
    before, digest, size = llm.executor, llm.digest().hex, llm.executor.size
    expected = tokens(llm)
    request = add(llm, PROMPTS[0])
    llm.engine.step()
    yield
    assert llm.executor is before
    assert (llm.executor.size, llm.digest().hex) == (size, digest)
    assert finish(llm, request) == [expected[:1]]
    assert tokens(llm) == expected


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"async_scheduling": True, "swap_space": 0.1}),
        ("mixtral", {"enable_expert_parallel": True}),
        ("mamba2", {"max_num_batched_tokens": 5}),
    ],
)
def test_requests_go_on_with_the_same_tokens(
    models: dict[str, tuple[Path, Any]], kind: str, options: dict[str, Any]
) -> None:
    """From one rank to two and back: greedy ones are transformers', and drawn ones one rank's."""
    folder, theirs = models[kind]
    expected = [[greedy(theirs, prompt)] for prompt in PROMPTS]
    with engine(folder, **options) as llm:
        digest = llm.digest().hex
        expected += finish(llm, add(llm, PROMPTS[0], DRAWN))
        assert expected[-1][0] != expected[-1][1]
        requests = [*(add(llm, prompt) for prompt in PROMPTS), add(llm, PROMPTS[0], DRAWN)]
        for size in (2, 1):
            for _ in range(5):
                llm.engine.step()
            assert llm.engine.scheduler.running
            assert llm.engine.scheduler.waiting
            llm.reshard(size)
            assert llm.executor.size == llm.model_config.tensor_parallel_size == size
            assert (llm.digest().hex, llm.weight_version) == (digest, "0")
        before = llm.executor
        llm.reshard(1)
        assert llm.executor is before, "nothing is done for the number that there is"
        assert finish(llm, *requests) == expected
        preempted = sum(each.metrics.num_preemptions for each in requests)
        metrics = {each.name: each for each in llm.get_metrics()}
        assert metrics["vllm:num_preemptions"].value == preempted > 2


def test_what_the_engine_knows_of_its_weights_stays(
    models: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates, versions, where weights are loaded from again; a proxy is not asked."""
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    monkeypatch.setenv("no_proxy", "")
    folder, theirs = models["llama"]
    name = "model.norm.weight"
    with engine(folder) as llm:
        loaded = llm.digest().hex
        llm.update_weights({name: torch.full((32,), 2.0)}, weight_version="two")
        updated = llm.digest().hex
        llm.reshard(2)
        assert (llm.weight_version, llm.digest().hex) == ("two", updated)
        llm.sleep(level=2)
        with pytest.raises(ModelNotReadyError, match="updates had changed them"):
            llm.wake_up()
        llm.reload_weights()
        assert (llm.weight_version, llm.digest().hex) == ("two+1", loaded)
        assert tokens(llm) == [greedy(theirs, prompt) for prompt in PROMPTS]
        with llm.serve_weights() as server:
            llm.reshard(1)
            end = server.size_of("model.safetensors")
            with pytest.raises(RuntimeError, match="engine has ended"):
                list(server.pieces("model.safetensors", 0, end, server.tag()))


def test_an_engine_beside_an_event_loop(models: dict[str, tuple[Path, Any]]) -> None:
    """Outputs come while new ranks load, and go on after they have taken over."""
    folder, theirs = models["llama"]

    expected = greedy(theirs, PROMPTS[0])

    async def run() -> None:
        async with AsyncLLM(engine(folder, max_model_len=64)) as llm:

            async def answer() -> list[int]:
                outputs = llm.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY)
                *_, last = [list(each.outputs[0].token_ids) async for each in outputs]
                return last

            resharded = asyncio.create_task(llm.reshard(2))
            during = 0
            while not resharded.done():
                assert await answer() == expected
                during += 1
            await resharded
            assert during > 1
            assert llm.llm.executor.size == 2
            assert await answer() == expected
            # The threads of a product are those of the thread that asks for it.
            assert await llm.call(lambda llm: torch.get_num_threads()) == 2

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        asyncio.run(run())
    finally:
        torch.set_num_threads(before)


def _fail(*_: Any) -> Any:
    raise RuntimeError("no memory for a piece")


def test_a_failure_leaves_the_engine_as_it_was(
    models: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the failure is, and before or after the new ranks have loaded."""
    monkeypatch.setattr(store, "_FIRST_DELAY", 1e-6)
    load = resharding._load
    norm = {"model.norm.weight": torch.ones(32)}
    with engine(models["llama"][0]) as llm:
        with goes_on(llm), pytest.raises(ShardingError):
            llm.reshard(3)
        for wrong in (0, -1, True, "2", None, 2.0):
            with pytest.raises(ValueError, match="integer from 1"):
                llm.reshard(wrong)  # type: ignore[arg-type]
        started: list[Any] = []
        pieces = replica.WeightServer.pieces

        class Started(group.Processes):
            def __init__(self, *arguments: Any) -> None:
                started.append(self)
                super().__init__(*arguments)

        def killing(*arguments: Any) -> Any:
            if started and started[0]._connections:  # all have begun
                with suppress(ProcessLookupError):  # it has ended before
                    os.kill(started[0]._processes[1].pid, signal.SIGKILL)
            return pieces(*arguments)

        with monkeypatch.context() as patch, goes_on(llm):
            patch.setattr(group, "Processes", Started)
            patch.setattr(replica.WeightServer, "pieces", killing)
            with pytest.raises(RankError, match=r"rank 1 .* was killed by signal 9"):
                llm.reshard(2)
        with monkeypatch.context() as patch, goes_on(llm):
            patch.setattr(replica.ServedFile, "read", _fail)
            with pytest.raises(WeightLoadError, match="409"):
                llm.reshard(2)

        def updating(*arguments: Any) -> Any:
            ranks = load(*arguments)
            llm.update_weights(norm)
            return ranks

        llm.update_weights(norm)
        with monkeypatch.context() as patch, goes_on(llm):
            patch.setattr(resharding, "_load", updating)
            with pytest.raises(RuntimeError, match="were changed while new ranks loaded"):
                llm.reshard(2)

        new: list[Any] = []

        def loading(*arguments: Any) -> Any:
            new.append(load(*arguments))
            return new[-1]

        close = replica.WeightServer.close
        with monkeypatch.context() as patch, goes_on(llm):
            patch.setattr(resharding, "_load", loading)
            patch.setattr(replica.WeightServer, "close", lambda of: (close(of), _fail()))
            with pytest.raises(RuntimeError, match="no memory for a piece"):
                llm.reshard(2)
            ended = new[0].end
            new[0].close()  # or they would be waited for
            assert ended == "it was closed"


def test_a_cache_that_is_too_small(models: dict[str, tuple[Path, Any]]) -> None:
    """On one rank a page has the heads of two: for no page, or fewer than a request may need."""
    page = 2 * 2 * 2 * 4 * 8 * 4  # layers, K and V, heads, tokens, size of a head, bytes
    llama = models["llama"][0]
    with (
        engine(llama, tensor_parallel_size=2, kv_cache_memory_bytes=5 * page) as llm,
        goes_on(llm),
        pytest.raises(ValueError, match=r"may have 25 tokens, .* room for 20"),
    ):
        llm.reshard(1)
    params = SamplingParams(temperature=0, max_tokens=2)
    with engine(llama, tensor_parallel_size=2, kv_cache_memory_bytes=page // 2) as llm:
        (before,) = llm.generate([{"prompt_token_ids": [9]}], params, use_tqdm=False)
        with pytest.raises(ValueError, match="no memory for a page"):
            llm.reshard(1)
        (after,) = llm.generate([{"prompt_token_ids": [9]}], params, use_tqdm=False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_the_limit_of_a_prompt_is_that_of_an_engine_with_such_a_cache(
    models: dict[str, tuple[Path, Any]],
) -> None:
    """A longer one would never be computed; it is refused by the limit of now, not of before."""
    llama, page = models["llama"][0], 2 * 2 * 2 * 4 * 8 * 4

    def refusals(llm: LLM) -> list[str | None]:
        found: list[str | None] = []
        for length in range(1, 40):
            try:
                llm.engine.add("x", [1] * length, SamplingParams(max_tokens=1))
            except ValueError as error:
                found.append(str(error))
            else:
                llm.engine.abort("x")
                found.append(None)
        return found

    with engine(llama, tensor_parallel_size=2, kv_cache_memory_bytes=5 * page) as llm:
        large = refusals(llm)
        llm.reshard(1)
        small = refusals(llm)
        llm.reshard(2)
        assert refusals(llm) == large
    with engine(llama, kv_cache_memory_bytes=5 * page) as fresh:
        assert small == refusals(fresh) != large


def test_engines_that_cannot_change(
    models: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused by what it is, and computes what it did."""
    llama = models["llama"][0]
    with (
        engine(llama, quantization="int8_per_channel_weight_only") as llm,
        goes_on(llm),
        pytest.raises(UnsupportedModelError, match="make an LLM of the other number"),
    ):
        llm.reshard(2)
    with engine(llama, distributed_executor_backend="uni") as llm:
        with goes_on(llm), pytest.raises(ValueError, match="'uni'"):
            llm.reshard(2)
        of_launcher = llm.executor.worker.config.model_copy(
            update={"distributed_executor_backend": "external_launcher"}
        )
        with monkeypatch.context() as patch:
            patch.setattr(llm.executor.worker, "config", of_launcher)
            with pytest.raises(ValueError, match="that a launcher started"):
                llm.reshard(2)
            patch.setattr(llm.executor.worker, "config", EngineConfig())
            patch.setenv("WORLD_SIZE", "2")
            with pytest.raises(ValueError, match="that a launcher started"):
                llm.reshard(2)
        with monkeypatch.context() as patch:
            patch.setattr(llm.executor, "stages", 2)
            with pytest.raises(ValueError, match="2 pipeline stages"):
                llm.reshard(2)
        with monkeypatch.context() as patch:
            patch.setattr(llm.executor.worker, "config", EngineConfig())
            patch.setattr(llm.executor.worker, "device", torch.device("cuda:1"))
            with pytest.raises(ValueError, match="is on cuda:1, which its ranks would not be on"):
                llm.reshard(2)
        llm.sleep()
        with pytest.raises(ModelNotReadyError, match="sleeps"):
            llm.reshard(2)
