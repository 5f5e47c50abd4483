"""Models with experts: in each form that transformers saves, and with ranks that hold some."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vllm_module.distributed import run_ranks

Tensors = dict[str, torch.Tensor]

NAMES = ("deepseek-v3", "mixtral", "olmoe", "qwen2-moe", "qwen3-moe")


@pytest.mark.parametrize(("name", "size"), [*zip(NAMES, cycle([2, 4]), strict=False)])
def test_ranks_that_hold_whole_experts_compute_what_transformers_does(
    tiny: Any, compute: Any, name: str, size: int
) -> None:
    """Where ranks share experts, evenly or not, logits and tokens are those of transformers."""
    checkpoint = tiny(name)
    reference = checkpoint.reference.first(12)
    job = checkpoint.folder, *reference.job, "auto", True
    for computed in run_ranks(size, lambda rank: compute(*job)):
        reference.check(computed)


def stored(folder: Path) -> Tensors:
    """Return all tensors of the checkpoint."""
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def repacked(folder: Path, target: Path) -> Path:
    """Save a checkpoint again, with one tensor for all experts."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(target, save_original_format=False)
    return target


@pytest.mark.parametrize("name", NAMES)
def test_packed_experts(tiny: Any, compute: Any, tmp_path: Path, name: str) -> None:
    """A checkpoint with one tensor for all experts computes the same, however ranks share them."""
    checkpoint = tiny(name)
    repacked(checkpoint.folder, tmp_path)
    layer = "model.layers.1.mlp.experts"
    assert stored(tmp_path).keys() >= {f"{layer}.gate_up_proj", f"{layer}.down_proj"}
    assert f"{layer}.gate_up_proj" not in stored(checkpoint.folder)
    prompts = checkpoint.reference.prompts
    for size, whole_experts in ((1, False), (2, False), (2, True)):
        job = tmp_path, prompts, 1, "auto", whole_experts
        for computed in run_ranks(size, lambda rank, job=job: compute(*job)):
            checkpoint.reference.check_prompts(computed)


BLOCK = 16
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}  # and no list of exceptions


def in_blocks(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return a checkpoint in FP8 blocks as it is published, and the numbers that it stands for."""
    eight: Tensors = {}
    wide: Tensors = {}
    for name, tensor in tensors.items():
        if "_proj" not in name:
            eight[name] = wide[name] = tensor
            continue
        blocks = tensor.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
        scale = blocks.abs().amax((-3, -1), keepdim=True) / 448
        numbers = (blocks / scale).to(torch.float8_e4m3fn)
        eight[name] = numbers.flatten(-4, -3).flatten(-2)
        # DeepSeek's name of a linear layer's scales, and transformers' for packed experts.
        eight[f"{name}_scale_inv"] = scale.squeeze(-1).squeeze(-2)
        wide[name] = (numbers.float() * scale).flatten(-4, -3).flatten(-2)
    return eight, wide


def write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("form", ["per expert", "packed"])
def test_experts_stored_in_fp8_blocks(tiny: Any, compute: Any, tmp_path: Path, form: str) -> None:
    """Routers are in full precision, and experts compute what their restored numbers do."""
    folder, prompts = tiny("qwen3-moe").folder, tiny("qwen3-moe").reference.prompts
    if form == "packed":
        folder = repacked(folder, tmp_path / "full")
    config = json.loads((folder / "config.json").read_text())
    eight, wide = in_blocks(stored(folder))
    quantized = write(tmp_path / "eight", eight, config | {"quantization_config": FP8})
    expected = compute(write(tmp_path / "wide", wide, config), prompts, 1)["prompt_logits"]
    for size, whole_experts in ((1, False), (2, False), (2, True)):
        job = quantized, prompts, 1, "auto", whole_experts
        for computed in run_ranks(size, lambda rank, job=job: compute(*job)):
            for ours, theirs in zip(computed["prompt_logits"], expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
