"""Calls of ``AsyncLLM`` whose callers go away, or that are aborted."""

from __future__ import annotations

import asyncio
import runpy
import threading
from pathlib import Path
from typing import Any

import pytest

from vllm_module import LLM, AsyncLLM, SamplingParams
from vllm_module.runtime.engine_thread import PauseMode

ASYNC = runpy.run_path(str(Path(__file__).with_name("test_async_llm.py")))
llm, sync = ASYNC["llm"], ASYNC["sync"]  # fixtures
free, last, run, tokens = (ASYNC[name] for name in ("free", "last", "run", "tokens"))
until, until_free, LONG = ASYNC["until"], ASYNC["until_free"], ASYNC["LONG"]
LEAVE = ["cancelled", "closed", "dropped", "cancelled at once"]


@pytest.mark.parametrize("how", LEAVE)
def test_whoever_leaves_frees_its_pages(llm: AsyncLLM, how: str) -> None:
    """However a caller goes away, its request ends long before its last token."""

    async def leave() -> None:
        outputs = llm.generate([1, 2, 3], LONG)
        if how.startswith("cancelled"):
            task = asyncio.ensure_future(last(llm, [1, 2, 3], LONG))
            if how == "cancelled":
                await until(lambda: llm.llm.engine.requests)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await outputs.__anext__()
            assert not free(llm)
            if how == "closed":
                await outputs.aclose()
        del outputs
        before = llm.llm.engine.totals.generation_tokens
        await until_free(llm)
        assert llm.llm.engine.totals.generation_tokens < before + LONG.max_tokens / 2
        assert not llm._accepted

    run(leave())


def test_cancelled_anywhere(sync: LLM, llm: AsyncLLM) -> None:
    """Tasks are cancelled after any number of turns of the loop; others have their tokens."""
    (expected,) = tokens(sync.generate([3, 4, 5], LONG, use_tqdm=False)[0])

    async def many() -> list[int]:
        steady = asyncio.ensure_future(last(llm, [3, 4, 5], LONG))
        for turns in range(30):
            task = asyncio.ensure_future(last(llm, [1 + turns], LONG))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        found: list[int] = tokens(await steady)[0]
        await until_free(llm)
        return found

    assert run(many()) == expected
    assert not llm._accepted


def test_abort_ends_the_stream(llm: AsyncLLM) -> None:
    """The output is that so far, with the reason; an unknown id is nothing."""

    async def aborted() -> tuple[str | None, int]:
        async for output in llm.generate([1, 2], LONG, "mine"):
            if not output.finished:
                await llm.abort("min")
                await llm.abort("mine")
        (sample,) = output.outputs
        return sample.finish_reason, len(sample.token_ids)

    reason, count = run(aborted())
    assert reason == "abort"
    assert 0 < count < 120
    assert free(llm)


@pytest.mark.parametrize("tokenized", [True, False])
@pytest.mark.parametrize("which", ["b", "b-1", "b-11", "b-12", "c"])
def test_abort_ends_all_of_a_call_and_nothing_else(
    llm: AsyncLLM, which: str, tokenized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the ids of other calls begin with, and whether or not the engine has the prompts."""
    calls = {"a": 1, "b": 12, "b-12": 1, "b-1-": 2, "B": 2, "bb": 1, "b.": 1}  # prompts of each
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    tokenize = llm._tokenize

    async def reasons(name: str) -> list[str | None]:
        served = llm.serve([[1]] * calls[name], params, name)
        found = {index: output.outputs[0].finish_reason async for index, output in served}
        return [reason for _, reason in sorted(found.items())]

    async def ended() -> dict[str, list[str | None]]:
        goes_on = asyncio.Event()

        async def waits(prompts: Any) -> Any:
            await goes_on.wait()
            return await tokenize(prompts)

        if not tokenized:
            # The call is to end while it tokenizes, which takes less than a test could meet.
            monkeypatch.setattr(llm, "_tokenize", waits)
        await llm.pause("keep")
        tasks = {name: asyncio.ensure_future(reasons(name)) for name in calls}
        has = llm.llm.engine.requests if tokenized else llm._thread.coming
        await until(lambda: len(has) == (sum(calls.values()) if tokenized else len(calls)))
        await llm.abort(which)
        goes_on.set()
        await llm.resume()
        return {name: await task for name, task in tasks.items()}

    expected = {}
    for name, count in calls.items():
        ids = [name] if count == 1 else [f"{name}-{index}" for index in range(count)]
        expected[name] = ["abort" if which in (name, each) else "length" for each in ids]
    assert run(ended()) == expected
    assert free(llm)


async def hold(llm: AsyncLLM, goes_on: threading.Event) -> None:
    """Hold the engine between two steps, where the calls that follow are carried out."""
    waits = threading.Event()

    def wait() -> tuple[()]:
        waits.set()
        assert goes_on.wait(60)
        return ()

    llm._thread.put(wait)
    await until(waits.is_set)


@pytest.mark.parametrize("leaves", [False, True])
def test_an_id_of_a_request_that_has_ended(sync: LLM, llm: AsyncLLM, leaves: bool) -> None:
    """Another request may have it, even before the caller of the first has been told of its end.

    Each ends as it would with an id of its own, also if the first caller leaves after the abort.
    """
    prompts, short = ([1, 2, 3], [4, 5], [6]), SamplingParams(temperature=0, max_tokens=9)
    expected = [tokens(sync.generate(each, short, use_tqdm=False)[0]) for each in prompts]
    goes_on = threading.Event()

    async def ended() -> list[Any]:
        first = asyncio.ensure_future(last(llm, prompts[0], LONG, "mine"))
        await until(lambda: any(each.sequences[0].output for each in requests.values()))
        await hold(llm, goes_on)
        await llm.abort("mine")
        others = [
            asyncio.ensure_future(last(llm, prompt, short, name))
            for prompt, name in ((prompts[1], "mine"), (prompts[2], "another"))
        ]
        await until(lambda: llm._thread._calls.qsize() == 5)  # each other one is expected and added
        if leaves:
            first.cancel()
            await asyncio.sleep(0)
        goes_on.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    requests = llm.llm.engine.requests
    gone, *found = run(ended())
    assert [tokens(each) for each in found] == expected[1:]
    if leaves:
        assert isinstance(gone, asyncio.CancelledError)
    else:
        (sample,) = gone.outputs
        assert (sample.finish_reason, len(sample.token_ids) < 120) == ("abort", True)
    assert free(llm)


def test_whoever_sleeps_and_leaves(llm: AsyncLLM) -> None:
    """A sleep that is cancelled while requests end leaves an engine that computes steps."""

    async def left() -> tuple[int, int]:
        running = asyncio.ensure_future(last(llm, [1, 2, 3], LONG))
        await until(lambda: llm.llm.engine.requests)
        sleeping = asyncio.ensure_future(llm.sleep(mode="wait"))
        await until(lambda: llm.is_paused)
        sleeping.cancel()
        later = await last(llm, [4, 5], LONG)
        return len(tokens(await running)[0]), len(tokens(later)[0])

    assert run(left()) == (120, 120)
    assert not llm.is_paused
    assert not llm.is_sleeping
    with pytest.raises(ValueError, match="mode should be 'abort' or 'wait', got 'no'"):
        run(llm.sleep(mode="no"))  # type: ignore[arg-type]  # that is the case
    assert not llm.is_paused


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_whoever_comes_while_an_engine_falls_asleep(llm: AsyncLLM, mode: PauseMode) -> None:
    """Requests that come while others end do not keep an engine awake; it refuses them, asleep."""
    goes_on = threading.Event()

    async def slept() -> list[Any]:
        first = asyncio.ensure_future(last(llm, [1, 2, 3], LONG))
        await until(lambda: llm.llm.engine.requests)
        await hold(llm, goes_on)
        sleeping = asyncio.ensure_future(llm.sleep(mode=mode))
        await until(lambda: llm._thread._calls.qsize() == 1)
        later = [asyncio.ensure_future(last(llm, [4, 5], LONG)) for _ in range(3)]
        await until(lambda: llm._thread._calls.qsize() == 7)  # each is expected and added
        goes_on.set()
        await sleeping
        assert llm.is_sleeping
        (sample,) = (await first).outputs
        assert sample.finish_reason == ("length" if mode == "wait" else "abort")
        return await asyncio.gather(*later, return_exceptions=True)

    try:
        refused = run(slept())
        assert len(refused) == 3
        assert all("the engine sleeps: wake_up() first" in str(each) for each in refused)
    finally:
        if llm.is_sleeping:
            run(llm.wake_up())
    assert not llm.is_paused
    assert len(tokens(run(last(llm, [4, 5], LONG)))[0]) == 120


def test_whoever_waits_for_the_end_of_requests_hears_of_the_end(folder: Path) -> None:
    """An engine that is closed while a call waits until requests have ended tells that call so."""

    async def closed() -> list[Any]:
        llm = AsyncLLM(LLM(str(folder), kv_cache_memory_bytes=1 << 20, dtype="float32"))
        running = asyncio.ensure_future(last(llm, [1, 2, 3], LONG))
        await until(lambda: llm.llm.engine.requests)
        calls = [llm.sleep(mode="wait"), llm.pause("wait", clear_cache=False)]
        waiting = [asyncio.ensure_future(each) for each in calls]
        await until(lambda: len(llm._thread._drained) == 2)
        await asyncio.to_thread(llm.close)
        return await asyncio.gather(running, *waiting, return_exceptions=True)

    for error in run(closed()):
        assert isinstance(error, RuntimeError)
        assert "the engine was closed" in str(error)
