"""Candidates of attention and of products, which are compiled beside what is launched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from compilation.configurations import (
    grouped_configurations,
    packed_configurations,
    scaled_configurations,
)
from compilation.experts import grouped
from compilation.launches import E4M3, Cases, Compiled, compiled, launching, tried
from compilation.products import CODEBOOKS, PACKED, multiplied, packed, packed_name
from vllm_module.kernels import choices
from vllm_module.kernels.attention import (
    mla_attention,
    paged_attention_decode,
    paged_attention_prefill,
)
from vllm_module.kernels.matmul.matmul_configurations import PackedWeight, ScaledWeight

ATTENTION = mla_attention, paged_attention_decode, paged_attention_prefill


OF_EACH_KIND = "attention 128, pages of 128", "latent, 128 heads"


# Kernels that have candidates, and the Triton kernels that each launches.
LAUNCHED = {
    "paged_attention_decode": ("_decode", "_combine"),
    "paged_attention_prefill": ("_prefill",),
    "mla_attention_decode": ("_decode_latent", "_combine"),
    "mla_attention_prefill": ("_prefill_latent",),
}


def candidates_of_products(fp8: bool) -> Cases:
    """Return every candidate of products with a weight of an 8B model, and with experts' weights.

    They are more than a test has time for. Those with FP8 numbers are left out unless ``fp8``.
    """
    found: Cases = {}
    for kind, rows in product(("fp8 given", "fp8 weight") if fp8 else (), (1, 128)):
        multiplied_in = E4M3 if kind == "fp8 given" else torch.bfloat16
        block = (1, 4096) if rows == 1 else (128, 128)
        for each in scaled_configurations(ScaledWeight(6144, 4096, block, multiplied_in)):
            if each.config.way != "torch":
                launch = multiplied(each.tokens, 6144, 4096, kind, rows)
                name = f"multiply {kind}, {each.tokens}, {rows} x {rows}, {each.name}"
                found[name] = tried("scaled_matmul", each.name, launch)
    for kind, rows in (("fp8", 1), ("fp8", 128), ("fp8 weight", 1), ("int8", 1), ("wide", 1)):
        if kind.startswith("fp8") and not fp8:
            continue
        multiplied_in = E4M3 if kind == "fp8" else torch.bfloat16
        block = (1, 2880) if rows == 1 else (128, 128)
        weights = ScaledWeight(1536, 2880, block, multiplied_in, experts=128)
        for each in grouped_configurations(weights):
            launch = grouped(each.tokens // 128, kind, rows)
            name = f"grouped {kind}, {each.tokens // 128}, {rows} x {rows}, {each.name}"
            found[name] = tried("grouped_matmul", each.name, launch)
    for kind, group, bits, dtype in PACKED:
        along, ordered = 0 if kind == "awq" else 1, 0 if kind == "unordered" else group
        weight = PackedWeight(4096, 4096, bits, along, ordered, kind in CODEBOOKS, dtype)
        for each in packed_configurations(weight):
            if each.config.way != "torch":
                launch = packed(each.tokens, kind, group, bits, dtype)
                name = f"{packed_name(each.tokens, kind, group, bits, dtype)}, {each.name}"
                found[name] = tried("packed_matmul", each.name, launch)
    return found


def candidates_of_attention(launch: Callable[[], object]) -> dict[str, list[str]]:
    """Return the names of the candidates of the kernels in ``LAUNCHED`` that ``launch`` chooses."""
    found: dict[str, list[str]] = {}

    def note(kernel: str, case: str, named: dict[str, Any], device: torch.device) -> Any:
        found[kernel] = list(named)
        return choices.choose(kernel, case, named, device)

    with launching(lambda *_: None):
        for module in ATTENTION:
            module.choose = note
        launch()
        for module in ATTENTION:
            module.choose = choices.choose
    return found


def compile_candidates(
    launch: Callable[[], object], capability: int, pattern: str = ""
) -> Iterator[dict[str, Any]]:
    """Compile the kernels of ``launch`` by every candidate but the first whose name matches."""
    for kernel, names in candidates_of_attention(launch).items():
        for name in filter(re.compile(pattern).search, names[1:]):
            done: list[Compiled] = []

            def note(jit: JITFunction, *rest: Any, done: Any = done, kernel: Any = kernel) -> None:
                if jit.__name__ in LAUNCHED[kernel]:
                    done.append(compiled(jit, *rest, capability))

            with choices.trying({kernel: name}), launching(note):
                launch()
            yield from (asdict(one) | {"candidate": name} for one in done)
