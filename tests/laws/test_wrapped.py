"""The laws of loading, checked on models of transformers in the wrapper."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from vllm_module.testing import LAWS, Law

WRAPPED = runpy.run_path(str(Path(__file__).with_name("wrapped.py")))["WRAPPED"]


@pytest.fixture(autouse=True)
def _fewer_cases() -> Iterator[None]:
    """Try few cases, since a model is built for each rank; "make laws" tries more."""
    before = settings.get_current_profile_name()
    settings.register_profile("one", settings.get_profile(before), max_examples=2)
    settings.load_profile("one")
    yield
    settings.load_profile(before)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_model_keeps_the_law(kind: str, law: Law) -> None:
    """The law holds for sizes of the family, tied or not, and any number of ranks."""
    WRAPPED[kind].hold(law)
