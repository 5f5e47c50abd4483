"""Recorded steps of functions that decide in Python, beside their results written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from vllm_module.kernels.matmul.products import Products, products, products_in_use
from vllm_module.kernels.recording import Recording
from vllm_module.layers import AttentionMetadata
from vllm_module.layers.recurrent import RecurrentLayer
from vllm_module.runtime import recorded_steps
from vllm_module.runtime.recorded_steps import RecordedSteps


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record whatever can be; list what is done again, which results do not tell."""
    again, found = Recording.again, list[int]()

    def counted(recording: Recording) -> None:
        found.append(1)
        again(recording)

    monkeypatch.setattr(Recording, "again", counted)
    monkeypatch.setattr(recorded_steps, "_GAIN", 0)  # a busy machine has strange clocks
    before = torch.get_num_threads()
    with torch.inference_mode(), products(Products(pages=True)):
        yield found
    torch.set_num_threads(before)


def step(ids: list[int], pages: int = 2) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Return a step with one token of each sequence, the state of each in its own slot."""
    count = len(ids)
    metadata = AttentionMetadata(
        torch.arange(count),
        torch.zeros(count, pages, dtype=torch.int32),
        torch.ones(count, dtype=torch.int32),
        torch.arange(count + 1, dtype=torch.int32),
        1,
        state_slots=torch.arange(count).flip(0) + 1,
    )
    return torch.tensor(ids), torch.zeros(count, dtype=torch.int64), metadata


DECIDE: dict[str, Callable[[AttentionMetadata], int]] = {
    "products": lambda _: products_in_use.get().codes,
    "threads": lambda _: torch.get_num_threads(),
    "pages of a table": lambda metadata: metadata.block_tables.shape[1],
    "sequences": lambda metadata: len(metadata.context_lens),
}


@pytest.mark.parametrize("by", DECIDE)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it sets the same each time
)
@given(drawn=st.lists(st.sampled_from([1, 2, 3]), min_size=10, max_size=25))
def test_what_python_code_may_decide_by_is_another_step(
    replayed: list[int], by: str, drawn: list[int]
) -> None:
    """A step of a kind that has not come is never done by a recording of another kind."""

    def compute(ids: torch.Tensor, _: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        return ids.float().unsqueeze(1) * (10 + DECIDE[by](metadata))

    steps = RecordedSteps(nn.Linear(1, 1), compute)
    for at, number in enumerate(drawn):
        ids = [at + each for each in range(number if by == "sequences" else 2)]
        torch.set_num_threads(number if by == "threads" else 1)
        given = step(ids, number if by == "pages of a table" else 2)
        with products(Products(pages=True, codes=number if by == "products" else 1)):
            result = steps.logits(*given)
        assert result.tolist() == [[each * (10.0 + number)] for each in ids]
    most = max(map(drawn.count, drawn))
    assert len(replayed) >= most - 3
    replayed.clear()


# Of nine steps, the third is recorded, and the fourth also done again.
AGAIN = {"recorded": 6, "other numbers": 1, "read first": 0, "read afterwards": 0}


class Summing(RecurrentLayer):
    """Keeps the sum of a sequence's tokens, and of numbers that Python code adds."""

    def __init__(self) -> None:
        super().__init__()
        self.states = {"sum": torch.zeros(4, 2)}


@pytest.mark.parametrize("what", AGAIN)
def test_states_are_those_of_the_model_alone(what: str, replayed: list[int]) -> None:
    """So they are where the step cannot be recorded, and where a recording gives other bits."""
    layer = Summing()
    layer.load_weights(())
    assert layer.states is not None
    state, more = layer.states["sum"], 0.0  # no module keeps the number, so it is not looked at

    def compute(ids: torch.Tensor, _: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        slots = metadata.state_slots
        assert slots is not None
        if what == "read first":
            assert float(state.sum()) >= 0
        state.index_add_(0, slots, (ids + more).unsqueeze(1).expand(-1, 2))
        if what == "read afterwards":
            assert float(state.sum()) >= 0
        return state.index_select(0, slots) * 3

    steps = RecordedSteps(layer, compute)
    sums = [0.0, 0.0]
    for at in range(9):
        more = float(at) if what == "other numbers" else 0.0
        ids = [at + 1, 2 * at + 5]
        sums = [total + each + more for total, each in zip(sums, ids, strict=True)]
        result = steps.logits(*step(ids))
        assert result.tolist() == [[3 * each] * 2 for each in sums]
        assert state.tolist() == [[0.0] * 2, [sums[1]] * 2, [sums[0]] * 2, [0.0] * 2]
    assert len(replayed) == AGAIN[what]
