"""Tiny models as GGUF files, written with gguf-py as llama.cpp's converters do.

A model is transformers', with the values that the file stands for. gguf-py computes these from the
bytes, and has the names of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# Rows are whole blocks of 256 values on each of four ranks.
WIDE = {
    **SIZES, "hidden_size": 256, "head_dim": 256, "intermediate_size": 1024, "vocab_size": 64,
    "num_hidden_layers": 1,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "original_max_position_embeddings": 64, "truncate": False,
}  # fmt: skip
_MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707, "truncate": True}
_DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "rope_interleave": True,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "n_group": 1,
    "topk_group": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "llama-biases": {"model_type": "llama", **SIZES, "attention_bias": True},
    "llama-wide": {"model_type": "llama", **WIDE},
    "llama-narrow": {"model_type": "llama", **WIDE, "intermediate_size": 512},
    "llama-tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 4},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "rms_norm_eps": 1e-5},
    "mixtral-wide": {"model_type": "mixtral", **WIDE, "num_local_experts": 4},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 64},
    "qwen2moe": {
        "model_type": "qwen2_moe", **SIZES, **_EXPERTS, "shared_expert_intermediate_size": 256,
    },
    "qwen3moe": {
        "model_type": "qwen3_moe", **SIZES, **_EXPERTS, "head_dim": 64, "norm_topk_prob": True,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", **SIZES, "intermediate_size": 128, "head_dim": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_parameters": YARN,
    },
    "phi3": {"model_type": "phi3", **SIZES, "pad_token_id": 0},
    "mistral3": {"model_type": "mistral", **SIZES, "head_dim": 64, "sliding_window": None},
    "glm4": {
        "model_type": "glm4", **SIZES, "head_dim": 64, "attention_bias": True, "pad_token_id": 0,
    },
    "deepseek2": {**_DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek2-groups": {
        **_DEEPSEEK, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy",
        "n_group": 2, "topk_group": 1, "rope_parameters": {**YARN, **_MSCALE},
    },
    "deepseek3": {
        **_DEEPSEEK, "model_type": "deepseek_v3", "n_group": 2, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "rope_parameters": {**YARN, **_MSCALE},
    },
    "gemma2": {
        "model_type": "gemma2", **SIZES, "head_dim": 64, "query_pre_attn_scalar": 64,
        "sliding_window": 4,
    },
    "gemma3": {
        "model_type": "gemma3_text", **SIZES, "head_dim": 64, "query_pre_attn_scalar": 64,
        "sliding_window": 4, "num_hidden_layers": 7,
    },
}  # fmt: skip
ARCHITECTURES = {
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
_GATE_UP = ((0, "gate"), (1, "up"))
PAIRED = ("llama", "mistral", "mixtral")


def new_model(config: Mapping[str, Any], seed: int = 0) -> PreTrainedModel:
    """Return a model whose weights are large enough to expose a wrong one."""
    gemma = "gemma" in config["model_type"]
    entries = {"tie_word_embeddings": gemma, **config}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**entries), attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.state_dict().items():
        mean, scale = (0.0, 0.1)
        if "norm" in name:
            mean, scale = (0.0 if gemma else 1.0), 0.3
        elif "correction" in name or "embed" in name or "lm_head" in name or name.endswith("bias"):
            scale = 0.5
        parameter.data.normal_(mean, scale, generator=generator)
    return model.eval()


# Types that gguf-py cannot quantize to, with the places of their scales and offsets in a block.
RANDOM = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), (0,)),
}  # fmt: skip
_MEAN_CODE = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}  # what offsets are multiplied by


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Return bytes of blocks that gguf-py cannot quantize to; their values are about 0.1."""
    of = gguf.GGMLQuantizationType[kind]
    values, nbytes = gguf.GGML_QUANT_SIZES[of]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // values, nbytes), dtype=np.uint8)

    def put(size: float) -> None:
        for at, factor in zip(RANDOM[kind], (1.0, _MEAN_CODE.get(kind)), strict=False):
            drawn = (size * factor * rng.uniform(0.5, 1, blocks.shape[:2])).astype(np.float16)
            blocks[..., at : at + 2] = drawn[..., None].view(np.uint8)

    put(1)
    put(0.1 / float(gguf.quants.dequantize(blocks.reshape(rows, -1), of).std()))
    return blocks.reshape(rows, -1)


def stored(value: torch.Tensor, kind: str, seed: int) -> tuple[np.ndarray, torch.Tensor]:
    """Return the bytes of a tensor in a type, and the values that they stand for."""
    of = gguf.GGMLQuantizationType[kind]
    data = value.detach().float().contiguous().numpy()
    if kind in RANDOM:
        rows = random_blocks(kind, data.size // data.shape[-1], data.shape[-1], seed)
        packed = rows.reshape(*data.shape[:-1], -1)
    else:
        packed = gguf.quants.quantize(data, of)
    values = torch.from_numpy(gguf.quants.dequantize(packed, of).copy())
    return packed, values.view(value.shape)


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows as llama.cpp stores those of q and k: the halves of each head in turns."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def write(
    path: Path,
    model: PreTrainedModel,
    kind_of: Callable[[str], str] = lambda name: "F32",
    change: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    kv_b_apart: bool = True,
    **options: Any,
) -> Path:
    """Write ``model`` to a file, and set its values to those that the file stands for.

    ``kind_of`` has the type of a weight by its name in the file; ``change`` adds keys and tensors.
    ``kv_b_apart``: as converters of 2025 and later write DeepSeek's attention.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    if config.model_type in PAIRED:  # Mistral Small 3 has no window
        windows = getattr(config, "sliding_window", 0), config.model_type
        architecture = "mistral3" if windows == (None, "mistral") else "llama"
    writer = gguf.GGUFWriter(path, architecture, **options)
    add_keys(writer, config, kv_b_apart)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config.num_hidden_layers,
    )
    tied = config.tie_word_embeddings
    heads = config.num_attention_heads if kv_b_apart else 0
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        if tied and name == "lm_head.weight":
            continue
        for part, value in parts(name, tensor, architecture == "gpt-oss", heads):
            base, _, last = part.rpartition(".")
            found = names.get_name(base)
            assert found is not None, part
            full = f"{found}.{last}"
            matrix = value.dim() > 1 and last == "weight" and "ffn_gate_inp" not in full
            packed, values = stored(value, kind_of(full) if matrix else "F32", seed)
            value.copy_(values)
            if config.model_type in PAIRED and found.endswith(("attn_q", "attn_k")):
                heads = config.num_key_value_heads
                packed = turned(packed, config.num_attention_heads if found[-1] == "q" else heads)
            if architecture.startswith("gemma") and full.endswith("norm.weight"):
                packed = packed + 1
                value.copy_(torch.from_numpy(packed - 1))  # rounded as the file's
            kind = gguf.GGMLQuantizationType[kind_of(full) if matrix else "F32"]
            writer.add_tensor(full, packed, raw_dtype=kind)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def parts(
    name: str, value: torch.Tensor, alternate: bool = False, heads: int = 0
) -> list[tuple[str, torch.Tensor]]:
    """Return what llama.cpp stores apart, with the names that its converters give to gguf-py.

    ``alternate``: the features of gate and up do so. ``heads``: of a latent, whose keys and values
    are apart.
    """
    base, _, attr = name.rpartition(".")
    if attr == "e_score_correction_bias":
        return [(f"{name.removesuffix('_bias')}.bias", value)]
    if base.endswith("kv_b_proj") and heads:
        of_head = value.unflatten(0, (heads, -1))
        keys, values = of_head.chunk(2, 1)  # of as many features here
        base = base.removesuffix("kv_b_proj")
        return [(f"{base}k_b_proj.weight", keys.mT), (f"{base}v_b_proj.weight", values)]
    if attr == "sinks":
        return [(f"{name}.weight", value)]
    if alternate and base.endswith("experts"):  # gpt-oss: and weights are stored transposed
        last = "bias" if attr.endswith("_bias") else "weight"
        value = value if last == "bias" else value.transpose(1, 2)
        if attr.startswith("down"):
            return [(f"{base}.down_proj.{last}", value)]
        return [(f"{base}.{which}_proj.{last}", value[:, at::2]) for at, which in _GATE_UP]
    if name.endswith("experts.gate_up_proj"):
        gate, up = value.chunk(2, 1)
        base = name.removesuffix("gate_up_proj")
        return [(f"{base}gate_proj.weight", gate), (f"{base}up_proj.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", value)]
    return [(name, value)]


def add_keys(writer: gguf.GGUFWriter, config: Any, kv_b_apart: bool) -> None:
    """Add what llama.cpp's converters write of a configuration."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    latent = "deepseek" in config.model_type
    kv_heads = 1 if latent and kv_b_apart else config.num_key_value_heads
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if config.model_type in PAIRED:
        writer.add_rope_dimension_count(head_dim)
    if config.model_type == "glm4":
        writer.add_rope_dimension_count(head_dim // 2)
    if latent:
        add_latent_keys(writer, config, kv_b_apart)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "gemma3" not in config.model_type:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    experts = next(
        (
            getattr(config, name)
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if getattr(config, name, None)
        ),
        None,
    )
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        width = getattr(config, "moe_intermediate_size", None)
        if config.model_type == "gpt_oss":
            width = config.intermediate_size
        if width is not None:
            writer.add_expert_feed_forward_length(width)
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
        if "mscale_all_dim" in scaling:
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    windows = ("mistral", "gemma2", "gemma3_text", "gpt_oss")
    if config.model_type in windows and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def add_latent_keys(writer: gguf.GGUFWriter, config: Any, kv_b_apart: bool) -> None:
    """Add the keys of DeepSeek's attention and experts."""
    rope, latent, value = config.qk_rope_head_dim, config.kv_lora_rank, config.v_head_dim
    head = config.qk_nope_head_dim + rope
    writer.add_rope_dimension_count(rope)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rope if kv_b_apart else head)
    writer.add_value_length(latent if kv_b_apart else value)
    if kv_b_apart:
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(value)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.n_group > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if config.model_type == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return what transformers computes, ``[tokens, vocab]``."""
    computed: torch.Tensor = model(ids[None]).logits[0]
    return computed
