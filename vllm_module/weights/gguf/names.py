"""Tables from llama.cpp's tensor names to those of Hugging Face's checkpoints.

``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``. There is a table for each
``general.architecture``. Sources:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and constants.py of gguf-py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_module.base.messages import shorten
from vllm_module.errors import UnsupportedModelError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_DENSE = {**_ATTENTION, **_MLP}
# A separate name, so that a tensor in Hugging Face's order is never taken for one of these.
_PAIRS = {"attn_q": "self_attn.q_proj_pairs", "attn_k": "self_attn.k_proj_pairs"}
# A * stands for an expert's number: llama.cpp stores the experts of a layer as one tensor.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
_PHI3 = {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT_OSS = {
    **_ATTENTION,
    **_EXPERTS,
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
del _GPT_OSS["ffn_norm"]
_GLM4 = {
    **_ATTENTION,
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
_DEEPSEEK2 = {
    **_DENSE,
    **_EXPERTS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    # Of layers that predict further tokens, which are behind the others.
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# Small weights, and keys that are stored transposed: their layers cannot multiply by blocks.
_DEQUANTIZED = {"ffn_gate_inp", "ffn_gate_inp_shexp", "attn_k_b"}
# Parameters that are no "weight", by the end of their name, with their suffix in the file.
_WITHOUT_LAST = {"attn_sinks": "weight", "exp_probs_b": "bias"}

# Until April 2024, llama.cpp stored each expert of Mixtral as a tensor.
_ONE_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d+)")


@dataclass(frozen=True)
class Architecture:
    """The tensor names of one ``general.architecture``, and llama.cpp's changes of the values.

    Attributes:
        layer: dict from the components after ``blk.N`` to the name after ``model.layers.N``.
        norms_plus_one: True if norm weights are stored with 1 added.
        experts_apart: True if each expert is a tensor of its own in the model (gate and up too),
            where Hugging Face's checkpoints have one tensor.
        rotary_pairs: True if rows of q and k that are rotated together are stored as neighbours;
            their names in ``layer`` end with ``_pairs``.

    """

    layer: Mapping[str, str] = field(hash=False)
    norms_plus_one: bool = False
    rotary_pairs: bool = False
    experts_apart: bool = False


ARCHITECTURES = {
    "llama": Architecture({**_DENSE, **_PAIRS, **_MIXTRAL}, rotary_pairs=True),
    "qwen2": Architecture(_DENSE),
    "qwen3": Architecture({**_DENSE, **_HEAD_NORMS}),
    "qwen2moe": Architecture({**_ATTENTION, **_EXPERTS, **_SHARED_EXPERT}),
    "qwen3moe": Architecture({**_ATTENTION, **_HEAD_NORMS, **_EXPERTS}),
    "gpt-oss": Architecture(_GPT_OSS, experts_apart=True),
    "mistral3": Architecture({**_DENSE, **_PAIRS, **_MIXTRAL}, rotary_pairs=True),
    "glm4": Architecture(_GLM4),
    "deepseek2": Architecture(_DEEPSEEK2),
    "phi3": Architecture({**_ATTENTION, **_PHI3}),
    "gemma2": Architecture({**_DENSE, **_GEMMA_NORMS}, norms_plus_one=True),
    "gemma3": Architecture({**_DENSE, **_HEAD_NORMS, **_GEMMA_NORMS}, norms_plus_one=True),
}

# Settings of the rotary embedding, which config.json has: these tensors are no weights.
ROPE_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


def architecture_of(name: object, where: str) -> Architecture:
    """Return the architecture that the file ``where`` names.

    Raises ``UnsupportedModelError`` if the architecture is unknown.
    """
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    raise UnsupportedModelError(
        f"{where}: general.architecture is {shorten(name)}, whose tensors have no names here: "
        f"expected one of {', '.join(ARCHITECTURES)}. Take the model in safetensors"
    )


def renamed(name: str, architecture: Architecture) -> str:
    """Return the Hugging Face name of the tensor ``name``, or ``name`` itself if unknown."""
    *above, last = name.split(".")
    if len(above) == 1 and above[0] in _TOP:
        return f"{_TOP[above[0]]}.{last}"
    if above[:1] != ["blk"]:
        return name
    component = ".".join(above[2:])
    apart = _ONE_EXPERT.fullmatch(component)
    if apart is not None and (experts := architecture.layer.get(f"{apart[1]}_exps")) is not None:
        return f"model.layers.{above[1]}.{experts.replace('*', apart[2])}.{last}"
    if component in architecture.layer:
        found = f"model.layers.{above[1]}.{architecture.layer[component]}"
        return found if component in _WITHOUT_LAST else f"{found}.{last}"
    return name


def stored_name(name: str, architecture: Architecture) -> str | None:
    """Return the name in GGUF files of the tensor that Hugging Face calls ``name``, or None."""
    of_layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    number, rest = of_layer.groups() if of_layer else ("", name)
    rest = re.sub(r"\.experts\.\d+\.", ".experts.*.", rest)
    base, _, last = rest.rpartition(".")
    last = last.partition("_")[0] if last.startswith("weight_") else last  # weight_q4_k
    for component, theirs in (architecture.layer if of_layer else _TOP).items():
        if theirs == rest and component in _WITHOUT_LAST:
            return f"blk.{number}.{component}.{_WITHOUT_LAST[component]}"
        if theirs == base and last in ("weight", "bias"):
            return f"{f'blk.{number}.' if of_layer else ''}{component}.{last}"
    return None


def is_dequantized(name: str) -> bool:
    """Return whether the tensor ``name`` is dequantized while it is read."""
    *_, component, last = ("", *name.split("."))
    return component in _DEQUANTIZED or last != "weight"


def is_of_heads(name: str) -> bool:
    """Return whether the tensor ``name`` has a dimension of heads, whose rows are contiguous."""
    return name.endswith((".attn_k_b.weight", ".attn_v_b.weight"))


def is_turned(name: str) -> bool:
    """Return whether the tensor ``name`` stores each head's matrix transposed."""
    return name.endswith(".attn_k_b.weight")


def is_norm(name: str) -> bool:
    """Return whether the tensor ``name`` is the weight of a norm."""
    return name.endswith("norm.weight")
