"""Every optional key of GGUF files: absent, zero and at its edges.

What a key means is what llama.cpp's converters write and its loader takes, and where transformers'
own reader of GGUF files has the key too, its entry must have the same value.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, LlamaConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_module import ModelConfig
from vllm_module.build.model_source import ModelSource
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.weights.gguf.metadata import Metadata
from vllm_module.weights.gguf.rope import check_rope_factors

written = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gguf_models.py"))))
REFUSALS = (CheckpointFormatError, UnsupportedModelError)
ABSENT = "absent"
LINEAR = {"rope.scaling.type": "linear"}
YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}  # fmt: skip
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MULTIPLIED = {**SCALED, "mscale": 1.0, "mscale_all_dim": 1.0}


class Row(NamedTuple):
    """A file with ``key`` at ``value``, and other keys: what ``entry`` is then.

    An entry of ``None`` is a refusal, of which ``expected`` is a part.
    """

    name: str
    key: str
    value: Any
    entry: str | None
    expected: Any
    others: dict[str, Any] = {}


def rows(
    name: str, key: str, entry: str, values: dict[Any, Any], others: dict[str, Any] | None = None
) -> list[Row]:
    return [
        Row(name, key, value, entry, expected, others or {}) for value, expected in values.items()
    ]


def refused(name: str, key: str, values: dict[Any, str], **others: Any) -> list[Row]:
    return [Row(name, key, value, None, part, others) for value, part in values.items()]


def scaling(key: str, values: dict[Any, Any], others: dict[str, Any]) -> list[Row]:
    return rows("qwen2", key, "rope_scaling", values, others)


TABLE = [
    # As many as heads; llama.cpp's loader has this default.
    *rows("llama", "attention.head_count_kv", "num_key_value_heads", {ABSENT: 4, 1: 1, 4: 4}),
    *refused("llama", "attention.head_count_kv", {0: "num_key_value_heads"}),
    # A number for each layer, where they are equal.
    *rows(
        "llama", "attention.head_count_kv", "num_key_value_heads", {(2, 2): 2},
        {"attention.head_count": 4},
    ),
    *refused("llama", "attention.head_count_kv", {(2, 4): "num_key_value_heads"}),
    *rows("llama", "attention.key_length", "head_dim", {ABSENT: 32, 32: 32}),
    *refused("llama", "attention.key_length", {0: "heads of one size", 31: "heads of one size"}),
    *rows("llama", "attention.value_length", "head_dim", {ABSENT: 32}),
    *refused("llama", "attention.value_length", {0: "heads of one size", 31: "heads of one size"}),
    *rows("llama", "rope.dimension_count", "partial_rotary_factor", {ABSENT: ABSENT, 32: ABSENT}),
    *refused("llama", "rope.dimension_count", {0: "all is rotated", 30: "all is rotated"}),
    *rows("phi3", "rope.dimension_count", "partial_rotary_factor", {ABSENT: ABSENT, 16: 0.5}),
    *refused("phi3", "rope.dimension_count", {0: "partial_rotary_factor"}),
    *rows("llama", "rope.freq_base", "rope_theta", {ABSENT: 10000.0, 10001.0: 10001.0}),
    *refused("llama", "rope.freq_base", {0.0: "rope_theta"}),
    # Of every architecture, `load_hparams` of llama.cpp reads it.
    *rows("qwen2", "attention.causal", "architectures", {
        ABSENT: ["Qwen2ForCausalLM"], True: ["Qwen2ForCausalLM"],
    }),
    *refused("qwen2", "attention.causal", {False: "qwen2.attention.causal is false"}),
    *refused("llama", "attention.causal", {False: "llama.attention.causal is false"}),
    *refused("deepseek3", "attention.causal", {False: "deepseek2.attention.causal is false"}),
    *rows("llama", "feed_forward_length", "intermediate_size", {256: 256}),
    *refused("llama", "feed_forward_length", {ABSENT: "intermediate_size", 0: "intermediate_size"}),
    *rows("qwen2moe", "feed_forward_length", "intermediate_size", {ABSENT: 256, 255: 255}),
    *rows("qwen3moe", "feed_forward_length", "intermediate_size", {ABSENT: 128, 255: 255}),
    # 0 is no expert and no window: converters write both for models that have none.
    *rows("llama", "expert_count", "architectures", {
        ABSENT: ["LlamaForCausalLM"], 0: ["LlamaForCausalLM"],
    }),
    *rows("llama", "attention.sliding_window", "architectures", {
        ABSENT: ["LlamaForCausalLM"], 0: ["LlamaForCausalLM"], 1: ["MistralForCausalLM"],
    }),
    *rows("llama", "attention.sliding_window", "sliding_window", {ABSENT: ABSENT, 0: ABSENT, 1: 1}),
    *rows("mixtral", "attention.sliding_window", "sliding_window", {ABSENT: None, 0: None, 1: 1}),
    *rows("phi3", "attention.sliding_window", "sliding_window", {ABSENT: None, 0: None, 1: 1}),
    # Default of files from before the key: https://github.com/ggml-org/llama.cpp/pull/8931
    *rows("phi3", "attention.sliding_window", "sliding_window", {ABSENT: 2047, 0: None, 9: 9}, {
        "context_length": 4096, "block_count": 32,
    }),
    *rows("phi3", "attention.sliding_window", "sliding_window", {ABSENT: None}, {
        "context_length": 4096, "block_count": 33,
    }),
    *rows("phi3", "attention.sliding_window", "sliding_window", {ABSENT: None}, {
        "context_length": 4097, "block_count": 40,
    }),
    *rows("mistral3", "attention.sliding_window", "sliding_window", {ABSENT: ABSENT, 0: ABSENT}),
    *refused("gpt-oss", "attention.sliding_window", {ABSENT: "gpt-oss.attention.sliding_window"}),
    *refused("gemma2", "attention.sliding_window", {ABSENT: "sliding_window", 0: "sliding_window"}),
    *refused("gemma3", "attention.sliding_window", {ABSENT: "sliding_window", 0: "sliding_window"}),
    *refused("gpt-oss", "attention.sliding_window", {0: "sliding_window"}),
    *[
        row
        for name in ("gpt-oss", "gemma2", "gemma3")
        for row in (
            *rows(name, "attention.sliding_window_pattern", "layer_types", {
                ABSENT: ABSENT, 0: ["sliding_attention"], 1: ["full_attention"],
                2: ["sliding_attention"],
            }),
            *refused(name, "attention.sliding_window_pattern", {
                (0, 1): "sliding_window_pattern is [0, 1]: expected a number n", -1: "is -1: exp",
            }),
        )
    ],
    *rows("mistral3", "attention.temperature_scale", "architectures", {
        ABSENT: ["LlamaForCausalLM"], 0.0: ["LlamaForCausalLM"],
    }),
    *refused("mistral3", "attention.temperature_scale", {1e-3: "temperature_scale"}),
    *rows("deepseek3", "attention.temperature_scale", "architectures", {
        ABSENT: ["DeepseekV3ForCausalLM"], 0.0: ["DeepseekV3ForCausalLM"],
    }),
    *refused("deepseek3", "attention.temperature_scale", {1e-3: "deepseek2.attention.temp"}),
    *rows("glm4", "rope.dimension_sections", "partial_rotary_factor", {ABSENT: 0.5}),
    *refused("glm4", "rope.dimension_sections", {(8, 12, 12, 0): "has sections"}),
    # Written where the configuration has it; without, it is what the architecture's models have.
    *rows("qwen2moe", "expert_weights_norm", "norm_topk_prob", {
        ABSENT: False, False: False, True: True,
    }),
    *rows("qwen3moe", "expert_weights_norm", "norm_topk_prob", {
        ABSENT: True, False: False, True: True,
    }),
    # No key has it: scores are divided by the root of this. It is the size of a head, and in the
    # largest model of each generation (27B) hidden_size over heads, as their config.json say.
    *rows("gemma2", "block_count", "query_pre_attn_scalar", {45: 64, 46: 32, 47: 64, 62: 64}),
    *rows("gemma3", "block_count", "query_pre_attn_scalar", {46: 64, 61: 64, 62: 32, 63: 64}),
    *rows("gemma2", "attn_logit_softcapping", "attn_logit_softcapping", {ABSENT: 50.0, 1.0: 1.0}),
    *rows("gemma2", "final_logit_softcapping", "final_logit_softcapping", {ABSENT: 30.0, 1.0: 1.0}),
    *refused("gemma2", "attn_logit_softcapping", {0.0: "attn_logit_softcapping"}),
    *refused("gemma2", "final_logit_softcapping", {0.0: "final_logit_softcapping"}),
    *rows("gemma3", "final_logit_softcapping", "final_logit_softcapping", {
        ABSENT: None, 0.0: None, 1.0: 1.0,
    }),
    *rows("gemma3", "rope.freq_base", "rope_theta", {ABSENT: 1e6, 10000.0: 10000.0}),
    *rows("gemma3", "rope.freq_base_swa", "rope_local_base_freq", {ABSENT: 1e4, 2e4: 2e4}),
    # DeepSeek: 0 is none, of ranks, factors, groups and shared experts.
    *rows("deepseek2", "attention.q_lora_rank", "q_lora_rank", {ABSENT: None, 0: None, 1: 1}),
    *rows("deepseek3", "attention.key_length_mla", "qk_nope_head_dim", {64: 32, 33: 1, 0: 64}),
    *rows("deepseek3", "attention.key_length_mla", "qk_nope_head_dim", {ABSENT: 64}),
    *refused("deepseek3", "attention.key_length_mla", {32: "a part is rotated"}),
    *rows("deepseek3", "attention.value_length_mla", "v_head_dim", {ABSENT: 64, 0: 64, 1: 1}),
    *rows("deepseek3", "expert_shared_count", "n_shared_experts", {ABSENT: None, 0: None, 1: 1}),
    *rows("deepseek3", "expert_weights_scale", "routed_scaling_factor", {
        ABSENT: 1.0, 0.0: 1.0, 2.5: 2.5,
    }),
    *rows("deepseek3", "expert_weights_norm", "norm_topk_prob", {
        ABSENT: False, False: False, True: True,
    }),
    *rows("deepseek3", "expert_group_count", "n_group", {ABSENT: 1, 0: 1, 1: 1, 4: 4}),
    *rows("deepseek3", "expert_group_used_count", "topk_group", {ABSENT: 1, 0: 1, 2: 2}),
    # Files from before the key are of V2, whose experts are chosen by softmax, or have the bias.
    *rows("deepseek2", "expert_gating_func", "scoring_func", {
        ABSENT: "softmax", 0: "softmax", 1: "softmax", 2: "sigmoid",
    }),
    *rows("deepseek3", "expert_gating_func", "scoring_func", {ABSENT: "sigmoid", 2: "sigmoid"}),
    *rows("deepseek3", "leading_dense_block_count", "first_k_dense_replace", {1: 1}),
    *refused("deepseek3", "leading_dense_block_count", {
        ABSENT: "blk.0.ffn_gate_exps.weight is missing", 0: "blk.0.ffn_gate_exps", 2: "blk.2.ffn_g",
    }),
    # `load_arch_hparams` of llama.cpp: these layers are among block_count, which is 2.
    *rows("deepseek3", "nextn_predict_layers", "num_hidden_layers", {ABSENT: 2, 0: 2, 1: 1}),
    *rows("deepseek3", "nextn_predict_layers", "num_nextn_predict_layers", {ABSENT: 0, 0: 0, 1: 1}),
    *refused("deepseek3", "nextn_predict_layers", {
        2: "num_hidden_layers", -1: "num_nextn_predict_layers", "1": "num_nextn_predict_layers",
    }),
    # llama.cpp's loader: a factor of 0 or none is 1, and without a type it is linear.
    *scaling("rope.scaling.factor", {ABSENT: ABSENT, 0.0: ABSENT}, {}),
    *scaling("rope.scaling.factor", {1.0: {"rope_type": "linear", "factor": 1.0}}, {}),
    *scaling("rope.scaling.factor", {ABSENT: ABSENT, 0.0: ABSENT}, LINEAR),
    *scaling("rope.scale_linear", {0.0: ABSENT, 2.0: {"rope_type": "linear", "factor": 2.0}}, {}),
    *scaling("rope.scaling.type", {"none": ABSENT}, {"rope.scaling.factor": 2.0}),
    *refused("qwen2", "rope.scaling.type", {"longrope": "is 'longrope'"}),
    *refused("qwen2", "rope.scaling.factor", {ABSENT: "scaling.factor", 0.0: "factor"}, **YARN),
    *refused("qwen2", "rope.scaling.original_context_length", {
        ABSENT: "no qwen2.rope.scaling.original_context_length", 0: "original_max_position_emb",
    }, **YARN),
    *scaling("rope.scaling.yarn_beta_fast", {
        ABSENT: SCALED, 32.0: {**SCALED, "beta_fast": 32.0}, 1.0: {**SCALED, "beta_fast": 1.0},
    }, YARN),
    *refused("qwen2", "rope.scaling.yarn_beta_fast", {0.0: "beta_fast"}, **YARN),
    *scaling("rope.scaling.yarn_beta_slow", {
        ABSENT: SCALED, 32.0: {**SCALED, "beta_slow": 32.0},
    }, YARN),
    *refused("qwen2", "rope.scaling.yarn_beta_slow", {0.0: "beta_slow", 33.0: "beta_slow"}, **YARN),
    *scaling("rope.scaling.yarn_attn_factor", {
        ABSENT: SCALED, 1.0: {**SCALED, "attention_factor": 1.0},
    }, YARN),
    *refused("qwen2", "rope.scaling.yarn_attn_factor", {0.0: "attention_factor"}, **YARN),
    *scaling("rope.scaling.yarn_log_multiplier", {
        ABSENT: SCALED, 0.0: SCALED, 1.0: MULTIPLIED,
    }, YARN),
    *rows("deepseek2", "rope.scaling.yarn_log_multiplier", "rope_scaling", {
        ABSENT: SCALED, 0.0: SCALED, 0.1: MULTIPLIED,
    }, YARN),
    *scaling("rope.scaling.yarn_ext_factor", {ABSENT: SCALED, 1.0: SCALED}, YARN),
    *refused("qwen2", "rope.scaling.yarn_ext_factor", {0.0: "ext_factor is 0.0: exp"}, **YARN),
    *scaling("rope.scaling.attn_factor", {ABSENT: SCALED, 1.0: SCALED}, YARN),
    *refused("qwen2", "rope.scaling.attn_factor", {0.0: "attn_factor is 0.0: exp"}, **YARN),
    # Token 0 is a token.
    *rows("llama", "bos_token_id", "bos_token_id", {ABSENT: ABSENT, 0: 0, 95: 95}),
    *rows("llama", "eos_token_id", "eos_token_id", {ABSENT: ABSENT, 0: 0, 95: 95}),
    *rows("llama", "padding_token_id", "pad_token_id", {ABSENT: ABSENT, 0: 0}),
    *rows("llama", "eot_token_id", "eos_token_id", {ABSENT: 2, 2: 2}, {"eos_token_id": 2}),
    *[Row("llama", "eot_token_id", 0, "eos_token_id", [2, 0], {"eos_token_id": 2})],
    *rows("llama", "eot_token_id", "eos_token_id", {0: 0}),
]  # fmt: skip


Write = Callable[[Row], tuple[str, Path]]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Write the file of a row, and return its architecture too; each model is made once."""
    models: dict[str, Any] = {}
    path = tmp_path_factory.mktemp("row") / "model.gguf"  # one after the other

    def call(row: Row) -> tuple[str, Path]:
        if row.name not in models:
            layers = 2 if "deepseek" in row.name else 1  # one of which is dense
            config = {**written.CONFIGS[row.name], "num_hidden_layers": layers}
            models[row.name] = written.new_model(config)
        architecture = ""

        def change(writer: gguf.GGUFWriter) -> None:
            nonlocal architecture
            architecture = writer.arch
            for key, value in {**row.others, row.key: row.value}.items():
                full = f"{'tokenizer.ggml' if key.endswith('token_id') else architecture}.{key}"
                writer.kv_data[0].pop(full, None)
                if value != ABSENT:
                    put(writer, full, value)

        written.write(path, models[row.name], change=change)
        return architecture, path

    return call


def put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, tuple):
        writer.add_array(key, list(value))
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    else:
        of_integer = writer.add_int32 if value < 0 else writer.add_uint32
        (of_integer if isinstance(value, int) else writer.add_float32)(key, value)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.name}-{row.key}-{row.value}")
def test_an_optional_key_is_read_as_llama_cpp_means_it(write: Write, row: Row) -> None:
    """Each value gives the entry of the table, and the one of transformers' reader."""
    architecture, path = write(row)
    if row.entry is None:
        with pytest.raises(REFUSALS) as error:
            ModelSource.find(ModelConfig(model=str(path)))
        assert row.expected in str(error.value)
        return
    source = ModelSource.find(ModelConfig(model=str(path)))  # whose types and ranges are checked
    found = json.loads((source.folder / "config.json").read_text()).get(row.entry, ABSENT)
    assert found == row.expected
    assert type(found) is type(row.expected)
    named = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
    mapping = GGUF_CONFIG_MAPPING.get(named.get(architecture, architecture), {})
    keys = {**mapping, **GGUF_CONFIG_MAPPING["tokenizer"]}
    theirs = keys.get(row.key, keys.get(f"ggml.{row.key}"))
    if theirs == row.entry and row.value != ABSENT and not row.others:
        assert load_gguf_checkpoint(str(path))["config"][theirs] == found


@pytest.mark.parametrize("name", written.CONFIGS)
def test_the_entries_are_those_of_transformers_model(tmp_path: Path, name: str) -> None:
    """The automatic classes build the model from the entries, which computes what it computed."""
    model = written.new_model(written.CONFIGS[name])
    # Files have a token that pads: it should be in the vocabulary, and some defaults are not.
    path = written.write(
        tmp_path / "model.gguf", model, change=lambda writer: writer.add_pad_token_id(0)
    )
    source = ModelSource.find(ModelConfig(model=str(path)))
    config = AutoConfig.from_pretrained(source.folder)
    again = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    assert [type(again).__name__] == source.config.architectures
    again.load_state_dict(model.state_dict())
    ids = torch.arange(2, 14)
    torch.testing.assert_close(written.logits(again, ids), written.logits(model, ids))


@pytest.mark.parametrize(
    ("experts", "n_group", "topk_group"),
    [
        (64, 1, 1),
        (159, 1, 1),
        (160, 8, 3),  # https://huggingface.co/deepseek-ai/DeepSeek-V2, config.json
        (161, 1, 1),
        (256, DeepseekV3Config().n_group, DeepseekV3Config().topk_group),
    ],
)
def test_files_that_say_no_groups_have_those_of_the_published_model(
    tmp_path: Path, experts: int, n_group: int, topk_group: int
) -> None:
    """Files from before the keys are of V2-Lite, V2 and V3, told apart by the number of experts."""
    sizes = {"n_routed_experts": experts, "moe_intermediate_size": 32, "hidden_size": 32}
    config = {**written.CONFIGS["deepseek2"], **sizes}
    path = written.write(tmp_path / "model.gguf", written.new_model(config))
    source = ModelSource.find(ModelConfig(model=str(path)))
    entries = json.loads((source.folder / "config.json").read_text())
    assert (entries["n_group"], entries["topk_group"]) == (n_group, topk_group)
    grouped = "greedy" if n_group == 1 else "group_limited_greedy"
    assert entries["topk_method"] == grouped


def check(factors: list[float] | None, entries: dict[str, Any]) -> None:
    """Compare ``config.json`` with a file that has these factors."""
    tensors = {} if factors is None else {"rope_freqs.weight": factors}
    file: Any = SimpleNamespace(
        path=Path("m.gguf"), metadata={"general.architecture": "llama"},
        header=SimpleNamespace(tensors=[]), rope_tensors=tensors, floats=list,
    )  # fmt: skip
    check_rope_factors([file], entries, "config.json")


def factors_of(kind: str, theta: float, scaling: dict[str, Any], head: int = 64) -> list[float]:
    """Return the factors on the frequencies by transformers' function of the same name."""
    config = LlamaConfig(
        head_dim=head, max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **scaling},
    )  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=131072)
    plain = 1 / theta ** (torch.arange(0, head, 2, dtype=torch.float64) / head)
    found: list[float] = (plain / scaled.double()).tolist()
    return found


LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONG = {"short_factor": [1.0] * 32, "long_factor": [1 + at / 8 for at in range(32)]}


@pytest.mark.parametrize(
    ("kind", "theta", "change"),
    [
        ("llama3", 5e5, {}),
        ("llama3", 1e4, {"factor": 32.0}),
        ("llama3", 1e6, {"low_freq_factor": 2.0, "high_freq_factor": 3.0}),
        ("llama3", 5e5, {"original_max_position_embeddings": 4096}),
        ("longrope", 1e4, {"original_max_position_embeddings": 4096}),
    ],
)
def test_factors_are_those_of_config_json_by_transformers(
    kind: str, theta: float, change: dict[str, Any]
) -> None:
    """The configuration that gives the file's factors is taken, in each spelling; no other is."""
    scaling = {**(LLAMA3 if kind == "llama3" else LONG), **change}
    factors = factors_of(kind, theta, scaling)
    named = {"rope_type": kind, **scaling}
    spellings: list[dict[str, Any]] = [
        {"rope_theta": theta, "rope_scaling": named},
        {"rope_theta": theta, "rope_scaling": {"type": kind, **scaling}},
        {"rope_parameters": {**named, "rope_theta": theta}},
        {"rope_scaling": None, "rope_parameters": {**named, "rope_theta": theta}},
        {"rope_theta": theta * 2, "rope_scaling": {**named, "rope_theta": theta}},
        *([{"rope_scaling": named}] if theta == 1e4 else []),  # transformers' default
    ]
    for entries in spellings:
        check(factors, entries)
    others: list[tuple[list[float], dict[str, Any]]] = [
        (factors, {"rope_theta": theta}),
        (factors, {"rope_theta": theta, "rope_scaling": {**named, "rope_type": "linear"}}),
        (factors[:-1], spellings[0]),
        ([*factors, factors[-1]], spellings[0]),
    ]
    for name in LLAMA3 if kind == "llama3" else ("long_factor",):
        wrong = [1.1] * 32 if name == "long_factor" else 1.1 * scaling[name]
        missing = {key: value for key, value in named.items() if key != name}
        for each in ({**named, name: wrong}, {**named, name: None}, missing):
            others.append((factors, {"rope_theta": theta, "rope_scaling": each}))
    if kind == "llama3":
        others += [
            (factors, {"rope_theta": 0, "rope_scaling": named}),
            (factors, {"rope_theta": theta, "rope_scaling": {**named, "rope_theta": 0}}),
            (factors, {"rope_theta": 2 * theta, "rope_scaling": named}),
        ]
    for values, entries in others:
        with pytest.raises(CheckpointFormatError, match=r"which rope_scaling of config\.json does"):
            check(values, entries)


def test_files_without_factors_go_with_any_config_json() -> None:
    """No tensor of factors, or factors of 1, say nothing; one that differs does."""
    for entries in ({}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}):
        check(None, entries)
        check([1.0] * 4, entries)
        with pytest.raises(CheckpointFormatError, match="from 1 to 2"):
            check([1.0, 1.0, 2.0], entries)


def test_every_optional_key_is_in_the_table(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that the reader takes, and the file may lack, has rows."""
    asked: set[str] = set()
    needed: set[str] = set()
    get, need = Metadata.get, Metadata.need

    def record(self: Metadata, key: str, default: Any = None) -> Any:
        asked.add(key)
        return get(self, key, default)

    def record_need(self: Metadata, key: str) -> Any:
        needed.add(key)
        return get(self, key) if get(self, key) is not None else need(self, key)

    monkeypatch.setattr(Metadata, "get", record)
    monkeypatch.setattr(Metadata, "need", record_need)
    names = ("llama", "mixtral", "mistral3", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gpt-oss")
    for name in (*names, "phi3", "glm4", "deepseek2", "deepseek3", "gemma2", "gemma3"):
        _, path = write(Row(name, "rope.scaling.type", "yarn", None, "", YARN))
        ModelSource.find(ModelConfig(model=str(path)))
    assert asked - {row.key for row in TABLE} <= needed
    assert len(asked) > 25
