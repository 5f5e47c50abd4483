"""Requests that are aborted by any thread, at any time."""

from __future__ import annotations

import runpy
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.runtime.step_inputs import StepInputs

# Pytest's importlib mode has no imports between test files.
PAGED: Any = runpy.run_path(str(Path(__file__).with_name("paged.py")))
expected, Setup, greedy = (PAGED[name] for name in ("expected", "Setup", "greedy"))


def test_an_abort_during_a_step_is_done_after_it() -> None:
    """The garbage collector may finalize a stream at any time, with or without samples."""
    setup = Setup(num_pages=20)
    engine = setup.engine
    for name, n in (("gone", 1), ("samples", 3)):
        engine.add(name, [1, 2], greedy(5, n=n))
    kept = engine.add("kept", [1, 2, 1], greedy(5))
    execute = engine.execute

    def aborting(inputs: StepInputs) -> torch.Tensor:
        for name in ("gone", "samples"):
            engine.abort(name)
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            engine.step()
        return execute(inputs)

    engine.execute = aborting
    engine.step()
    assert list(engine.requests) == ["kept"]
    engine.execute = execute
    setup.run()
    assert kept.sequences[0].output == expected([1, 2, 1], 5)


def test_an_abort_waits_for_nothing() -> None:
    """A finalizer may run in a thread that a step in another thread waits for."""
    setup = Setup(num_pages=20)
    setup.engine.add("gone", [1, 2], greedy(5))
    kept = setup.engine.add("kept", [1, 2, 1], greedy(5))
    stepping, aborted = threading.Event(), threading.Event()
    execute = setup.engine.execute

    def waiting(inputs: StepInputs) -> torch.Tensor:
        stepping.set()
        assert aborted.wait(10)
        return execute(inputs)

    setup.engine.execute = waiting
    thread = threading.Thread(target=setup.engine.step)
    thread.start()
    assert stepping.wait(10)
    setup.engine.abort("gone")
    assert "gone" in setup.engine.requests
    aborted.set()
    thread.join()
    assert list(setup.engine.requests) == ["kept"]
    setup.run()
    assert kept.sequences[0].output == expected([1, 2, 1], 5)


@pytest.mark.parametrize("held", ["read", "add"])
def test_an_abort_is_done_whatever_the_lock_is_held_for(held: str) -> None:
    """Another thread takes an output, or adds a request that is refused, and calls nothing more."""
    setup = Setup(num_pages=20)
    engine = setup.engine
    engine.add("gone", [1, 2], greedy(5))
    holding, aborted = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        holding.set()
        assert aborted.wait(10)
        raise ValueError("refused")

    def hold() -> None:
        with suppress(ValueError):
            if held == "add":
                engine.add("refused", [1, 2], greedy(5))
            else:
                with engine.reading():
                    wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_check", wait)
        thread = threading.Thread(target=hold)
        thread.start()
        assert holding.wait(10)
        engine.abort("gone")
        assert "gone" in engine.requests
        aborted.set()
        thread.join()
    assert not engine.requests
    setup.assert_all_free()


def test_an_abort_keeps_samples_that_have_ended() -> None:
    setup = Setup(num_pages=20)
    request = setup.engine.add("two", [1], greedy(9, n=2))
    setup.engine.step()
    setup.engine._finish(request.sequences[0], "stop")
    setup.engine.abort("two")
    assert [sequence.finish_reason for sequence in request.sequences] == ["stop", "abort"]
    setup.assert_all_free()


@pytest.mark.parametrize("closed", [False, True])
def test_another_request_has_the_id(closed: bool) -> None:
    """Whoever serves or aborts a request that has ended does nothing to one that has its id now."""
    setup = Setup(num_pages=20)
    engine = setup.engine
    old = engine.add("same", [1, 2], greedy(9))
    served = engine.serve([old], lambda request: len(request.sequences[0].output), every_token=True)
    assert [next(served), next(served)] == [(0, 1), (0, 2)]
    engine.abort(old)
    assert engine.requests.get(old.request_id) is not old
    new = engine.add("same", [1, 2, 1], greedy(5))
    if closed:
        served.close()
    else:
        assert list(served) == [(0, 2)], "it has ended, and no step is computed for it"
    engine.abort(old)
    assert engine.requests.get(new.request_id) is new
    setup.run()
    assert new.sequences[0].output == expected([1, 2, 1], 5)
    setup.assert_all_free()
