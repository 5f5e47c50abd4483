"""Compile kernels as they would be launched, on a machine without the GPU.

``python tests/kernels/compiling.py 90`` compiles the cases of ``SHORT`` for compute capability 9.0
and prints, as JSON, what each compiled kernel needs, and the kernels that no case of them launches.
With ``--all``, it compiles every case of ``compilation``; with ``--candidates``, every candidate of
attention and of products, too. ``90 --table`` prints the table of design/0017, and
``90 --table --short`` some of its rows.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # absent with -P

from compilation import adapters, attention, caches, experts, products, recurrent, rows, table
from compilation.candidates import (
    ATTENTION,
    OF_EACH_KIND,
    candidates_of_products,
    compile_candidates,
)
from compilation.launches import E4M3, FP32, Cases, compiling, launching, meta, specialized

from vllm_module.kernels import dtypes
from vllm_module.kernels.dtypes import tiled_as
from vllm_module.kernels.experts import grouped_matmul
from vllm_module.kernels.matmul import matmul_configurations, scaled_matmul

__all__ = ["E4M3", "FP32", "launching", "meta", "specialized"]  # tests import them

KINDS = attention, caches, rows, products, experts, adapters, recurrent
# For architectures of 8.0 only what needs no FP8.
CASES: Cases = {name: launch for kind in KINDS for name, launch in kind.CASES.items()}
HOPPER: Cases = {
    name: launch for kind in KINDS for name, launch in getattr(kind, "HOPPER", {}).items()
}

# Of each kernel and of its ways through the code, what takes the most registers and shared memory:
# the rest takes minutes where nothing is cached. The two smaller capabilities differ in tiles.
SHORT = {
    80: (
        "attention 128", "attention 512",
        "quantize to int8 by tensor", "quantize to int8 by token", "multiply int8, 256",
        "packed nf4, 256, 4 bits, groups of 64, bf16", "grouped bf16, 64", "grouped mxfp4, 64",
        "grouped packed awq, 128", "adapters, 2048 tokens, rank 64",
    ),
    120: ("attention 512", "latent, 128 heads", "multiply int8, 256"),
    90: (
        "attention 128", "attention 320, fp32", "attention 320, e4m3, everything",
        "latent, 128 heads", "rotated latents, fp32",
        "norm, rotary, store 512 in e4m3", "rotary, store of neighbours", "rotary, fp32",
        "store 512", "store in e4m3 by heads", "copy in a layer",
        "norm 5120", "norm 16384, fp32, offset", "norm, launched early", "add-norm 16384, fp32",
        "add-norm to FP8 by token, 8192", "norm to FP8, static", "silu 14336",
        "gelu to FP8 by token, 16384", "silu to FP8 by token, 29568",
        "gelu to FP8 by token, 32768", "silu to FP8 by group", "quantize to int8 by tensor",
        "quantize by token, 100000", "quantize by block", "quantize, static", "swiglu of gpt-oss",
        "draw tokens", "adjust logits", "digest int64",
        "multiply int8, 256",
        "multiply fp8, 256, by block", "multiply fp8 of an odd size",
        "multiply fp8, 512, by block, descriptors", "packed nf4, 256, 4 bits, groups of 64, bf16",
        "packed gptq, 64, 4 bits, groups of 128, bf16",
        "packed unordered, 1024, 4 bits, groups of 128, bf16",
        "route to 512", "route to 256 in groups", "experts' rows", "grouped fp8, 128, by block",
        "grouped fp32, 128", "grouped fp8, 128, by block, tiles, descriptors",
        "grouped mxfp4, 64", "grouped packed awq, 128", "grouped packed gptq in no order, 64",
        "adapters, 32 tokens", "adapters, 2048 tokens, rank 64",
        "adapters, 2048 tokens, fp32, rank 64", "adapters of 512 experts", "adapters of heads",
        "convolve, fp32", "scan, single tokens", "scan, 256 numbers", "delta rule, single tokens",
        "delta rule, prompts",
    ),
}  # fmt: skip


def choose_for(capability: int) -> None:
    """Choose tiles for a capability, since a meta tensor's device has none."""
    of_products = scaled_matmul, grouped_matmul, matmul_configurations
    for module in (dtypes, *ATTENTION, *of_products):
        module.capability = lambda _: tiled_as(divmod(capability, 10))


def launched(cases: Cases) -> set[str]:
    """Launch cases without compiling anything, and return the names of their kernels."""
    names: set[str] = set()
    with launching(lambda jit, *_: names.add(jit.__name__)):
        for launch in cases.values():
            launch()
    return names


def main(capability: int, *, short: bool, every_candidate: bool) -> None:
    """Compile cases; print a list with an entry for each kernel, and kernels not compiled.

    Candidates of attention are compiled for a model of each kind, unless all are; if ``short``,
    only the largest that load by TMA, and those that are launched early.
    """
    cases = CASES | HOPPER if capability == 90 else CASES
    if every_candidate:
        cases = cases | candidates_of_products(fp8=capability == 90)
    kernels = launched(cases)
    results = []
    for name, launch in cases.items():
        if not short or name in SHORT[capability]:
            with compiling(capability) as done:
                launch()
            results += [asdict(one) | {"case": name} for one in done]
        attends = name.startswith(("attention", "latent"))
        if attends and (every_candidate or (capability == 90 and name in OF_EACH_KIND)):
            found = compile_candidates(
                launch, capability, r"256, TMA|128, TMA|early" if short else ""
            )
            results += [one | {"case": f"{name}: {one['candidate']}"} for one in found]
    left_out = sorted(kernels - {one["kernel"] for one in results})
    json.dump({"compiled": results, "left out": left_out}, sys.stdout)


if __name__ == "__main__":
    choose_for(int(sys.argv[1]))
    if "--table" in sys.argv:
        sys.stdout.write("\n".join(table.rows(short="--short" in sys.argv)) + "\n")
    else:
        everything = "--candidates" in sys.argv
        short = not everything and "--all" not in sys.argv
        main(int(sys.argv[1]), short=short, every_candidate=everything)
