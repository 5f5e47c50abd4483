"""CPU seconds and memory to plan and inspect a checkpoint of Kimi-K2's shape, over many ranks.

The checkpoint has the names, shapes and dtypes of all its tensors, about 140,000, in sparse files:
headers alone take room on the disk. Each row runs in a process of its own, with its imports. The
plans of --json are checked: all ranks together read every expert once.

    python tests/bench/plan.py [--ep 32] [--tp 8] [--out tests/bench/results/plan.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import write as write_results

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
_NBYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
Tensors = dict[str, tuple[str, list[int]]]


def quantized(name: str, output: int, input: int) -> Tensors:
    """Return a weight in FP8 and the scales of its blocks."""
    scales = [-(-output // 128), -(-input // 128)]
    return {
        f"{name}.weight": ("F8_E4M3", [output, input]),
        f"{name}.weight_scale_inv": ("F32", scales),
    }


def mlp(name: str, hidden: int, intermediate: int) -> Tensors:
    return {
        **quantized(f"{name}.gate_proj", intermediate, hidden),
        **quantized(f"{name}.up_proj", intermediate, hidden),
        **quantized(f"{name}.down_proj", hidden, intermediate),
    }


def layer(number: int, hidden: int = 7168, heads: int = 64, experts: int = 384) -> Tensors:
    at = f"model.layers.{number}"
    tensors: Tensors = {
        f"{at}.input_layernorm.weight": ("BF16", [hidden]),
        f"{at}.post_attention_layernorm.weight": ("BF16", [hidden]),
        **quantized(f"{at}.self_attn.q_a_proj", 1536, hidden),
        f"{at}.self_attn.q_a_layernorm.weight": ("BF16", [1536]),
        **quantized(f"{at}.self_attn.q_b_proj", heads * 192, 1536),
        **quantized(f"{at}.self_attn.kv_a_proj_with_mqa", 576, hidden),
        f"{at}.self_attn.kv_a_layernorm.weight": ("BF16", [512]),
        **quantized(f"{at}.self_attn.kv_b_proj", heads * 256, 512),
        **quantized(f"{at}.self_attn.o_proj", hidden, heads * 128),
    }
    if number < CONFIG["first_k_dense_replace"]:
        return tensors | mlp(f"{at}.mlp", hidden, 18432)
    tensors[f"{at}.mlp.gate.weight"] = ("BF16", [experts, hidden])
    tensors[f"{at}.mlp.gate.e_score_correction_bias"] = ("F32", [experts])
    tensors |= mlp(f"{at}.mlp.shared_experts", hidden, 2048)
    for expert in range(experts):
        tensors |= mlp(f"{at}.mlp.experts.{expert}", hidden, 2048)
    return tensors


def write(folder: Path, layers: int) -> int:
    """Write the checkpoint, a file for each layer; return the number of tensors."""
    config = CONFIG | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    ends: Tensors = {
        "model.embed_tokens.weight": ("BF16", [163840, 7168]),
        "model.norm.weight": ("BF16", [7168]),
        "lm_head.weight": ("BF16", [163840, 7168]),
    }
    predictor = layer(layers)  # the multi-token prediction layer, which is skipped
    at = f"model.layers.{layers}"
    predictor |= {
        f"{at}.{name}.weight": ("BF16", [7168]) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    predictor[f"{at}.eh_proj.weight"] = ("BF16", [7168, 14336])
    predictor[f"{at}.embed_tokens.weight"] = ("BF16", [163840, 7168])
    predictor[f"{at}.shared_head.head.weight"] = ("BF16", [163840, 7168])
    weight_map = {}
    for index, tensors in enumerate([ends, *map(layer, range(layers)), predictor]):
        name = f"model-{index:05}.safetensors"
        write_sparse(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    index_file = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return len(weight_map)


def write_sparse(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file whose data is a hole."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + torch.Size(shape).numel() * _NBYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)


# What a model's author calls, without the command line.
EXPECTED_WEIGHTS = """
import sys, torch
from vllm_module import ModelConfig
from vllm_module.build.model_source import ModelSource
model = ModelSource.find(ModelConfig(model=sys.argv[1])).build(torch.device("cpu"))
print(len(model.expected_weights()))
"""


def measure(arguments: Sequence[str]) -> tuple[dict[str, float], str]:
    """Run Python with ``arguments``; return its seconds and peak memory, and what it printed."""
    with tempfile.TemporaryFile("w+") as out:
        begin = time.perf_counter()
        process = subprocess.Popen([sys.executable, *arguments], stdout=out, text=True)
        ended, peak = 0, 0
        while not ended:  # its usage has a peak too, but that counts this process before exec
            time.sleep(0.01)
            peak = max(peak, peak_resident(process.pid))
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, arguments
        out.seek(0)
        printed = out.read()
    figures = {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_resident_mib": peak / 1024,
    }
    return figures, printed


def peak_resident(pid: int) -> int:
    """Return the peak memory of a process in KiB; 0 once it has ended. Process 0 is this one."""
    status = Path(f"/proc/{pid or 'self'}/status").read_text()
    return next((int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line), 0)


def check(plan: dict[str, Any], layers: int) -> dict[str, list[int]]:
    """Check that ranks read every expert once; return the least and the most that one reads."""
    read = [rank["bytes_read"] for rank in plan["ranks"]]
    experts = [
        sum(each["bytes"] for each in rank["reads"] if ".experts." in each["name"])
        for rank in plan["ranks"]
    ]
    assert sum(experts) == sum(
        torch.Size(shape).numel() * _NBYTES[dtype]
        for number in range(layers)
        for name, (dtype, shape) in layer(number).items()
        if ".experts." in name
    ), "the ranks together do not read every expert once"
    return {
        "bytes_read_by_rank": [min(read), max(read)],
        "bytes_of_experts_by_rank": [min(experts), max(experts)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ep", type=int, default=32)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tensors = write(Path(folder), options.layers)
        command = ["-m", "vllm_module.cli"]
        plan = [*command, "plan", folder]
        spread = [*plan, "--expert-parallel-size", str(options.ep)]
        works = {
            f"plan, {options.ep} expert-parallel ranks": spread,
            f"plan --json, {options.ep} expert-parallel ranks": [*spread, "--json"],
            f"plan, {options.tp} tensor-parallel ranks": [*plan, "--tp", str(options.tp)],
            "inspect": [*command, "inspect", folder],
            "expected_weights": ["-c", EXPECTED_WEIGHTS, folder],
        }
        results: dict[str, Any] = {"tensors": tensors}
        for name, arguments in works.items():
            results[name], printed = measure(arguments)
            if "--json" in arguments:
                results[name] |= check(json.loads(printed), options.layers)
            print(f"{name}: {json.dumps(results[name])}", flush=True)
    if options.out:
        write_results(options.out, results)


if __name__ == "__main__":
    main()
