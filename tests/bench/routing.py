"""Microseconds a name to route, and to load, the names of mixture-of-experts models.

A 94-layer, 128-expert model and ones of twice and four times as many layers, through a tree of
toy modules with 2 x 2 tensors; names shuffled. "route" compares every name, shape and dtype and
fills the ledger; "load" also materializes, cuts and copies. The smallest of several runs is taken,
and a figure is printed only if every slot was filled.

    python tests/bench/routing.py [--out tests/bench/results/routing.json]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from vllm_module import vLLMModule
from vllm_module.layers import MergedColumnParallelLinear, RowParallelLinear

LAYERS, EXPERTS, RUNS = 94, 128, 3


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


def build(layers: int) -> vLLMModule:
    def layer() -> vLLMModule:
        return Node("mlp", Node("experts", nn.ModuleList(Expert() for _ in range(EXPERTS))))

    return Node("model", Node("layers", nn.ModuleList(layer() for _ in range(layers))))


def least(work: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        gc.collect()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(layers: int, tensor: torch.Tensor) -> dict[str, float]:
    model = build(layers)
    weights = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", tensor)
        for layer in range(layers)
        for expert in range(EXPERTS)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    random.Random(0).shuffle(weights)
    assert model.plan_weights(weights).report.ok
    route = least(lambda: model.plan_weights(weights)) / len(weights) * 1e6
    model.load_weights(weights)
    model.check_ready()
    load = least(lambda: model.load_weights(weights)) / len(weights) * 1e6
    return {"names": len(weights), "route_us": route, "load_us": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    tensor = torch.rand(2, 2)
    print(f"{'names':>8} {'route µs':>9} {'load µs':>9}")
    for times in (1, 2, 4):
        result = measure(LAYERS * times, tensor)
        results.append(result)
        print(f"{result['names']:8} {result['route_us']:9.1f} {result['load_us']:9.1f}")
    if options.out:
        machine = {"torch": torch.__version__, "python": platform.python_version(),
                   "machine": platform.platform()}  # fmt: skip
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
