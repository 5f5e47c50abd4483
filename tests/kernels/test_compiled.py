"""Shipped configurations of the kernels, compiled on a machine without the GPU.

The largest of each kernel are compiled; ``make laws`` sets ``AT_LENGTH``, and all are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton

Compile = Callable[..., str]
SHARED_MEMORY = {120: 101376, 90: 232448, 80: 166912}  # bytes of one thread block, at most
AT_LENGTH = bool(os.environ.get("AT_LENGTH"))
PROGRAM = Path(__file__).with_name("compiling.py")
NOTE = Path(__file__).parents[2] / "design" / "0017-before-the-first-gpu.md"


@pytest.fixture(scope="module")
def compiled(
    run_with_torch: Callable[..., subprocess.CompletedProcess[str]],
) -> Compile:
    """Return the function that compiles in another process: in this one Triton interprets."""

    def compile_them(*arguments: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        code = f"import runpy; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
        done = run_with_torch(code, *arguments, modules=PROGRAM.parent, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return compile_them


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="each compiler has registers of its own")
def test_the_code_of_defaults_is_that_of_the_note(compiled: Compile) -> None:
    """Registers, blocks, tiles ahead and conversions of each main kernel are those of the note."""
    lines = compiled("90", "--table", *[] if AT_LENGTH else ["--short"]).splitlines()
    assert len(lines) == (12 if AT_LENGTH else 5)
    noted = NOTE.read_text().splitlines()
    assert [line for line in lines if line not in noted] == []


def test_gpus_of_less_shared_memory_than_hopper_take_other_tiles(compiled: Compile) -> None:
    """Of 12.0, which is later than Hopper, a thread block has less than half of its memory."""
    results = json.loads(compiled("120", *["--all"] * AT_LENGTH))["compiled"]
    assert {"_decode", "_prefill", "_decode_latent", "_prefill_latent", "_multiply"} <= {
        one["kernel"] for one in results
    }
    assert [one for one in results if one["shared"] > SHARED_MEMORY[120]] == []


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.at_length)])
def test_kernels_compile_within_the_limits_of_the_gpu(compiled: Compile, capability: int) -> None:
    """Shared memory fits, no register spills, and products use the GPU's matrix instructions.

    The figures are real: larger tiles need more shared memory.
    """
    done = json.loads(compiled(str(capability), *["--all"] * AT_LENGTH))
    results: list[dict[str, Any]] = done["compiled"]
    if capability == 90:
        assert done["left out"] == []
    assert [one for one in results if one["shared"] > SHARED_MEMORY[capability]] == []
    assert [one for one in results if one["spilled"]] == []
    products = {
        "_prefill", "_multiply", "_multiply_described", "_multiply_groups", "_multiply_mxfp4",
        "_multiply_packed", "_multiply_packed_groups",
    }  # fmt: skip
    if capability == 80:
        products.remove("_multiply_described")
    # The interpreter's minimum keeps NaN whatever is asked for, and the GPU's only where it is.
    # Rows of exact gelu that are too long for one launch are quantized by another one.
    clamping = [
        one
        for one in results
        if re.search(r"to (FP8|int8)|quantize|swiglu", one["case"])
        and one["case"] != "gelu to FP8 by token, 32768"
    ]
    keeping = {one["case"] for one in clamping if "min.NaN.f32" in one["instructions"]}
    assert len(keeping) > 1
    assert keeping == {one["case"] for one in clamping}
    assert [one for one in clamping if {"min.f32", "max.f32"} & {*one["instructions"]}] == []
    matrix = [
        one
        for one in results
        if one["kernel"] in products and "fp32" not in one["case"] and "odd" not in one["case"]
    ]
    instruction = "wgmma.mma_async" if capability == 90 else "mma.sync"
    assert {one["kernel"] for one in matrix} == products
    # Tiles for heads of more than 256 features have fewer rows than wgmma takes.
    large = [one for one in matrix if one["case"].startswith(("attention 320", "attention 512"))]
    assert large
    assert [one for one in large if "mma.sync" not in one["instructions"]] == []
    others = [one for one in matrix if one not in large]
    assert [one for one in others if instruction not in one["instructions"]] == []
    described = [one for one in results if "descriptors" in one["case"] + one["kernel"]]
    described = [one for one in described if one["kernel"] in products]
    assert [one for one in described if "cp.async.bulk.tensor" not in one["instructions"]] == []
    prefill = {one["case"]: one for one in results if one["kernel"] == "_prefill"}
    decode = {one["case"]: one for one in results if one["kernel"] == "_decode"}
    assert prefill["attention 128"]["registers"] > 128
    if capability == 90:
        largest = decode["attention 320, e4m3, everything"]
        assert 0 < decode["attention 128"]["shared"] < largest["shared"]
        tma = [one for one in results if "TMA" in one["case"] and one["kernel"] != "_combine"]
        assert len(tma) == (3 if AT_LENGTH else 2)
    controls = {"griddepcontrol.wait", "griddepcontrol.launch_dependents"}
    early = [one for one in results if controls & one["instructions"].keys()]
    expected = {"_decode", "_held_rows"} if capability == 90 else set()
    assert {one["kernel"] for one in early} == expected
    for one in results:
        is_early = "launched early" in one["case"] and one["kernel"] in expected
        counts = [one["instructions"].get(name, 0) for name in controls]
        assert counts == ([1, 1] if is_early else [0, 0]), one
    if capability == 90 or AT_LENGTH:
        latent = {one["kernel"]: one for one in results if one["case"] == "latent, 128 heads"}
        assert instruction in latent["_decode_latent"]["instructions"]
        assert instruction in latent["_prefill_latent"]["instructions"]
