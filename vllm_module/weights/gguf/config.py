"""Building ``config.json`` from the metadata and the tensors of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Where a tensor's shape and a key
disagree, the shape is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_module.base.messages import shorten
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.weights.gguf.file import GGUFFile
from vllm_module.weights.gguf.metadata import Metadata
from vllm_module.weights.gguf.names import ARCHITECTURES
from vllm_module.weights.gguf.rope import rope_scaling
from vllm_module.weights.gguf.tokenizer import end_tokens

Entries = dict[str, Any]


def stored_entries(files: Sequence[GGUFFile]) -> Entries:
    """Return the entries that describe how the files store weights, whoever wrote the others."""
    types = {
        name.rpartition(".")[0]: kind
        for file in files
        for name, kind in file.kinds.items()
        if not name.endswith(".weight")
    }
    tensors = {tensor.name for file in files for tensor in file.header.tensors}
    architecture = ARCHITECTURES[files[0].metadata["general.architecture"]]
    entries: Entries = {"tie_word_embeddings": "output.weight" not in tensors}
    if architecture.rotary_pairs:
        entries["stored_rotary_pairs"] = True
    if architecture.experts_apart:
        entries["stored_experts_apart"] = True
    if "blk.0.attn_k_b.weight" in tensors:
        entries["stored_kv_b_apart"] = True
    if types:
        entries["quantization_config"] = {"quant_method": "gguf", "types": types}
    return entries


def config_of(files: Sequence[GGUFFile]) -> Entries:
    """Return the entries of ``config.json`` that the files' metadata describes.

    Raises ``CheckpointFormatError`` for a key that is missing, ``UnsupportedModelError`` for
    settings that no model here has.
    """
    of = Metadata(files)
    vocabulary, hidden = of.shape("token_embd.weight", 2)
    heads = of.need("attention.head_count")
    entries: Entries = {
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "num_hidden_layers": of.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _alike(of.get("attention.head_count_kv", heads)),
        "max_position_embeddings": of.need("context_length"),
        "rms_norm_eps": of.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": of.get("rope.freq_base", 10000.0),
        "dtype": _dtype(of),
    }
    if (width := of.get("feed_forward_length")) is not None:
        entries["intermediate_size"] = _alike(width)
    if of.get("rope.dimension_sections") is not None:
        raise UnsupportedModelError(
            f"{of.where}: the rotary embedding has sections ({of.architecture}.rope."
            "dimension_sections), as in models that see images: expected positions of text"
        )
    if not of.get("attention.causal", True):
        raise UnsupportedModelError(
            f"{of.where}: {of.architecture}.attention.causal is false: tokens attend to later "
            "ones, and models of GGUF files attend to earlier ones only: take a model that "
            "generates"
        )
    if of.get("attention.temperature_scale"):
        raise UnsupportedModelError(
            f"{of.where}: {of.architecture}.attention.temperature_scale multiplies queries by a "
            "function of their position (Ministral 3, Mistral Large 3), which no model here does"
        )
    entries |= _head(of, hidden, heads)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token := of.keys.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            entries[f"{name}_token_id"] = token
    if ends := end_tokens(of.keys):
        entries["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    model, own = _BY_ARCHITECTURE[of.architecture]
    entries["architectures"] = [model]
    entries |= {} if own is None else own(of, entries)
    entries["model_type"] = _MODEL_TYPES[entries["architectures"][0]]
    if (scaling := rope_scaling(of)) is not None:
        entries["rope_scaling"] = scaling
    return entries


def _alike(value: Any) -> Any:
    """Return the one number of a list with a number for each layer, if all are equal."""
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        return value[0]
    return value


def _dtype(of: Metadata) -> str:
    kinds = {tensor.kind for tensor in of.tensors.values()}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _head(of: Metadata, hidden: int, heads: Any) -> Entries:
    """Return the size of a head and the part of it that is rotated."""
    if type(heads) is not int or not 0 < heads <= hidden:
        raise CheckpointFormatError(
            f"{of.where}: {of.architecture}.attention.head_count should be a number of heads, and "
            f"is {shorten(heads)}"
        )
    if of.architecture == "deepseek2":
        return _latent_head(of, heads)
    size = of.get("attention.key_length", hidden // heads)
    rotated, values = of.get("rope.dimension_count", size), of.get("attention.value_length", size)
    # Rotated pairs are stored for whole heads only.
    whole = ARCHITECTURES[of.architecture].rotary_pairs
    if values != size or (whole and rotated != size):
        raise UnsupportedModelError(
            f"{of.where}: expected heads of one size, of which all is rotated, got key_length "
            f"{shorten(size)}, value_length {shorten(values)} and rope.dimension_count "
            f"{shorten(rotated)}"
        )
    entries = {"head_dim": size}
    if rotated != size and type(rotated) is type(size) is int and size > 0:
        entries["partial_rotary_factor"] = rotated / size
    return entries


def _latent_head(of: Metadata, heads: int) -> Entries:
    """Return head sizes of latent attention, whose keys and values are computed from one latent.

    In files that store ``attn_kv_b`` apart, the usual keys describe the latent as one key and value
    shared by all heads, and other keys have the sizes of a head.
    """
    rotated = of.need("rope.dimension_count")
    size = of.get("attention.key_length_mla") or of.need("attention.key_length")
    values = of.get("attention.value_length_mla") or of.need("attention.value_length")
    if type(size) is not int or type(rotated) is not int or not 0 < rotated < size:
        raise CheckpointFormatError(
            f"{of.where}: expected heads of which a part is rotated, got {shorten(size)} features, "
            f"of which rope.dimension_count says {shorten(rotated)}"
        )
    return {
        "num_key_value_heads": heads,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": size - rotated,
        "v_head_dim": values,
        "kv_lora_rank": of.need("attention.kv_lora_rank"),
        "q_lora_rank": of.get("attention.q_lora_rank") or None,
    }


def _window(of: Metadata) -> Any:
    """Return the sliding window, or None; converters write 0 for none."""
    return of.get("attention.sliding_window") or None


def _layers_with_window(of: Metadata, entries: Entries) -> Entries:
    """Return the window, and the layers that have it if the file says so: all but every n-th.

    The number n is a key that converters seldom write. If it is 0, all layers have the window.
    """
    found: Entries = {"sliding_window": of.need("attention.sliding_window")}
    period, layers = of.get("attention.sliding_window_pattern"), entries["num_hidden_layers"]
    if period is None:
        return found
    if type(period) is not int or period < 0:
        raise UnsupportedModelError(
            f"{of.where}: {of.architecture}.attention.sliding_window_pattern is {shorten(period)}: "
            "expected a number n, so that every n-th layer attends to all tokens. Take the model "
            "in safetensors"
        )
    if type(layers) is int and layers <= len(of.tensors):  # more are refused later
        found["layer_types"] = [
            "full_attention" if period and at % period == 0 else "sliding_attention"
            for at in range(1, layers + 1)
        ]
    return found


def _llama(of: Metadata, entries: Entries) -> Entries:
    window = _window(of)
    if of.get("expert_count"):
        return {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": of.need("expert_count"),
            "num_experts_per_tok": of.need("expert_used_count"),
            "sliding_window": window,
        }
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return _bias(of, entries) | (mistral if window else {})


def _bias(of: Metadata, entries: Entries) -> Entries:
    return {"attention_bias": "blk.0.attn_q.bias" in of.tensors}


def _experts(of: Metadata, renormalized: bool) -> Entries:
    return {
        "num_experts": of.need("expert_count"),
        "num_experts_per_tok": of.need("expert_used_count"),
        "moe_intermediate_size": of.shape("blk.0.ffn_gate_exps.weight", 3)[-2],
        "norm_topk_prob": of.get("expert_weights_norm", renormalized),
    }


def _qwen2moe(of: Metadata, entries: Entries) -> Entries:
    shared = of.shape("blk.0.ffn_gate_shexp.weight", 2)[0]
    return {
        **_experts(of, renormalized=False),
        "shared_expert_intermediate_size": shared,
        "intermediate_size": entries.get("intermediate_size", shared),
    }


def _qwen3moe(of: Metadata, entries: Entries) -> Entries:
    experts = _experts(of, renormalized=True)
    width = entries.get("intermediate_size", experts["moe_intermediate_size"])
    return {**experts, "intermediate_size": width}


def _gpt_oss(of: Metadata, entries: Entries) -> Entries:
    return {
        **_bias(of, entries),
        "num_local_experts": of.need("expert_count"),
        "num_experts_per_tok": of.need("expert_used_count"),
        "intermediate_size": of.shape("blk.0.ffn_gate_exps.weight", 3)[-2],
        **_layers_with_window(of, entries),
        "rope_parameters": {},  # a config.json without them has YaRN's
    }


def _phi3(of: Metadata, entries: Entries) -> Entries:
    window = _window(of)
    if of.get("attention.sliding_window") is None:
        # Files from before the key, such as Microsoft's own of Phi-3-mini-4k and -medium-4k.
        sizes = entries["num_hidden_layers"], entries["max_position_embeddings"]
        window = 2047 if sizes in ((32, 4096), (40, 4096)) else None
    return {"sliding_window": window}


# DeepSeek-V2, V3 and R1, by number of experts: the number of groups, and how many groups a token's
# experts are chosen from. Only newer files have these two keys.
_EXPERT_GROUPS = {160: (8, 3), 256: (8, 4)}
_SIGMOID = 2  # value of expert_gating_func; 1 is softmax, and older files lack the key


def _deepseek2(of: Metadata, entries: Entries) -> Entries:
    experts, dense = of.need("expert_count"), of.get("leading_dense_block_count", 0)
    corrected = f"blk.{dense}.exp_probs_b.bias" in of.tensors
    sigmoid = of.get("expert_gating_func", _SIGMOID if corrected else 0) == _SIGMOID
    groups, chosen = _EXPERT_GROUPS.get(experts, (1, 1))
    groups = of.get("expert_group_count") or groups
    chosen = of.get("expert_group_used_count") or chosen
    greedy = "greedy" if groups == 1 else "group_limited_greedy"
    # Layers that predict further tokens count as blocks, also where a file has none of them.
    layers, further = entries["num_hidden_layers"], of.get("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": layers - further if type(layers) is type(further) is int else layers,
        "architectures": [f"DeepseekV{3 if corrected else 2}ForCausalLM"],
        "n_routed_experts": experts,
        "num_experts_per_tok": of.need("expert_used_count"),
        "n_shared_experts": of.get("expert_shared_count") or None,
        "moe_intermediate_size": of.shape(f"blk.{dense}.ffn_gate_exps.weight", 3)[-2],
        "first_k_dense_replace": dense,
        "n_group": groups,
        "topk_group": chosen,
        "topk_method": "noaux_tc" if corrected else greedy,
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "norm_topk_prob": of.get("expert_weights_norm", False),
        "routed_scaling_factor": of.get("expert_weights_scale") or 1.0,  # 0 means no scale
        "num_nextn_predict_layers": further,
    }


def _gemma(of: Metadata, entries: Entries, largest: int) -> Entries:
    """Return the entries common to Gemma 2 and 3; ``largest``: the largest model's layer count."""
    heads, size = entries["num_attention_heads"], entries["head_dim"]
    if entries["num_hidden_layers"] == largest:  # the largest model scales its scores differently
        size = entries["hidden_size"] // heads
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        **_layers_with_window(of, entries),
        "query_pre_attn_scalar": size,
    }


def _gemma2(of: Metadata, entries: Entries) -> Entries:
    return {
        **_gemma(of, entries, largest=46),
        "attn_logit_softcapping": of.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": of.get("final_logit_softcapping", 30.0),
    }


def _gemma3(of: Metadata, entries: Entries) -> Entries:
    return {
        **_gemma(of, entries, largest=62),
        "rope_theta": of.get("rope.freq_base", 1000000.0),
        "rope_local_base_freq": of.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": of.get("final_logit_softcapping") or None,
    }


# By general.architecture, the model's class and what else its configuration has.
_BY_ARCHITECTURE: Mapping[str, tuple[str, Callable[[Metadata, Entries], Entries] | None]] = {
    "llama": ("LlamaForCausalLM", _llama),  # or Mixtral's or Mistral's
    "qwen2": ("Qwen2ForCausalLM", None),
    "qwen3": ("Qwen3ForCausalLM", None),
    "qwen2moe": ("Qwen2MoeForCausalLM", _qwen2moe),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen3moe),
    "gpt-oss": ("GptOssForCausalLM", _gpt_oss),
    "mistral3": ("LlamaForCausalLM", _llama),
    "glm4": ("Glm4ForCausalLM", _bias),
    "deepseek2": ("DeepseekV2ForCausalLM", _deepseek2),  # or V3's
    "phi3": ("Phi3ForCausalLM", _phi3),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
}
# By the model's class, what transformers calls its configuration.
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Glm4ForCausalLM": "glm4",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
}
