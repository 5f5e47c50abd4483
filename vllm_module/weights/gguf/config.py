"""The ``config.json`` that a GGUF file stands for, from its metadata and its tensors.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What a tensor's shape says goes
before what a key says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.messages import shorten
from vllm_module.weights.gguf.file import GGUFFile
from vllm_module.weights.gguf.metadata import Metadata
from vllm_module.weights.gguf.names import ARCHITECTURES
from vllm_module.weights.gguf.rope import rope_scaling

Entries = dict[str, Any]


def stored_entries(files: Sequence[GGUFFile]) -> Entries:
    """Return the entries that say how the files store weights, whoever wrote the others."""
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
    if types:
        entries["quantization_config"] = {"quant_method": "gguf", "types": types}
    return entries


def config_of(files: Sequence[GGUFFile]) -> Entries:
    """Return the entries of ``config.json`` that the files' metadata stands for.

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
    entries |= _head(of, hidden, heads)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token := of.keys.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            entries[f"{name}_token_id"] = token
    turn_ends = of.keys.get("tokenizer.ggml.eot_token_id")
    if "eos_token_id" in entries and turn_ends not in (None, entries["eos_token_id"]):
        entries["eos_token_id"] = [entries["eos_token_id"], turn_ends]
    entries |= _BY_ARCHITECTURE[of.architecture](of, entries)
    if (scaling := rope_scaling(of)) is not None:
        entries["rope_scaling"] = scaling
    return entries


def _alike(value: Any) -> Any:
    """Return one number where layers that are alike have one each."""
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        return value[0]
    return value


def _dtype(of: Metadata) -> str:
    kinds = {tensor.kind for tensor in of.tensors.values()}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _head(of: Metadata, hidden: int, heads: Any) -> Entries:
    """Return the size of a head, and how much of it is rotated."""
    if type(heads) is not int or not 0 < heads <= hidden:
        raise CheckpointFormatError(
            f"{of.where}: {of.architecture}.attention.head_count should be a number of heads, and "
            f"is {shorten(heads)}"
        )
    size = of.get("attention.key_length", hidden // heads)
    rotated, values = of.get("rope.dimension_count", size), of.get("attention.value_length", size)
    whole = ARCHITECTURES[of.architecture].rotary_pairs  # pairs of whole heads are stored
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


def _llama(of: Metadata, entries: Entries) -> Entries:
    own: Entries = {"attention_bias": "blk.0.attn_q.bias" in of.tensors}
    window = of.get("attention.sliding_window")
    if of.get("expert_count"):
        return {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": of.need("expert_count"),
            "num_experts_per_tok": of.need("expert_used_count"),
            "sliding_window": window,
        }
    if window:
        return {**own, "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {**own, "architectures": ["LlamaForCausalLM"]}


def _qwen2(of: Metadata, entries: Entries) -> Entries:
    return {"architectures": ["Qwen2ForCausalLM"]}


def _qwen3(of: Metadata, entries: Entries) -> Entries:
    return {"architectures": ["Qwen3ForCausalLM"]}


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
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": shared,
        "intermediate_size": entries.get("intermediate_size", shared),
    }


def _qwen3moe(of: Metadata, entries: Entries) -> Entries:
    experts = _experts(of, renormalized=True)
    width = entries.get("intermediate_size", experts["moe_intermediate_size"])
    return {**experts, "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": width}


def _gpt_oss(of: Metadata, entries: Entries) -> Entries:
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in of.tensors,
        "num_local_experts": of.need("expert_count"),
        "num_experts_per_tok": of.need("expert_used_count"),
        "intermediate_size": of.shape("blk.0.ffn_gate_exps.weight", 3)[-2],
        "sliding_window": of.need("attention.sliding_window"),
    }


def _phi3(of: Metadata, entries: Entries) -> Entries:
    window = of.get("attention.sliding_window") or None  # 0 is none
    return {"architectures": ["Phi3ForCausalLM"], "sliding_window": window}


def _gemma(of: Metadata, entries: Entries, largest: int) -> Entries:
    """Return what Gemma 2 and 3 have in common; the ``largest`` has this number of layers."""
    heads, size = entries["num_attention_heads"], entries["head_dim"]
    if entries["num_hidden_layers"] == largest:  # the one whose scores are scaled otherwise
        size = entries["hidden_size"] // heads
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": of.need("attention.sliding_window"),
        "query_pre_attn_scalar": size,
    }


def _gemma2(of: Metadata, entries: Entries) -> Entries:
    return {
        **_gemma(of, entries, largest=46),
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": of.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": of.get("final_logit_softcapping", 30.0),
    }


def _gemma3(of: Metadata, entries: Entries) -> Entries:
    return {
        **_gemma(of, entries, largest=62),
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": of.get("rope.freq_base", 1000000.0),
        "rope_local_base_freq": of.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": of.get("final_logit_softcapping"),
    }


_BY_ARCHITECTURE: Mapping[str, Callable[[Metadata, Entries], Entries]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gpt-oss": _gpt_oss,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
