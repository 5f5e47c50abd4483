"""Faults in the moving of states: with each, some sequence gets other tokens than alone."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from vllm_module.runtime.scheduler import Scheduler, Step

# Pytest's importlib mode has no imports between test files.
STATES: Any = runpy.run_path(str(Path(__file__).with_name("hybrid.py")))

# Pages are so few that sequences are swapped all the time.
SETUPS = st.builds(
    STATES["Setup"], num_pages=st.just(8), host_pages=st.just(20), host_states=st.just(5),
    async_scheduling=st.booleans(),
)  # fmt: skip


def moved(change: Callable[[Any], None]) -> tuple[str, Any]:
    """Return a faulty ``schedule``: ``change`` is given the states that a step moves."""
    right = Scheduler.schedule

    def schedule(scheduler: Scheduler, *arguments: Any, **named: Any) -> Step:
        step = right(scheduler, *arguments, **named)
        change(step.states)
        return step

    return "schedule", schedule


def of_its_own_row(states: Any) -> None:
    states.copied[:] = [(target, target) for _, target in states.copied]


FAULTS: dict[str, tuple[str, Any]] = {
    "a sample gets no state": moved(lambda states: states.copied.clear()),
    "a sample gets the state that its row had": moved(of_its_own_row),
    "a state is not swapped out": moved(lambda states: states.swapped_out.clear()),
    "a state is not swapped in": moved(lambda states: states.swapped_in.clear()),
    "states advance twice when a step is dropped": ("start_over", lambda scheduler: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_moved_states_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fault, some schedule gives other tokens than each sequence alone."""

    @given(SETUPS, STATES["schedules"], st.data())
    @settings(max_examples=200, phases=[Phase.generate], derandomize=True, database=None)
    def law(setup: Any, schedule: list[Any], data: st.DataObject) -> None:
        def between(index: int) -> None:
            if data.draw(st.booleans()):
                setup.engine.resume()

        asked = setup.serve(schedule, between)
        setup.run()
        STATES["assert_right"](asked)

    monkeypatch.setattr(Scheduler, *FAULTS[fault])
    with pytest.raises(AssertionError):
        law()
