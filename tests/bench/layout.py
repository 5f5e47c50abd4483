"""CPU seconds and memory of the layout of large checkpoints on many ranks, and of its file.

A checkpoint has the names, shapes and dtypes of all of its tensors and no files. Each runs in a
process of its own. The layout is read back from its JSON, which checks that boxes neither overlap
nor leave anything out, before a figure is printed.

    python tests/bench/layout.py [--out tests/bench/results/layout.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from machine import write as write_results
from plan import CONFIG, Tensors, layer, peak_resident

from vllm_module import ModelConfig
from vllm_module.base.garbage import paused_gc
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.layout import parse_layout
from vllm_module.layout.layout_file import layout_json
from vllm_module.weights.region import Region, whole

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


def llama(layers: int = 80) -> Tensors:
    """Return the tensors of a dense model of 70 billion parameters."""
    shapes: dict[str, list[int]] = {
        "model.embed_tokens.weight": [128256, 8192],
        "model.norm.weight": [8192],
        "lm_head.weight": [128256, 8192],
    }
    for number in range(layers):
        at = f"model.layers.{number}"
        shapes |= {
            f"{at}.input_layernorm.weight": [8192],
            f"{at}.post_attention_layernorm.weight": [8192],
            f"{at}.self_attn.q_proj.weight": [8192, 8192],
            f"{at}.self_attn.k_proj.weight": [1024, 8192],
            f"{at}.self_attn.v_proj.weight": [1024, 8192],
            f"{at}.self_attn.o_proj.weight": [8192, 8192],
            f"{at}.mlp.gate_proj.weight": [28672, 8192],
            f"{at}.mlp.up_proj.weight": [28672, 8192],
            f"{at}.mlp.down_proj.weight": [8192, 28672],
        }
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def experts(layers: int, count: int) -> Tensors:
    """Return the tensors of a model of Kimi-K2's shape with ``count`` experts a layer."""
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", [163840, 7168]),
        "model.norm.weight": ("BF16", [7168]),
        "lm_head.weight": ("BF16", [163840, 7168]),
    }
    for number in range(layers):
        tensors |= layer(number, experts=count)
    return tensors


# By name: tensor-parallel size, expert-parallel size, configuration, tensors.
CASES: dict[str, tuple[int, int, dict[str, Any], Callable[[], Tensors]]] = {
    "Kimi-K2's shape, EP 128": (1, 128, CONFIG, lambda: experts(61, 384)),
    "896 experts, 2.8T parameters, EP 128": (
        1, 128, CONFIG | {"num_hidden_layers": 72, "n_routed_experts": 896},
        lambda: experts(72, 896),
    ),
    "a dense model of 70B, TP 8": (8, 1, LLAMA, llama),
}  # fmt: skip


def source_of(name: str) -> tuple[ModelSource, dict[str, Region]]:
    """Return a case's model without weights, and regions in place of its tensors."""
    _, _, config, tensors = CASES[name]
    regions = {
        key: Region.within(key, torch.Size(shape), whole(torch.Size(shape)), _DTYPES[dtype])
        for key, (dtype, shape) in tensors().items()
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return ModelSource.find(ModelConfig(model=folder), "dummy"), regions


def measure(name: str) -> Iterator[tuple[str, float]]:
    """Yield CPU seconds of each step and the memory that they took."""
    tp_size, ep_size, _, _ = CASES[name]
    source, regions = source_of(name)
    before = peak_resident(0)
    yield "tensors", len(regions)
    seconds = {}
    begin = time.process_time()

    def passed(step: str) -> None:
        nonlocal begin
        seconds[step] = time.process_time() - begin
        begin = time.process_time()

    spread = expert_parallel(rank=0, size=ep_size) if ep_size > 1 else nullcontext()
    with paused_gc(), tensor_parallel(rank=0, size=tp_size), spread:
        model = source.build(torch.device("cpu"))
        passed("build")
        plan = model.plan_weights(regions)
        passed("plan")
        layout = plan.layout()
        passed("layout")
    assert layout.ranks == max(tp_size, ep_size)
    yield "seconds", sum(seconds.values())
    yield from seconds.items()
    yield "mib", (peak_resident(0) - before) / 1024
    begin = time.process_time()
    data = layout_json(layout)
    passed("write")
    read = parse_layout(data)
    passed("read")
    assert read == layout, "the layout differs after it was written and read"
    named = {name: entry.shape for name, entry, _ in layout.names()}
    assert named == {name: tuple(region.shape) for name, region in regions.items()}
    yield "json_mib", len(data) / 2**20
    yield "write", seconds["write"]
    yield "read", seconds["read"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case:
        print(json.dumps(dict(measure(options.case))))
        return
    results = {}
    for name in CASES:
        command = [sys.executable, __file__, "--case", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = json.loads(done.stdout)
        print(f"{name}: {done.stdout}", end="", flush=True)
    if options.out:
        write_results(options.out, results)


if __name__ == "__main__":
    main()
