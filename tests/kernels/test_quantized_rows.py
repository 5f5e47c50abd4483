"""Norms that quantize add the squares of a row in the order in which norms that do not add them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

PROGRAM = """
import json, re, sys

sys.path.insert(0, sys.argv[1])
import torch, triton
from compiling import E4M3, FP32, launching, meta, specialized
from triton.backends.compiler import GPUTarget
from vllm_module.kernels.rows.rms_norm import fused_add_rms_norm_triton, rms_norm_quantize_triton

found = []

def note(jit, arguments, options):
    source = specialized(jit, arguments)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    # The layout of what the first reduction adds up.
    layout = re.search(r"tt.reduce.*?}\\) : \\(tensor<\\S+, (#\\w+)>\\)", text, re.DOTALL)[1]
    found.append(re.search(rf"^{layout} = (.*)$", text, re.MULTILINE)[1])

with launching(note):
    for columns, dtype in ((1024, torch.bfloat16), (96, torch.bfloat16), (512, FP32)):
        x, weight = meta(8192, columns, dtype=dtype), meta(columns, dtype=dtype)
        fused_add_rms_norm_triton(x, x, weight, 1e-6)
        for group, static in ((columns, None), (32, None), (0, meta(1, dtype=FP32))):
            rms_norm_quantize_triton(x, x, weight, 1e-6, E4M3, group, static)
json.dump(found, sys.stdout)
"""


def test_squares_are_added_in_one_order(
    run_with_torch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """A thread has the same numbers of a row whether the norm is quantized or not."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = run_with_torch(PROGRAM, str(Path(__file__).parent), environment=environment)
    assert done.returncode == 0, done.stderr
    layouts = json.loads(done.stdout)
    assert len(layouts) == 12
    for first in range(0, 12, 4):
        assert len(set(layouts[first : first + 4])) == 1
