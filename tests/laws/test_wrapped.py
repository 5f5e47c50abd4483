"""The laws of loading, checked on models of transformers in the wrapper."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from vllm_module.testing import LAWS, Law

_CASES = runpy.run_path(str(Path(__file__).with_name("wrapped.py")))
WRAPPED = _CASES["WRAPPED"]

# Every law on some families, and every family under some laws: "make laws" tries all of them.
PAIRS = [
    (kind, law)
    for row, kind in enumerate(WRAPPED)
    for column, law in enumerate(LAWS)
    if (row + column) % 8 == 0 and _CASES["is_held"](kind, law.__name__)
]


@pytest.fixture(autouse=True)
def _one_case() -> Iterator[None]:
    """Try one case, since models are built for each rank."""
    before = settings.get_current_profile_name()
    settings.register_profile("one", settings.get_profile(before), max_examples=1)
    settings.load_profile("one")
    yield
    settings.load_profile(before)


@pytest.mark.parametrize(("kind", "law"), PAIRS)
def test_a_wrapped_model_keeps_the_law(kind: str, law: Law) -> None:
    """The law holds for sizes of the family, tied or not, and any number of ranks."""
    WRAPPED[kind].hold(law)
