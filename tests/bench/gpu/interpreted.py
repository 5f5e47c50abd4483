"""Kernels on a CPU, in Triton's interpreter, which TRITON_INTERPRET=1 turns on."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
from triton.runtime import interpreter

_TESTS = Path(__file__).parents[2]


def interpret() -> None:
    """Make public functions launch their kernels, and the interpreter cast as a device does."""
    runpy.run_path(str(_TESTS / "interpreter.py"))["hasten"](setattr)
    correct = runpy.run_path(str(_TESTS / "kernels" / "conftest.py"))
    builder = interpreter.InterpreterBuilder
    for name in ("create_fp_to_fp", "create_fp_trunc", "create_fp_ext", "cast_impl"):
        setattr(builder, name, correct["cast"])
    builder.create_dot = correct["dot"]
    interpreter._patch_lang_tensor = correct["indexed"](interpreter._patch_lang_tensor)
    for name in ("binary_op", "unary_op"):
        setattr(builder, name, correct["arithmetic"](getattr(builder, name)))
    np.seterr(all="ignore")  # of infinities that a device computes with in silence
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm_module.kernels."):
            for operator in [x.removesuffix("_triton") for x in vars(module)]:
                if hasattr(module, f"_{operator}") and hasattr(module, f"{operator}_triton"):
                    setattr(module, f"_{operator}", getattr(module, f"{operator}_triton"))
