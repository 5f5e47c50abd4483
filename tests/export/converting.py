"""Checkpoints that are converted, and what is in their folders, for tests.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vllm_module import ModelConfig, QuantizationConfig
from vllm_module.export.compressed import convert

FILE_BYTES = 60_000
BLOCKS = QuantizationConfig(scheme="fp8_per_block", weight_block_size=(4, 4))
FLAT_BLOCKS = QuantizationConfig(scheme="fp8_per_block", weight_block_size=(2, 4))
MIXED = QuantizationConfig(
    scheme="fp8_per_tensor", overrides={"mlp": "fp8_per_channel"}, ignore=("lm_head", "o_proj")
)
INT4 = QuantizationConfig(scheme="int4_per_group", group_size=8)
INT4_AND_FP8 = QuantizationConfig(
    scheme="int4_per_group", group_size=8, overrides={"self_attn": "fp8_per_channel"}
)
CASES: dict[str, tuple[str, Any]] = {
    "tied, per tensor": ("qwen2", "fp8"),
    "per channel": ("llama", "fp8_per_channel"),
    "per block": ("qwen2", BLOCKS),
    "several schemes": ("llama", MIXED),
    "experts": ("qwen3-moe", "fp8"),
    "latent attention, stored as pairs": ("deepseek-v3", "fp8_per_channel"),
    "stored fused, per channel": ("phi3", "fp8_per_channel"),
    "tied, in other orders": ("cohere", "fp8"),
    "four bits": ("llama", INT4),
    "four bits and eight": ("qwen3-moe", INT4_AND_FP8),
    "four bits, stored fused": ("phi3", INT4),
    "stored in groups, per channel": ("qwen3-next", "fp8_per_channel"),
    "stored in groups, four bits": ("qwen3-next", INT4),
    "stored in groups, per block": ("qwen3-next", FLAT_BLOCKS),
}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def entries(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.fixture(scope="module")
def converted(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """Return the original and the converted checkpoint of a case; each is written once."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(case: str) -> tuple[Path, Path]:
        if case not in made:
            name, quantization = CASES[case]
            original, folder = checkpoint(name), tmp_path_factory.mktemp("converted") / "out"
            convert(
                ModelConfig(model=str(original), quantization=quantization),
                folder,
                file_bytes=FILE_BYTES,
            )
            made[case] = original, folder
        return made[case]

    return get
