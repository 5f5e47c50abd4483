"""The ``config.json`` that a GGUF file stands for, from its metadata and its tensors.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What a tensor's shape says goes
before what a key says of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.messages import printable, shorten
from vllm_module.weights.gguf.file import GGUFFile
from vllm_module.weights.gguf.header import GGUFTensor
from vllm_module.weights.gguf.names import ARCHITECTURES

Entries = dict[str, Any]

# Settings of rope scaling that become no entry of config.json, and what they have to be.
_USUAL = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
_WITHIN = 1e-3  # of a factor on a frequency: files hold them in float32


class _Metadata:
    """The keys of one architecture, and the tensors of all files."""

    def __init__(self, files: Sequence[GGUFFile]) -> None:
        self.files = files
        self.where = printable(files[0].path)
        self.keys: Mapping[str, Any] = files[0].metadata
        self.architecture: str = self.keys["general.architecture"]
        self.tensors: dict[str, GGUFTensor] = {
            tensor.name: tensor for file in files for tensor in file.header.tensors
        }

    def get(self, key: str, default: Any = None) -> Any:
        return self.keys.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise CheckpointFormatError(
                f"{self.where}: the metadata has no {self.architecture}.{key}, and there is no "
                "config.json beside the file: put one there, or convert the model again"
            )
        return value

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        if name not in self.tensors:
            raise CheckpointFormatError(
                f"{self.where}: the tensor {name} is missing; download the model again"
            )
        shape = self.tensors[name].shape
        if len(shape) != dims:
            raise CheckpointFormatError(
                f"{self.where}: the tensor {name} should have {dims} dimensions, and its shape is "
                f"{list(shape)}; download the model again"
            )
        return shape

    def factors(self, name: str) -> list[float] | None:
        """Return the values of a tensor with factors on frequencies, if there is one."""
        for file in self.files:
            if name in file.rope_tensors:
                return file.floats(file.rope_tensors[name])
        return None


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
    of = _Metadata(files)
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
    if (scaling := _rope_scaling(of)) is not None:
        entries["rope_scaling"] = scaling
    return entries


def _alike(value: Any) -> Any:
    """Return one number where layers that are alike have one each."""
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        return value[0]
    return value


def _dtype(of: _Metadata) -> str:
    kinds = {tensor.kind for tensor in of.tensors.values()}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _head(of: _Metadata, hidden: int, heads: Any) -> Entries:
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


def _llama(of: _Metadata, entries: Entries) -> Entries:
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


def _qwen2(of: _Metadata, entries: Entries) -> Entries:
    return {"architectures": ["Qwen2ForCausalLM"]}


def _qwen3(of: _Metadata, entries: Entries) -> Entries:
    return {"architectures": ["Qwen3ForCausalLM"]}


def _experts(of: _Metadata, renormalized: bool) -> Entries:
    return {
        "num_experts": of.need("expert_count"),
        "num_experts_per_tok": of.need("expert_used_count"),
        "moe_intermediate_size": of.shape("blk.0.ffn_gate_exps.weight", 3)[-2],
        "norm_topk_prob": of.get("expert_weights_norm", renormalized),
    }


def _qwen2moe(of: _Metadata, entries: Entries) -> Entries:
    shared = of.shape("blk.0.ffn_gate_shexp.weight", 2)[0]
    return {
        **_experts(of, renormalized=False),
        "architectures": ["Qwen2MoeForCausalLM"],
        "shared_expert_intermediate_size": shared,
        "intermediate_size": entries.get("intermediate_size", shared),
    }


def _qwen3moe(of: _Metadata, entries: Entries) -> Entries:
    experts = _experts(of, renormalized=True)
    width = entries.get("intermediate_size", experts["moe_intermediate_size"])
    return {**experts, "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": width}


def _gpt_oss(of: _Metadata, entries: Entries) -> Entries:
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in of.tensors,
        "num_local_experts": of.need("expert_count"),
        "num_experts_per_tok": of.need("expert_used_count"),
        "intermediate_size": of.shape("blk.0.ffn_gate_exps.weight", 3)[-2],
        "sliding_window": of.need("attention.sliding_window"),
    }


def _phi3(of: _Metadata, entries: Entries) -> Entries:
    window = of.get("attention.sliding_window") or None  # 0 is none
    return {"architectures": ["Phi3ForCausalLM"], "sliding_window": window}


def _gemma(of: _Metadata, entries: Entries, largest: int) -> Entries:
    """Return what Gemma 2 and 3 have in common; the ``largest`` has this number of layers."""
    heads, size = entries["num_attention_heads"], entries["head_dim"]
    if entries["num_hidden_layers"] == largest:  # the one whose scores are scaled otherwise
        size = entries["hidden_size"] // heads
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": of.need("attention.sliding_window"),
        "query_pre_attn_scalar": size,
    }


def _gemma2(of: _Metadata, entries: Entries) -> Entries:
    return {
        **_gemma(of, entries, largest=46),
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": of.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": of.get("final_logit_softcapping", 30.0),
    }


def _gemma3(of: _Metadata, entries: Entries) -> Entries:
    return {
        **_gemma(of, entries, largest=62),
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": of.get("rope.freq_base", 1000000.0),
        "rope_local_base_freq": of.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": of.get("final_logit_softcapping"),
    }


_BY_ARCHITECTURE: Mapping[str, Callable[[_Metadata, Entries], Entries]] = {
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


def _rope_scaling(of: _Metadata) -> Entries | None:
    """Return the rope scaling, from keys or from the factors that a file has as tensors."""
    factor = of.get("rope.scaling.factor", of.get("rope.scale_linear"))
    kind = of.get("rope.scaling.type", "linear" if factor else "none")  # llama.cpp's default
    long, short = of.factors("rope_factors_long.weight"), of.factors("rope_factors_short.weight")
    each = of.factors("rope_freqs.weight")
    original = of.get("rope.scaling.original_context_length")
    if each is not None and (long or short or kind not in ("none", "linear") or factor):
        raise UnsupportedModelError(
            f"{of.where}: rope_freqs.weight has a factor for each frequency, and the metadata has "
            f"another rope scaling, {shorten(kind)}: expected one of the two"
        )
    if (long is None) != (short is None):
        raise CheckpointFormatError(
            f"{of.where}: expected both of rope_factors_long.weight and rope_factors_short.weight, "
            "or neither; download the model again"
        )
    for key, usual in _USUAL.items():
        taken = long is not None and key == "rope.scaling.attn_factor"
        if not taken and of.get(key, usual) != usual:
            raise UnsupportedModelError(
                f"{of.where}: {of.architecture}.{key} is {shorten(of.get(key))}: expected {usual:g}"
            )
    if each is not None:
        # What Llama 3.1 computes from four settings, which files do not have, are these numbers.
        if all(one == 1 for one in each):
            return None
        long = short = each
        attention_factor, original = 1.0, of.need("context_length")
    elif long is not None:
        original = of.need("rope.scaling.original_context_length")
        attention_factor = of.get("rope.scaling.attn_factor")
    if long is not None:
        scaling: Entries = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        }
        return scaling if attention_factor is None else {
            **scaling, "attention_factor": attention_factor
        }  # fmt: skip
    if kind == "none" or (kind == "linear" and not factor):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": of.need("rope.scaling.factor") if factor is None else factor,
            "original_max_position_embeddings": of.need("rope.scaling.original_context_length"),
        }
        # No key says it: gpt-oss was trained with bounds that are not rounded.
        return {**scaling, "truncate": False} if of.architecture == "gpt-oss" else scaling
    raise UnsupportedModelError(
        f"{of.where}: rope.scaling.type is {shorten(kind)}: expected none, linear, yarn, or "
        "factors in rope_freqs.weight or rope_factors_*.weight"
    )


def check_rope_factors(files: Sequence[GGUFFile], entries: Mapping[str, Any], path: str) -> None:
    """Refuse a ``config.json`` whose scaling is not the factors that the files have.

    ``path`` is the file's, for the message. The formula is that of Llama 3.1.
    """
    factors = _Metadata(files).factors("rope_freqs.weight")
    if factors is None or all(one == 1 for one in factors):
        return
    scaling = entries.get("rope_scaling") or entries.get("rope_parameters")
    if isinstance(scaling, Mapping):
        kind = scaling.get("rope_type") or scaling.get("type")
        theta = scaling.get("rope_theta", entries.get("rope_theta", 10000.0))
        try:
            if kind == "llama3" and _same(_llama3_factors(scaling, theta, len(factors)), factors):
                return
            if kind == "longrope" and _same(scaling.get("long_factor") or (), factors):
                return
        except (TypeError, ValueError, ArithmeticError):
            pass  # an entry is no number, or none that the formula takes: it gives other factors
    raise CheckpointFormatError(
        f"{printable(files[0].path)} has factors on the rotary frequencies (rope_freqs.weight), "
        f"from {min(factors):g} to {max(factors):g}, which rope_scaling of {path} does not give: "
        "they belong to different models, or the entry is missing. Correct it, or remove "
        "config.json to take the factors of the file"
    )


def _same(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(
        math.isclose(one, other, rel_tol=_WITHIN) for one, other in zip(some, others, strict=True)
    )


def _llama3_factors(scaling: Mapping[str, Any], theta: float, count: int) -> list[float]:
    names = (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    )  # fmt: skip
    factor, low, high, original = (float(scaling.get(name, math.nan)) for name in names)
    factors = []
    for index in range(count):
        turns = original / (2 * math.pi * theta ** (index / count))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
