"""Every setting that PEFT has is computed, or harmless, or refused: decided beside PEFT itself."""

from __future__ import annotations

import dataclasses
import importlib.util
import runpy
import typing
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import config as of_peft
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga

from vllm_module.adapters import AdapterConfig, adapter_config, config
from vllm_module.errors import UnsupportedModelError

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
FIELDS = [field.name for field in dataclasses.fields(peft.LoraConfig)]


def undecided(names: list[str]) -> list[str]:
    """Return settings of which nobody has said what they do here."""
    decided = {*AdapterConfig.model_fields, *config._WITHOUT_EFFECT, *config._NOT_COMPUTED}
    return [name for name in names if name not in decided | {"init_lora_weights"}]


def test_every_field_of_peft_is_decided() -> None:
    """One that a later PEFT adds has to be looked at."""
    assert undecided(FIELDS) == []
    assert undecided([*FIELDS, "use_other"]) == ["use_other"]
    assert undecided([*config._WITHOUT_EFFECT, *config._NOT_COMPUTED]) == []
    stale = {*config._WITHOUT_EFFECT, *config._NOT_COMPUTED} - {*FIELDS}
    assert not stale, "entries that no PEFT writes"


ON: dict[str, Any] = {
    "alora_invocation_tokens": [1],
    "bias": "lora_only",
    "layer_replication": [[0, 1]],
    "modules_to_save": ["norm"],
    "trainable_token_indices": {"embed_tokens": [1]},
}


@pytest.mark.parametrize("name", sorted(config._NOT_COMPUTED))
def test_what_is_not_computed_is_refused_by_name(name: str) -> None:
    """PEFT's default is accepted, and so is null."""
    field = next(field for field in dataclasses.fields(peft.LoraConfig) if field.name == name)
    for value in (field.default, None):
        adapter_config(PLAIN | {name: value}, "file")
    for value in (ON.get(name, True), {}):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                asked = peft.LoraConfig(**{name: value})
        except TypeError:  # a configuration, and True is none
            pass
        else:
            if value == {} and not getattr(asked, name):
                continue  # PEFT takes an empty list for none, too
        with pytest.raises(UnsupportedModelError, match=rf"file: {name} is .*\("):
            adapter_config(PLAIN | {name: value}, "file")


BEGINNINGS: dict[str, Any] = {
    name: {"init_lora_weights": name}
    for name in ("gaussian", "eva", "orthogonal", "mica", "olora", "pissa", "pissa_niter_4")
}
BEGINNINGS |= {
    "true": {"init_lora_weights": True},
    "false": {"init_lora_weights": False},
    "corda": {"init_lora_weights": "corda"},
    "lora_ga": {"init_lora_weights": "lora_ga", "lora_ga_config": peft.LoraGAConfig()},
    "loftq": {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}},
    "velora": {"velora_config": of_peft.VeloraConfig(num_groups=4)},
    "monteclora": {"monteclora_config": of_peft.MontecloraConfig()},
    "kasa": {"kasa_config": of_peft.KasaConfig()},
}


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the base's weights by their own names."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor.detach().clone()
        for name, tensor in model.named_parameters()
        if "lora_" not in name
    }


@pytest.mark.parametrize("name", BEGINNINGS)
def test_what_peft_changes_the_base_for(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are refused if PEFT changed a weight of the base, and else compute as PEFT does."""
    model, ids = SUPPORT["small_model"]("llama", tmp_path / "base"), torch.arange(3, 48, 5)
    before = weights_of(model)
    if name == "loftq":  # without its libraries: what it returns for the base is not the base
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: name == "scipy" or find(name, *rest)
        )
        monkeypatch.setattr(
            "peft.tuners.lora.layer.loftq_init",
            lambda weight, **_: (weight.round(), torch.ones(4, 32), torch.ones(32, 4)),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = peft.LoraConfig(**PLAIN, **BEGINNINGS[name])
        if name == "corda":
            preprocess_corda(model, asked, run_model=lambda: model(ids[None]))
        if name == "lora_ga":
            loss = partial(model, ids[None], labels=ids[None])
            preprocess_loraga(model, asked, train_step=lambda: loss().loss.backward())
        tuned = peft.get_peft_model(model, asked).eval()
        for each, parameter in tuned.named_parameters():
            if "lora_A" in each or "lora_B" in each:
                torch.nn.init.normal_(parameter, std=0.2)
        tuned.save_pretrained(tmp_path / "adapter")
    after = weights_of(tuned)
    assert after.keys() == before.keys()
    same = all(torch.equal(after[each], before[each]) for each in before)
    base = SUPPORT["load_base"](tmp_path / "base")
    # These two leave the base alone; what they save is refused for its other tensors.
    if not same or name in ("velora", "monteclora"):
        with pytest.raises(UnsupportedModelError, match=r"(init_lora_weights|_config) is .*merge"):
            SUPPORT["load_adapter"](base, tmp_path / "adapter")
        return
    adapter = SUPPORT["load_adapter"](base, tmp_path / "adapter")
    with torch.no_grad():
        logits = tuned(ids[None]).logits[0]
    torch.testing.assert_close(SUPPORT["adapted_logits"](base, adapter, ids), logits, **CLOSE)


CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def test_every_beginning_that_peft_names_is_tried() -> None:
    """A later PEFT's has to be looked at; one that nobody knows is refused."""
    field = next(f for f in dataclasses.fields(peft.LoraConfig) if f.name == "init_lora_weights")
    hint = eval(str(field.type), vars(of_peft))
    named = {each for one in typing.get_args(hint) for each in typing.get_args(one)}
    assert {"pissa", "gaussian"} < named
    assert {each.split("[")[0] for each in named} <= {*BEGINNINGS} | {"pissa_niter_"}
    for value in ("next", "pissa_niter_16", "PiSSA", "corda_x", 2, ["gaussian"]):
        with pytest.raises(UnsupportedModelError, match="init_lora_weights is"):
            adapter_config(PLAIN | {"init_lora_weights": value}, "file")


def test_a_converted_adapter_is_one_of_the_unchanged_base(
    tmp_path: Path, tuned: Callable[[str], Any]
) -> None:
    """What the error tells to do is loaded, and right beside the model that was trained."""
    model, ids = SUPPORT["small_model"]("llama", tmp_path / "base"), torch.arange(3, 48, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asked = peft.LoraConfig(**PLAIN, init_lora_weights="pissa")
        trained = peft.get_peft_model(model, asked).eval()
        trained.peft_config["default"].init_lora_weights = True
        trained.save_pretrained(tmp_path / "initial")
        trained.peft_config["default"].init_lora_weights = "pissa"
        for each, parameter in trained.named_parameters():
            if "lora_" in each:
                parameter.data += 0.1 * torch.randn_like(parameter)
        with torch.no_grad():
            logits = trained(ids[None]).logits[0]
        trained.save_pretrained(
            tmp_path / "adapter",
            path_initial_model_for_weight_conversion=str(tmp_path / "initial"),
        )
    base = SUPPORT["load_base"](tmp_path / "base")
    adapter = SUPPORT["load_adapter"](base, tmp_path / "adapter")
    torch.testing.assert_close(SUPPORT["adapted_logits"](base, adapter, ids), logits, **CLOSE)


# What PEFT writes by default, and another value of each entry.
OTHERS: dict[str, Any] = {
    "r": 5,
    "lora_alpha": 9.0,
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 3.0},
    "use_rslora": True,
    "target_modules": ["k_proj"],
    "exclude_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.down_proj"],
    "layers_to_transform": [1],
    "layers_pattern": "layers",
    "fan_in_fan_out": True,
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_update_in_place_has_the_same_settings(name: str) -> None:
    """Each setting by itself, absent from either of the two files or in both."""
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    one, other = adapter_config(plain, "one"), adapter_config(plain | {name: OTHERS[name]}, "other")
    for first, second in ((one, other), (other, one)):
        with pytest.raises(UnsupportedModelError, match=f"has .?{name} "):
            first.check_same(second)
        first.check_same(first.model_copy())
    written = {each: getattr(one, each) for each in type(one).model_fields}
    one.check_same(adapter_config(written, "with every entry"))
