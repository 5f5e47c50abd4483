"""Every shipped configuration, compiled for GPUs that need not be there."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_MEMORY = {90: 232448, 80: 166912}  # bytes that one block can have
PROGRAM = Path(__file__).with_name("compiling.py")


@functools.cache
def compiled(capability: int) -> list[dict[str, Any]]:
    """Compile in a process of its own: in this one Triton interprets."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = [sys.executable, str(PROGRAM), str(capability)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("capability", [90, 80])
def test_kernels_compile_within_the_limits_of_the_gpu(capability: int) -> None:
    """Shared memory fits and no register spills.

    On Hopper, kernels that multiply large tiles do so by its own matrix instructions.
    """
    results = compiled(capability)
    over = [one for one in results if one["shared"] > SHARED_MEMORY[capability]]
    assert not over
    assert [one for one in results if one["spilled"]] == []
    if capability == 90:
        matrices = {"_prefill", "_multiply"}
        slow = [
            one
            for one in results
            if one["kernel"] in matrices
            and "fp32" not in one["case"]
            and "odd" not in one["case"]
            and not {"HGMMA", "QGMMA"} & set(one["instructions"])
        ]
        assert not slow
        assert {one["kernel"] for one in results} >= matrices


def test_the_checks_would_see_a_kernel_that_does_not_fit() -> None:
    """The harness reports what a kernel really needs: far more for tiles far too large."""
    sizes = {one["case"]: one for one in compiled(80) if one["kernel"] == "_prefill"}
    small, large = sizes["attention 64"], sizes["attention 128"]
    assert 0 < small["shared"] < large["shared"]
    assert large["registers"] > 128
    assert large["instructions"]["HMMA"] > 0
