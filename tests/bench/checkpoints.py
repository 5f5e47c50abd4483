"""Checkpoints for benchmarks: real shapes and layout, random values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 47,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def random_bits(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return random bits of half the exponent's range: finite, distinct and quick to make."""
    bits = torch.randint(0, 0x4000, shape, dtype=torch.int16, generator=generator)
    return bits.view(torch.bfloat16)


def plausible(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return ones for a norm, else normal numbers that keep features of the size they have."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) / shape[1] ** 0.5).bfloat16()


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a Qwen3, a Llama or a Qwen3 with experts, by name."""
    hidden, inner, head = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = (config[k] * head for k in ("num_attention_heads", "num_key_value_heads"))
    normed = config["model_type"].startswith("qwen3")
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        **({"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)} if normed else {}),
        "post_attention_layernorm": (hidden,),
    }
    experts = config.get("num_experts", 0)
    if experts:
        layer["mlp.gate"], inner = (experts, hidden), config["moe_intermediate_size"]
    for mlp in [f"mlp.experts.{index}" for index in range(experts)] or ["mlp"]:
        layer |= {f"{mlp}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        layer[f"{mlp}.down_proj"] = (hidden, inner)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    return shapes


def write_qwen3(
    folder: Path,
    *,
    files: int = 2,
    values: Callable[[tuple[int, ...], torch.Generator], torch.Tensor] = random_bits,
    **changes: Any,
) -> Path:
    """Write a Qwen3-shaped bf16 checkpoint of 2.1 GB (47 layers of 0.6B's shape, untied)."""
    config = QWEN3 | changes
    shapes = shapes_of(config)
    names = list(shapes)
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    total = 0
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(files):
        part = names[file * len(names) // files : (file + 1) * len(names) // files]
        tensors = {name: values(shapes[name], generator) for name in part}
        path = f"model-{file + 1:05}-of-{files:05}.safetensors"
        save_file(tensors, folder / path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, path)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def evict_pages(folder: Path) -> None:
    """Write the checkpoint's files to the disk and take them out of the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_pages(folder: Path) -> None:
    """Bring the files into the page cache as reading does, in large pages where it has them."""
    evict_pages(folder)
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
