"""Adapters that other servers served as the base model, or as something else, and that load right.

Those that are refused are in ``test_refusals.py``. The numbers are of reports.
"""

from __future__ import annotations

import json
import runpy
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module.adapters import attach, base_names
from vllm_module.adapters.config import AdapterConfig
from vllm_module.errors import UnsupportedModelError, WeightLoadError
from vllm_module.layers.lora_rows import AdapterRows
from vllm_module.layers.lora_slots import AdapterSlots

SUPPORT = runpy.run_path(str(Path(__file__).with_name("support.py")))
adapt, load_base, load_adapter = SUPPORT["adapt"], SUPPORT["load_base"], SUPPORT["load_adapter"]
adapted_logits, logits_of = SUPPORT["adapted_logits"], SUPPORT["logits_of"]
IDS = torch.arange(3, 48, 5)
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def rewritten(
    folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]], **entries: Any
) -> None:
    """Write an adapter again, with other tensors and settings."""
    tensors = change(load_file(folder / "adapter_model.safetensors"))
    save_file(
        {n: each.contiguous() for n, each in tensors.items()}, folder / "adapter_model.safetensors"
    )
    config = json.loads((folder / "adapter_config.json").read_text()) | entries
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_of_the_model_without_its_head(tmp_path: Path) -> None:
    """vLLM 39278: ends of names fit, and what is before them is another class's."""
    model = SUPPORT["small_model"]("gpt_neox", tmp_path / "base").base_model
    adapted = adapt(model, tmp_path / "adapter", target_modules="all-linear")
    with torch.no_grad():
        hidden = adapted(IDS[None]).last_hidden_state[0]
    base, rows = load_base(tmp_path / "base"), AdapterRows()
    attach(load_adapter(base, tmp_path / "adapter"), 0, rows)
    rows.set({0: 0}, [0, len(IDS)], IDS.device)
    with torch.no_grad():
        found = base(IDS, torch.arange(len(IDS)))
    torch.testing.assert_close(found, hidden, rtol=0, atol=1e-5)


def experts(folder: Path, inter: int) -> Any:
    """Save a model whose experts are one tensor in memory, ``[experts, output, input]``."""
    torch.manual_seed(0)
    entries = SUPPORT["_SIZES"] | SUPPORT["_EXPERTS"] | {"moe_intermediate_size": inter}
    config = AutoConfig.for_model("qwen3_moe", **entries)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("inter", [8, 16, 32])
def test_parameters_of_experts(tmp_path: Path, inter: int) -> None:
    """vLLM 41384: with target_parameters, and an expression for modules; also of square ones."""
    model = experts(tmp_path / "base", inter)
    regex = r".*\.(q|k|v|o|gate|up|down)_proj"
    adapted = adapt(model, tmp_path / "adapter", target_modules=regex, target_parameters=PARAMETERS)
    with torch.no_grad():
        logits = adapted(IDS[None]).logits[0]
    base = load_base(tmp_path / "base")
    adapter = load_adapter(base, tmp_path / "adapter")
    assert not torch.allclose(logits_of(base, IDS), logits, atol=1e-2)
    torch.testing.assert_close(adapted_logits(base, adapter, IDS), logits, rtol=0, atol=1e-5)
    for version in ("0.19.1", "0.20.0", "1.0.0.dev0"):  # of which none has them turned
        rewritten(tmp_path / "adapter", dict, peft_version=version)
        assert load_adapter(base, tmp_path / "adapter").config.peft_version == version


def test_experts_that_peft_leaves_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The shared expert alone has modules of these names in transformers 5; the log says so."""
    torch.manual_seed(0)
    entries = SUPPORT["FAMILIES"]["qwen3_next"][0] | {"head_dim": 16}
    config = AutoConfig.for_model("qwen3_5_moe_text", **SUPPORT["_SIZES"] | entries)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(tmp_path / "base")
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = adapt(model, tmp_path / "adapter", target_modules=names)
    with torch.no_grad():
        logits = adapted(IDS[None]).logits[0]
    base = load_base(tmp_path / "base")
    adapter = load_adapter(base, tmp_path / "adapter")
    torch.testing.assert_close(adapted_logits(base, adapter, IDS), logits, rtol=0, atol=1e-5)
    assert "modules that the adapter has no A and B for" in caplog.text


ORDERS = [("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"), ("down", "x_down")]
# What is in no order, as a set, has the right one by chance, but not for all of these.
ORDERS += [(f"a{i}", f"b{i}", f"c{i}") for i in range(8)]


@pytest.mark.parametrize("names", ORDERS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_each_wrapper_of_experts_has_its_parameter(names: tuple[str, ...], turned: bool) -> None:
    """However many a module has, in any order of ``target_parameters``, as PEFT wraps them."""
    inner = torch.nn.Module()
    for size, name in enumerate(names, 3):
        inner.register_parameter(name, torch.nn.Parameter(torch.randn(2, size, 4)))
    model = torch.nn.Module()
    model.experts = inner
    listed = [f"experts.{name}" for name in (reversed(names) if turned else names)]
    settings = {"r": 2, "lora_alpha": 2, "target_modules": [], "target_parameters": listed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT has many for such a model
        wrapped = get_peft_model(model, LoraConfig(**settings))
    tensors = get_peft_model_state_dict(wrapped)
    found = base_names(tensors, AdapterConfig(**settings))
    expected, layer = {}, wrapped.base_model.model.experts
    while hasattr(layer, "parameter_name"):
        path = f"experts.{layer.parameter_name}"
        expected[f"{path}.lora_A"] = layer.lora_A["default"].weight
        expected[f"{path}.lora_B"] = layer.lora_B["default"].weight
        layer = layer.base_layer
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.flatten().sort().values, expected[name].flatten().sort().values)


@pytest.mark.parametrize(
    ("family", "names", "patterns"),
    [
        # Mixtral's checkpoint has block_sparse_moe for what transformers calls mlp.
        ("mixtral", PARAMETERS, {"mlp.experts.down_proj": 64}),
        ("mixtral", ["mlp.gate.weight"], {"mlp.gate.weight": 64}),
        # A parameter has a name of its own, which is not that of its module.
        ("qwen3_moe", ["mlp.gate.weight"], {"mlp.gate": 64}),
        ("qwen3_moe", ["mlp.gate.weight"], {"mlp.gate.weight": 64}),
    ],
)
def test_patterns_are_for_the_names_that_peft_has(
    tmp_path: Path, family: str, names: list[str], patterns: dict[str, int]
) -> None:
    """Ranks and scales of a module or parameter are those of its name in transformers."""
    model = SUPPORT["small_model"](family, tmp_path / "base")
    settings = {"alpha_pattern": patterns, "rank_pattern": dict.fromkeys(patterns, 3)}
    adapted = adapt(
        model, tmp_path / "adapter", target_modules=[], target_parameters=names, **settings
    )
    with torch.no_grad():
        logits = adapted(IDS[None]).logits[0]
    base = load_base(tmp_path / "base")
    adapter = load_adapter(base, tmp_path / "adapter")
    assert not torch.allclose(logits_of(base, IDS), logits, atol=1e-3)
    torch.testing.assert_close(adapted_logits(base, adapter, IDS), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", "", None, "x"])
@pytest.mark.parametrize("inter", [8, 16, 32])
def test_parameters_of_experts_by_an_older_peft(
    tmp_path: Path, inter: int, version: str | None
) -> None:
    """Before 0.19.1, A was along the outputs. It is refused, also where no shape tells."""
    model = experts(tmp_path / "base", inter)
    folder = tmp_path / "adapter"
    adapt(model, folder, target_modules=[], target_parameters=PARAMETERS)

    def turned(tensors: dict[str, Any]) -> dict[str, Any]:
        """Return A and B as if each weight was stored the other way round."""
        found = {}
        for name, tensor in tensors.items():
            other = name.replace("lora_A", "-").replace("lora_B", "lora_A").replace("-", "lora_B")
            found[other] = (
                tensor.unflatten(0, (4, -1)).permute(2, 1, 0).flatten(1)
                if "lora_A" in name
                else tensor.unflatten(1, (-1, 4)).permute(2, 1, 0).flatten(0, 1)
            )
        return found

    rewritten(folder, turned, peft_version=version)
    if version is None:
        config = json.loads((folder / "adapter_config.json").read_text())
        del config["peft_version"]
        (folder / "adapter_config.json").write_text(json.dumps(config))
    base = load_base(tmp_path / "base")
    square = {16: "gate_up_proj", 32: "down_proj"}.get(inter)
    with pytest.raises(WeightLoadError) as refused:
        load_adapter(base, folder)
    if square is None:
        assert "expected shape" in str(refused.value)
    else:
        assert isinstance(refused.value, UnsupportedModelError)
        assert f"mlp.experts.{square} has as many outputs as inputs" in str(refused.value)


def test_scaled_once_however_often_it_is_read(tuned: Callable[[str], Any]) -> None:
    """SkyRL 2250: what comes into a slot again after an eviction is not scaled again."""
    one = tuned("llama")
    base, rows = load_base(one.base), AdapterRows(AdapterSlots(1, torch.device("cpu")))
    kept = load_file(one.adapter / "adapter_model.safetensors")
    before = {name: tensor.clone() for name, tensor in kept.items()}
    adapters = [load_adapter(base, one.adapter) for _ in range(2)]
    for number, adapter in enumerate(adapters):
        attach(adapter, number, rows)
    assert rows.slots is not None
    for _ in range(3):
        for number, adapter in enumerate(adapters):
            slot = rows.slots.place([number])[number]
            rows.set_slots(torch.full((len(IDS),), slot, dtype=torch.int32))
            torch.testing.assert_close(logits_of(base, IDS), one.logits, rtol=0, atol=1e-5)
            adapter.update(base_names(kept, adapter.config))
            rows.slots.refill(number)
    assert all(torch.equal(before[name], tensor) for name, tensor in kept.items())


def test_what_the_settings_do_not_name_is_told(
    tuned: Callable[[str], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tensors say what is adapted; PEFT would leave these out, without an error, too."""
    one = tuned("llama")
    base = SUPPORT["load_base"](one.base)
    SUPPORT["load_adapter"](base, one.adapter)
    assert caplog.text == ""
    folder = tmp_path / "adapter"
    shutil.copytree(one.adapter, folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["target_modules"] = sorted({*settings["target_modules"]} - {"q_proj"})
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    SUPPORT["load_adapter"](base, folder)
    (record,) = caplog.records
    assert "target_modules does not name" in record.message
    assert record.message.endswith("model.layers.{0..1}.self_attn.q_proj")
