"""AutoRound's checkpoints: GPTQ's and AWQ's layouts under a configuration of their own."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module import ModelConfig, get_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError, WeightLoadError
from vllm_module.quantization import rules_for

_HERE = Path(__file__).parent
layouts = SimpleNamespace(**runpy.run_path(str(_HERE / "layouts.py")))
packing = SimpleNamespace(**runpy.run_path(str(_HERE / "packing.py")))

# As AutoRound 0.5 writes it.
WRITTEN: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
    "enable_quanted_input": True,
    "autoround_version": "0.5.1",
    "batch_size": 8,
    "block_name_to_quantize": "model.layers",
    "packing_format": "auto_round:auto_gptq",
}
KEPT, WIDER, FINER = "layers.0.mlp.down_proj", "layers.1.mlp.down_proj", ".self_attn.o_proj"
EXTRA: dict[str, Any] = {
    f"model.{KEPT}": {"bits": 16, "data_type": "fp"},
    f"model.{WIDER}": {"bits": 8},
    # A pattern, which AutoRound searches for.
    r"self_attn\.o_proj": {"group_size": 16, "sym": False},
}
CASES: dict[str, dict[str, Any]] = {
    "gptq": {"extra_config": EXTRA},
    "gptq with zeros": {"sym": False, "block_name_to_quantize": None},
    "awq": {
        "sym": False,
        "packing_format": "auto_round:auto_awq",
        "block_name_to_quantize": ["model.layers"],
        "extra_config": {f"model.{KEPT}": {"bits": 16}},
    },
    "zeros as they are": {"sym": False, "packing_format": "auto_round", "extra_config": EXTRA},
    "zeros as they are, and groups": {"sym": False, "packing_format": "auto_round:gptqmodel"},
    "the head": {
        "block_name_to_quantize": "model.layers, lm_head",
        "extra_config": {"lm_head": {"bits": 4, "data_type": "int"}},
    },
}


def layer_of(config: dict[str, Any], name: str, weight: torch.Tensor) -> Any:
    """Return what AutoRound's packing stores of a layer, written out in ``packing``."""
    extra = config.get("extra_config") or {}
    rows, columns = weight.shape
    if (name == "lm_head" and name not in extra) or (
        name.endswith(KEPT) and f"model.{KEPT}" in extra
    ):
        return None
    if config["packing_format"].endswith("awq"):
        return packing.awq(rows, columns, 32, seed=len(name))
    bits, group, symmetric = 4, 32, config["sym"]
    if len(extra) > 1:
        bits = 8 if name.endswith(WIDER) else 4
        if name.endswith(FINER):
            group, symmetric = 16, False
    # GPTQ's format has zeros minus one; AutoRound's own, and the one for GPTQModel, has them.
    v2 = config["packing_format"] in ("auto_round", "auto_round:gptqmodel")
    made = packing.gptq(rows, columns, bits, group, symmetric=symmetric, v2=v2, seed=len(name))
    if not config["packing_format"].endswith("gptqmodel"):
        del made.stored["g_idx"]  # which some versions leave out
    return made


@pytest.fixture(scope="module")
def checkpoints(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = {}
    sizes = layouts.QWEN3 | {"vocab_size": 128}
    for name, entries in CASES.items():
        config = WRITTEN | entries
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))

        def make(path: str, weight: torch.Tensor, config: Any = config) -> Any:
            return layer_of(config, path, weight)

        made[name] = packing.publish(folder, sizes, make, config)
    return made


def loaded(folder: Path) -> Any:
    return get_model(model_config=ModelConfig(model=str(folder), dtype="float32"))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_weights_multiplied_out(
    checkpoints: dict[str, Any], name: str, size: int
) -> None:
    """Layers have the settings of ``extra_config``, and any ranks compute the formula's logits."""
    checkpoint = checkpoints[name]

    def work(rank: int) -> torch.Tensor:
        model = loaded(checkpoint.folder)
        with torch.inference_mode():
            return model.compute_logits(model(checkpoint.ids, torch.arange(len(checkpoint.ids))))

    for computed in run_ranks(size, work):
        torch.testing.assert_close(computed, checkpoint.logits, rtol=0, atol=1e-4)


def test_settings_of_layers() -> None:
    """Names go before patterns, those before blocks, and what is in no block is not quantized."""
    both = {"model.layers.2.self_attn.o_proj": {"bits": 16}}
    blocks = "model.layers, model.vision.blocks"
    config = WRITTEN | {"extra_config": EXTRA | both, "block_name_to_quantize": blocks}
    rules = rules_for(None, config)
    assert rules is not None
    for name, expected in {
        "model.layers.0.mlp.down_proj": "None",
        "model.layers.10.mlp.down_proj": "GPTQ, 4 bits, symmetric, a scale for 32 inputs",
        "model.layers.1.mlp.down_proj": "GPTQ, 8 bits, symmetric, a scale for 32 inputs",
        "model.layers.1.self_attn.o_proj": "GPTQ, 4 bits, with zeros, a scale for 16 inputs",
        "model.layers.2.self_attn.o_proj": "None",
        "model.vision.blocks.0.fc1": "GPTQ, 4 bits, symmetric, a scale for 32 inputs",
        "model.vision.merger.fc1": "None",
        "lm_head": "None",
    }.items():
        assert str(rules.rule_of(name)[1]) == expected, name


@pytest.mark.parametrize(
    ("backend", "form"),
    [
        ("auto_round:exllamav2", "auto_round"),
        ("auto_round:tritonv2", "auto_round"),
        ("auto_round:gptq:exllamav2", "auto_round:gptq"),
        ("auto_round:auto_gptq:tritonv2", "auto_round:auto_gptq"),
        ("gptq:exllamav2", "auto_round:gptq"),
        ("auto_gptq:tritonv2", "auto_round:auto_gptq"),
        ("auto_round:auto_awq:gemm", "auto_round:auto_awq"),
        ("auto", "auto_round:auto_gptq"),
    ],
)
def test_older_files_name_the_layout_with_a_kernel(backend: str, form: str) -> None:
    """The backends of AutoRound 0.4; "triton" there packs zeros as they are, as its own format."""
    common = {name: value for name, value in WRITTEN.items() if name != "packing_format"}
    older = common | {"quant_method": "intel/auto-round", "backend": backend}
    assert rules_for(None, older) == rules_for(None, common | {"packing_format": form})
    both = older | {"packing_format": "auto_round:gptqmodel"}
    assert rules_for(None, both) == rules_for(None, WRITTEN | both | {"backend": None})


@pytest.mark.parametrize(
    ("attr", "change"),
    [
        ("scales", lambda t: None),
        ("qzeros", lambda t: None),
        ("scales", lambda t: t.fill_(torch.nan)),
        ("scales", lambda t: t.int()),
        ("qweight", lambda t: t.float()),
        ("qweight", lambda t: t[:, :-8].clone()),
        ("qzeros", lambda t: t + 1),  # not those of symmetric weights
        ("qweight", lambda t: t.T.contiguous()),
    ],
)
def test_damages_are_refused_by_name(
    checkpoints: dict[str, Any], tmp_path: Path, attr: str, change: Any
) -> None:
    """What is missing, misshapen, of another dtype or no number is named."""
    folder, name = checkpoints["gptq"].folder, f"model.layers.0.mlp.up_proj.{attr}"
    tensors = load_file(folder / "model.safetensors")
    new = change(tensors.pop(name))
    tensors |= {} if new is None else {name: new}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightLoadError) as refused:
        loaded(tmp_path)
    message = str(refused.value)
    assert name in message or f"gate_up_proj.{attr} (slot 'up_proj')" in message, message


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"packing_format": "auto_round:exllamav2"}, UnsupportedModelError, "format.*auto_gptq"),
        ({"packing_format": "auto_round:fp8"}, UnsupportedModelError, "packing_format"),
        (
            {"packing_format": None, "backend": "auto_round:gptq:marlin"},
            UnsupportedModelError,
            "config.backend.*auto_round:gptq or .*, got auto_round:gptq:marlin",
        ),
        ({"act_bits": 8}, CheckpointFormatError, "act_bits"),
        ({"data_type": "mx_fp"}, CheckpointFormatError, "data_type"),
        ({"bits": 5}, CheckpointFormatError, "bits"),
        ({"extra_config": {"a": {"data_type": "fp", "bits": 8}}}, CheckpointFormatError, "data_"),
        ({"extra_config": {"a": {"act_bits": 8}}}, CheckpointFormatError, "act_bits"),
        ({"extra_config": {"a": {"bits": 5}}}, CheckpointFormatError, "bits"),
        ({"extra_config": {"a": {"bits": "4"}}}, CheckpointFormatError, "bits"),
        ({"extra_config": {"(a*)*": {"bits": 16}}}, UnsupportedModelError, "forever"),
        (
            {"packing_format": "auto_round:auto_awq", "extra_config": {"a.b": {"bits": 8}}},
            UnsupportedModelError,
            r"extra_config\.a\.b\.bits",
        ),
    ],
)
def test_other_settings_are_refused(
    entries: dict[str, Any], error: type[Exception], message: str
) -> None:
    """What is not read is refused by the entry."""
    with pytest.raises(error, match=message):
        rules_for(None, WRITTEN | entries)
