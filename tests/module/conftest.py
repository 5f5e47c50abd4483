from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

STAND_IN = runpy.run_path(str(Path(__file__).parents[1] / "weights" / "delayed_device.py"))


@pytest.fixture(params=["onto the host", "onto a device"])
def onto(request: pytest.FixtureRequest) -> Iterator[None]:
    """Load as on a CPU, and through the pinned buffers and streams of a device."""
    if request.param == "onto the host":
        yield
        return
    with STAND_IN["loading_onto_a_device"](batch=1 << 20):
        yield
