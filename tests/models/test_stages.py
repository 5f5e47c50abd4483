"""Pipeline stages: each loads its own layers, and one after the other they are the whole model."""

from __future__ import annotations

import copy
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, ModelConfig, QuantizationConfig, get_model
from vllm_module.build import registry
from vllm_module.build.model_source import build_model
from vllm_module.build.stages import divide
from vllm_module.core.module import vLLMModule
from vllm_module.distributed import PipelineStage, pipeline_parallel, run_ranks
from vllm_module.errors import ShardingError, UnexpectedWeightError, UnsupportedModelError
from vllm_module.hf_config import parse_config
from vllm_module.layout import TransferPlan, layout_of_stages, parse_layout
from vllm_module.layout.layout_file import layout_json
from vllm_module.models.decoder import DecoderForCausalLM
from vllm_module.quantization import rules_for
from vllm_module.testing import random_weights
from vllm_module.weights import open_checkpoint

CASES = runpy.run_path(str(Path(__file__).with_name("configurations.py")))
CONFIGS = CASES["CONFIGS"]
INT8 = "int8_per_channel_weight_only"
FIVE = {"num_hidden_layers": 5}
# Of these, three stages are uneven.
DEEPER = {
    "deepseek-v3": ("deepseek-v3", FIVE | {"first_k_dense_replace": 3}),
    "mamba2": ("mamba2", FIVE),
    "granite-4": ("granite-4", FIVE | {"layer_types": ["mamba", "attention"] * 3}),
    "bamba": ("bamba", FIVE | {"attn_layer_indices": [1, 4], "layer_types": None}),
}


def config_of(name: str, **changed: Any) -> Any:
    entries = CONFIGS[name]
    hf_config = AutoConfig.for_model(**entries)
    cls = AutoModelForCausalLM._model_mapping[type(hf_config)].__name__
    entries = hf_config.to_dict() | changed | {"architectures": [cls]}
    if "layer_types" in changed and changed["layer_types"] is None:
        entries = {
            k: v for k, v in entries.items() if k not in ("layer_types", "layers_block_type")
        }
    return parse_config(registry.config_class([cls]), entries, Path("config.json"))


def build(config: Any) -> vLLMModule:
    return build_model(config, torch.float32, torch.device("cpu")).eval()


def stages(config: Any, count: int) -> list[vLLMModule]:
    models = []
    for rank in range(count):
        with pipeline_parallel(rank=rank, size=count):
            models.append(build(config))
    return models


def logits(models: list[Any], weights: Any) -> torch.Tensor:
    """Load the stages and run tokens through them, each stage with what the one before returned."""
    tokens = torch.arange(12) * 7 % 60
    passed: Any = tokens
    with torch.no_grad():
        for model in models:
            model.load_weights(weights)
            passed = model(passed, torch.arange(12))
        result: torch.Tensor = models[-1].compute_logits(passed)
    return result


def check_stages(config: Any, count: int, tp_size: int) -> None:
    """Check logits, names, rules and digests of ``count`` stages against the whole model."""
    weights = random_weights(build(config).expected_weights(), seed=3)

    def both(rank: int) -> tuple[list[vLLMModule], torch.Tensor, torch.Tensor]:
        whole, parts = build(config), stages(config, count)
        expected, got = logits([whole], weights), logits(parts, weights)
        return [whole, *parts], expected, got

    ranks = run_ranks(tp_size, both)
    for models, expected, got in ranks:
        assert torch.equal(got, expected)
        loaded = [set(each.expected_weights()) for each in models[1:]]
        assert set().union(*loaded) == weights.keys()
        for own, model in zip(loaded, models[1:], strict=True):
            report: Any = model.load_report
            assert report.skipped.keys() == weights.keys() - own
            assert sorted(name for names in report.loaded.values() for name in names) == sorted(own)
            for name, reason in report.skipped.items():
                stage = int(reason.split()[2])
                assert reason == f"pipeline stage {stage} of {count} holds it"
                assert name in loaded[stage]
    whole = sum(models[0].digest() for models, _, _ in ranks)
    assert sum(each.digest() for models, _, _ in ranks for each in models[1:]) == whole


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in CASES["DISTINCT"] else [pytest.mark.at_length])
        for name in CONFIGS
        if "gpt2" not in name
    ],
)
def test_two_stages_are_the_whole_model(name: str) -> None:
    """Logits are equal bit for bit, each name is loaded by its stage, and digests add up.

    The law of stages tries other sizes and other numbers of ranks.
    """
    check_stages(config_of(name), 2, 2)


@pytest.mark.parametrize("name", DEEPER)
def test_three_uneven_stages_are_the_whole_model(name: str) -> None:
    kind, changed = DEEPER[name]
    config = config_of(kind, **changed)
    check_stages(config, 3, 1)
    held = [list(PipelineStage(rank, 3).layers(5)) for rank in range(3)]
    assert held == [[0, 1], [2, 3], [4]]


def test_weights_move_from_a_whole_model_to_stages() -> None:
    """From one rank, each stage is sent what it holds, and both ends the tied table."""
    config = config_of("llama", num_hidden_layers=3, tie_word_embeddings=True)
    weights = random_weights(build(config).expected_weights())
    layouts = [each.plan_weights(weights).layout(1) for each in stages(config, 3)]
    whole = build(config).plan_weights(weights).layout(1)
    target = layout_of_stages(layouts)
    table = target.owners("model.embed_tokens.weight", (0, 0))
    assert [(owner.rank, owner.parameter) for owner in table] == [
        (0, "model.embed_tokens.weight"),
        (2, "model.embed_tokens.weight"),
    ]
    sent = TransferPlan(whole, target).sent_bytes()
    for rank, model in enumerate(stages(config, 3)):
        kept = sum(weights[name].nbytes for name in model.expected_weights())
        assert sum(count for (_, to), count in sent.items() if to == rank) == kept


def test_stages_may_have_other_numbers_of_ranks() -> None:
    """One rank of the first stage and two of the last are ranks 0, 1 and 2 of one layout."""
    config = config_of("qwen3")
    weights = random_weights(build(config).expected_weights())

    def work(stage: int, rank: int) -> vLLMModule:
        with pipeline_parallel(rank=stage, size=2):
            model = build(config)
        model.load_weights(weights)
        return model

    first = run_ranks(1, lambda rank: work(0, rank))
    last = run_ranks(2, lambda rank: work(1, rank))
    plans = [models[0].plan_weights(weights) for models in (first, last)]
    layout = layout_of_stages([plans[0].layout(1), plans[1].layout(2)])
    assert parse_layout(layout_json(layout)) == layout
    digests = [model.digest(layout) for model in (*first, *last)]
    assert [digest.ranks for digest in digests] == [(0,), (1,), (2,)]
    whole = build(config)
    whole.load_weights(weights)
    assert sum(digests) == whole.digest()


def test_get_model_returns_a_stage(tmp_path: Path) -> None:
    """The surrounding stage is read from a folder, and its report names the other one."""
    config = config_of("llama")
    weights = random_weights(build(config).expected_weights())
    save_file(weights, tmp_path / "model.safetensors")
    entries = CONFIGS["llama"] | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pipeline_parallel(rank=1, size=2):
        model = get_model(model_config=ModelConfig(model=str(tmp_path)))
    assert "model.layers.1.mlp.down_proj.weight" in dict(model.named_parameters())
    report = model.load_report
    assert report is not None
    assert report.skipped["model.embed_tokens.weight"] == "pipeline stage 0 of 2 holds it"
    assert "skipped 10: pipeline stage 0 of 2 holds it" in str(report)


def test_layouts_of_other_models_are_no_stages() -> None:
    names = "llama", "qwen3"
    layouts = []
    for name in names:
        model = build(config_of(name))
        layouts.append(model.plan_weights(model.expected_weights()).layout(1))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*Qwen3ForCausalLM"):
        layout_of_stages(layouts)
    with pytest.raises(ValueError, match="got no layout"):
        layout_of_stages([])


def test_a_stage_reads_the_bytes_that_it_keeps(tmp_path: Path) -> None:
    """Nothing is read of a file that only other stages need, and no byte of their tensors."""
    config = config_of("llama", num_hidden_layers=4)
    weights = random_weights(build(config).expected_weights())
    save_file(weights, tmp_path / "model.safetensors")
    for model in stages(config, 2):
        with open_checkpoint(tmp_path) as checkpoint:
            plan = model.plan_weights(checkpoint)
            kept = sum(weights[name].nbytes for name in model.expected_weights())
            assert sum(read.nbytes for read in plan.reads()) == kept
            assert sum(end - begin for _, begin, end in plan.ranges(gap=0)) == kept
            model.load_weights(checkpoint)


@pytest.mark.parametrize("stored", ["lm_head.weight", "model.embed_tokens.weight"])
def test_both_ends_read_a_tied_weight_by_either_name(stored: str) -> None:
    config = config_of("llama", num_hidden_layers=3, tie_word_embeddings=True)
    weights = random_weights(build(config).expected_weights(), seed=1)
    table = weights.pop("model.embed_tokens.weight")
    weights[stored] = table
    first, middle, last = (dict(each.named_parameters()) for each in _loaded(config, weights))
    for held in (first, last):
        assert torch.equal(held["model.embed_tokens.weight"][: len(table)], table)
    assert first["model.embed_tokens.weight"] is not last["model.embed_tokens.weight"]
    assert not any("embed" in name or "lm_head" in name for name in middle)


def _loaded(config: Any, weights: Any) -> list[vLLMModule]:
    models = stages(config, 3)
    for model in models:
        model.load_weights(iter(weights.items()))  # streamed: rules hold there as well
    return models


def test_an_update_skips_names_of_other_stages() -> None:
    """A whole update changes a stage's own weights in place, as it does the whole model's."""
    config = config_of("qwen3")
    old, new = (random_weights(build(config).expected_weights(), seed=seed) for seed in (1, 2))
    models = stages(config, 2)
    logits(models, old)
    addresses = [p.data_ptr() for model in models for p in model.parameters()]
    for model in models:
        model.update_weights(new)
    assert addresses == [p.data_ptr() for model in models for p in model.parameters()]
    assert torch.equal(logits(models, new), logits([build(config)], new))


def test_a_wrong_name_is_refused_by_the_stage_that_should_have_it() -> None:
    config = config_of("llama")
    weights = random_weights(build(config).expected_weights())
    first, last = stages(config, 2)
    weights["model.layers.1.self_attn.extra.weight"] = torch.ones(2)
    first.load_weights(weights)
    with pytest.raises(UnexpectedWeightError, match=r"layers\.1\.self_attn\.extra\.weight"):
        last.load_weights(weights)
    weights = {"model.layers.2.self_attn.q_proj.weight": torch.ones(2)}
    for model in (first, last):
        assert [each.name for each in model.plan_weights(weights).report.unexpected] == [*weights]


class Deep(vLLMModule):
    """As many layers as wanted, between an embedding and a head, which may be tied to it."""

    divided_layers = "inner.layers"

    def __init__(self, layers: int, *, tied: bool) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.table = nn.Embedding(2, 1, device="meta")
        self.inner.layers = nn.ModuleList(nn.Linear(1, 1, device="meta") for _ in range(layers))
        self.inner.norm = nn.LayerNorm(1, device="meta")
        self.head = nn.Linear(1, 2, bias=False, device="meta")
        if tied:
            self.head.weight = self.inner.table.weight


@pytest.mark.parametrize("tied", [False, True])
def test_each_part_is_on_its_stage_and_the_others_name_it(tied: bool) -> None:
    """For each number of layers on each number of stages, of which the last has the fewest."""
    for count in range(1, 9):
        for size in range(1, count + 1):
            holds: dict[str, list[int]] = {}
            named: dict[str, set[str]] = {}
            for rank in range(size):
                model = Deep(count, tied=tied)
                divide(model, PipelineStage(rank, size))
                parts = dict(model.inner.layers.named_children())
                parts |= {"table": model.inner.table, "norm": model.inner.norm, "head": model.head}
                for name, part in parts.items():
                    reason = getattr(part, "held_elsewhere", "")
                    named.setdefault(name, set()).update([reason] if reason else [])
                    holds.setdefault(name, []).extend([] if reason else [rank])
            first, last, both = [0], [size - 1], sorted({0, size - 1})
            assert [holds.pop(name) for name in ("table", "norm", "head")] == (
                [both, last, both] if tied else [first, last, last]
            )
            owners = [rank for ranks in holds.values() for rank in ranks]  # of layers
            assert len(owners) == count
            assert owners == sorted(owners)
            numbers = [owners.count(rank) for rank in range(size)]
            assert max(numbers) - numbers[-1] < 2
            assert min(numbers) == numbers[-1]
            holds |= {"table": first, "norm": last, "head": last}
            for name, reasons in named.items():
                assert reasons <= {f"pipeline stage {holds[name][0]} of {size} holds it"}


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ShardingError, match="3 pipeline stages cannot share 2 layers"):
        stages(config_of("llama"), 3)


@pytest.mark.parametrize("architecture", ["BertModel", "QWenLMHeadModel"])
def test_a_model_without_stages_is_refused_by_name(architecture: str) -> None:
    entries = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "kv_channels": 8}
    entries |= {"num_hidden_layers": 2, "intermediate_size": 24, "architectures": [architecture]}
    config = parse_config(registry.config_class([architecture]), entries, Path("config.json"))
    build(config)
    with pytest.raises(UnsupportedModelError, match=f"{architecture} has no pipeline stages"):
        stages(config, 2)


def test_layers_of_two_stages_that_share_a_tensor_are_refused() -> None:
    """Both stages would need it, and a checkpoint has it under the name of one layer."""
    model: Any = build(config_of("llama", num_hidden_layers=3))
    first, second, third = model.model.layers  # the first two are one stage's
    second.mlp = first.mlp
    divide(copy.deepcopy(model), PipelineStage(1, 2))
    third.mlp = first.mlp
    with pytest.raises(UnsupportedModelError, match=r"layers 0 and 2 share mlp\.gate_up_proj\.w"):
        divide(model, PipelineStage(1, 2))


@pytest.mark.parametrize("path", ["model.layer", "model.rotary_emb"])
def test_a_path_to_no_layers_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has what is there: a name is misspelt, or that of a module without weights."""
    monkeypatch.setattr(DecoderForCausalLM, "divided_layers", path)  # what every decoder declares
    has = "LlamaModel has no .* with weights: it has embed_tokens, layers, norm"
    with pytest.raises(ValueError, match=has):
        stages(config_of("llama"), 2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_stage_that_is_none_is_refused(rank: int) -> None:
    with (
        pytest.raises(ValueError, match=rf"stage {rank} is outside of range\(2\)"),
        pipeline_parallel(rank=rank, size=2),
    ):
        pass


@pytest.mark.parametrize(
    "overrides",
    [{}, {"embed_tokens": INT8}, {"lm_head": INT8}, {"layers.0": INT8}, {"re:.*1.mlp": "none"}],
    ids=lambda overrides: str(*overrides),
)
@pytest.mark.parametrize("tied", [False, True])
def test_stages_are_quantized_while_they_load(tied: bool, overrides: dict[str, str]) -> None:
    """Layers of each stage are quantized as the whole model's are, so logits stay the same.

    A rule may name a layer that one stage alone has.
    """
    config = config_of("llama", tie_word_embeddings=tied)
    wanted = QuantizationConfig(scheme="fp8_per_channel", overrides=overrides)

    def quantized() -> vLLMModule:
        rules = rules_for(wanted, None)
        return build_model(config, torch.float32, torch.device("cpu"), rules).eval()

    weights = random_weights(build(config).expected_weights(), seed=5)
    parts = []
    for rank in range(2):
        with pipeline_parallel(rank=rank, size=2):
            parts.append(quantized())
    whole = quantized()
    assert torch.equal(logits(parts, weights), logits([whole], weights))
    held = [{k: v.dtype for k, v in each.named_parameters()} for each in (*parts, whole)]
    assert held[0] | held[1] == held[2]
    assert torch.float8_e4m3fn in held[1].values()


def test_an_engine_of_a_stage_is_refused(tmp_path: Path) -> None:
    with (
        pipeline_parallel(rank=1, size=2),
        pytest.raises(UnsupportedModelError, match="an engine makes its pipeline stages itself"),
    ):
        LLM(str(tmp_path))
