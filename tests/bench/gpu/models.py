"""Models of real shapes whose weights are random and made on the device."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoints import QWEN3, shapes_of

from vllm_module import register_source

_SMALL = {
    "head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
_LLAMA = QWEN3 | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32,
    "num_hidden_layers": 32, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3 | {"num_hidden_layers": 28, "tie_word_embeddings": True},
    "Llama-8B": _LLAMA,
    "Llama-8B, 4 layers": _LLAMA | {"num_hidden_layers": 4},
    "Qwen3-30B-A3B, 8 layers": QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_key_value_heads": 4, "num_hidden_layers": 8, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}  # fmt: skip


def shape(name: str, small: bool) -> dict[str, Any]:
    """Return a configuration; if ``small``, of the same architecture and a size for a CPU."""
    found = SHAPES[name]
    if not small:
        return found
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return found | _SMALL | (experts if "num_experts" in found else {})


class RandomWeights:
    """A source of weights that are cut out of one random tensor on a device."""

    def __init__(self, config: Mapping[str, Any], device: str) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.folder = Path(self._directory.name)
        (self.folder / "config.json").write_text(json.dumps(config))
        self._shapes, self._device = shapes_of(config), device

    def weights(self) -> dict[str, torch.Tensor]:
        most = max(math.prod(each) for each in self._shapes.values())
        spare = 1 << 16
        with torch.device(self._device):
            numbers = torch.randn(most + spare, dtype=torch.bfloat16) * 0.02
            ones = torch.ones(most if most < spare else spare, dtype=torch.bfloat16)
        found = {}
        for index, (name, size) in enumerate(self._shapes.items()):
            count, start = math.prod(size), 512 * index % spare  # different tensors differ
            found[name] = (
                ones[:count] if len(size) == 1 else numbers[start : start + count].view(size)
            )
        return found


def open_random(url: str) -> RandomWeights:
    """Open ``random://DEVICE/SHAPE``, or ``random://DEVICE/small/SHAPE``."""
    device, *small, name = url.removeprefix("random://").split("/")
    return RandomWeights(shape(name, bool(small)), device)


def random_model(name: str, device: str, small: bool) -> str:
    """Return what names the model for an ``LLM``."""
    register_source("random", open_random)
    return f"random://{device}/{'small/' if small else ''}{name}"
