"""Compile kernels as they would be launched, on a machine without the GPU.

``python tests/kernels/compiling.py 90`` compiles every case of ``compilation`` for compute
capability 9.0 and prints, as JSON, what each compiled kernel needs; ``80`` does the largest case
of each kernel. With ``--candidates``, it compiles every case and every candidate of attention and
of products, too. ``90 --table`` prints the table of design/0017.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # absent with -P

from compilation import attention, caches, experts, products, recurrent, rows, table
from compilation.candidates import (
    ATTENTION,
    OF_EACH_KIND,
    candidates_of_products,
    compile_candidates,
)
from compilation.launches import E4M3, FP32, Cases, compiling, launching, meta, specialized

from vllm_module.kernels import dtypes
from vllm_module.kernels.experts import grouped_matmul
from vllm_module.kernels.matmul import matmul_configurations, scaled_matmul

__all__ = ["E4M3", "FP32", "launching", "meta", "specialized"]  # tests import them

KINDS = attention, caches, rows, products, experts, recurrent
# For architectures of 8.0 only what needs no FP8.
CASES: Cases = {name: launch for kind in KINDS for name, launch in kind.CASES.items()}
HOPPER: Cases = {
    name: launch for kind in KINDS for name, launch in getattr(kind, "HOPPER", {}).items()
}

# Of each kernel, what takes the most registers and shared memory: all that is compiled for 8.0,
# unless candidates are, because compiling takes minutes where nothing is cached.
LARGEST = (
    "attention 64", "attention 128", "attention 512", "attention 512, fp32",
    "latent, 128 heads", "latent, 16 heads, fp32",
    "norm, rotary, store 512, a part", "rotary, fp32", "rotated latents, fp32", "store 512",
    "copy in a layer", "norm 5120", "norm 65536, fp32, offset", "silu 14336",
    "quantize to int8 by tensor", "quantize to int8 by token", "multiply int8, 256",
    "packed nf4, 256, 4 bits, groups of 64, bf16", "packed gptq, 64, 4 bits, groups of 128, bf16",
    "grouped bf16, 64", "grouped int8, 128", "grouped fp32, 128", "grouped mxfp4, 64",
    "grouped packed awq, 128", "grouped packed gptq in no order, 64", "route to 512",
    "experts' rows", "convolve, fp32", "scan, prompts", "scan, 256 numbers", "delta rule, prompts",
    "draw tokens", "adjust logits", "digest int64",
)  # fmt: skip


def choose_for(capability: int) -> None:
    """Choose tiles for a capability, since a meta tensor's device has none."""
    of_products = scaled_matmul, grouped_matmul, matmul_configurations
    for module in (dtypes, *ATTENTION, *of_products):
        module.capability = lambda _: divmod(capability, 10)


def main(capability: int, *, every_candidate: bool) -> None:
    """Compile every case and print a list with an entry for each kernel.

    Candidates of attention are compiled for a model of each kind, unless all are.
    """
    cases = CASES | HOPPER if capability == 90 else CASES
    if capability == 80 and not every_candidate:
        cases = {name: CASES[name] for name in LARGEST}
    if every_candidate:
        cases = cases | candidates_of_products(fp8=capability == 90)
    results = []
    for name, launch in cases.items():
        with compiling(capability) as done:
            launch()
        results += [asdict(one) | {"case": name} for one in done]
        attends = name.startswith(("attention", "latent"))
        if attends and (every_candidate or (capability == 90 and name in OF_EACH_KIND)):
            found = compile_candidates(launch, capability)
            results += [one | {"case": f"{name}: {one['candidate']}"} for one in found]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    choose_for(int(sys.argv[1]))
    if "--table" in sys.argv:
        sys.stdout.write("\n".join(table.rows()) + "\n")
    else:
        main(int(sys.argv[1]), every_candidate="--candidates" in sys.argv)
