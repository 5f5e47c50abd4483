"""Answers are those that vLLM gave to the same requests, which are kept as data."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

import vllm_module

PARITY = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "parity.py"))
THEIRS = json.loads(Path(__file__).with_name("vllm_answers.json").read_text())["answers"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    answers = PARITY["answers"](vllm_module, tmp_path_factory.mktemp("parity"))
    return json.loads(json.dumps(answers))  # as the data is: keys are text, tuples are lists


@pytest.mark.parametrize("name", THEIRS)
def test_an_answer_is_that_of_vllm(ours: dict[str, Any], name: str) -> None:
    """Text, token ids, reasons, logprobs with their ranks, beams, classes and scores are equal."""
    if name in PARITY["DIFFERENT"]:
        assert PARITY["difference"](THEIRS[name], ours[name]) is not None, "it is equal now"
    else:
        assert PARITY["difference"](THEIRS[name], ours[name]) is None


def test_every_case_has_an_answer(ours: dict[str, Any]) -> None:
    """No case was added without asking vLLM."""
    assert ours.keys() == THEIRS.keys()


def test_a_difference_is_found() -> None:
    """The comparison sees another number, key, length or type, and says where it is."""
    difference = PARITY["difference"]
    assert difference({"a": [1.0, None]}, {"a": [1.00005, None]}) is None
    assert difference({"a": [1.0, None]}, {"a": [1.1, None]}) == ".a[0]: 1.0 and 1.1"
    assert difference([1], [1, 2]) is not None
    assert difference({"a": 1}, {"b": 1}) is not None
    assert difference(None, 0) is not None
    assert difference("a", None) is not None
