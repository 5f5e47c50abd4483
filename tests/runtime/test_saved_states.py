"""States after prefixes, which are saved for later prompts."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.errors import WeightLoadError
from vllm_module.runtime.cache.saved_states import SavedStates
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.served_adapter import AdapterMemory, ServedAdapter
from vllm_module.runtime.step_inputs import StepInputs

# Pytest's importlib mode has no imports between test files.
HYBRID: Any = runpy.run_path(str(Path(__file__).with_name("hybrid.py")))
greedy, expected, Setup = (HYBRID[name] for name in ("greedy", "expected", "Setup"))
assert_right, served_alone = (HYBRID[name] for name in ("assert_right", "served_alone"))
soak = HYBRID["soak"]


def test_a_prompt_reuses_what_has_pages_and_a_state() -> None:
    """The same prompt, a longer one, and from the third on prompts that only begin alike."""
    setup = Setup(prefix_caching=True)
    conversation = [1, 0] * 6
    assert served_alone(setup, conversation) == 0
    assert served_alone(setup, conversation) == 8  # pages of 4, and one token is computed
    assert served_alone(setup, [*conversation, 1, 1, 1]) == 8
    assert served_alone(setup, [*conversation, 1, 1, 1]) == 12
    assert served_alone(setup, [*conversation, 1, 1, 1], n=3) == 12
    assert served_alone(setup, conversation[:8]) == 0  # its state is not the one after 4 tokens
    system = [2] * 9
    assert [served_alone(setup, [*system, *[end] * 7]) for end in (3, 4, 5, 6)] == [0, 0, 8, 8]
    assert served_alone(setup, [*system, 7], prompt_logprobs=1) == 0


def test_a_prompt_that_is_computed_again_reuses_states() -> None:
    """After it was preempted, a sequence goes on from the longest prefix that has a state."""
    setup = Setup(num_pages=8, prefix_caching=True)
    asked = []
    for index in range(2):
        prompt = [index] * 9
        asked.append((setup.engine.add(str(index), prompt, greedy(12)), expected(prompt, 12)))
    setup.run()
    assert_right(asked)
    assert setup.scheduler.preemptions
    assert setup.model.hits


def test_the_state_used_last_is_kept_longest() -> None:
    """With two slots, the third prompt takes the slot of the one that was used least recently."""
    setup = Setup(max_num_seqs=2, prefix_caching=True)
    assert [served_alone(setup, [index] * 6) for index in (1, 2, 1, 3, 1, 2)] == [0, 0, 4, 0, 4, 0]
    assert len(setup.scheduler.saved) == 2


def test_a_state_goes_with_its_page() -> None:
    """When others have taken the pages of a prefix, its slot is free."""
    setup = Setup(num_pages=4, prefix_caching=True)
    assert [served_alone(setup, [1] * 6), served_alone(setup, [1] * 6)] == [0, 4]
    assert served_alone(setup, [2] * 14, count=1) == 0
    assert len(setup.scheduler.saved) == 1
    assert served_alone(setup, [1] * 6) == 0


def test_a_prompt_that_dies_leaves_a_right_state_or_none() -> None:
    """Aborted between the chunk that ends where its state is saved and the copy of it."""
    setup = Setup(prefix_caching=True)
    setup.engine.add("0", [1] * 10, greedy(4))
    setup.engine.step()
    setup.engine.abort("0")
    assert setup.scheduler.saved.waiting
    assert setup.engine.step() == []  # of nothing: it copies nothing
    setup.assert_saved_states()
    assert served_alone(setup, [2] * 10) == 0  # in the row of the first
    assert served_alone(setup, [1] * 10) == 8
    setup.engine.add("1", [3] * 20, greedy(4))
    setup.engine.step()
    setup.engine.abort("1")
    setup.engine.resume()
    assert [served_alone(setup, [3] * 20), served_alone(setup, [3] * 20)] == [0, 16]


def test_new_weights_forget_states() -> None:
    """So do those that a prompt in progress would have saved."""
    setup = Setup(prefix_caching=True, max_num_batched_tokens=4)
    served_alone(setup, [1] * 6)
    setup.engine.add("0", [2] * 14, greedy(1))
    setup.engine.step()
    setup.engine.resume()
    assert not len(setup.scheduler.saved)
    setup.run()
    assert not len(setup.scheduler.saved)
    assert [served_alone(setup, [token] * 6) for token in (1, 2, 1, 2)] == [0, 0, 4, 4]


def test_an_interrupt_forgets_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool then counts prefixes from the first again, which would be taken for others."""

    def interrupted(self: Engine, launched: Any) -> None:
        raise KeyboardInterrupt

    setup = Setup(prefix_caching=True)
    served_alone(setup, [1] * 10)
    setup.engine.add("0", [2] * 10, greedy(2))
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "_finish_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            setup.engine.step()
    assert [served_alone(setup, [3] * 10), served_alone(setup, [3] * 10)] == [0, 8]
    assert len(setup.scheduler.saved) == 1


@pytest.mark.parametrize("advanced", [False, True])
def test_states_of_a_step_that_failed_are_not_used(advanced: bool) -> None:
    """Whether its copies were made or not; its prompts are computed from their first token."""
    setup = Setup(prefix_caching=True)
    served_alone(setup, [1] * 6)

    def failing(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        setup.engine.execute = setup.model
        if advanced:
            setup.model(inputs, sampled)
        raise RuntimeError("once")

    asked = []
    for index in (1, 2, 3):
        asked.append((setup.engine.add(str(index), [index] * 10, greedy(4)), [index] * 10))
    setup.engine.step()  # up to where states are saved
    hits, setup.engine.execute = setup.model.hits, failing
    setup.engine.step()
    assert setup.model.hits - hits == 0
    assert len(setup.scheduler.saved) <= 3, "those of prompts that were computed alone"
    setup.run()
    assert_right([(request, expected(prompt, 4)) for request, prompt in asked])
    assert {request.sequences[0].finish_reason for request, _ in asked} == {"length"}
    for index in (1, 2, 3):
        served_alone(setup, [index] * 10)


def test_a_prompt_that_fails_with_a_hit_ends_alone() -> None:
    """Copies of saved states can be made again, so others are told apart from it."""
    setup = Setup(prefix_caching=True)
    served_alone(setup, [1] * 10)

    def failing(inputs: StepInputs, sampled: torch.Tensor | None = None) -> torch.Tensor:
        if 6 in inputs.input_ids:
            raise RuntimeError("a bad token")
        logits: torch.Tensor = setup.model(inputs, sampled)
        return logits

    setup.engine.execute = failing
    bad = setup.engine.add("bad", [*[1] * 10, 6], greedy(4))
    good = [setup.engine.add(str(index), [1] * (9 + index), greedy(4)) for index in range(3)]
    setup.run()
    assert bad.sequences[0].finish_reason == "error"
    assert_right([(each, expected(each.prompt_token_ids, 4)) for each in good])
    assert {each.sequences[0].finish_reason for each in good} == {"length"}


COPIES = SavedStates.copies


def late(self: Any) -> list[tuple[int, int]]:
    rows, self.rows = getattr(self, "rows", {}), dict(self._rows)
    self._rows = rows
    return COPIES(self)


def forgetful(self: Any, prefix: int) -> None:
    if prefix in self._slots:
        self._free.append(self._slots[prefix])


def other(self: Any, prefix: int) -> int:
    slot: int = next(iter(self._slots.values()))
    return slot


FAULTS: dict[str, tuple[type, str, Any]] = {
    "a state is copied a step late": (SavedStates, "copies", late),
    "a slot is given away, and its first prefix still has it": (SavedStates, "forget", forgetful),
    "the state of another prefix is used": (SavedStates, "use", other),
    "states are used after an error": (
        Engine,
        "_execute",
        lambda self, step, *inputs: self.execute(*inputs),
    ),
}


def soak_with_errors() -> None:
    for seed in range(3):
        soak(60, seed, caching=True, errors=0.05)


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_designs_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives a wrong token, or leaves a wrong state, in a soak with errors."""
    with monkeypatch.context() as patched:
        patched.setattr(*FAULTS[fault])
        with pytest.raises(AssertionError):
            soak_with_errors()
    soak_with_errors()


def test_a_step_that_is_not_run_has_saved_nothing() -> None:
    """The only request of the step that copies a state has an adapter that cannot be read."""

    def missing(number: int, path: str) -> Any:
        raise WeightLoadError("it is gone")

    setup = Setup(prefix_caching=True)
    setup.engine.adapters["a"] = ServedAdapter("a", 0, "nowhere")
    setup.engine.adapter_memory = AdapterMemory(missing, *[lambda number: None] * 2, None)
    setup.engine.add("0", [1, 2, 3, 4, 5, 6, 7, 8, 9], greedy(3))
    setup.engine.step()
    assert setup.scheduler.saved.waiting
    setup.engine.abort("0")
    request = setup.engine.add("1", [3], greedy(3), adapter="a")
    setup.engine.step()
    assert request.error is not None
    setup.assert_saved_states()
    assert not len(setup.scheduler.saved)
