"""The tiny configurations of each architecture that are compared with transformers, by name.

Pytest's importlib mode has no imports between test files: take them with ``runpy.run_path``.
"""

from __future__ import annotations

from typing import Any


def config_of(kind: str, **entries: Any) -> dict[str, Any]:
    small = {
        "vocab_size": 130,  # padded to 192: the last of 4 ranks holds only padding
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,  # fewer than 4 ranks
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return {"model_type": kind, **small, **entries}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,  # low enough for wavelengths on both sides of each threshold
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
    "original_max_position_embeddings": 32,
}

MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.0625,
    "logits_scaling": 2.0,
}

LATENT = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
# A dense layer, and one with experts.
LATENT_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
GROUPS = {"n_group": 4, "topk_group": 2}

GEMMA = {"head_dim": 24, "sliding_window": 5, "query_pre_attn_scalar": 20}
# Two layers have no full attention by default.
WINDOW_THEN_NONE = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# GLM's own padding token is not in these small vocabularies.
GLM = {"head_dim": 24, "pad_token_id": None}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 130,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT_OSS = {
    "head_dim": 24,
    "sliding_window": 6,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
NO_PADDING = {"pad_token_id": None}  # Phi-3's own is not in these small vocabularies
PHI4_ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75}

MAMBA2 = {
    "model_type": "mamba2",
    "n_groups": 4,
    "vocab_size": 130,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 8,
    "chunk_size": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
BAMBA = {
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "pad_token_id": None,
}
QWEN3_5 = {
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
QWEN3_5_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
LFM2 = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_bias": True,
}
LFM3 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
    "head_dim": 16,
    "conv_bias": True,
    "conv_L_cache": 7,
    "attention_bias": True,
    "sliding_window": 4,
    "pad_token_id": None,
}
OLMO_HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,  # transformers writes three equal parts of the convolution
    "pad_token_id": None,
}
FALCON_H1 = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_ssm": 96,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.75, 1.25],
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.75,
    "ssm_multipliers": [0.5, 1.0, 1.25, 0.75, 1.5],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.5,
}
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
    # transformers bounds steps by it from below, the authors' code by time_step_limit, from 0.
    "time_step_min": 1e-30,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-3,
}
GRANITE4 = {
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "shared_intermediate_size": 48,
    **MULTIPLIERS,
}
QWEN3_NEXT = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "mlp_only_layers": [2],
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}

# What transformers computes with: arguments of AutoConfig.for_model.
CONFIGS = {
    "deepseek-v2": config_of(
        "deepseek_v2", **LATENT, **LATENT_EXPERTS, q_lora_rank=None, n_shared_experts=2
    ),
    "deepseek-v2-groups": config_of(
        "deepseek_v2",
        **LATENT,
        **LATENT_EXPERTS,
        **GROUPS,
        topk_method="group_limited_greedy",
        q_lora_rank=20,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        attention_bias=True,
    ),
    "deepseek-v3": config_of(
        "deepseek_v3",
        **LATENT,
        **LATENT_EXPERTS,
        **GROUPS,
        q_lora_rank=20,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    ),
    "deepseek-v3-halves": config_of(
        "deepseek_v3",
        **LATENT,
        **LATENT_EXPERTS | {"first_k_dense_replace": 2},
        q_lora_rank=None,
        rope_interleave=False,
    ),
    "cohere": config_of("cohere", use_qk_norm=True, logit_scale=0.5, layer_norm_eps=0.01),
    "cohere-biases-untied": config_of("cohere", attention_bias=True, num_key_value_heads=4),
    "cohere2": config_of("cohere2", **WINDOW_THEN_NONE, sliding_window=5, logit_scale=1.0),
    "gemma2": config_of(
        "gemma2",
        **GEMMA,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=6.0,
        tie_word_embeddings=True,
    ),
    "gemma3": config_of(
        "gemma3_text",
        **GEMMA,
        **WINDOW_THEN_NONE,
        rope_parameters=GEMMA3_ROPES,
        tie_word_embeddings=True,
    ),
    "glm": config_of(
        "glm", **GLM, rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.25}
    ),
    "glm4": config_of("glm4", **GLM, attention_bias=False),
    "gpt2": GPT2,
    "gpt2-scales-by-layer": {
        **GPT2,
        "n_inner": 96,
        "activation_function": "gelu",
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    "gpt-oss": config_of("gpt_oss", **GPT_OSS, **WINDOW_THEN_NONE, rope_parameters=YARN),
    "granite": config_of("granite", **MULTIPLIERS, num_hidden_layers=3),
    "granite-tied-biases-one-kv-head": config_of(
        "granite",
        **MULTIPLIERS,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=1,
    ),
    "llama": config_of("llama", num_key_value_heads=4, vocab_size=97),
    "llama-tied-biases": config_of(
        "llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama-llama3": config_of("llama", rope_parameters=LLAMA3),
    "llama-llama3-tied-biases-one-kv-head": config_of(
        "llama",
        rope_parameters=LLAMA3,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=1,
    ),
    "llama-yarn": config_of("llama", rope_parameters=YARN, vocab_size=97),
    "llama-yarn-tied-biases-one-kv-head": config_of(
        "llama",
        rope_parameters=YARN | {"attention_factor": 1.25, "truncate": False},
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=1,
    ),
    "llama-linear": config_of("llama", rope_parameters=LINEAR, mlp_bias=True),
    # Saved with another file than transformers computes with: see FILES.
    "llama-dynamic": config_of(
        "llama",
        rope_parameters={"rope_theta": 10000.0 * 13 ** (16 / 14)},
        attention_bias=True,
    ),
    "llama-longrope": config_of(
        "llama", rope_parameters=LONGROPE | {"short_factor": LONGROPE["long_factor"]}
    ),
    "llama-gelu-head-size": config_of("llama", head_dim=24, hidden_act="gelu_pytorch_tanh"),
    "mistral-window": config_of("mistral", sliding_window=5, num_hidden_layers=3),
    "mistral": config_of("mistral", sliding_window=None, head_dim=24, tie_word_embeddings=True),
    "olmo2": config_of("olmo2"),
    "olmo2-biases-one-kv-head": config_of("olmo2", attention_bias=True, num_key_value_heads=1),
    "phi3": config_of("phi3", **NO_PADDING, sliding_window=6, rope_parameters=PHI4_ROPE),
    "phi3-longrope": config_of(
        "phi3",
        **NO_PADDING,
        original_max_position_embeddings=32,
        num_key_value_heads=1,
        rope_parameters=LONGROPE | {"short_factor": LONGROPE["long_factor"]},
    ),
    "qwen2": config_of("qwen2", tie_word_embeddings=True),
    "qwen2-window-one-kv-head": config_of(
        "qwen2",
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        num_hidden_layers=3,
        num_key_value_heads=1,
    ),
    "qwen2-window-and-bias-unused": config_of(  # transformers' class reads neither
        "qwen2",
        use_sliding_window=False,
        sliding_window=6,
        max_window_layers=0,
        attention_bias=True,
    ),
    "qwen3": config_of("qwen3", head_dim=24, num_attention_heads=8, num_key_value_heads=8),
    "qwen3-tied-biases-window": config_of(
        "qwen3",
        head_dim=24,
        num_attention_heads=8,
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        rope_parameters=YARN,
    ),
    "starcoder2": config_of("starcoder2", sliding_window=6, norm_epsilon=0.01),
    "starcoder2-no-biases-tied": config_of(
        "starcoder2", use_bias=False, hidden_act="gelu", tie_word_embeddings=True
    ),
    "mamba2": MAMBA2,
    "bamba": config_of("bamba", **BAMBA, mamba_n_groups=1),
    "qwen3.5": config_of("qwen3_5_text", **QWEN3_5),
    "qwen3.5-moe": config_of("qwen3_5_moe_text", **QWEN3_5, **QWEN3_5_EXPERTS),
    "lfm2": config_of("lfm2", **LFM2),
    "lfm3": config_of("lfm3", **LFM3),
    "lfm3-plain-tied": config_of(
        "lfm3",
        **LFM3,
        use_sandwich_norm=False,
        use_attention_gate=False,
        tie_word_embeddings=True,
    ),
    "lfm2-moe": config_of(
        "lfm2_moe", **LFM2, num_dense_layers=1, num_experts=5, moe_intermediate_size=24
    ),
    "olmo-hybrid": config_of(
        "olmo_hybrid", **OLMO_HYBRID, rope_parameters={"rope_theta": None, "rope_type": "default"}
    ),
    "olmo-hybrid-rope-biases-tied": config_of(
        "olmo_hybrid",
        **OLMO_HYBRID,
        linear_allow_neg_eigval=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "falcon-h1": config_of("falcon_h1", **FALCON_H1),
    "falcon-h1-norm-biases-tied": config_of(
        "falcon_h1",
        **FALCON_H1,
        mamba_rms_norm=True,
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        projectors_bias=True,
        tie_word_embeddings=True,
    ),
    "nemotron-h": config_of("nemotron_h", **NEMOTRON_H),
    "nemotron-h-latent-groups-biases": config_of(
        "nemotron_h",
        **NEMOTRON_H | {"layers_block_type": ["moe", "linear_attention", "full_attention", "moe"]},
        moe_latent_size=32,
        n_group=3,
        topk_group=2,
        norm_topk_prob=False,
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
    ),
    "granite-4": config_of("granitemoehybrid", **GRANITE4, num_local_experts=5),
    "granite-4-dense-rope-tied": config_of(
        "granitemoehybrid",
        **GRANITE4,
        num_local_experts=0,
        position_embedding_type="rope",
        tie_word_embeddings=True,
    ),
    "qwen3-next": config_of("qwen3_next", **QWEN3_NEXT),
    "mixtral": config_of("mixtral", num_local_experts=5, num_experts_per_tok=2),
    "qwen2-moe": config_of(
        "qwen2_moe",
        num_experts=6,  # which 4 expert-parallel ranks share unevenly
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=2,
    ),
    "qwen3-moe": config_of(
        "qwen3_moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
    "olmoe": config_of(
        "olmoe", num_experts=3, num_experts_per_tok=2, num_key_value_heads=4, pad_token_id=None
    ),
}

# Entries of config.json, where the scaling depends on a length. transformers chooses it by the
# length in each step, we by max_model_len, which is 128. What it computes is therefore fixed to the
# same frequencies: the base of dynamic scaling is multiplied by 4 * 128 / 32 - (4 - 1) = 13, to the
# power of 16 / (16 - 2), and longrope has long factors only.
FILES: dict[str, dict[str, Any]] = {
    # One prompt is longer than this limit. The others exceed it during generation.
    "llama-dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 32},
    "llama-longrope": {"rope_parameters": LONGROPE},
    "phi3-longrope": {"rope_parameters": LONGROPE},
}

# One configuration of each architecture, and those whose layers or positions differ most from it.
DISTINCT = {
    *{config["model_type"]: name for name, config in reversed(CONFIGS.items())}.values(),
    "llama-dynamic",
    "llama-longrope",
    "llama-tied-biases",
    "mistral-window",
    "qwen2-window-one-kv-head",
    "deepseek-v2-groups",
}
