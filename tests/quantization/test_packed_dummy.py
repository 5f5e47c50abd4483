"""Dummy weights of packed layouts, whose tensors have to fit the configuration and each other."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import LoadConfig, ModelConfig, get_model
from vllm_module.distributed import run_ranks

CONFIGS = runpy.run_path(str(Path(__file__).parents[1] / "models" / "configurations.py"))
QWEN3: dict[str, Any] = CONFIGS["config_of"]("qwen3", head_dim=32, hidden_size=64)
QWEN3 |= {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32", "rms_norm_eps": 1e-6}
QWEN3 |= {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.arange(5)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def _ct(**weights: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights
    group = {"targets": ["Linear"], "weights": args, "input_activations": None}
    layout = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return layout | {"ignore": ["lm_head"], "config_groups": {"group_0": group}}


CASES = {
    **{f"gptq-{bits}-bits": GPTQ | {"bits": bits} for bits in (2, 3, 4, 8)},
    **{f"gptq-v2-{bits}-bits": GPTQ | {"bits": bits, "checkpoint_format": "gptq_v2"}
       for bits in (3, 4)},
    "gptq-act-order": GPTQ | {"desc_act": True, "sym": False},
    "gptq-one-group": GPTQ | {"group_size": -1},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    "ct": _ct(),
    "ct-with-zeros": _ct(symmetric=False),
    "ct-act-order": _ct(actorder="group"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_loaded_with_dummy_weights(case: str, tmp_path: Path) -> None:
    """What a load checks holds of dummy weights, on one rank and on two, with the same logits."""
    entries = QWEN3 | {"quantization_config": CASES[case]}
    (tmp_path / "config.json").write_text(json.dumps(entries))

    def work(rank: int) -> torch.Tensor:
        model: Any = get_model(
            model_config=ModelConfig(model=str(tmp_path)),
            load_config=LoadConfig(load_format="dummy"),
        )
        with torch.inference_mode():
            logits: torch.Tensor = model.compute_logits(model(IDS, IDS))
        return logits

    (alone,) = run_ranks(1, work)
    assert bool(alone.isfinite().all())
    for of_rank in run_ranks(2, work):
        torch.testing.assert_close(of_rank, alone)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_of_outputs_that_end_in_a_run(bits: int, tmp_path: Path) -> None:
    """Keys and values have 48 outputs each here, and zeros are made for 32 at a time."""
    layout = GPTQ | {"bits": bits, "group_size": -1}
    entries = QWEN3 | {"head_dim": 24, "quantization_config": layout}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    model: Any = get_model(
        model_config=ModelConfig(model=str(tmp_path)), load_config=LoadConfig(load_format="dummy")
    )
    zeros = model.get_parameter("model.layers.0.self_attn.qkv_proj.qzeros")
    codes = zeros.detach().contiguous().view(torch.uint8)
    middle = (1 << (bits - 1)) - 1  # GPTQ stores one less
    assert codes.unique().tolist() == [sum(middle << at for at in range(0, 8, bits))]
    assert codes.numel() * 8 // bits == (4 + 2 + 2) * 24
