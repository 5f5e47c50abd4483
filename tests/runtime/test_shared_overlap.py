"""``LLM`` with steps that overlap, shared by threads, over ranks, and closed in the middle."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.errors import RankError

SMALL = {"kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 8, "async_scheduling": True}
CONFIG = {
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
PROMPTS = [{"prompt_token_ids": [3 + index, 5, 8 + index]} for index in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = AutoConfig.for_model("qwen3", architectures=["Qwen3ForCausalLM"], **CONFIG)
    theirs = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in theirs.named_parameters():
        parameter.data.normal_(0, 1.0 if "norm" in name else 0.4, generator=generator)
    path = tmp_path_factory.mktemp("overlap")
    theirs.save_pretrained(path)
    return path


def asked(stops: list[int]) -> list[SamplingParams]:
    """Return requests that end by their length, by a stop token, and of several samples."""
    return [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=20, stop_token_ids=stops),
        SamplingParams(seed=1, max_tokens=9, n=2, logprobs=2, repetition_penalty=1.2),
        SamplingParams(seed=2, max_tokens=1, prompt_logprobs=1),
    ]


def tokens_of(outputs: list[Any]) -> list[Any]:
    return [
        [(o.token_ids, o.finish_reason, o.stop_reason) for o in each.outputs] for each in outputs
    ]


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[SamplingParams], list[Any]]:
    """Return requests, one of which a stop token ends, and what one rank gives without overlap."""
    with LLM(str(folder), **{**SMALL, "async_scheduling": False}) as llm:
        free = llm.generate(PROMPTS, asked([]), False)
        params = asked([free[1].outputs[0].token_ids[5]])
        expected = tokens_of(llm.generate(PROMPTS, params, False))
    assert [reason for ((_, reason, _), *_) in expected[:2]] == ["length", "stop"]
    return params, expected


def shared(engine: LLM, params: list[SamplingParams], expected: list[Any]) -> None:
    """Generate, stream and abort at once; each request gives what it gives alone."""
    begin = threading.Barrier(3)
    wrong: list[Any] = []

    def generate() -> None:
        begin.wait(10)
        for _ in range(2):
            got = tokens_of(engine.generate(PROMPTS, params, False))
            if got != expected:
                wrong.append(got)

    def stream() -> None:
        begin.wait(10)
        for _ in range(2):
            outputs = list(engine.stream(PROMPTS[1], params[1]))
            lengths = [len(each.outputs[0].token_ids) for each in outputs]
            if tokens_of(outputs[-1:]) != expected[1:2] or lengths != sorted(set(lengths)):
                wrong.append(lengths)

    def abort() -> None:
        begin.wait(10)
        for count in (1, 2, 4):
            outputs: Any = engine.stream(PROMPTS[0], params[0])
            for _ in range(count):
                next(outputs, None)  # other threads' steps may have ended it
            outputs.close()

    threads = [threading.Thread(target=each) for each in (generate, stream, abort)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not engine.engine.requests
    assert not engine.engine._launched
    pool = engine.engine.scheduler.pool
    assert pool.free_pages == pool.num_pages


def held(engine: LLM, at: int) -> tuple[threading.Event, threading.Event]:
    """Have call ``at`` of the model wait; return what it sets, and what it waits for."""
    come, go, execute = threading.Event(), threading.Event(), engine.engine.execute
    calls = 0

    def waiting(*inputs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            come.set()
            assert go.wait(10)
        return execute(*inputs)

    engine.engine.execute = waiting
    return come, go


def serving(engine: LLM) -> tuple[threading.Thread, list[BaseException]]:
    """Return a thread that generates, and what it raises."""
    raised: list[BaseException] = []

    def serve() -> None:
        try:
            params = SamplingParams(temperature=0, max_tokens=100)
            engine.generate(PROMPTS, params, False)
        except RuntimeError as error:
            raised.append(error)

    return threading.Thread(target=serve), raised


def early_steps(engine: LLM, params: SamplingParams) -> list[bool]:
    """Return whether each step of a request is launched before the tokens before it are read."""
    early = []
    execute = engine.engine.execute

    def noted(inputs: Any, *sampled: torch.Tensor) -> torch.Tensor:
        early.append(bool(inputs.num_sampled))
        return execute(inputs, *sampled)

    engine.engine.execute = noted
    engine.generate(PROMPTS[0], params, False)
    engine.engine.execute = execute
    return early


@pytest.mark.parametrize("size", [1, 2])
def test_threads_and_ranks_share_overlapped_steps_until_they_are_closed(
    folder: Path, plain: Any, size: int
) -> None:
    """Tokens are those of one rank in turns; closing in the middle ends the step and all else."""
    params, expected = plain
    with LLM(str(folder), **SMALL, tensor_parallel_size=size) as engine:
        shared(engine, params, expected)
        assert early_steps(engine, params[0]) == [False] + [True] * 11
        come, go = held(engine, at=4)
        thread, raised = serving(engine)
        thread.start()
        assert come.wait(10)
        closing = threading.Thread(target=engine.close)
        closing.start()
        go.set()
        closing.join()
        thread.join()
        assert [str(error) for error in raised] == ["the engine has ended: it was closed"]
        assert not engine.engine.requests
        assert not engine.engine._launched
    assert not multiprocessing.active_children()


def test_a_rank_that_ends_between_two_overlapped_steps_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next call names it and later ones do, nothing is tried again, and requests end."""
    with LLM(str(folder), **SMALL, tensor_parallel_size=2) as engine:
        stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=50))
        next(stream)
        next(stream)
        assert engine.engine._launched
        (worker,) = multiprocessing.active_children()
        worker.kill()
        worker.join()
        calls: list[Callable[[], object]] = [
            lambda: next(stream),
            lambda: engine.generate(PROMPTS, SamplingParams(max_tokens=2), False),
        ]
        for call in calls:
            with pytest.raises(RankError, match=rf"rank 1 \(pid {worker.pid}\) was kill") as caught:
                call()
            assert caught.value.ranks == (1,)
        assert not engine.engine.requests
        assert "computed again" not in caplog.text
