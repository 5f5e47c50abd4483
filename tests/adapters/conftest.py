"""The models and adapters of the tests, each made once."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
FAMILIES, adapt, small_model = SUPPORT["FAMILIES"], SUPPORT["adapt"], SUPPORT["small_model"]


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return what makes the model and the adapter of a family, once."""

    @cache
    def of(family: str) -> Any:
        folder = tmp_path_factory.mktemp(family)
        model, ids = small_model(family, folder / "base"), torch.arange(3, 48, 5)
        with torch.no_grad():
            base_logits = model(ids[None]).logits[0]
            adapted = adapt(model, folder / "adapter", **FAMILIES[family][1])
            logits = adapted(ids[None]).logits[0]
        return SUPPORT["Tuned"](folder / "base", folder / "adapter", ids, base_logits, logits)

    return of
