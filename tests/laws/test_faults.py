"""The laws bite: each of many faults, applied to the running code, breaks the law it should."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from vllm_module import testing

FAULTS = runpy.run_path(str(Path(__file__).with_name("faults.py")))["FAULTS"]
SUBJECTS = runpy.run_path(str(Path(__file__).with_name("subjects.py")))["SUBJECTS"]


@pytest.fixture(autouse=True)
def _first_failure_is_enough() -> Iterator[None]:
    """Look for a case that fails, and not for the smallest one."""
    before = settings.get_current_profile_name()
    settings.register_profile(
        "faults", settings.get_profile(before), phases=[Phase.generate], max_examples=100
    )
    settings.load_profile("faults")
    yield
    settings.load_profile(before)


def test_there_are_many_faults() -> None:
    """The table has at least 25 faults, each of its own, and every law is shown to bite."""
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
    assert {f"assert_{fault.law}" for fault in FAULTS} == {law.__name__ for law in testing.LAWS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_breaks_its_law(fault: Any) -> None:
    """With one line of the running code changed, the law fails."""
    law = getattr(testing, f"assert_{fault.law}")
    with fault.applied(), pytest.raises(Exception) as caught:  # noqa: PT011  # some crash
        SUBJECTS[fault.subject].hold(law)
    assert not isinstance(caught.value, SyntaxError | NameError)
