"""Models with recurrent state against transformers: prompts, chunks of them, and greedy tokens.

Steps are made by hand here, with a page table of one page and a state slot for each sequence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, ModelConfig, SamplingParams, get_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError, WeightLoadError
from vllm_module.layers import AttentionMetadata, RecurrentLayer
from vllm_module.parameters import Dim
from vllm_module.parameters.division import division_of
from vllm_module.runtime.cache.kv_cache import attention_layers

WITHIN = 1e-4
PAGE = 64
SMALL: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEADS: dict[str, Any] = {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 8, "chunk_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba2": {"model_type": "mamba2", **SMALL, **MAMBA2, "n_groups": 2},
    "mamba2-one-group-tied-biases": {
        "model_type": "mamba2",
        **SMALL,
        **MAMBA2,
        "n_groups": 1,
        "use_bias": True,
        "use_conv_bias": False,
        "time_step_limit": (0.3, 2.0),
        "tie_word_embeddings": True,
    },
    "bamba": {
        "model_type": "bamba",
        **SMALL,
        **HEADS,
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "attn_layer_indices": [1],
    },
    "falcon-h1": {
        "model_type": "falcon_h1",
        **SMALL,
        **HEADS,
        "mamba_n_heads": 8,
        "mamba_d_ssm": 128,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "ssm_multipliers": [0.5, 1.0, 1.25, 0.75, 1.5],
    },
    "nemotron-h": {
        "model_type": "nemotron_h",
        **SMALL,
        **HEADS,
        "layers_block_type": ["linear_attention", "full_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "time_step_min": 1e-30,  # which transformers reads in place of time_step_limit
    },
    "granite-4": {
        "model_type": "granitemoehybrid",
        **SMALL,
        **HEADS,
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 24,
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        **SMALL,
        **HEADS,
        "num_hidden_layers": 3,
        "full_attention_interval": 2,
        "mlp_only_layers": [2],
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return the folder and the model of a name in CONFIGS. Each is made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]))
            generator = torch.Generator().manual_seed(0)
            for key, parameter in model.named_parameters():
                wide = "norm" in key or key.endswith((".D", "A_log", "dt_bias"))
                # Larger logits would show how one rounding more changes a model of these weights.
                projects = parameter.dim() == 2 and "embed" not in key
                scale = 1.0 if wide else 0.15 if projects else 0.5
                parameter.data.normal_(0, scale, generator=generator)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = folder, model.eval()
        return made[name]

    return get


def load(folder: Path) -> Any:
    return get_model(model_config=ModelConfig(model=str(folder)))


def in_parts(model: Any, sequences: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """Return the logits of each sequence: in chunks all at once, then its second half one by one.

    The states and pages hold large numbers before.
    """
    count = len(sequences)
    for layer in model.modules():
        if isinstance(layer, RecurrentLayer):
            layer.states = {
                name: torch.full((count + 1, *shape), 1e3)
                for name, shape in layer.state_shapes.items()
            }
    for layer in attention_layers(model):
        planes, *heads = layer.token_shape
        layer.kv_cache = torch.full((planes, count, PAGE, *heads), 1e3)
    done, logits = [0] * count, [[] for _ in sequences]
    while any(begin < len(ids) for begin, ids in zip(done, sequences, strict=True)):
        # The last one first: slots, pages and tokens lie in different orders.
        of = [at for at in reversed(range(count)) if done[at] < len(sequences[at])]
        ends = [
            min(done[at] + (chunk if 2 * done[at] < len(sequences[at]) else 1), len(sequences[at]))
            for at in of
        ]
        positions = [torch.arange(done[at], end) for at, end in zip(of, ends, strict=True)]
        lengths = torch.tensor([len(each) for each in positions], dtype=torch.int32)
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()))
        metadata = AttentionMetadata(
            torch.cat([at * PAGE + each for at, each in zip(of, positions, strict=True)]),
            torch.tensor(of, dtype=torch.int32).unsqueeze(1),
            torch.tensor(ends, dtype=torch.int32),
            starts,
            int(lengths.max()),
            state_slots=torch.tensor([count - at for at in of]),
        )
        ids = [torch.tensor(sequences[at])[each] for at, each in zip(of, positions, strict=True)]
        hidden = model(torch.cat(ids), torch.cat(positions), metadata)
        parts = model.compute_logits(hidden).split(lengths.tolist())
        for at, end, part in zip(of, ends, parts, strict=True):
            logits[at].append(part)
            done[at] = end
    return [torch.cat(each) for each in logits]


@torch.inference_mode()
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(folders: Any, name: str, size: int) -> None:
    """Whole, in chunks beside others, and token by token, logits are transformers', at any size."""
    folder, reference = folders(name)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(130, (n,), generator=generator).tolist() for n in (19, 1, 30)]
    expected = [reference(torch.tensor([ids])).logits[0] for ids in sequences]

    def compute(rank: int) -> list[list[torch.Tensor]]:
        with torch.inference_mode():
            model = load(folder)
            whole = [
                model.compute_logits(model(torch.tensor(ids), torch.arange(len(ids))))
                for ids in sequences
            ]
            return [whole, in_parts(model, sequences, 7)]

    for ways in run_ranks(size, compute):
        for way in ways:
            for logits, right in zip(way, expected, strict=True):
                torch.testing.assert_close(logits, right, rtol=0, atol=WITHIN)


@torch.inference_mode()
def test_the_residual_has_the_dtype_that_the_configuration_says(
    folders: Any, tmp_path: Path
) -> None:
    """In bfloat16, the sum of layers is rounded as transformers does it, or kept in float32."""
    folder, _ = folders("mamba2")
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.embeddings.weight"] *= 256  # a layer adds less than bfloat16 rounds off
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    ids = torch.arange(9)
    sums: list[torch.Tensor] = []  # of the embedding and the first layer

    def keep(layer: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        sums.append(output.float())

    for kept in (True, False):
        config = AutoConfig.for_model(**CONFIGS["mamba2"], residual_in_fp32=kept)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        model.load_state_dict(tensors)
        model.backbone.layers[0].register_forward_hook(keep)
        model(ids[None])
    for kept in (True, False):
        rewrite(folder, tmp_path, tensors, residual_in_fp32=kept, dtype="bfloat16")
        model = load(tmp_path)
        model.backbone.layers[0].register_forward_hook(keep)
        model(ids, ids)
        exact, rounded, ours = sums[0][0], sums[1][0], sums.pop()
        right, wrong = (exact, rounded) if kept else (rounded, exact)
        assert 4 * (ours - right).norm() < (ours - wrong).norm(), kept


@torch.inference_mode()
@pytest.mark.parametrize("name", CONFIGS)
def test_an_error_of_one_percent_in_any_tensor_shows(folders: Any, name: str) -> None:
    """The comparison with transformers fails if any tensor of the checkpoint is off by 1 %."""
    folder, reference = folders(name)
    ids = torch.arange(40) * 37 % 130
    expected = reference(ids[None]).logits[0]
    model = load(folder)

    def error() -> float:
        logits = model.compute_logits(model(ids, torch.arange(len(ids))))
        return (logits - expected).abs().max().item()

    for key, tensor in load_file(folder / "model.safetensors").items():
        noise = 1 + 0.01 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        model.update_weights({key: tensor * noise})
        assert error() > 5 * WITHIN, key
        model.update_weights({key: tensor})
    assert error() < WITHIN


@torch.inference_mode()
def test_groups_taken_for_slots_show(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with transformers fails if key heads' groups are read as slots."""
    folder, reference = folders("qwen3-next")
    ids = torch.arange(9)
    monkeypatch.setattr(Dim, "alternates", property(lambda dim: False))
    division_of.cache_clear()
    try:
        model = load(folder)
    finally:
        division_of.cache_clear()
    logits = model.compute_logits(model(ids, ids))
    assert (logits - reference(ids[None]).logits[0]).abs().max() > 0.1


@torch.inference_mode()
def test_layers_that_predict_further_tokens_are_skipped(folders: Any, tmp_path: Path) -> None:
    """Qwen3-Next's mtp is skipped with its reason, whatever is below it."""
    folder, _ = folders("qwen3-next")
    extra = {"mtp.fc.weight": torch.ones(2, 3), "mtp.layers.0.mlp.gate.weight": torch.ones(1)}
    rewrite(folder, tmp_path, extra)
    report = load(tmp_path).load_report
    assert set(extra) <= set(report.skipped)


def rewrite(folder: Path, target: Path, tensors: dict[str, Any], **entries: Any) -> None:
    """Copy a checkpoint with some tensors and entries of config.json changed."""
    save_file(load_file(folder / "model.safetensors") | tensors, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | entries
    (target / "config.json").write_text(json.dumps(config))


def test_a_native_mamba_checkpoint_names_its_embedding_otherwise(
    folders: Any, tmp_path: Path
) -> None:
    """backbone.embedding of the authors' files is backbone.embeddings."""
    folder, _ = folders("mamba2")
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert torch.equal(
        load(tmp_path).backbone.embeddings.weight, load(folder).backbone.embeddings.weight
    )


@torch.inference_mode()
@pytest.mark.parametrize(
    "entries",
    [
        # transformers replaces the entry, and not what rope_parameters has.
        {"partial_rotary_factor": 0.25, "rope_parameters": None, "rope_theta": 10000.0},
        {"attn_layer_indices": None, "layer_types": ["linear_attention", "full_attention"]},
        {"layers_block_type": ["mamba", "attention"]},
    ],
)
def test_entries_of_bamba_that_change_nothing(
    folders: Any, tmp_path: Path, entries: dict[str, Any]
) -> None:
    """Attention layers may be named by kind too, and half of each head is always rotated."""
    folder, _ = folders("bamba")
    rewrite(folder, tmp_path, {}, **entries)
    ids = torch.arange(9)
    assert torch.equal(load(tmp_path)(ids, ids), load(folder)(ids, ids))


@pytest.mark.parametrize(
    "entries",
    [
        {"layers_block_type": None, "hybrid_override_pattern": "M*", "num_hidden_layers": 2},
        {"layers_block_type": ["mamba", "attention"]},
    ],
)
def test_entries_of_nemotron_h_that_change_nothing(
    folders: Any, tmp_path: Path, entries: dict[str, Any]
) -> None:
    """Published files have a letter for each layer, and older names for its kind."""
    folder, _ = folders("nemotron-h")
    rewrite(folder, tmp_path, {}, **entries)
    ids = torch.arange(9)
    assert torch.equal(load(tmp_path)(ids, ids), load(folder)(ids, ids))


def test_multipliers_of_falcon_h1_may_be_null(folders: Any, tmp_path: Path) -> None:
    """They are then those that transformers takes."""
    folder, _ = folders("falcon-h1")
    nulls = {"ssm_multipliers": None, "mlp_multipliers": None}
    rewrite(folder, tmp_path, {}, **nulls)
    ours, theirs = load(tmp_path).config, AutoConfig.for_model("falcon_h1", **nulls)
    for name in nulls:
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("qwen3-next", {"layer_types": ["linear_attention", "mamba", "x"]}, r"layer_types\[1\]"),
        ("qwen3-next", {"layer_types": ["linear_attention"]}, "layer_types has 1 entries"),
        ("qwen3-next", {"num_attention_heads": 3}, "3 attention heads with gates .* 2 key-value"),
        ("qwen3-next", {"linear_num_value_heads": 5}, "5 value heads .* 2 key heads"),
        ("bamba", {"attn_layer_indices": [2]}, "attn_layer_indices has 2"),
        ("bamba", {"layers_block_type": ["attention", "mamba"]}, r"layers \[0\], .* is \[1\]"),
        (
            "bamba",
            {"attn_layer_indices": None, "layer_types": ["full_attention", "x"]},
            r"layer_types\[1\] is 'x'",
        ),
        ("mamba2", {"layer_types": ["linear_attention", "x"]}, "layer_types has 'x'"),
        ("bamba", {"mamba_n_heads": 7, "mamba_d_head": "auto"}, "mamba_n_heads 7 .* 128"),
        (
            "bamba",
            {"mamba_n_heads": 7},
            r"mamba_n_heads 7 \* mamba_d_head 16 .* hidden_size 64",
        ),
        (
            "nemotron-h",
            {"layers_block_type": ["mamba", "rwkv"]},
            "layers_block_type has 'rwkv': expected",
        ),
        ("nemotron-h", {"layers_block_type": None}, "layers_block_type should be a list"),
        ("nemotron-h", {"num_hidden_layers": 3}, "num_hidden_layers is 3, and 2 are listed"),
        (
            "nemotron-h",
            {"mlp_hidden_act": "relu", "layers_block_type": ["mamba", "mlp"]},
            "hidden_act 'relu' has no layer here",
        ),
        ("nemotron-h", {"residual_in_fp32": True}, "residual_in_fp32 should be"),
        ("nemotron-h", {"n_shared_experts": 2}, "n_shared_experts should be"),
        ("nemotron-h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act should be"),
        ("granite-4", {"hidden_act": "gelu"}, "hidden_act should be 'silu' or 'swish', got"),
        ("granite-4", {"layer_types": ["mamba", "moe"]}, r"layer_types\[1\] is 'moe'"),
        (
            "falcon-h1",
            {"mamba_d_ssm": 120},
            r"mamba_n_heads 8 \* mamba_d_head 16 should be mamba_d_ssm 120",
        ),
        ("falcon-h1", {"projectors_bias": True}, "projectors_bias and mamba_proj_bias differ"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act should be 'silu' or 'swish', got 'gelu'"),
        ("bamba", {"mamba_d_conv": 1}, "mamba_d_conv should be .* 2, got 1"),
        ("mamba2", {"num_heads": 7}, r"num_heads 7 \* head_dim 16 .* expand 2 \* hidden_size 64"),
        ("mamba2", {"state_size": 9}, r"in_proj\.weight"),
        ("mamba2", {"n_groups": 3}, "num_heads 8 .* n_groups 3"),
        ("bamba", {"mamba_n_groups": 3}, "mamba_n_heads 8 .* mamba_n_groups 3"),
        ("mamba2", {"conv_kernel": 9}, "conv_kernel should be .* 8, got 9"),
        ("qwen3-next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim .* 2, got 1"),
        ("mamba2", {"time_step_limit": [2.0, 1.0]}, "time_step_limit should be a least"),
        ("mamba2", {"time_step_limit": ["a", 1.0]}, "time_step_limit"),
        ("mamba2", {"time_step_limit": [math.inf, math.inf]}, "time_step_limit .* finite"),
        ("mamba2", {"conv_kernel": 3}, r"conv1d\.weight"),
    ],
)
def test_what_does_not_fit_is_named(
    folders: Any, tmp_path: Path, name: str, entries: dict[str, Any], message: str
) -> None:
    """A configuration that is wrong or does not fit its tensors is refused by the entry."""
    rewrite(folders(name)[0], tmp_path, {}, **entries)
    kinds = CheckpointFormatError, UnsupportedModelError, WeightLoadError
    with pytest.raises(kinds, match=message):
        load(tmp_path)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("bamba", {"attn_layer_indices": []}),
        ("bamba", {"attn_layer_indices": [0, 1]}),
        ("qwen3-next", {"layer_types": ["linear_attention"] * 3}),
        ("qwen3-next", {"layer_types": ["full_attention"] * 3}),
        ("qwen3-next", {"num_experts": 0}),
    ],
)
def test_a_hybrid_may_have_layers_of_one_kind(
    tmp_path: Path, name: str, entries: dict[str, Any]
) -> None:
    """Without any layer of one kind, or experts, the engine's greedy tokens are transformers'."""
    config = AutoConfig.for_model(**CONFIGS[name] | entries)
    reference = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in reference.parameters():
        parameter.normal_(0, 0.5, generator=generator)
    reference.save_pretrained(tmp_path)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_num_batched_tokens=5) as llm:
        asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (got,) = llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
    assert got.error is None
    for token in got.outputs[0].token_ids:
        logits = reference(torch.tensor([ids]), use_cache=False).logits[0, -1]
        assert logits.max() - logits[token] < 1e-3
        ids.append(token)
