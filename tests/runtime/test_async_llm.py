"""``AsyncLLM``: the engine beside an event loop."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_module import LLM, AsyncLLM, SamplingParams
from vllm_module.errors import EngineBusyError
from vllm_module.runtime.engine_thread import PauseMode

PROMPTS = [
    [1, 2, 3],
    [4, 5, 6, 7, 8],
    [9],
    [10, 11, 12, 13],
    [1, 2, 3, 4],
    [59],
    [7, 7, 7],
    [30, 31],
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
SEEDED = [
    SamplingParams(temperature=1.5, seed=seed, n=1 + seed % 2, max_tokens=10, ignore_eos=True)
    for seed in range(len(PROMPTS))
]


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), kv_cache_memory_bytes=1 << 20, dtype="float32", **settings)


@pytest.fixture(scope="module")
def sync(folder: Path) -> Iterator[LLM]:
    with load(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(load(folder), max_waiting=50)
    yield llm
    llm.close()


def free(llm: AsyncLLM) -> bool:
    pool = llm.llm.engine.scheduler.pool
    return not llm.llm.engine.requests and pool.free_pages == pool.num_pages


async def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def run(what: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(what, 120)

    return asyncio.run(limited())


async def last(llm: AsyncLLM, *arguments: Any, **options: Any) -> Any:
    outputs = [each async for each in llm.generate(*arguments, **options)]
    return outputs[-1]


def tokens(output: Any) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]


@pytest.mark.parametrize("params", [[GREEDY] * len(PROMPTS), SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_those_of_llm(sync: LLM, llm: AsyncLLM, params: list[SamplingParams]) -> None:
    """Requests that arrive in any order, at any time, get the tokens that each gets alone."""
    expected = [
        tokens(sync.generate(prompt, each, use_tqdm=False)[0])
        for prompt, each in zip(PROMPTS, params, strict=True)
    ]

    async def all_of_them(order: list[int]) -> list[Any]:
        async def one(index: int) -> Any:
            await asyncio.sleep(random.Random(index).random() * 0.01)
            return await last(llm, PROMPTS[index], params[index])

        return await asyncio.gather(*map(one, order))

    for seed in range(3):
        order = random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS))
        found = run(all_of_them(order))
        assert [tokens(each) for each in found] == [expected[index] for index in order]
    assert free(llm)


def test_ranks_and_steps_that_overlap(sync: LLM, folder: Path) -> None:
    """Two processes, with a step launched before the one before is read: the same tokens."""
    expected = [tokens(each) for each in sync.generate(PROMPTS, GREEDY, use_tqdm=False)]

    async def all_of_them() -> list[Any]:
        settings = {"tensor_parallel_size": 2, "async_scheduling": True}
        async with AsyncLLM(load(folder, **settings)) as llm:
            return await asyncio.gather(*(last(llm, prompt, GREEDY) for prompt in PROMPTS))

    assert [tokens(each) for each in run(all_of_them())] == expected


def test_outputs_grow_and_the_last_is_whole(sync: LLM, llm: AsyncLLM) -> None:
    """Each output begins with the one before; without ``every_token`` there is only the last."""

    async def stream(**options: Any) -> list[list[int]]:
        return [tokens(each)[0] async for each in llm.generate([5, 6], GREEDY, **options)]

    (whole,) = tokens(sync.generate([5, 6], GREEDY, use_tqdm=False)[0])
    found = run(stream())
    assert found[-1] == whole
    assert all(whole[: len(each)] == each for each in found)
    assert [len(each) for each in found] == sorted({len(each) for each in found})
    assert run(stream(every_token=False)) == [whole]


def test_a_slow_caller_finds_the_latest_output(llm: AsyncLLM) -> None:
    """Outputs do not pile up: after a pause, the next one is complete."""

    async def slow() -> list[int]:
        counts = []
        async for output in llm.generate([1], GREEDY):
            counts.append(len(tokens(output)[0]))
            await until(lambda: not llm.llm.engine.requests)
        return counts

    counts = run(slow())
    assert len(counts) == 2
    assert counts[1] == GREEDY.max_tokens


def test_prompts_that_are_served_together(sync: LLM, llm: AsyncLLM) -> None:
    """Each has its index; if one is refused, none runs."""

    async def together(prompts: list[list[int]]) -> dict[int, list[list[int]]]:
        return {i: tokens(output) async for i, output in llm.serve(prompts, GREEDY, "together")}

    expected = [tokens(each) for each in sync.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert run(together(PROMPTS)) == dict(enumerate(expected))
    with pytest.raises(ValueError, match=r"prompt 1: token 500 is outside of the vocabulary of 60"):
        run(together([[1], [500], [2]]))
    run(until_free(llm))


async def until_free(llm: AsyncLLM) -> None:
    await until(lambda: free(llm))


def test_too_many_requests_are_refused(llm: AsyncLLM) -> None:
    """The message has the numbers; when others have ended, requests are accepted again."""

    async def crowd() -> None:
        params = SamplingParams(max_tokens=5, n=llm.max_requests)
        with pytest.raises(
            ValueError, match=r"^307 samples are more than the 306 that are accepted \(max_num_seqs"
        ):
            await last(llm, [1], params.model_copy(update={"n": llm.max_requests + 1}))
        tasks = [asyncio.ensure_future(last(llm, [i % 60], LONG)) for i in range(llm.max_requests)]
        await asyncio.sleep(0)
        with pytest.raises(
            EngineBusyError, match=r"^306 samples are computed or wait, and 1 more would"
        ):
            await last(llm, [1], GREEDY)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        assert len(tokens(await last(llm, [1], GREEDY))[0]) == 12
        await tasks[0]

    run(crowd())


def test_pause_keeps_and_resume_continues(sync: LLM, llm: AsyncLLM) -> None:
    """Between them no token comes, new requests wait, and all have their tokens afterwards."""
    expected = [tokens(sync.generate(each, LONG, use_tqdm=False)[0]) for each in ([1], [2, 3])]

    async def paused() -> list[list[list[int]]]:
        first = asyncio.ensure_future(last(llm, [1], LONG))
        await until(lambda: llm.llm.engine.totals.generation_tokens and llm.llm.engine.requests)
        await llm.pause("keep")
        assert llm.is_paused
        second = asyncio.ensure_future(last(llm, [2, 3], LONG))
        gone = asyncio.ensure_future(last(llm, [4], LONG, "gone"))
        before = llm.llm.engine.totals.generation_tokens
        await asyncio.sleep(0.05)
        await llm.abort("gone")
        assert not tokens(await gone)[0]
        assert llm.llm.engine.totals.generation_tokens == before
        assert not first.done()
        await llm.resume()
        return [tokens(each) for each in await asyncio.gather(first, second)]

    assert run(paused()) == expected


def test_no_other_thread_computes_requests_that_a_pause_keeps(sync: LLM, llm: AsyncLLM) -> None:
    """Its steps would compute all requests, so they are refused, until none waits any more."""
    (expected,) = tokens(sync.generate([1], LONG, use_tqdm=False)[0])

    def others() -> list[list[int]]:
        return tokens(llm.llm.generate([5], GREEDY, use_tqdm=False)[0])

    async def paused() -> list[int]:
        first = asyncio.ensure_future(last(llm, [1], LONG))
        await until(lambda: llm.llm.engine.totals.generation_tokens and llm.llm.engine.requests)
        await llm.pause("keep")
        before = llm.llm.engine.totals.generation_tokens
        with pytest.raises(RuntimeError, match="paused, and a step would compute 1 requests that"):
            await asyncio.to_thread(others)
        with pytest.raises(RuntimeError, match="paused"):
            await llm.call(lambda engine: engine.generate([5], GREEDY, use_tqdm=False))
        assert llm.llm.engine.totals.generation_tokens == before
        assert len(llm.llm.engine.requests) == 1, "the refused ones have ended"
        await llm.resume()
        found: list[int] = tokens(await first)[0]
        for mode in get_args(PauseMode):  # nothing waits, so nothing is computed that should not be
            await llm.pause(mode)
            assert [len(each) for each in await asyncio.to_thread(others)] == [12]
            waits = asyncio.ensure_future(last(llm, [2], GREEDY))
            await until(lambda: llm.llm.engine.requests)
            with pytest.raises(RuntimeError, match="paused"):
                await asyncio.to_thread(others)
            assert not waits.done()
            await llm.resume()
            assert [len(each) for each in tokens(await waits)] == [12]
        return found

    assert run(paused()) == expected
    assert [len(each) for each in others()] == [12]


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_pause_ends_what_runs(llm: AsyncLLM, mode: Any) -> None:
    """``abort`` ends requests as they are, ``wait`` returns when they are complete."""

    async def paused() -> None:
        first = asyncio.ensure_future(last(llm, [1], LONG))
        await until(lambda: llm.llm.engine.requests)
        pausing = asyncio.ensure_future(llm.pause(mode))
        second = asyncio.ensure_future(last(llm, [2], GREEDY))
        third = asyncio.ensure_future(last(llm, [3], LONG))
        await asyncio.sleep(0)
        third.cancel()
        await pausing
        reason = (await first).outputs[0].finish_reason
        assert reason == {"abort": "abort", "wait": "length"}[mode]
        await asyncio.sleep(0.02)
        assert not second.done()
        await llm.resume()
        assert len(tokens(await second)[0]) == 12
        assert not llm.llm.engine.requests, "the third has left before it was begun"

    run(paused())
    with pytest.raises(ValueError, match="mode should be 'abort', 'wait' or 'keep', got 'no'"):
        run(llm.pause("no"))  # type: ignore[arg-type]  # that is the case


def test_weights_change_between_two_steps(folder: Path, llm: AsyncLLM) -> None:
    """A stream goes on over an update; later requests have the tokens of the new weights."""
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    old = reference.lm_head.weight.detach().clone()
    reference.lm_head.weight.data = old.flip(0)

    def greedy(prompt: list[int]) -> list[int]:
        row = torch.tensor([prompt])
        ids = reference.generate(
            row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=12,
            eos_token_id=None,
        )  # fmt: skip
        found: list[int] = ids[0, len(prompt) :].tolist()
        return found

    async def updated() -> tuple[int, list[int]]:
        running = asyncio.ensure_future(last(llm, [1], LONG))
        await until(lambda: llm.llm.engine.requests)
        await llm.update_weights({"lm_head.weight": old.flip(0)})
        found = tokens(await last(llm, [5, 6], GREEDY))[0]
        whole = await running
        await llm.update_weights({"lm_head.weight": old})
        await llm.call(lambda each: each.reset_prefix_cache())
        return len(tokens(whole)[0]), found

    assert run(updated()) == (120, greedy([5, 6]))
    with pytest.raises(ValueError, match="nonsense"):
        run(llm.update_weights({"nonsense": old}))
    run(llm.check_health())


def test_a_failed_step_ends_every_request(folder: Path) -> None:
    """Each caller gets the reason; the engine then serves the next ones."""
    llm = AsyncLLM(load(folder))
    execute = llm.llm.engine.execute
    fails = threading.Event()

    def broken(*arguments: Any) -> torch.Tensor:
        if fails.is_set():
            raise KeyError("broken kernel")
        return execute(*arguments)

    llm.llm.engine.execute = broken

    async def failing() -> None:
        tasks = [asyncio.ensure_future(last(llm, prompt, LONG)) for prompt in PROMPTS]
        await until(lambda: len(llm.llm.engine.requests) == len(PROMPTS))
        fails.set()
        for each in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(each, RuntimeError)
            assert "a step failed: KeyError: 'broken kernel'" in str(each)
        fails.clear()
        assert len(tokens(await last(llm, [1], GREEDY))[0]) == 12
        assert free(llm)

    run(failing())
    llm.close()


def test_close_ends_everything(folder: Path) -> None:
    """Running and later calls raise; a second close does nothing."""

    async def closing() -> None:
        async with AsyncLLM(load(folder)) as llm:
            task = asyncio.ensure_future(last(llm, [1], LONG))
            await until(lambda: llm.llm.engine.requests)
        with pytest.raises(RuntimeError, match="the engine was closed"):
            await task
        for call in (last(llm, [1], LONG), llm.check_health(), llm.pause(), llm.resume()):
            with pytest.raises(RuntimeError, match="the engine was closed"):
                await call
        llm.close()
        assert not llm._thread._thread.is_alive()

    run(closing())


def test_arguments_are_checked(sync: LLM) -> None:
    """An LLM that exists takes no more settings, and the bound is a number."""
    with pytest.raises(ValueError, match="the LLM exists already: leave out dtype, seed"):
        AsyncLLM(sync, seed=1, dtype="float32")
    with pytest.raises(ValueError, match="max_waiting should be an integer from 0, got -1"):
        AsyncLLM(sync, max_waiting=-1)


IN_A_FORK: dict[str, Callable[[AsyncLLM], Awaitable[object]]] = {
    "generate": lambda llm: last(llm, PROMPTS[0], GREEDY),
    "serve": lambda llm: anext(llm.serve([PROMPTS[0]], GREEDY)),
    "call": lambda llm: llm.call(repr),
    "embed": lambda llm: llm.embed([PROMPTS[0]]),
    "abort": lambda llm: llm.abort("a"),
    "pause": lambda llm: llm.pause(),
    "resume": lambda llm: llm.resume(),
    "check_health": lambda llm: llm.check_health(),
    "update_weights": lambda llm: llm.update_weights({}),
    "reshard": lambda llm: llm.reshard(2),
    "rearrange_experts": lambda llm: llm.rearrange_experts([[1.0]]),
    "sleep": lambda llm: llm.sleep(),
    "wake_up": lambda llm: llm.wake_up(),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "collective_rpc": lambda llm: llm.collective_rpc("check"),
}


def test_each_method_has_a_case_in_a_fork() -> None:
    """No method that waits for the engine is left out of the next test."""
    waits = {
        name
        for name, each in vars(AsyncLLM).items()
        if not name.startswith("_")
        and (asyncio.iscoroutinefunction(each) or inspect.isasyncgenfunction(each))
    }
    assert waits == {*IN_A_FORK}


@pytest.mark.parametrize("method", IN_A_FORK)
def test_an_engine_does_not_survive_a_fork(llm: AsyncLLM, method: str) -> None:
    """A fork says so at once, whatever locks other threads held; its close ends nothing."""
    with llm._lock, llm._thread._lock, llm.llm.engine.lock:
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # ends a child that waits for a thread that it lacks
            code = 1
            try:
                asyncio.run(IN_A_FORK[method](llm))
            except RuntimeError as error:
                code = 0 if "a fork of it, has none of its threads" in str(error) else 2
            finally:
                llm.close()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tokens(run(last(llm, PROMPTS[0], GREEDY)))
