"""Tiny models of many families, adapters that PEFT makes of them, and how tests load both."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import DeviceConfig, LoadConfig, ModelConfig, get_model
from vllm_module.adapters import Adapter, attach, detach, open_adapter
from vllm_module.layers.lora_rows import AdapterRows

_SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
ALL: dict[str, Any] = {"target_modules": "all-linear"}

# By family: entries of its configuration, and settings of its adapter.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {},
        {
            "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "lm_head", "embed_tokens"],
            "rank_pattern": {
                r"0\.self_attn\.v_proj": 6,
                "v_proj": 2,
                r"layers\.1\.self_attn\.q_proj": 7,
            },
            "alpha_pattern": {"o_proj": 3},
            "use_rslora": True,
        },
    ),
    "gpt2": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60},
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "phi3": ({"pad_token_id": 0, "eos_token_id": 1}, ALL),
    "qwen3": (
        {"head_dim": 8},
        {"target_modules": r".*\.1\..*_proj", "exclude_modules": ["k_proj"]},
    ),
    "mixtral": (
        {"num_local_experts": 4},
        {"target_modules": ["q_proj", "v_proj", "w1", "w2", "w3"]},
    ),
    "qwen3_moe": (_EXPERTS, ALL),
    "gpt_oss": (
        {**_EXPERTS, "num_local_experts": 4, "layer_types": ["sliding_attention"] * 2},
        {
            "target_modules": ["q_proj", "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "deepseek_v3": (
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
        ALL,
    ),
    "qwen3_next": (
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        ALL,
    ),
    "bamba": (
        {
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "attn_layer_indices": [1],
        },
        ALL,
    ),
    "gpt_neox": ({}, ALL),  # of transformers, wrapped
    "olmo3": ({}, {"target_modules": ["q_proj", "down_proj", "lm_head"], "layers_to_transform": 1}),
}


class Tuned(NamedTuple):
    """A model and an adapter of it.

    Attributes:
        base, adapter: their folders.
        ids: tokens, ``[9]``.
        base_logits, logits: what transformers and PEFT compute of them, without and with it.

    """

    base: Path
    adapter: Path
    ids: torch.Tensor
    base_logits: torch.Tensor
    logits: torch.Tensor


def adapt(model: Any, folder: Path, seed: int = 0, **settings: Any) -> Any:
    """Save a new adapter of ``model`` in ``folder``; return PEFT's model with it."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():  # of what transformers has renamed since
        warnings.simplefilter("ignore")
        tuned = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, **settings})).eval()
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        tuned.save_pretrained(folder)
    return tuned


def small_model(family: str, folder: Path) -> Any:
    """Save a tiny model of transformers in ``folder``, and return it."""
    torch.manual_seed(0)
    entries, _ = FAMILIES[family]
    config = AutoConfig.for_model(family, **(entries if family == "gpt2" else _SIZES | entries))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():  # the sum of -0.0 and 0.0 is 0.0: adding nothing is seen
        parameter.data.view(-1)[0] = -0.0
    model.save_pretrained(folder)
    return model


def load_base(folder: Path, **settings: Any) -> Any:
    return get_model(
        model_config=ModelConfig(**{"model": str(folder), "dtype": "float32"} | settings),
        load_config=LoadConfig(),
        device_config=DeviceConfig(device="cpu"),
    )


def load_adapter(base: Any, folder: Path) -> Adapter:
    with open_adapter(folder) as (config, weights):
        adapter = Adapter(base, config)
        adapter.load(weights)
    return adapter


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.compute_logits(model(ids, torch.arange(len(ids))))
    return logits


def adapted_logits(base: Any, adapter: Adapter, ids: torch.Tensor) -> torch.Tensor:
    """Return what a model computes of ``ids [tokens]`` with an adapter, on one rank."""
    rows = AdapterRows()
    attach(adapter, 0, rows)
    rows.set({0: 0}, [0, len(ids)], ids.device)
    logits = logits_of(base, ids)
    detach(adapter, 0)
    return logits
