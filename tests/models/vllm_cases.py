"""The tiny checkpoints that are compared with vLLM's loader, and the ranks that load them.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers import AutoModelForSequenceClassification as Classifier

_tiny = runpy.run_path(str(Path(__file__).with_name("configurations.py")))
CONFIGS: dict[str, dict[str, Any]] = _tiny["CONFIGS"]
config_of: Callable[..., dict[str, Any]] = _tiny["config_of"]
_quantized = runpy.run_path(str(Path(__file__).with_name("random_quantized.py")))


@dataclass(frozen=True)
class Case:
    """A checkpoint that transformers writes, and the sizes at which it is loaded."""

    config: dict[str, Any]
    sizes: tuple[int, ...] = (1, 2, 4)
    expert_sizes: tuple[int, ...] = ()  # the same, with whole experts on each rank
    entries: dict[str, Any] = field(default_factory=dict)  # what transformers' config.json lacks
    kind: Any = AutoModelForCausalLM
    layout: str = ""  # of quantized linear layers, in random_quantized.py


ODD = {  # of 6 ranks, the last has only padding, and each KV head is on two
    "vocab_size": 130,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "intermediate_size": 42,
}
ODD_DENSE: dict[str, dict[str, Any]] = {
    "gemma2": {"tie_word_embeddings": True},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "phi3": {"pad_token_id": None},
    "qwen3": {"attention_bias": True},
    "starcoder2": {"tie_word_embeddings": True},
}
ODD_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 18}
ODD_SPARSE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    # In these two, vLLM takes heads for hidden_size / num_attention_heads wide.
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 2, "head_dim": 16},
    "qwen2_moe": ODD_EXPERTS | {"shared_expert_intermediate_size": 30, "head_dim": 16},
    "qwen3_moe": ODD_EXPERTS,
    "qwen3_next": ODD_EXPERTS
    | {
        "shared_expert_intermediate_size": 30,
        "full_attention_interval": 2,
        "linear_num_key_heads": 6,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
    "deepseek_v2": _tiny["LATENT"]
    | {
        "num_key_value_heads": 6,
        "head_dim": 8,
        "q_lora_rank": 20,
        "n_shared_experts": 1,
        "n_routed_experts": 7,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 18,
        "first_k_dense_replace": 1,
    },
}
# Four ranks have whole groups of 32 features, and copies of KV heads.
QUANTIZED = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
QUANTIZED_LINEAR = [layout for layout in _quantized["CONFIGS"] if layout != "mxfp4"]
# vLLM runs no experts of INT4 without AMX, and has one input scale for two projections.
QUANTIZED_EXPERTS = ("gptq", "awq", "fp8-block", "fp8-channel", "int8-channel")
QUANTIZED_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "phi3": {"pad_token_id": None},  # stores qkv_proj and gate_up_proj
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
BERT = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 26,
}
GPT_OSS = {"num_local_experts": 8, "num_key_value_heads": 4}
GRANITE4_TYPES = {"layer_types": ["mamba", "attention"]}
TIED = {"tie_word_embeddings": True}
DENSE = (
    "cohere-biases-untied", "deepseek-v3-halves", "gemma2", "gemma3", "glm4", "gpt2", "granite",
    "granite-tied-biases-one-kv-head", "llama", "llama-tied-biases",
    "llama-llama3-tied-biases-one-kv-head", "mamba2", "mistral", "olmo2",
    "olmo2-biases-one-kv-head", "phi3", "phi3-longrope", "qwen2", "qwen2-window-and-bias-unused",
    "qwen3", "starcoder2", "starcoder2-no-biases-tied",
)  # fmt: skip
SPARSE = (
    "deepseek-v2", "deepseek-v2-groups", "mixtral", "olmoe", "qwen2-moe", "qwen3-moe", "qwen3-next"
)  # fmt: skip
UNTIED = ("deepseek-v2", "olmoe", "qwen3-next")  # by vLLM, whatever config.json says
CASES = {
    **{name: Case(CONFIGS[name]) for name in DENSE},
    **{name: Case(CONFIGS[name], expert_sizes=(2, 4)) for name in SPARSE},
    "cohere": Case(CONFIGS["cohere"] | TIED),
    "falcon-h1": Case(CONFIGS["falcon-h1"], (1, 2)),
    "lfm2": Case(CONFIGS["lfm2"] | TIED, entries={"block_dim": 64, "conv_dim": 64}),
    "lfm2-moe": Case(CONFIGS["lfm2-moe"] | TIED, expert_sizes=(2, 4)),
    # vLLM does not know how transformers 5 names the layers, nor cuts two groups for four ranks.
    "granite-4": Case(CONFIGS["granite-4"], (1, 2), (2,), entries=GRANITE4_TYPES),
    "granite-4-dense-rope-tied": Case(
        CONFIGS["granite-4-dense-rope-tied"], (1, 2), entries=GRANITE4_TYPES
    ),
    # On a CPU vLLM has no experts without gates.
    "nemotron-h": Case(
        CONFIGS["nemotron-h"] | {"layers_block_type": ["mamba", "mlp", "attention"]}, (1, 2)
    ),
    "cohere2": Case(CONFIGS["cohere2"] | TIED),
    "deepseek-v3": Case(
        CONFIGS["deepseek-v3"], (1, 2, 4), (2, 4), entries={"topk_method": "noaux_tc"}
    ),
    # vLLM refuses more ranks than KV heads, and only in MXFP4 cuts between blocks of 32 features.
    "gpt-oss": Case(CONFIGS["gpt-oss"] | GPT_OSS | {"intermediate_size": 128}, expert_sizes=(2, 4)),
    "gpt-oss-mxfp4": Case(CONFIGS["gpt-oss"] | GPT_OSS, expert_sizes=(2, 4), layout="mxfp4"),
    "qwen2-many-heads": Case(config_of("qwen2", num_attention_heads=8), (8,)),
    **{
        f"{kind}-odd": Case(config_of(kind, **ODD | entries), (3, 6))
        for kind, entries in ODD_DENSE.items()
    },
    **{
        f"{kind}-odd": Case(config_of(kind, **ODD | entries), (3, 6), (3, 6))
        for kind, entries in ODD_SPARSE.items()
    },
    "qwen2-moe-no-biases": Case(CONFIGS["qwen2-moe"] | {"qkv_bias": False}, (2,)),
    **{f"{name}-tied": Case(CONFIGS[name] | TIED, (2,)) for name in UNTIED},
    "gpt2-odd": Case(CONFIGS["gpt2"] | {"n_embd": 48, "n_head": 6, "n_positions": 192}, (3, 6)),
    "mamba2-odd": Case(
        CONFIGS["mamba2"]
        | {"hidden_size": 48, "num_heads": 12, "head_dim": 8, "n_groups": 6, "state_size": 5},
        (2, 3, 6),
    ),
    "mamba2-one-group": Case(CONFIGS["mamba2"] | {"n_groups": 1, "use_bias": True}),
    **{
        f"{kind}-{layout}": Case(config_of(kind, **QUANTIZED | entries), layout=layout)
        for kind, entries in QUANTIZED_KINDS.items()
        for layout in (QUANTIZED_EXPERTS if kind == "qwen3_moe" else QUANTIZED_LINEAR)
    },
    "bert": Case({"model_type": "bert", **BERT}, kind=AutoModel),
    "roberta": Case({"model_type": "roberta", **BERT}, kind=AutoModel),
    "bert-classifier": Case({"model_type": "bert", **BERT}, kind=Classifier),
    "roberta-classifier": Case({"model_type": "roberta", **BERT}, kind=Classifier),
    "xlm-roberta-classifier": Case({"model_type": "xlm-roberta", **BERT}, kind=Classifier),
}


class Layout(NamedTuple):
    """A case on some ranks, by tensor parallelism or with whole experts on each rank."""

    name: str
    size: int
    experts: bool

    def __str__(self) -> str:
        return f"{self.name}-{'ep' if self.experts else 'tp'}{self.size}"

    def file(self, folder: Path, rank: int) -> Path:
        """Return the file of vLLM's parameters of a rank."""
        return folder / f"{self}-{rank}.safetensors"


LAYOUTS = [
    Layout(name, size, experts)
    for name, case in CASES.items()
    for experts, sizes in ((False, case.sizes), (True, case.expert_sizes))
    for size in sizes
]


def write(folder: Path, case: Case) -> None:
    """Save a model of random values with transformers."""
    model = case.kind.from_config(AutoConfig.for_model(**case.config))
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and "inv_freq" not in name:
            tensor.normal_(generator=generator)
    model.save_pretrained(folder)
    entries = dict(case.entries)
    if case.layout:
        entries["quantization_config"] = _quantized["CONFIGS"][case.layout]
        stored = load_file(folder / "model.safetensors")
        names = r".*\.experts\.\w+_proj" if case.layout == "mxfp4" else r".*_proj\.weight"
        for name in [name for name in stored if re.fullmatch(names, name)]:
            tensors = _quantized["quantized"](case.layout, stored.pop(name).shape, generator)
            stored |= {name.removesuffix("weight") + each: tensors[each] for each in tensors}
        save_file(stored, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
