"""Hypothesis strategies of the configurations of tiny models.

Like all strategies here, these shrink towards the simplest case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from vllm_module.build.registry import config_class
from vllm_module.core.module import vLLMModule
from vllm_module.hf_config import HFConfig
from vllm_module.testing.strategies import head_layouts, vocabularies

_ACTIVATIONS = st.sampled_from(["silu", "gelu_pytorch_tanh"])
_WINDOWS = st.none() | st.integers(1, 4)
_ROPE = st.sampled_from(
    [
        {"rope_type": "default", "rope_theta": 100.0},
        {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0},
    ]
)
_QWEN_WINDOWS: Mapping[str, st.SearchStrategy[Any]] = {
    "use_sliding_window": st.booleans(),
    "sliding_window": st.integers(1, 4),
    "max_window_layers": st.integers(0, 2),
}
_PATTERN: Mapping[str, st.SearchStrategy[Any]] = {
    "sliding_window": st.integers(1, 4),
    "sliding_window_pattern": st.integers(1, 2),
}
_GEMMA: Mapping[str, st.SearchStrategy[Any]] = {
    "query_pre_attn_scalar": st.sampled_from([1, 16]),
    "final_logit_softcapping": st.none() | st.just(5.0),
    **_PATTERN,
}
_GLM: Mapping[str, st.SearchStrategy[Any]] = {
    "attention_bias": st.booleans(),
    "head_dim": st.sampled_from([4, 8]),  # half of each head is rotated, in pairs
}
_COHERE: Mapping[str, st.SearchStrategy[Any]] = {
    "attention_bias": st.booleans(),
    "logit_scale": st.sampled_from([1.0, 0.25]),
}
_EXPERTS: Mapping[str, st.SearchStrategy[Any]] = {
    "num_experts": st.integers(3, 5),
    "num_experts_per_tok": st.integers(1, 3),
    "norm_topk_prob": st.booleans(),
}
_SPARSE_LAYERS: Mapping[str, st.SearchStrategy[Any]] = {
    "moe_intermediate_size": st.just(24),
    "decoder_sparse_step": st.integers(1, 2),
    "mlp_only_layers": st.none() | st.just([0]),
    **_EXPERTS,
}
_DELTA_NET: Mapping[str, st.SearchStrategy[Any]] = {
    "attention_bias": st.booleans(),
    "linear_num_key_heads": st.just(12),
    "linear_num_value_heads": st.sampled_from([12, 24]),
    "linear_key_head_dim": st.integers(1, 3),
    "linear_value_head_dim": st.integers(1, 3),
    "linear_conv_kernel_dim": st.integers(2, 4),
}
_QWEN_HYBRID: Mapping[str, st.SearchStrategy[Any]] = {
    **_DELTA_NET,
    "head_dim": st.sampled_from([8, 16]),
    "shared_expert_intermediate_size": st.just(24),
    "full_attention_interval": st.integers(1, 3),
}
_QWEN_HYBRID_EXPERTS: Mapping[str, st.SearchStrategy[Any]] = {
    **_QWEN_HYBRID,
    **_EXPERTS,
    "norm_topk_prob": st.just(True),
    "moe_intermediate_size": st.just(24),
}
_SHORT_CONV: Mapping[str, st.SearchStrategy[Any]] = {
    "layer_types": st.lists(st.sampled_from(["conv", "full_attention"]), min_size=2, max_size=2),
    "conv_kernel": st.integers(2, 4),
    "conv_bias": st.booleans(),
    "block_multiple_of": st.just(12),
}

_BERT: Mapping[str, st.SearchStrategy[Any]] = {
    "hidden_act": st.sampled_from(["gelu", "gelu_new"]),
    "type_vocab_size": st.integers(1, 3),
}

_LABELS: st.SearchStrategy[Any] = st.none() | st.integers(1, 4).map(
    lambda count: {str(number): f"LABEL_{number}" for number in range(count)}
)

_LATENT: Mapping[str, st.SearchStrategy[Any]] = {
    "head_dim": st.just(4),  # must equal qk_rope_head_dim
    "qk_rope_head_dim": st.just(4),
    "qk_nope_head_dim": st.integers(1, 3),
    "v_head_dim": st.integers(1, 3),
    "kv_lora_rank": st.sampled_from([3, 6]),
    "q_lora_rank": st.none() | st.just(5),
    "attention_bias": st.booleans(),
    "num_nextn_predict_layers": st.integers(0, 2),
    "first_k_dense_replace": st.integers(0, 1),
    "moe_intermediate_size": st.just(24),
    "n_routed_experts": st.sampled_from([4, 6]),
    "n_shared_experts": st.none() | st.integers(1, 2),
    "num_experts_per_tok": st.integers(1, 2),
    "n_group": st.just(2),
    "topk_group": st.integers(1, 2),
}

_MULTIPLIERS: Mapping[str, st.SearchStrategy[Any]] = {
    "attention_bias": st.booleans(),
    "embedding_multiplier": st.sampled_from([1.0, 3.0]),
    "residual_multiplier": st.sampled_from([1.0, 0.5]),
    "attention_multiplier": st.sampled_from([1.0, 0.25]),
    "logits_scaling": st.sampled_from([1.0, 4.0]),
}

_MAMBA2: Mapping[str, st.SearchStrategy[Any]] = {
    "mamba_n_heads": st.just(12),
    "mamba_d_head": st.integers(1, 3),
    "mamba_n_groups": st.sampled_from([1, 6, 12]),
    "mamba_d_state": st.integers(1, 3),
    "mamba_d_conv": st.integers(2, 4),
    "mamba_conv_bias": st.booleans(),
    "mamba_proj_bias": st.booleans(),
}

_ARCHITECTURES: Mapping[str, Mapping[str, st.SearchStrategy[Any]]] = {
    "CohereForCausalLM": {**_COHERE, "use_qk_norm": st.booleans()},
    "Cohere2ForCausalLM": {**_COHERE, **_PATTERN},
    "Gemma2ForCausalLM": {
        **_GEMMA,
        "attn_logit_softcapping": st.none() | st.just(5.0),
    },
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": {**_GEMMA, "final_logit_softcapping": st.none()},
    "BambaForCausalLM": {
        **_MAMBA2,
        "head_dim": st.sampled_from([4, 8]),
        "attn_layer_indices": st.none() | st.lists(st.integers(0, 0)),
    },
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": {**_BERT, "id2label": _LABELS},
    "BertModel": _BERT,
    "DeepseekV2ForCausalLM": {
        **_LATENT,
        "mlp_bias": st.booleans(),
        "topk_method": st.sampled_from(["greedy", "group_limited_greedy"]),
    },
    "DeepseekV3ForCausalLM": {**_LATENT, "rope_interleave": st.booleans()},
    "GPT2LMHeadModel": {"hidden_act": _ACTIVATIONS},
    "GptOssForCausalLM": {
        "num_local_experts": st.integers(3, 5),
        "num_experts_per_tok": st.integers(1, 3),
        "intermediate_size": st.sampled_from([24, 32]),  # 32 is not cut; the others have padding
        **_PATTERN,
    },
    "GraniteForCausalLM": {**_MULTIPLIERS, "mlp_bias": st.booleans()},
    "GraniteMoeHybridForCausalLM": {
        **_MULTIPLIERS,
        **_MAMBA2,
        "layer_types": st.lists(st.sampled_from(["mamba", "attention"]), min_size=2, max_size=2),
        "intermediate_size": st.just(24),
        "shared_intermediate_size": st.just(24),
        "num_local_experts": st.sampled_from([0, 3, 5]),
        "num_experts_per_tok": st.integers(1, 3),
        "position_embedding_type": st.none() | st.just("rope"),
    },
    "FalconH1ForCausalLM": {
        **_MAMBA2,
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "mamba_d_head": st.just(2),
        "mamba_d_ssm": st.just(24),
        "mamba_proj_bias": st.just(False),
        "mamba_rms_norm": st.booleans(),
        "mamba_norm_before_gate": st.booleans(),
        "key_multiplier": st.sampled_from([1.0, 0.5]),
        "ssm_multipliers": st.just([0.5, 0.75, 1.0, 1.25, 1.5]),
        "mlp_multipliers": st.just([0.5, 0.75]),
    },
    "NemotronHForCausalLM": {
        "layer_types": st.lists(
            st.sampled_from(["linear_attention", "full_attention", "mlp", "moe"]),
            min_size=2,
            max_size=2,
        ),
        "head_dim": st.sampled_from([4, 8]),
        "mamba_num_heads": st.just(12),
        "mamba_head_dim": st.integers(1, 3),
        "n_groups": st.sampled_from([1, 6, 12]),
        "ssm_state_size": st.integers(1, 3),
        "conv_kernel": st.integers(2, 4),
        "use_conv_bias": st.booleans(),
        "use_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "n_routed_experts": st.sampled_from([4, 6]),
        "num_experts_per_tok": st.integers(1, 2),
        "moe_intermediate_size": st.just(24),
        "moe_latent_size": st.none() | st.just(8),
        "moe_shared_expert_intermediate_size": st.just(24),
        "n_group": st.just(2),
        "topk_group": st.integers(1, 2),
    },
    "Lfm2ForCausalLM": _SHORT_CONV,
    "Lfm2MoeForCausalLM": {
        **_SHORT_CONV,
        **_EXPERTS,
        "block_auto_adjust_ff_dim": st.just(False),
        "moe_intermediate_size": st.just(24),
        "num_dense_layers": st.integers(0, 2),
        "use_expert_bias": st.booleans(),
    },
    "Lfm2VlForConditionalGeneration": _SHORT_CONV,
    "Lfm3ForCausalLM": {
        **_SHORT_CONV,
        "layer_types": st.lists(
            st.sampled_from(["conv", "full_attention", "sliding_attention"]), min_size=2, max_size=2
        ),
        "attention_bias": st.booleans(),
        "head_dim": st.sampled_from([4, 8]),
        "sliding_window": st.integers(1, 4),
        "use_sandwich_norm": st.booleans(),
        "use_attention_gate": st.booleans(),
    },
    "LlamaForCausalLM": {
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "hidden_act": _ACTIVATIONS,
    },
    "Mamba2ForCausalLM": {
        "num_attention_heads": st.just(12),
        "n_groups": st.sampled_from([1, 6, 12]),
        "state_size": st.integers(1, 3),
        "conv_kernel": st.integers(2, 4),
        "use_bias": st.booleans(),
        "use_conv_bias": st.booleans(),
    },
    "MistralForCausalLM": {"sliding_window": _WINDOWS},
    "MixtralForCausalLM": {
        "num_local_experts": st.integers(3, 5),
        "num_experts_per_tok": st.integers(1, 3),
        "sliding_window": _WINDOWS,
    },
    "OlmoeForCausalLM": _EXPERTS,
    "Olmo2ForCausalLM": {"attention_bias": st.booleans()},
    "OlmoHybridForCausalLM": {
        **_DELTA_NET,
        "layer_types": st.lists(
            st.sampled_from(["linear_attention", "full_attention"]), min_size=2, max_size=2
        ),
        "linear_allow_neg_eigval": st.booleans(),
    },
    "Phi3ForCausalLM": {"sliding_window": _WINDOWS},
    # Gate and up have half of these features each, which most sizes divide.
    "QWenLMHeadModel": {"intermediate_size": st.just(240), "no_bias": st.booleans()},
    "Qwen2ForCausalLM": _QWEN_WINDOWS,
    "Qwen2MoeForCausalLM": {
        **_SPARSE_LAYERS,
        "shared_expert_intermediate_size": st.just(24),
        "qkv_bias": st.booleans(),
        **_QWEN_WINDOWS,
    },
    "Qwen3ForCausalLM": {"attention_bias": st.booleans(), **_QWEN_WINDOWS},
    "Qwen3MoeForCausalLM": {
        **_SPARSE_LAYERS,
        "attention_bias": st.booleans(),
        "use_sliding_window": st.booleans(),
        "sliding_window": st.integers(1, 4),
    },
    "Qwen2VLForConditionalGeneration": _QWEN_WINDOWS,
    "Qwen2_5_VLForConditionalGeneration": _QWEN_WINDOWS,
    "Qwen3VLForConditionalGeneration": {"attention_bias": st.booleans()},
    "Qwen3VLMoeForConditionalGeneration": {
        **_SPARSE_LAYERS,
        "attention_bias": st.booleans(),
        "norm_topk_prob": st.just(True),
    },
    "Qwen3NextForCausalLM": {**_SPARSE_LAYERS, **_QWEN_HYBRID},
    "Qwen3_5ForCausalLM": _QWEN_HYBRID,
    "Qwen3_5ForConditionalGeneration": _QWEN_HYBRID,
    "Qwen3_5MoeForCausalLM": _QWEN_HYBRID_EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_HYBRID_EXPERTS,
    "Starcoder2ForCausalLM": {"attention_bias": st.booleans(), "sliding_window": _WINDOWS},
    "RobertaForMaskedLM": _BERT,
    "RobertaForSequenceClassification": {**_BERT, "id2label": _LABELS},
    "RobertaModel": _BERT,
    "XLMRobertaForMaskedLM": _BERT,
    "XLMRobertaForSequenceClassification": {**_BERT, "id2label": _LABELS},
    "XLMRobertaModel": _BERT,
}


def architectures() -> tuple[str, ...]:
    """Return the architectures that :func:`model_configs` can draw."""
    return tuple(_ARCHITECTURES)


@st.composite
def model_configs(
    draw: st.DrawFn,
    model: str | type[vLLMModule] | None = None,
    /,
    **entries: st.SearchStrategy[Any],
) -> HFConfig:
    """Draw the configuration of a tiny causal language model, or of an encoder.

    Args:
        model: a model's class, or the name of a registered architecture; the configuration is of
            its ``config_class``, whose defaults are used for entries that are not drawn. Without
            it, the entries are Llama's.
        **entries: strategies for further entries, by their names here and not by the file's; they
            replace those drawn here. Give one for each size of the model's own, because its
            default is that of a real model.

    Drawn are the numbers of layers, heads and key-value heads, ``hidden_size`` (which the heads
    divide into even sizes), ``head_dim`` (even, and not derived from ``hidden_size``),
    ``intermediate_size``, ``vocab_size``, ``tie_word_embeddings`` and ``rope_parameters``. A model
    that rotates half of each head needs ``head_dim=st.sampled_from([4, 8])``, and one that cannot
    be tied needs ``tie_word_embeddings=st.just(False)``.

    Raises ``UnsupportedModelError`` if no model of that name is registered.

    """
    name, cls = _config_class(model)
    layout = draw(head_layouts())
    drawn: dict[str, Any] = {
        "architectures": [name or "TestForCausalLM"],
        "num_hidden_layers": draw(st.integers(1, 2)),
        # A model may derive the size of its heads from hidden_size.
        "hidden_size": layout.heads * draw(st.sampled_from([2, 4])),
        "num_attention_heads": layout.heads,
        "num_key_value_heads": layout.kv_heads,
        "head_dim": layout.head_size,
        # A multiple of the heads; otherwise most tensor-parallel sizes would be refused.
        "intermediate_size": layout.heads * draw(st.integers(1, 3)),
        "vocab_size": draw(vocabularies()),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(_ROPE),
        "max_position_embeddings": 64,
    }
    if model is None:
        drawn |= {"hidden_act": "silu", "rms_norm_eps": 1e-6}
    chosen = {**_ARCHITECTURES.get(name or "", {}), **entries}
    drawn |= {entry: draw(strategy) for entry, strategy in chosen.items()}
    return cls(**drawn)


def _config_class(model: str | type[vLLMModule] | None) -> tuple[str | None, type[HFConfig]]:
    """Return the architecture's name and its configuration class."""
    if model is None:
        return None, HFConfig
    if isinstance(model, str):
        return model, config_class([model])
    return model.__name__, getattr(model, "config_class", HFConfig)
