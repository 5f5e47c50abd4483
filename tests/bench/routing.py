"""Microseconds a name to route, and to load, the names of mixture-of-experts models.

94 layers of 128 experts, and as many names in more layers or experts, up to four times as many;
61 layers of 256 with the scales of FP8 blocks. Once through a tree of toy modules with 2 x 2
tensors, and once into ``FusedMoE``, whose parameters hold all experts. Names are shuffled. "route"
compares every name, shape and dtype and records what it fills; "load" also cuts and copies;
"stream" loads from an iterator, tensor by tensor. The first two are given in units of a bare
``copy_`` of such a tensor, a stream in units of a load. Five rounds alternate the four; the CPU's
time is counted, and a figure is printed only if every slot was filled.

    python tests/bench/routing.py [--out tests/bench/results/routing.json]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import over, spread, write
from torch import nn

from vllm_module import vLLMModule
from vllm_module.layers import FusedMoE, MergedColumnParallelLinear, RowParallelLinear
from vllm_module.quantization import Rules, quantize
from vllm_module.quantization.rules import EVERY_LAYER
from vllm_module.quantization.scheme import Scheme

ROUNDS = 5


class Expert(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            2, [2, 2], bias=False, shard_names=["gate_proj", "up_proj"]
        )
        self.down_proj = RowParallelLinear(2, 2, bias=False)


class Node(vLLMModule):
    """A module with one child under one name."""

    def __init__(self, name: str, child: nn.Module) -> None:
        super().__init__()
        self.add_module(name, child)


def build(layers: int, experts: int, fused: bool, scales: bool) -> vLLMModule:
    def of_layer() -> nn.Module:
        if fused:
            return FusedMoE(experts, 1, 2, 2)
        return nn.ModuleList(Expert() for _ in range(experts))

    tree = nn.ModuleList(Node("mlp", Node("experts", of_layer())) for _ in range(layers))
    model = Node("model", Node("layers", tree))
    if scales:
        scheme = Scheme("block", block=(2, 2), scale_name="weight_scale_inv")
        quantize(model, Rules(((EVERY_LAYER, scheme),)))
    return model


def cpu_seconds(work: Callable[[], object]) -> float:
    gc.collect()
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(layers: int, experts: int, fused: bool, scales: bool) -> dict[str, Any]:
    model = build(layers, experts, fused, scales)
    tensors = {"weight": torch.rand(2, 2)}
    if scales:
        weight = tensors["weight"].to(torch.float8_e4m3fn)
        tensors = {"weight": weight, "weight_scale_inv": torch.ones(1, 1)}
    weights = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{name}.{attr}", tensor)
        for layer in range(layers)
        for expert in range(experts)
        for name in ("gate_proj", "up_proj", "down_proj")
        for attr, tensor in tensors.items()
    ]
    random.Random(0).shuffle(weights)
    assert model.plan_weights(weights).report.ok
    model.load_weights(weights)
    model.check_ready()
    targets = [torch.empty_like(tensor) for _, tensor in weights]

    def copy() -> None:
        for target, (_, tensor) in zip(targets, weights, strict=True):
            target.copy_(tensor)

    works = {
        "route": lambda: model.plan_weights(weights),
        "load": lambda: model.load_weights(weights),
        "stream": lambda: model.load_weights(iter(weights)),
        "copy": copy,
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            seconds[name].append(cpu_seconds(work))
    result = {
        "layers": layers, "experts": experts, "fused": fused, "scales": scales,
        "names": len(weights),
    }  # fmt: skip
    for name, taken in seconds.items():
        result[f"{name}_us"] = statistics.median(taken) / len(weights) * 1e6
        if name != "copy":
            result[f"{name}_copies"] = spread(over(seconds, name, "copy"))
    result["stream_loads"] = spread(over(seconds, "stream", "load"))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="leave out the largest trees")
    options = parser.parse_args()
    results = []
    cases = [(94, 128, False, False), (94, 128, True, False)]
    cases += [(47, 256, True, False), (188, 64, True, False)]  # as many names
    if not options.quick:
        cases += [(188, 128, False, False), (376, 128, False, False)]
        cases += [(188, 128, True, False), (376, 128, True, False)]
        cases += [(61, 256, False, True), (61, 256, True, True)]
    print(
        "layers experts        form   names  copy µs       route in copies        load in copies"
        "       stream in loads"
    )
    for case in cases:
        result = measure(*case)
        results.append(result)
        form = ("fused" if case[2] else "modules") + (" fp8" if case[3] else "")
        print(
            f"{case[0]:6} {case[1]:7} {form:>11} {result['names']:7} {result['copy_us']:8.2f} "
            f"{shown(result['route_copies'])} {shown(result['load_copies'])} "
            f"{shown(result['stream_loads'])}",
            flush=True,
        )
    if options.out:
        write(options.out, results)


def shown(ratio: dict[str, float]) -> str:
    between = f"({ratio['least']:.1f} to {ratio['greatest']:.1f})"
    return f"{ratio['median']:6.1f} {between:>14}"


if __name__ == "__main__":
    main()
