"""Each of many faults, applied to the running code, breaks the law that it should."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from vllm_module import testing
from vllm_module.core import fit, given, run

TABLE = runpy.run_path(str(Path(__file__).with_name("faults.py")))
FAULTS = TABLE["FAULTS"]
# Each takes half a second and more, and others break the same laws: "make laws" tries all.
LONG = {
    "every size but 1 is refused",
    "a rule for a path skips what begins like it",
    "ranks of all groups add up their sums of squares",
    "a rank forgets the bias that experts are chosen by",
    "packed experts are cut by rank and not by slot",
    "experts that follow each other lie side by side, whatever their places",
    "rows that two ranks want are laid out one too far",
    "the padding of slots is not zeroed",
    "what is left of a row before a range is not cut out",
    "parts of two ranks are exchanged",
    "a rank counts blocks of nested scales from its own first",
    "a word or group of two ranks is cut",
    "a buffer is reused before every rank has taken its batch",
    "the order of inputs is ignored",
    "experts have one value between them",
}
SUBJECTS = runpy.run_path(str(Path(__file__).with_name("subjects.py")))["SUBJECTS"]


@pytest.fixture(autouse=True)
def _first_failure_is_enough() -> Iterator[None]:
    """Look for a case that fails, and not for the smallest one."""
    before = settings.get_current_profile_name()
    settings.register_profile(
        "faults", settings.get_profile(before), phases=[Phase.generate], max_examples=200
    )
    settings.load_profile("faults")
    yield
    settings.load_profile(before)


def test_there_are_many_faults() -> None:
    """The table has at least 25 faults, each of its own, and every law is shown to bite."""
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
    short = {fault for fault in FAULTS if fault.name not in LONG}
    assert len(short) == len(FAULTS) - len(LONG)
    assert {f"assert_{fault.law}" for fault in short} == {law.__name__ for law in testing.LAWS}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.at_length] if fault.name in LONG else [])
        for fault in FAULTS
    ],
    ids=lambda fault: fault.name.replace(" ", "-"),
)
def test_a_fault_breaks_its_law(fault: Any) -> None:
    """With the fault in the running code, the law fails, and not because the fault is broken."""
    law = getattr(testing, f"assert_{fault.law}")
    with fault.applied(), pytest.raises(Exception) as raised:  # noqa: PT011  # kinds are below
        SUBJECTS[fault.subject].hold(law)
    if not TABLE["caught"](raised.value):
        raise raised.value


def test_loading_together_breaks_no_law_by_itself() -> None:
    """Where ranks load together and the ring has no fault, the law of its faults holds."""
    settings.register_profile("few", settings.get_profile("faults"), max_examples=15)
    settings.load_profile("few")
    with TABLE["cooperating"](TABLE["instead"]):
        assert SUBJECTS["row"].hold(testing.assert_sharding_equivalent)


@pytest.mark.parametrize("gone", ["parameters:Dim.gone", "core.run:gone", "core.run:Gone.fill"])
def test_a_fault_of_what_is_gone_is_an_error(gone: str) -> None:
    """A function that a refactor removes takes no fault silently with it."""
    with pytest.raises(KeyError), TABLE["instead"](gone, lambda right, *arguments: None)():
        pass


def test_a_fault_is_taken_back() -> None:
    """After a fault every class and every module that imported a function has the right one."""

    def names() -> dict[str, Any]:
        return {"function": fit.misfit, "imported": given.find, **vars(run.Run)}

    right = names()
    for where in ("core.fit:misfit", "core.routes:find", "core.run:Run.fill"):
        with TABLE["instead"](where, lambda right, *arguments, **named: None)():
            assert names() != right
        assert names() == right
