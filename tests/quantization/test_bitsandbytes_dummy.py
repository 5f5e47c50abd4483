"""Made-up weights of models that are stored by bitsandbytes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module import LoadConfig, ModelConfig, get_model
from vllm_module.distributed import run_ranks

bnb = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("bnb_checkpoints.py"))))

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
STORED = {
    "nf4": {**FOUR_BITS, "bnb_4bit_quant_type": "nf4"},
    "nf4-nested": {**FOUR_BITS, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {**FOUR_BITS, "bnb_4bit_quant_type": "fp4"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("size", [1, 2])
def test_dummy_weights_are_what_a_checkpoint_could_have(
    tmp_path: Path, name: str, size: int
) -> None:
    """Every check of loaded tensors takes them, and logits are finite and not all the same."""
    (tmp_path / "config.json").write_text(
        json.dumps({**MODEL, "quantization_config": STORED[name]})
    )

    @torch.inference_mode()
    def logits(rank: int) -> Any:
        config = ModelConfig(model=str(tmp_path), dtype="float32")
        model: Any = get_model(model_config=config, load_config=LoadConfig(load_format="dummy"))
        layer = model.model.layers[0].self_attn.qkv_proj
        largest = layer.quant_method.full_precision(layer).abs().amax()
        assert 1e-3 < largest < 1  # as weights are
        return model.compute_logits(model(torch.arange(5), torch.arange(5)))

    whole = logits(0)
    assert whole.isfinite().all()
    assert whole.std() > 0
    for each in run_ranks(size, logits):
        torch.testing.assert_close(each, whole, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("kind", [kind for kind in bnb.KINDS if kind != "int8"])
@pytest.mark.parametrize("name", bnb.MODELS)
def test_expected_weights_are_what_bitsandbytes_writes(
    tmp_path: Path, name: str, kind: str
) -> None:
    """Names, dtypes and shapes are a checkpoint's, and dummy weights have them."""
    stored = bnb.publish(tmp_path, name, kind).tensors
    config = ModelConfig(model=str(tmp_path), dtype="float32")
    model: Any = get_model(model_config=config, load_config=LoadConfig(load_format="dummy"))
    expected = model.expected_weights()
    assert expected.keys() == stored.keys()
    for key, tensor in stored.items():
        shape, is_state = expected[key].shape, ".quant_state." in key  # which ends with its text
        assert expected[key].dtype == tensor.dtype, key
        assert shape.numel() >= len(tensor) if is_state else shape == tensor.shape, key
