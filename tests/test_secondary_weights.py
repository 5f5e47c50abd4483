"""A model may name more sources of weights, each for a module below it: one load, one report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm_module import DeviceConfig, LoadConfig, ModelConfig, get_model, vLLMModule
from vllm_module.build import registry
from vllm_module.build.model_source import ModelSource
from vllm_module.cli import main
from vllm_module.distributed import run_ranks
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError, WeightLoadError
from vllm_module.export.sharded_state import shard
from vllm_module.hf_config import HFConfig
from vllm_module.layers import ColumnParallelLinear

CPU = DeviceConfig(device="cpu")
CONFIG = {
    "architectures": ["TwoParts"],
    "dtype": "float32",
    "vocab_size": 8,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
TEXT = {"text.weight": torch.arange(32.0).reshape(8, 4)}
TOWER = {"up.weight": torch.arange(32.0).reshape(8, 4) + 100}


class Tower(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(4, 8, bias=False)


class TwoParts(vLLMModule):
    """A model whose tower has a checkpoint of its own, which config.json names."""

    class config_class(HFConfig):
        tower: Any = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.text = ColumnParallelLinear(4, 8, bias=False)
        self.vision = nn.ModuleDict({"tower": Tower()})

    @staticmethod
    def secondary_weights(config: Any) -> Mapping[str, str]:
        return config.tower if isinstance(config.tower, dict) else {"vision.tower": config.tower}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.registered.models_by_call, "TwoParts", TwoParts)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    """The folder of the model and that of its tower."""
    folder, tower = tmp_path / "text", tmp_path / "tower"
    for each, tensors in ((folder, TEXT), (tower, TOWER)):
        each.mkdir()
        save_file(tensors, each / "model.safetensors")
    configure(folder, str(tower))
    return folder, tower


def configure(folder: Path, tower: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tower": tower}))


def loaded(folder: Path, **load: Any) -> vLLMModule:
    config = ModelConfig(model=str(folder))
    return get_model(model_config=config, load_config=LoadConfig(**load), device_config=CPU)


def test_both_sources_are_one_load(parts: tuple[Path, Path]) -> None:
    """The tower's names are below its module, in one report, and each rank reads its shard."""
    model = loaded(parts[0])
    assert model.load_report is not None
    assert model.load_report.loaded == {
        "text.weight": ["text.weight"],
        "vision.tower.up.weight": ["vision.tower.up.weight"],
    }
    assert torch.equal(model.get_parameter("text.weight"), TEXT["text.weight"])
    assert torch.equal(model.get_parameter("vision.tower.up.weight"), TOWER["up.weight"])
    for size in (2, 4):
        ranks = run_ranks(size, lambda _: loaded(parts[0]))
        for name in ("text.weight", "vision.tower.up.weight"):
            whole = torch.cat([rank.get_parameter(name).data for rank in ranks])
            assert torch.equal(whole, model.get_parameter(name))


def test_the_sources_may_have_different_formats(parts: tuple[Path, Path]) -> None:
    """The format that is asked for is that of the model's own files; the tower's is found."""
    torch.save(TEXT, parts[0] / "pytorch_model.bin")
    (parts[0] / "model.safetensors").unlink()
    model = loaded(parts[0], load_format="pt")
    assert torch.equal(model.get_parameter("vision.tower.up.weight"), TOWER["up.weight"])
    source = ModelSource.find(ModelConfig(model=str(parts[0])), "pt")
    with source.open() as opened:
        assert opened.load_format == "pt"


def test_what_one_source_lacks_is_missing_by_its_full_name(parts: tuple[Path, Path]) -> None:
    """A tensor too few, one too many and a wrong shape in the tower are in the one report."""
    for tensors, kind, name in (
        ({"other.weight": torch.ones(1)}, "missing 1", "vision.tower.up.weight"),
        (TOWER | {"down.weight": torch.ones(1)}, "unexpected 1", "vision.tower.down.weight"),
        ({"up.weight": torch.ones(8, 5)}, "misshapen 1", "vision.tower.up.weight"),
    ):
        save_file(tensors, parts[1] / "model.safetensors")
        with pytest.raises(WeightLoadError) as refused:
            loaded(parts[0])
        assert kind in str(refused.value)
        assert name in str(refused.value)


def test_a_name_in_both_sources_is_refused(parts: tuple[Path, Path]) -> None:
    """The refusal names the tensor and both folders."""
    save_file(TEXT | {"vision.tower.up.weight": torch.ones(1)}, parts[0] / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=r"'vision\.tower\.up\.weight' is in ") as error:
        loaded(parts[0])
    assert all(str(part) in str(error.value) for part in parts)


def test_the_fingerprint_covers_both_sources(parts: tuple[Path, Path]) -> None:
    """Hosts that have another tower have another fingerprint, though shapes are the same."""
    source = ModelSource.find(ModelConfig(model=str(parts[0])))
    with source.open() as opened:
        before = opened.fingerprint
    save_file({"up.weight": TOWER["up.weight"] + 1}, parts[1] / "model.safetensors")
    with source.open() as opened:
        assert opened.fingerprint != before
        assert opened.nbytes == 2 * 128


@pytest.mark.parametrize(
    ("tower", "error", "message"),
    [
        ({"vision.tower": 1}, UnsupportedModelError, "secondary_weights should map the path"),
        ({"vision.tower.": "x"}, UnsupportedModelError, "secondary_weights should map the path"),
        ("/no/such/tower", CheckpointFormatError, "/no/such/tower does not exist"),
        ("none://tower", CheckpointFormatError, "no source of the scheme none://"),
        ({"vision": {}}, UnsupportedModelError, "secondary_weights should map the path"),
    ],
)
def test_a_declaration_that_leads_nowhere_is_refused(
    parts: tuple[Path, Path], tower: Any, error: type[Exception], message: str
) -> None:
    configure(parts[0], tower)
    with pytest.raises(error, match=message):
        loaded(parts[0])


def test_a_declaration_that_fails_is_the_models(
    parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of a model from outside is named, and what it raised."""
    monkeypatch.setattr(TwoParts, "secondary_weights", staticmethod(lambda config: config.absent))
    with pytest.raises(UnsupportedModelError, match=r"the model TwoParts of .* fails"):
        loaded(parts[0])
    monkeypatch.setattr(TwoParts, "secondary_weights", staticmethod(lambda config: ["tower"]))
    with pytest.raises(UnsupportedModelError, match=r"should map the path .*\['tower'\]"):
        loaded(parts[0])


def test_dummy_weights_need_no_second_source(parts: tuple[Path, Path]) -> None:
    """Values are made for the whole model; the tower's source is not looked for."""
    configure(parts[0], "/no/such/tower")
    model = loaded(parts[0], load_format="dummy")
    assert model.load_report is not None
    assert len(model.load_report.loaded) == 2


def test_plan_lists_both(parts: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of two ranks reads half of each tensor of both sources."""
    assert main(["plan", str(parts[0]), "--tp", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["checkpoint_bytes"] == 256
    assert [rank["bytes_read"] for rank in plan["ranks"]] == [128, 128]


def test_a_sharded_state_has_the_tensors_of_both(parts: tuple[Path, Path], tmp_path: Path) -> None:
    """It is loaded alone, also where the second source is gone."""
    expected = loaded(parts[0])
    shard(ModelConfig(model=str(parts[0])), 1, tmp_path / "out")
    (parts[1] / "model.safetensors").unlink()
    held = loaded(tmp_path / "out")
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, held.get_parameter(name))
