"""Layouts in the names of transformers' classes, which fuse what checkpoints have apart."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, DeviceConfig, ModelConfig, get_model
from vllm_module.cooperative import SentBoxes
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import (
    CheckpointFormatError,
    DuplicateWeightError,
    MisshapenWeightError,
    MissingWeightError,
    UnexpectedWeightError,
)
from vllm_module.layout import (
    TransferPlan,
    layout_json,
    layout_of_shards,
    layout_of_state_dict,
    parse_layout,
    rows,
)
from vllm_module.testing.transfers import assert_plan_moves

READ = runpy.run_path(str(Path(__file__).with_name("test_reader.py")))["reader"]()
CPU = DeviceConfig(device="cpu")
SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SMALL = {"moe_intermediate_size": 16}
# By model_type; with three experts, two ranks have different numbers of them.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 3, **SMALL},
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": {"num_experts": 3, "shared_expert_intermediate_size": 16, **SMALL},
    "olmoe": {"num_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": 4, **SMALL,
    },
    "gpt_oss": {"num_local_experts": 4},
}  # fmt: skip


def saved(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Have transformers save a model as a checkpoint, and return its state dict."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES | CONFIGS.get(kind, {}))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return dict(model.state_dict())


WAYS: dict[str, dict[str, Any]] = {
    "tensor-parallel": {"model_impl": "native"},
    "expert-parallel": {"model_impl": "native", "enable_expert_parallel": True},
    "wrapped": {"model_impl": "transformers"},
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, way) for kind in CONFIGS for way in WAYS if way != "wrapped"),
        *((kind, "wrapped") for kind in ("mixtral", "gpt_oss")),
    ],
)
def test_ranks_hold_what_the_layout_says_of_a_state_dict(
    kind: str, way: str, tmp_path: Path
) -> None:
    """Cut by it out of the state dict is what ranks load of transformers' checkpoint."""
    tensors, fused, ranks = saved(kind, tmp_path), tmp_path / "fused", []
    for rank in range(2):
        with tensor_parallel(rank=rank, size=2):
            config = ModelConfig(model=str(tmp_path), **WAYS[way])
            ranks.append(get_model(model_config=config, device_config=CPU))
    trainer = layout_of_state_dict(tensors)
    layout = ranks[0].plan_weights(trainer.handles()).layout()
    assert any(each.name.endswith("experts.gate_up_proj") for each in layout.tensors)
    fused.mkdir()
    save_file(tensors, fused / "model.safetensors")
    file = fused / "layout.json"
    file.write_bytes(layout_json(layout))
    assert parse_layout(file.read_bytes()) == layout
    for rank, model in enumerate(ranks):
        got, own = READ(fused, file, rank), dict(model.named_parameters())
        assert own.keys() <= got.keys()
        for path, tensor in own.items():
            assert torch.equal(got[path], tensor), f"{path} on rank {rank}"
    # Of rows on three ranks, as FSDP2 has them, each element gets to the ranks that keep it, once.
    shards = layout_of_shards(trainer.tensors, 3, lambda *of: rows(*of[1:], ranks=3))
    assert_plan_moves(TransferPlan(shards, layout), shards, layout)


def test_what_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    """By the trainer's name of the tensor, as a source and in a plan; the engine goes on."""
    tensors = saved("qwen3_moe", tmp_path)
    up, down = (f"model.layers.1.mlp.experts.{each}_proj" for each in ("gate_up", "down"))
    apart = "model.layers.1.mlp.experts.2.down_proj.weight"

    def without(name: str) -> dict[str, torch.Tensor]:
        return {each: tensor for each, tensor in tensors.items() if each != name}

    bad: list[tuple[dict[str, torch.Tensor], type[Exception], str]] = [
        ({**tensors, up: torch.empty(4, 32, 32)}, MisshapenWeightError, up),
        ({**tensors, up: torch.empty(2, 32, 32)}, MisshapenWeightError, up),
        ({**tensors, down: torch.empty(3, 16, 32)}, MisshapenWeightError, down),
        (without(down), MissingWeightError, down.replace("down", "{0..2}.down")),
        ({**tensors, apart: torch.empty(32, 16)}, DuplicateWeightError, apart),
        ({**tensors, f"{up}.weight": torch.empty(3, 32, 32)}, UnexpectedWeightError, up),
    ]
    with LLM(str(tmp_path), device="cpu", kv_cache_memory_bytes=1 << 20) as llm:
        trainer = layout_of_state_dict(tensors)
        with pytest.raises(
            ValueError, match=r"experts\.0\.gate_proj.* or make .*llm\.layout\(source"
        ):
            TransferPlan(trainer, llm.layout())
        digest = llm.digest()
        for given, error, name in bad:
            source = layout_of_state_dict(given)
            with pytest.raises(error, match=f"{re.escape(name)}.*\n(.*\n)*.*the source's layout"):
                llm.layout(source)
            ours = layout_of_shards(source.tensors, 1, lambda *of: rows(*of[1:], ranks=1))
            with pytest.raises(error, match=re.escape(name)):
                llm.update_weights(SentBoxes(TransferPlan(source, ours), "127.0.0.1", 1, timeout=1))
        # Names and shapes are right, and the boxes are not those of this engine's parameters.
        ours = layout_of_shards(trainer.tensors, 1, lambda *of: rows(*of[1:], ranks=1))
        with pytest.raises(ValueError, match=r"other parts of .*experts\.gate_up_proj"):
            llm.update_weights(SentBoxes(TransferPlan(trainer, ours), "127.0.0.1", 1, timeout=1))
        assert (llm.digest(), llm.weight_version) == (digest, "0")


def test_fused_experts_of_a_dense_model(tmp_path: Path) -> None:
    """A dense model refuses them, whatever its own projection is called."""
    tensors = saved("qwen3", tmp_path)
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.empty(3, 96, 32)
    with tensor_parallel(rank=0, size=1):
        model = get_model(model_config=ModelConfig(model=str(tmp_path)), device_config=CPU)
    plan = model.plan_weights(layout_of_state_dict(tensors).handles())
    with pytest.raises(UnexpectedWeightError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        plan.layout()


@pytest.mark.parametrize("dtype", ["float33", "nn"])
def test_a_dtype_of_no_tensor_has_no_handle(dtype: str) -> None:
    layout = layout_of_state_dict({"model.w": torch.empty(2)})
    other = replace(layout, tensors=(replace(layout.tensors[0], dtype=dtype),))
    assert layout.handles()["model.w"].dtype is torch.float32
    with pytest.raises(CheckpointFormatError, match=rf"model\.w has the dtype '{dtype}'"):
        other.handles()
