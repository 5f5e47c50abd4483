"""Some elements of a tensor, sent alone, end where the whole tensor would have put them."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from vllm_module.errors import WeightLoadError
from vllm_module.testing.case import Case, law
from vllm_module.testing.lifecycle import assert_same_state, state
from vllm_module.weights.changes import Changes, find_changes

SUBJECTS = runpy.run_path(str(Path(__file__).with_name("subjects.py")))["SUBJECTS"]
COMPARED: list[str] = []  # names of tensors, over all subjects


@pytest.fixture(autouse=True)
def _few() -> Iterator[None]:
    before = settings.get_current_profile_name()
    settings.register_profile("two", settings.get_profile(before), max_examples=2)
    settings.load_profile("two")
    yield
    settings.load_profile(before)


@law
def assert_elements_go_where_they_are_held(case: Case) -> None:
    """An update with some elements of tensors gives the bits of a load with the new tensors.

    Tensors that are converted while they are loaded refuse it by name, and nothing changes.
    """
    module = case.build(case.rank, case.size)
    module.load_weights(case.tensors)
    before = {path: tensor.clone() for path, tensor in state(module).items()}
    new: dict[str, Any] = dict(case.tensors)
    sent: dict[str, Changes] = {}
    for name, other in case.other_tensors().items():
        old = case.tensors[name]
        if old.dtype.itemsize == 1 and old.dtype.is_floating_point:
            continue  # torch cannot choose among these
        chosen = torch.arange(old.numel()).view(old.shape) % 3 == 1
        new[name] = torch.where(chosen, other, old)
        sent[name] = find_changes(old, new[name])
    for name in case.some(sorted(sent), "sent"):
        refused = ""
        try:
            module.update_weights({name: sent[name]})
        except WeightLoadError as error:
            refused = str(error)
        if refused:
            assert name in refused
            assert "send the tensor whole" in refused or "dtype" in refused, refused
            assert_same_state(state(module), before, "after a refused update")
            return
        fresh = case.build(case.rank, case.size)
        fresh.load_weights({**case.tensors, name: new[name]})
        assert_same_state(state(module), state(fresh), f"after some elements of {name}")
        COMPARED.append(name)
        module.load_weights(case.tensors)


DEEP = "a tied model in depth", "a hybrid with experts in depth"  # whose stages are subjects, too


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.at_length] if name in DEEP else [])
        for name in SUBJECTS
    ],
)
def test_subject(name: str) -> None:
    SUBJECTS[name].hold(assert_elements_go_where_they_are_held)
