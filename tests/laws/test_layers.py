"""The laws of loading, held against every layer and some plain modules."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from vllm_module.testing import LAWS, Law

LAYERS = runpy.run_path(str(Path(__file__).with_name("subjects.py")))["LAYERS"]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_keeps_the_law(name: str, law: Law) -> None:
    """Whatever the layer is built with and however many ranks share it, the law holds."""
    LAYERS[name].hold(law)
