"""Strange values of every entry of config.json: each is refused by name, or changes nothing."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module import DeviceConfig, ModelConfig, WeightLoadError, get_model
from vllm_module.build.model_source import build_model
from vllm_module.hf_config import HFConfig
from vllm_module.testing import random_weights, write_checkpoint

BASE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
# By name: the architecture, and entries beside those above.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}),
    "llama3": ("LlamaForCausalLM", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "yarn": ("LlamaForCausalLM", {"rope_scaling": YARN}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8, "attention_bias": False}),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 2.0,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            "hidden_act": None,
            "hidden_activation": "silu",
            "head_dim": 8,
            "query_pre_attn_scalar": 2,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 5.0,
            "sliding_window": 8,
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 8, "sliding_window": 8}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 8, "attention_bias": True}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {"rms_norm_eps": None, "norm_epsilon": 1e-5, "use_bias": True},
    ),
    "cohere": (
        "CohereForCausalLM",
        {"rms_norm_eps": None, "layer_norm_eps": 1e-5, "use_qk_norm": True, "logit_scale": 2.0},
    ),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"rms_norm_eps": None, "hidden_act": None, "activation_function": "gelu_new"},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 6,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 8}),
    "qwen": ("QWenLMHeadModel", {"rms_norm_eps": None, "seq_length": 64}),
}

NAN, INFINITY = float("nan"), math.inf
NO_NUMBER: tuple[Any, ...] = ("1", "", [], [1], {}, {"a": 1}, True)
NO_SIZE: tuple[Any, ...] = (*NO_NUMBER, 0, -1, 1.5, NAN, INFINITY, 2**31, 10**30)
NO_POSITIVE: tuple[Any, ...] = (*NO_NUMBER, 0, -1.0, -INFINITY, INFINITY, NAN)
# 2**31 - 1 would take hours, and memory for the name of each.
NO_EXPERTS: tuple[Any, ...] = (*NO_SIZE, 2**31 - 1, 5000, 3)
NO_BOOL: tuple[Any, ...] = ("false", "true", 0, 1, None, [], {}, 0.0)
NO_LIST: tuple[Any, ...] = ("x", 1, {}, [1], [None], True)
NO_TEXT: tuple[Any, ...] = (None, 1, [], {}, True, "", "relu", "\x1b[2J")

# By model and entry: values that are refused. A dot leads into an object.
REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {
        "architectures": (None, "LlamaForCausalLM", [], [1], {}, ["X"], ["\x1b[2J"]),
        "hidden_size": (*NO_SIZE, None),
        "num_hidden_layers": (*NO_SIZE, None, 3, 300_000, 2**31 - 1),
        "num_attention_heads": (*NO_SIZE, None, 17),
        "vocab_size": (*NO_SIZE, None, 31, 2**31 - 1),
        "intermediate_size": (*NO_SIZE, None, 2**31 - 1),
        "num_key_value_heads": (*NO_SIZE, 3),
        "head_dim": (*NO_SIZE, 3, 2**20),
        "max_position_embeddings": NO_SIZE,
        "rms_norm_eps": (*NO_POSITIVE, None),
        "hidden_act": NO_TEXT,
        "tie_word_embeddings": NO_BOOL,
        "attention_bias": NO_BOOL,
        "mlp_bias": NO_BOOL,
        "rope_theta": NO_POSITIVE,
        "partial_rotary_factor": (*NO_NUMBER, 0, -0.5, 1.5, NAN, INFINITY, 1e-9),
        "rope_scaling": ("linear", 1, [], [1], True, {"rope_type": "own"}, {"factor": 2.0}),
        "rope_parameters": ("linear", 1, [], [1], True, {"rope_type": ["default"]}),
        "layer_types": NO_LIST,
        "n_positions": NO_SIZE[:-2],
        "dtype": ("float64", "int8", "x", 1, [], "\x1b[2J", "torch.nn"),
        "quantization_config": ("fp8", 1, [], {}, {"quant_method": "own"}, {"quant_method": 1}),
    },
    "llama3": {
        "rope_scaling.factor": (*NO_POSITIVE, None),
        "rope_scaling.low_freq_factor": (*NO_POSITIVE, None, 4.0, 5.0),
        "rope_scaling.high_freq_factor": (*NO_POSITIVE, None, 1.0, 0.5),
        "rope_scaling.original_max_position_embeddings": NO_SIZE,
        "rope_scaling.rope_type": ("", 1, [], "LLAMA3", "llama4"),
    },
    "yarn": {
        "rope_scaling.factor": NO_POSITIVE,
        "rope_scaling.beta_fast": (*NO_POSITIVE, 0.9, 0.5),
        "rope_scaling.beta_slow": (*NO_POSITIVE, 32.1, 33),
        "rope_scaling.truncate": ("false", 0, 1, [], {}),
        "rope_scaling.attention_factor": NO_POSITIVE,
        "rope_scaling.attn_factor": NO_POSITIVE,
        "rope_scaling.mscale": (*NO_NUMBER, -1.0, NAN, INFINITY),
        "rope_scaling.original_max_position_embeddings": (*NO_SIZE, 1),
        "rope_theta": (1, 1.0, 0.5),
    },
    "mistral": {"sliding_window": NO_SIZE},
    "qwen2": {
        "use_sliding_window": NO_BOOL,
        "sliding_window": NO_SIZE,
        "max_window_layers": (*NO_NUMBER, -1, 1.5, NAN, None),
        "layer_types": (*NO_LIST, ["full_attention"], ["full_attention", "own"]),
    },
    "qwen3": {"head_dim": (*NO_SIZE, None, 16, 7)},
    "granite": dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
        (*NO_POSITIVE, None),
    ),
    "gemma2": {
        "hidden_activation": ("relu", 1, None),
        "query_pre_attn_scalar": ("2", 0, -1.0, NAN, None),
        "attn_logit_softcapping": ("5", 0, -1.0, NAN, True),
        "final_logit_softcapping": ("5", 0, -1.0, NAN, True),
        "sliding_window": (0, 1.5, None),
        "sliding_window_pattern": (0, "2", None),
        "use_bidirectional_attention": (True, "false", 1),
    },
    "gemma3": {
        "attn_logit_softcapping": (5.0, 0, "5"),
        "rope_theta": ("1", 0, NAN, None),
        "rope_local_base_freq": ("1", 0, -1.0, NAN, None),
        "use_bidirectional_attention": (True,),
    },
    "glm4": {
        "attention_bias": (None, 1, "true"),
        "partial_rotary_factor": ("0.5", 0, 1.5, NAN, None, 0.4),  # 0.4 * 8 features, cut to 3
    },
    "olmo2": {"rms_norm_eps": (0, NAN, None), "num_key_value_heads": (1, 4)},
    "starcoder2": {
        "norm_epsilon": ("1", 0, -1.0, NAN, None),
        "use_bias": (None, 1, "true", False),
        "hidden_act": ("relu", None),
    },
    "cohere": {
        "layer_norm_eps": ("1", 0, -1.0, NAN, None),
        "logit_scale": ("1", 0, -1.0, NAN, None),
        "use_qk_norm": (None, 1, "true", False),
    },
    "cohere2": {"sliding_window": (0, "8", None), "sliding_window_pattern": (0, 1.5, None)},
    "gpt2": {
        "n_embd": (32, "16", 0),
        "n_inner": (16, "32", 0),
        "activation_function": ("relu", 1),
        "layer_norm_epsilon": ("1", 0, -1.0, NAN, None),
        "scale_attn_weights": ("true", 1, None),
        "add_cross_attention": (True, "false", 1),
        "n_positions": (32, "64", 0),
    },
    "gpt-oss": {
        "num_local_experts": (*NO_EXPERTS, None, 1, 5),
        "num_experts_per_tok": (*NO_SIZE, None, 5),
        "swiglu_alpha": ("1", 0, NAN, None),
        "swiglu_limit": ("7", 0, NAN, None),
        "sliding_window": (0, "8", None),
        "attention_bias": (None, 1, False),
        "quantization_config": ({"quant_method": "mxfp4", "modules_to_not_convert": "x"},),
    },
    "mixtral": {"num_local_experts": NO_EXPERTS, "num_experts_per_tok": (*NO_SIZE, None, 5)},
    "deepseek": {
        "n_routed_experts": (*NO_EXPERTS, None),
        "num_experts_per_tok": (*NO_SIZE, None, 3),
        "n_group": (*NO_SIZE, 3),
        "topk_group": (*NO_SIZE, None, 3),
        "num_nextn_predict_layers": (*NO_NUMBER, -1, 1.5, 2**31 - 1, None),
        "n_shared_experts": (*NO_NUMBER, -1, 0, 2, None),
        "first_k_dense_replace": (*NO_NUMBER, -1, 0, 2, None),
        "moe_layer_freq": (*NO_SIZE, 2, None),
        "q_lora_rank": (*NO_SIZE, 7, None),
        **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), (*NO_SIZE, 5, None)),
        "qk_rope_head_dim": (*NO_SIZE, 1, 4, None),
        "routed_scaling_factor": (*NO_POSITIVE, None),
        "scoring_func": ("relu", 1, None),
        "topk_method": ("best", 1, None),
        "norm_topk_prob": NO_BOOL,
        "rope_interleave": NO_BOOL,
    },
    "phi3": {"sliding_window": (0, "8"), "partial_rotary_factor": ("0.5", 0, 1.5, NAN)},
    "qwen": {
        "seq_length": (*NO_SIZE, None, 1),
        "intermediate_size": (16, 1, "32"),
        "kv_channels": (*NO_SIZE, 2, 3, 8),
        "layer_norm_epsilon": ("1", 0, -1.0, NAN, None),
        "no_bias": ("true", 1, None, False),
        "use_dynamic_ntk": ("true", 1, None),
        "use_logn_attn": ("true", 1, None),
        "rotary_emb_base": NO_POSITIVE,
        "rotary_pct": ("1", 0, 1.5, NAN),
    },
}
# Values that other tools write, and mean what the file said before.
HARMLESS: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {
        "architectures": (["LlamaForCausalLM", "X"], ["X", "LlamaForCausalLM"]),
        "num_key_value_heads": (2,),
        "head_dim": (None, 4),
        "rope_theta": (None, 10000, 1e4),
        "rope_scaling": (None, {}, {"rope_type": "default"}, {"type": None}),
        "rope_parameters": (None, {}, {"rope_theta": 10000}),
        "partial_rotary_factor": (None, 1, 1.0),
        "layer_types": (None, ["full_attention"] * 2),
        "sliding_window": (None, 4096),
        "dtype": ("float32", "torch.float32", None),
        "quantization_config": (None,),
        "anything_else": (None, 1, "x", [1], {"a": {}}, NAN),
        "max_position_embeddings": (64, None),
        "n_positions": (None, 64),
        "pad_token_id": (None, -1, 0),
    },
    "llama3": {"rope_scaling.original_max_position_embeddings": (32,)},
    "yarn": {
        "rope_scaling.beta_fast": (None, 32, 32.0),
        "rope_scaling.attn_factor": (None, 1, 1.0),
        "rope_scaling.truncate": (None, True),
        "rope_scaling.mscale": (None,),
    },
    "mistral": {"use_sliding_window": (True, False)},
    "qwen2": {"layer_types": (None, ["full_attention", "sliding_attention"])},
    "gemma2": {
        "hidden_act": ("silu",),
        "layer_types": (None, ["sliding_attention", "full_attention"]),
        "sliding_window_pattern": (2,),
        "tie_word_embeddings": (False,),
        "use_bidirectional_attention": (None, False),
    },
    "gemma3": {
        "attn_logit_softcapping": (None,),
        "layer_types": (["sliding_attention"] * 2,),
        "rope_local_base_freq": (10000,),
        "rope_parameters": (
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        ),
    },
    "glm4": {"partial_rotary_factor": (0.5,), "rope_parameters": ({"partial_rotary_factor": 0.5},)},
    "starcoder2": {"rms_norm_eps": (1e-5,)},
    "cohere": {"rms_norm_eps": (1e-5,), "rope_theta": (500000,)},
    "cohere2": {
        "layer_types": (["sliding_attention", "full_attention"],),
        "logit_scale": (0.0625,),
    },
    "gpt2": {
        "n_inner": (None, 32),
        "n_embd": (None, 16),
        "layer_norm_epsilon": (1e-5,),
        "num_key_value_heads": (None, 4),
        "rope_theta": (None, 500.0),
    },
    "gpt-oss": {
        "layer_types": (None, ["sliding_attention", "full_attention"]),
        "swiglu_limit": (7, 7.0),
        "num_experts": (None, 7),
    },
    "mixtral": {"sliding_window": (None, 4096)},
    "deepseek": {"num_nextn_predict_layers": (0, 3), "num_key_value_heads": (None, 4)},
    "phi3": {"original_max_position_embeddings": (64, 4096), "partial_rotary_factor": (1.0,)},
    "qwen": {
        "kv_channels": (None, 4),
        "rotary_emb_base": (None, 10000),
        "seq_length": (32,),
        "use_dynamic_ntk": (True, False),
        "use_logn_attn": (True, False),
    },
}
REFUSALS = [(model, entry) for model, entries in REFUSED.items() for entry in entries]


def entries_of(model: str) -> dict[str, Any]:
    architecture, entries = MODELS[model]
    return {"architectures": [architecture], **BASE, **json.loads(json.dumps(entries))}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a checkpoint of each model."""
    folders = {}
    for name in MODELS:
        config = entries_of(name)
        model = build_model(HFConfig(**config), torch.float32, torch.device("cpu"))
        folders[name] = folder = tmp_path_factory.mktemp(name)
        weights = random_weights(model.expected_weights(), seed=0)
        write_checkpoint(folder, weights, config=config)
    return folders


def logits(folder: Path) -> torch.Tensor:
    model: Any = get_model(
        model_config=ModelConfig(model=str(folder)), device_config=DeviceConfig(device="cpu")
    )
    tokens = torch.arange(20) % BASE["vocab_size"]
    return model.compute_logits(model(tokens, torch.arange(20)))


def changed(checkpoints: dict[str, Path], to: Path, model: str, entry: str, value: Any) -> Path:
    """Copy the checkpoint of ``model`` with another value of ``entry``."""
    shutil.copy(checkpoints[model] / "model.safetensors", to)
    entries = entries_of(model)
    outer, dot, inner = entry.partition(".")
    (entries[outer] if dot else entries)[inner if dot else outer] = value
    (to / "config.json").write_text(json.dumps(entries))
    return to


@pytest.mark.parametrize(("model", "entry"), REFUSALS)
def test_a_strange_value_is_refused_by_name(
    checkpoints: dict[str, Path], tmp_path: Path, model: str, entry: str
) -> None:
    """One short message names the file or the tensors, and the entry or its value."""
    for value in REFUSED[model][entry]:
        folder = changed(checkpoints, tmp_path, model, entry, value)
        begin = time.thread_time()
        try:
            logits(folder)
        except WeightLoadError as refused:
            text = str(refused)
        else:
            pytest.fail(f"{value!r} is not refused")
        assert time.thread_time() - begin < 20, value  # it took minutes to count 2**31 layers
        name = entry.rpartition(".")[2]
        assert len(text) < 5000
        assert "\x1b" not in text
        shapes = "expected shape" in text or "missing" in text or "unexpected" in text
        assert name in text or shapes or "divided" in text or repr(value) in text, (value, text)


@pytest.mark.parametrize("model", HARMLESS)
def test_a_value_that_means_the_same_changes_no_logit(
    checkpoints: dict[str, Path], tmp_path: Path, model: str
) -> None:
    """What other tools write for the same model gives the same bits."""
    expected = logits(checkpoints[model])
    for entry, values in HARMLESS[model].items():
        for value in values:
            found = logits(changed(checkpoints, tmp_path, model, entry, value))
            assert torch.equal(found, expected), (entry, value)


def test_there_are_enough_cases() -> None:
    """The tables are not emptied by accident."""
    tables = [*REFUSED.values(), *HARMLESS.values()]
    assert sum(len(values) for entries in tables for values in entries.values()) > 1100
