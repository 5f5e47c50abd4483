"""What is wrong with an adapter is said by name, and nothing of it is used: none is silent."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module.adapters import adapter_config, base_names, open_adapter
from vllm_module.adapters.files import file_versions, fingerprint
from vllm_module.distributed import run_ranks
from vllm_module.errors import (
    CheckpointFormatError,
    MissingWeightError,
    UnsupportedModelError,
    WeightLoadError,
    WeightReadError,
)

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
load_base, load_adapter = SUPPORT["load_base"], SUPPORT["load_adapter"]
Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model.model.layers."


def changed(
    tuned: Any, folder: Path, change: Callable[[Tensors], Any] | None = None, **entries: Any
) -> Path:
    """Write the adapter again, with other tensors or settings."""
    tensors = load_file(tuned.adapter / "adapter_model.safetensors")
    if change is not None:
        change(tensors)
    config = json.loads((tuned.adapter / "adapter_config.json").read_text()) | entries
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    return change


def without(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def edited(part: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            tensors[name] = edit(tensors[name]).contiguous()

    return change


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[3] = float("nan")
    return tensor


Q = "1.self_attn.q_proj"
# Family, change of the tensors, and what the error names. The numbers are of reports to vLLM and
# SGLang, where such an adapter was loaded and did nothing, or something else.
CASES: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "another prefix (vllm 34186)": (
        "qwen3",
        rename("model.model.", "model.lm."),
        "has no 'base_model'",
    ),
    "inside a language model (vllm 48019, 41754)": (
        "qwen3",
        rename("model.model.", "model.model.language_model."),
        "has no 'language_model'",
    ),
    "of a model without its head (vllm 39278)": (
        "qwen3",
        rename("model.model.", "model."),
        "has no 'layers'",
    ),
    "names that nothing has (vllm 55193)": (
        "qwen3",
        rename("q_proj", "qq_proj"),
        "has no 'qq_proj'",
    ),
    "a layer too many": ("qwen3", rename("layers.1.", "layers.7."), "has no such number"),
    "A without B (sglang 27381)": ("qwen3", without(f"{Q}.lora_B"), r"q_proj\.lora_B: expected"),
    "B without A": ("qwen3", without(f"{Q}.lora_A"), r"q_proj\.lora_A: expected"),
    "a target without weights": ("qwen3", without(Q), r"q_proj\.lora_"),
    "experts without B (sglang 32376)": (
        "mixtral",
        without("1.mlp.experts.lora_B"),
        r"down_proj\.lora_B: expected",
    ),
    "experts transposed (vllm 52194, 52198)": (
        "gpt_oss",
        edited("experts.lora_A", torch.t),
        r"down_proj\.lora_A: expected",
    ),
    "A and B swapped": (
        "qwen3",
        lambda tensors: (
            rename("lora_A", "x")(tensors),
            rename("lora_B", "lora_A")(tensors),
            rename(".x.", ".lora_B.")(tensors),
        ),
        "expected shape",
    ),
    "a part of the rank (sglang 21864)": ("qwen3", edited(Q, lambda t: t[:2]), "expected shape"),
    "another rank": ("qwen3", edited("lora_A", lambda t: t[:3]), "expected shape"),
    "a model of another size": (
        "qwen3",
        edited("q_proj.lora_A", lambda t: torch.cat([t, t], 1)),
        "expected shape",
    ),
    **{
        f"{value} in {slot}": (
            "qwen3_moe",
            edited(f"1.self_attn.{slot}_proj.lora_B", lambda t, value=value: t.fill_(value)),
            rf"1\.self_attn\.{slot}_proj\.lora_B .*infinite",
        )
        for slot in "qkv"  # one parameter holds all three
        for value in (torch.inf, -torch.inf)
    },
    "NaN": ("qwen3", edited(f"{Q}.lora_B", with_nan), r"1\.self_attn\.q_proj\.lora_B .*NaN"),
    "DoRA's vectors": (
        "qwen3",
        lambda tensors: tensors.update({f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(32)}),
        "lora_magnitude_vector",
    ),
    "a bias": (
        "qwen3",
        lambda tensors: tensors.update({f"{PREFIX}{Q}.bias": torch.ones(32)}),
        "bias",
    ),
    "the embedding of another base": (
        "llama",
        edited("embed_tokens.base_layer", lambda t: t + 1),
        "embed_tokens.weight.*another one than the base model's",
    ),
    "a base of another vocabulary": (
        "llama",
        edited("lm_head.base_layer", lambda t: torch.cat([t, t[:4]])),
        r"lm_head\.weight: expected shape \[60, 32\], got \[64, 32\]",
    ),
    "a copy of what the base lacks": (
        "llama",
        rename("lm_head.base_layer", "head.base_layer"),
        r"head\.weight",
    ),
    "two copies of the base's weight": (
        "llama",
        lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.ones(60, 32)}),
        "two copies of a weight",
    ),
    "nothing": ("qwen3", without(""), "lora_"),
    **{
        f"a copy of the base's {what}": (
            "llama",
            lambda tensors, what=what: tensors.update(
                {f"{PREFIX}1.self_attn.q_proj.base_layer.{what}": torch.ones(32)}
            ),
            rf"q_proj\.base_layer\.{what}|q_proj\.base_layer|q_proj\.{what}",
        )
        for what in ("bias", "weight_scale", "qweight")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_refused(tuned: Callable[[str], Any], tmp_path: Path, case: str) -> None:
    family, change, named = CASES[case]
    one = tuned(family)
    base = load_base(one.base)
    with pytest.raises(WeightLoadError, match=f"(?s){named}"):
        load_adapter(base, changed(one, tmp_path, change))


NAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    # Family, settings, and the module whose A and B the file lacks.
    "by an end": ("llama", {"target_modules": ["up_proj"]}, "mlp.up_proj"),
    "by an expression": ("llama", {"target_modules": r".*\.o_proj"}, "self_attn.o_proj"),
    "as a linear layer": ("llama", {"target_modules": "all-linear"}, "mlp.down_proj"),
    "by its weight": ("llama", {"target_parameters": ["down_proj.weight"]}, "mlp.down_proj"),
    "by its weight, in a fused layer": (
        "llama",
        {"target_parameters": ["self_attn.k_proj.weight", "q_proj.weight"]},
        "self_attn.k_proj",
    ),
    "by its weight, with an exception": (
        "llama",
        {"target_parameters": ["o_proj.weight"], "exclude_modules": ["o_proj"]},
        "self_attn.o_proj",
    ),
    "a router by its weight": ("qwen3_moe", {"target_parameters": ["gate.weight"]}, "mlp.gate"),
    "experts by a parameter": (
        "qwen3_moe",
        {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]},
        "mlp.experts.",
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_layer_that_is_named_and_not_stored(tmp_path: Path, case: str) -> None:
    """However the settings name it, it is missed in one layer, and not served as the base's."""
    family, settings, module = NAMED[case]
    model = SUPPORT["small_model"](family, tmp_path / "base")
    SUPPORT["adapt"](model, tmp_path / "adapter", **{"target_modules": ["v_proj"]} | settings)
    one = SUPPORT["Tuned"](tmp_path / "base", tmp_path / "adapter", *[torch.empty(0)] * 3)
    base = load_base(one.base)
    load_adapter(base, one.adapter)
    (tmp_path / "less").mkdir()
    folder = changed(one, tmp_path / "less", without(f"layers.1.{module}"))
    with pytest.raises(MissingWeightError, match=rf"layers\.1\.{module}\S*\.lora_[AB]: expected"):
        load_adapter(base, folder)


UPDATES: dict[str, tuple[str, str, str]] = {
    # Family, a name that the adapter has, and one that it lacks.
    "a slot of a fused layer": ("llama", "1.self_attn.q_proj", "1.self_attn.k_proj"),
    "a layer": ("llama", "1.self_attn.q_proj", "1.mlp.down_proj"),
    "a slot of an expert": ("mixtral", "1.mlp.experts.0.w1", "1.mlp.experts.1.w3"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", UPDATES)
def test_an_update_of_what_was_not_loaded(
    tuned: Callable[[str], Any], tmp_path: Path, case: str, ranks: int
) -> None:
    """It is refused by name, and nothing of the update is written."""
    family, has, lacks = UPDATES[case]
    one = tuned(family)
    entries: dict[str, Any] = {}
    if family == "mixtral":  # each expert for itself, as of transformers 4; one of them in one slot
        entries = {"target_modules": [], "target_parameters": None}

        def change(tensors: Tensors) -> None:
            tensors.clear()
            name = f"{PREFIX}1.block_sparse_moe.experts.0.w1.lora_"
            tensors |= {f"{name}A.weight": torch.ones(4, 32), f"{name}B.weight": torch.ones(32, 4)}

        folder = changed(one, tmp_path, change, **entries)
        has, lacks = (
            has.replace("mlp", "block_sparse_moe"),
            lacks.replace("mlp", "block_sparse_moe"),
        )
    else:
        folder = one.adapter

    def rank(_: int) -> None:
        base = load_base(one.base)
        adapter = load_adapter(base, folder)
        before = {name: each.clone() for name, each in adapter.state_dict().items()}
        names = [f"model.layers.{has}.lora_A", *(f"model.layers.{lacks}.lora_{x}" for x in "AB")]
        with open_adapter(folder) as (_, weights):
            shape = weights[names[0]].shape
        new = {names[0]: torch.ones(shape), names[1]: torch.ones(4, 32)}
        new[names[2]] = torch.ones(16 if "k_proj" in lacks else 32, 4)
        for update in (adapter.check_update, adapter.update):
            with pytest.raises(WeightLoadError, match=rf"(?s){lacks}\.lora_A.*{lacks}\.lora_B"):
                update(new)
        after = adapter.state_dict()
        assert all(torch.equal(after[name], each) for name, each in before.items())
        adapter.update({names[0]: torch.full(shape, 3.0)})
        assert any((each == 3).any() for each in adapter.state_dict().values())

    run_ranks(ranks, rank)


@pytest.mark.parametrize(
    ("prefix", "family"),
    [("", "qwen3"), ("base_model.model.", "qwen3"), ("base_model.model.", "gpt2")],
)
def test_the_prefix_of_peft_may_be_missing(
    tuned: Callable[[str], Any], tmp_path: Path, prefix: str, family: str
) -> None:
    one = tuned(family)
    base = load_base(one.base)
    adapter = load_adapter(base, changed(one, tmp_path, rename("base_model.model.", prefix)))
    assert any(adapter.layers())


def test_a_layer_of_another_kind_is_named(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    one = tuned("qwen3")

    def change(tensors: Tensors) -> None:
        for part, shape in (("A", (4, 32)), ("B", (32, 4))):
            name = f"base_model.model.model.norm.lora_{part}.weight"
            tensors[name] = torch.ones(shape)

    with pytest.raises(WeightLoadError, match=r"norm\.lora_A: RMSNorm is no layer that an adapter"):
        load_adapter(load_base(one.base), changed(one, tmp_path, change))


SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank 0": ({"r": 0}, CheckpointFormatError, "r should be greater than 0"),
    "a rank in words": ({"r": "8"}, CheckpointFormatError, "r should be"),
    "True is no rank": ({"r": True}, CheckpointFormatError, "r should be"),
    "a huge rank": ({"r": 2**31}, CheckpointFormatError, "r should be"),
    "alpha in words": ({"lora_alpha": "16"}, CheckpointFormatError, "lora_alpha should be"),
    "alpha NaN": ({"lora_alpha": float("nan")}, CheckpointFormatError, "lora_alpha should be"),
    "alpha beyond float32": ({"lora_alpha": 1e39}, CheckpointFormatError, "lora_alpha should be"),
    "alpha below float32": ({"lora_alpha": -1e39}, CheckpointFormatError, "lora_alpha should be"),
    "alpha of a pattern beyond float32": (
        {"alpha_pattern": {"q_proj": 1e308}},
        CheckpointFormatError,
        "alpha_pattern should be",
    ),
    "alpha of a pattern": (
        {"alpha_pattern": {"q_proj": "x"}},
        CheckpointFormatError,
        "alpha_pattern should be",
    ),
    "no rank": ({"r": None}, CheckpointFormatError, "r should be"),
    "a pattern that refers to itself": (
        {"target_modules": r"(.*)\.\1"},
        CheckpointFormatError,
        "that ends soon, without references",
    ),
    "a pattern that looks behind": (
        {"exclude_modules": "(?<=a)b*"},
        CheckpointFormatError,
        "that ends soon, without flags",
    ),
    "a pattern with flags": (
        {"rank_pattern": {"(?i)q": 4}},
        CheckpointFormatError,
        "that ends soon, without flags",
    ),
    "a pattern of many groups": (
        {"alpha_pattern": {"(" * 60 + ")" * 60: 4}},
        CheckpointFormatError,
        "that ends soon, with at most 40 groups",
    ),
    "a long pattern": ({"target_modules": "a" * 10_001}, CheckpointFormatError, "at most 10000"),
    "a pattern for the layers": (
        {"layers_to_transform": 1, "layers_pattern": "(a|b)*"},
        CheckpointFormatError,
        "layers_pattern should",
    ),
    "no pattern": ({"target_modules": "("}, CheckpointFormatError, "regular expression"),
    "numbers for names": ({"target_modules": [1]}, CheckpointFormatError, "target_modules"),
    "a number for names": ({"target_modules": 1}, CheckpointFormatError, "be a list of names"),
    "DoRA": ({"use_dora": True}, UnsupportedModelError, "use_dora is True"),
    "biases": ({"bias": "all"}, UnsupportedModelError, "bias is 'all'"),
    "whole modules": (
        {"modules_to_save": ["norm"]},
        UnsupportedModelError,
        r"modules_to_save is \['norm'\]",
    ),
    "rows of the embedding": (
        {"trainable_token_indices": [1]},
        UnsupportedModelError,
        "trainable_token_indices",
    ),
    "layers used twice": (
        {"layer_replication": [[0, 1]]},
        UnsupportedModelError,
        "layer_replication",
    ),
    "another kind": ({"peft_type": "IA3"}, UnsupportedModelError, "peft_type is 'IA3'"),
    "what a later PEFT may have": ({"use_other": 1}, UnsupportedModelError, "use_other is 1"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_refused(case: str) -> None:
    entries, kind, named = SETTINGS[case]
    with pytest.raises(kind, match=named) as refused:
        adapter_config({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | entries, "file")
    assert isinstance(refused.value, WeightLoadError)


@pytest.mark.parametrize("parameters", [["down_proj"], ["down_proj", "gate_up_proj"]])
def test_wrappers_of_more_parameters_than_are_named(parameters: list[str]) -> None:
    """PEFT wraps experts once for each parameter: one more has a parameter that nothing names."""
    entries = {"r": 1, "lora_alpha": 1, "target_parameters": parameters}
    config = adapter_config({"peft_type": "LORA", **entries}, "settings")
    depths = [f"{PREFIX}0.mlp.experts{'.base_layer' * n}.lora_A.weight" for n in range(3)]
    fit = {name: torch.ones(2, 3) for name in depths[: len(parameters)]}
    assert len(base_names(fit, config)) == len(parameters)
    with pytest.raises(CheckpointFormatError, match="and this tensor is of one more"):
        base_names({depths[len(parameters)]: torch.ones(2, 3)}, config)


def test_ten_thousand_targets() -> None:
    """They take no time for each module."""
    names = [f"module_{number}" for number in range(10_000)]
    config = adapter_config({"r": 4, "lora_alpha": 8, "target_modules": names}, "file")
    assert config.targets("model.layers.1.module_77")
    assert not any(config.targets(f"model.layers.{n}.q_proj") for n in range(10_000))


def test_files_that_are_missing(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    base = load_base(tuned("qwen3").base)
    with pytest.raises(CheckpointFormatError, match=r"adapter_config\.json"):
        load_adapter(base, tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
    with pytest.raises(CheckpointFormatError, match=r"no adapter_model\.safetensors or"):
        load_adapter(base, tmp_path)


@pytest.mark.parametrize("path", ["~no-such-user/adapter", Path("~no-such-user/adapter")])
def test_a_home_of_nobody_is_a_folder_that_is_missing(path: str | Path) -> None:
    """A ``~`` of no user stays what it is, as a shell has it."""
    assert file_versions(path) == ()
    with pytest.raises(CheckpointFormatError, match=r"~no-such-user/adapter"), open_adapter(path):
        pass
    with pytest.raises(FileNotFoundError, match=r"~no-such-user/adapter"):
        fingerprint(path)


def test_a_pickle_that_runs_code(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    one = tuned("qwen3")
    changed(one, tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    seen = tmp_path / "seen"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (seen,)

    torch.save({"a": Evil()}, tmp_path / "adapter_model.bin")
    with pytest.raises(WeightLoadError):
        load_adapter(load_base(one.base), tmp_path)
    assert not seen.exists()


def test_a_bin_file(tuned: Callable[[str], Any], tmp_path: Path) -> None:
    one = tuned("qwen3")
    changed(one, tmp_path)
    torch.save(load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    base = load_base(one.base)
    of_bin, of_safetensors = load_adapter(base, tmp_path), load_adapter(base, one.adapter)
    state = of_safetensors.state_dict()
    assert state.keys() == of_bin.state_dict().keys()
    for name, tensor in of_bin.state_dict().items():
        assert torch.equal(tensor, state[name])


@pytest.mark.parametrize("at", [0, 1, -1])
def test_a_nan_is_found_in_any_part(
    tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A tensor is looked through in parts; one number of any of them is enough."""
    one = tuned("llama")

    def change(tensors: Tensors) -> None:
        name = next(name for name in tensors if "q_proj.lora_A" in name)
        tensors[name].view(-1)[at] = torch.nan

    folder = changed(one, tmp_path, change)
    monkeypatch.setattr("vllm_module.adapters.adapter._FEW", 7)
    with pytest.raises(WeightReadError, match=r"q_proj\.lora_A.* has a NaN"):
        load_adapter(load_base(one.base), folder)
