"""Checkpoints whose quantized layers are written by bitsandbytes' own modules.

transformers' models keep bitsandbytes' layers in place of their own ones; what they save is what
those layers' ``state_dict`` returns. Loading them through transformers would need accelerate.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import json
import runpy
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from safetensors.torch import save_file
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

publishing = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("publishing.py"))))

Tensors = dict[str, torch.Tensor]

TINY: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **TINY},
    # Ranks hold copies of the key-value head, and biases stay as they are.
    "llama": {"model_type": "llama", **TINY, "num_key_value_heads": 1, "attention_bias": True},
    # Slots are stored as one tensor.
    "phi3": {"model_type": "phi3", **TINY},
    # Stored as [input, output] in full precision, and as [output, input] quantized.
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 130,
        "n_embd": 256,
        "n_head": 4,
        "n_layer": 1,
        "n_positions": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-nested": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4-nested": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
}


@dataclass(frozen=True)
class Stored:
    """A checkpoint of bitsandbytes, and one with the weights that it multiplies out.

    Attributes:
        tensors: what ``folder`` holds.
        config: its ``config.json``.
        plain: another folder, in full precision.
        logits: of the prompt ``ids``, by transformers in full precision.

    """

    folder: Path
    tensors: Tensors
    config: dict[str, Any]
    plain: Path
    ids: torch.Tensor
    logits: torch.Tensor


def quantized(weight: torch.Tensor, kind: str) -> tuple[Tensors, torch.Tensor]:
    """Return what bitsandbytes saves of a linear layer's weight, and the weight multiplied out."""
    layer = _layer(weight, None, kind)
    return layer.state_dict(), _multiplied_out(layer)


def _layer(weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> nn.Module:
    rows, columns = weight.shape
    asked = KINDS[kind]
    layer: Any
    if "load_in_8bit" in asked:
        layer = bnb.nn.Linear8bitLt(columns, rows, bias is not None, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False)
    else:
        how = {
            "quant_type": asked["bnb_4bit_quant_type"],
            "compress_statistics": asked.get("bnb_4bit_use_double_quant", False),
        }
        layer = bnb.nn.Linear4bit(columns, rows, bias is not None, torch.float32, **how)
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, **how)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer.to("cpu")  # which quantizes


def _multiplied_out(layer: Any) -> torch.Tensor:
    if isinstance(layer, bnb.nn.Linear4bit):
        return dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)


@torch.no_grad()
def publish(folder: Path, model: str, kind: str, skipped: list[str] | None = None) -> Stored:
    """Write a checkpoint with all linear layers but the head, and ``skipped`` ones, quantized."""
    config = MODELS[model]
    held = publishing.randomized(config)
    plain = deepcopy(held)
    for name, layer in list(held.named_modules()):
        transposed = isinstance(layer, Conv1D)
        if not isinstance(layer, nn.Linear | Conv1D) or name in (skipped or ["lm_head"]):
            continue
        weight = layer.weight.data.T.contiguous() if transposed else layer.weight.data
        made = _layer(weight, layer.bias, kind)
        wide = _multiplied_out(made)
        plain.get_parameter(f"{name}.weight").copy_(wide.T if transposed else wide)
        held.set_submodule(name, made)
    ids = publishing.prompt(config["vocab_size"])
    logits = plain(ids[None]).logits[0]
    plain.save_pretrained(folder / "plain")
    entries = json.loads((folder / "plain" / "config.json").read_text())
    asked = BitsAndBytesConfig(**KINDS[kind], llm_int8_skip_modules=skipped)
    entries["quantization_config"] = asked.to_dict()
    tensors = {name: each.contiguous() for name, each in held.state_dict().items()}
    if entries["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    write(folder, tensors, entries)
    return Stored(folder, tensors, entries, folder / "plain", ids, logits)


def write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
