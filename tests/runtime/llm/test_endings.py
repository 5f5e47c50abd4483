"""Interrupts, closing, ranks that end and forks."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_module import LLM
from vllm_module.errors import RankError

# Pytest's importlib mode has no imports between test files.
ASKING: Any = runpy.run_path(str(Path(__file__).with_name("asking.py")))
SMALL, generated, greedy, ids_of = (
    ASKING[name] for name in ("SMALL", "generated", "greedy", "ids_of")
)


def test_ctrl_c_ends_running_requests_only(llm: LLM, theirs: Any) -> None:
    """The interrupted call raises KeyboardInterrupt, and the next call is served."""
    execute = llm.engine.execute

    def interrupted(inputs: Any) -> Any:
        raise KeyboardInterrupt

    stream = llm.stream("dog", greedy(20, ignore_eos=True))
    next(stream)
    llm.engine.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], greedy(5), use_tqdm=False)
    llm.engine.execute = execute
    assert "failed: KeyboardInterrupt" in str(list(stream)[-1].error)
    (output,) = llm.generate("once upon", greedy(9), use_tqdm=False)
    assert output.outputs[0].token_ids == generated(theirs, ids_of("once upon"), 9)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupt_between_two_prompts_leaves_none(
    llm: LLM, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts before it are aborted, though no step has begun."""
    add, added = llm.engine.add, []

    def interrupted(*given: Any, **named: Any) -> Any:
        if added:
            raise error
        added.append(add(*given, **named))
        return added[-1]

    monkeypatch.setattr(llm.engine, "add", interrupted)
    with pytest.raises(error):
        llm.generate(["a", "b"], greedy(5), use_tqdm=False)
    assert not llm.engine.requests
    assert added[0].sequences[0].finish_reason == "abort"


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_closed_engine_has_no_cache(folder: Path, overlapped: bool) -> None:
    """Closing releases the memory, even while the ``LLM`` object exists, and gives no token."""
    with LLM(folder, **SMALL, async_scheduling=overlapped) as llm:
        stream = llm.stream("dog", greedy(8, ignore_eos=True))
        next(stream)
    llm.close()
    assert llm.executor.worker.cache.nbytes == 0
    assert not llm.engine._launched
    for late in (lambda: next(stream), lambda: llm.generate("fox", use_tqdm=False)):
        with pytest.raises(RuntimeError, match="the engine has ended: it was closed"):
            late()
    calls = lambda: llm.update_weights({}), llm.wake_up, llm.sleep, llm.reload_weights
    for late in calls:
        with pytest.raises(RuntimeError, match="the engine has ended: it was closed"):
            late()


@pytest.mark.parametrize("overlapped", [False, True])
def test_closing_waits_for_a_step_of_another_thread(folder: Path, overlapped: bool) -> None:
    """The other thread's call raises that the engine was closed, and no other error."""
    raised: list[BaseException] = []
    with LLM(folder, **SMALL, async_scheduling=overlapped) as llm:
        begun = threading.Event()
        execute = llm.engine.execute

        def slow(*inputs: Any) -> Any:
            begun.set()
            time.sleep(0.05)
            return execute(*inputs)

        llm.engine.execute = slow

        def serve() -> None:
            try:
                llm.generate("dog", greedy(100, ignore_eos=True), use_tqdm=False)
            except RuntimeError as error:
                raised.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        begun.wait()
    thread.join()
    assert [str(error) for error in raised] == ["the engine has ended: it was closed"]


def test_every_method_names_a_rank_that_has_ended(folder: Path, theirs: Any) -> None:
    """The error is the same whatever is called, also before a step; closing works."""
    with LLM(folder, tensor_parallel_size=2, **SMALL) as llm:
        stream = llm.stream("fox", greedy(5))
        next(stream)
        (worker,) = multiprocessing.active_children()
        worker.kill()
        worker.join()
        calls: dict[str, Callable[[], object]] = {
            "stream": lambda: next(stream),
            "generate": lambda: llm.generate("fox", use_tqdm=False),
            "refused": lambda: llm.generate({"prompt_token_ids": []}, use_tqdm=False),
            "chat": lambda: llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False),
            "update": lambda: llm.update_weights(theirs.state_dict()),
            "sleep": llm.sleep,
            "wake up": llm.wake_up,
            "new stream": lambda: next(llm.stream("fox")),
        }
        for call in calls.values():
            with pytest.raises(
                RankError, match=rf"rank 1 \(pid {worker.pid}\) was killed"
            ) as raised:
                call()
            assert raised.value.ranks == (1,)
    assert not multiprocessing.active_children()


def test_an_engine_does_not_survive_a_fork(folder: Path) -> None:
    """A fork while another thread generates says so at once, and its close ends nothing."""
    with LLM(folder, **SMALL) as llm:
        with llm.engine.lock:  # as a step of another thread holds it
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    llm.generate("fox", greedy(3), use_tqdm=False)
                except RuntimeError as error:
                    code = 0 if "a fork of it, has none of its threads" in str(error) else 2
                finally:
                    llm.close()
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert llm.generate("fox", greedy(3), False)[0].outputs[0].token_ids
