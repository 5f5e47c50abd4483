"""The formats of weights: one list of names, one table, and what is said of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file

from vllm_module import LoadConfig, ModelConfig, get_model
from vllm_module.build.model_source import ModelSource, build_model
from vllm_module.cli import main, options
from vllm_module.config import LoadFormat
from vllm_module.errors import CheckpointFormatError
from vllm_module.models.llama import LlamaConfig
from vllm_module.testing import random_weights
from vllm_module.weights import open_checkpoint, source
from vllm_module.weights.formats import FORMATS, Files, Unit, imported
from vllm_module.weights.source import register_source

NAMES = get_args(LoadFormat)
BIN, SAFE = "pytorch_model.bin", "model.safetensors"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    model = build_model(LlamaConfig(**CONFIG), torch.float32, torch.device("cpu"))
    return random_weights(model.expected_weights(), seed=0)


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A model whose weights are there as safetensors and as files of torch.save."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / SAFE)
    torch.save(tensors, tmp_path / BIN)
    return tmp_path


def test_all_lists_of_names_are_one() -> None:
    """The setting, the options of commands and the table have the same names in the same order."""
    assert [each.value for each in options.LoadFormat] == list(NAMES)
    assert [name for name in NAMES if name in FORMATS] == list(FORMATS)
    assert set(NAMES) - set(FORMATS) == {"auto", "layered", "dummy"}
    with pytest.raises(ValueError, match=f"expected {', '.join(NAMES)}$"):
        open_checkpoint("folder", "h5")


@pytest.mark.parametrize("name", FORMATS)
def test_what_opens_a_format_is_there(name: str) -> None:
    """Openers are names, which only a load of their format would find wrong."""
    each = FORMATS[name]
    assert callable(imported(each.opener))
    assert isinstance(each, Files) or each.made_from is None or each.made_from in FORMATS


@pytest.mark.parametrize("asked", ["auto", "layered", "safetensors", "pt", "npcache"])
def test_a_load_says_which_format_it_took(
    asked: Any, folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log, load and inspect name the format of the files, and not what stands for others."""
    took = "safetensors" if asked in ("auto", "layered") else asked
    with caplog.at_level(logging.INFO, "vllm_module.build.loader"):
        config = ModelConfig(model=str(folder))
        get_model(model_config=config, load_config=LoadConfig(load_format=asked))
    assert f"weights in {folder}: {took}" in caplog.messages
    chosen = str(folder), "--load-format", asked
    assert main(["load", *chosen, "--device", "cpu"]) == 0
    assert f"\nformat: {took}\n" in capsys.readouterr().out
    assert main(["inspect", *chosen]) == 0
    assert f", in the format {took}\n" in capsys.readouterr().out
    assert main(["inspect", *chosen, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["load_format"] == took
    assert found["total"]["tensors"] == 12


def test_every_format_of_the_same_weights_loads_the_same_bits(folder: Path) -> None:
    """Safetensors, files of torch.save and their cache."""
    models = [
        get_model(
            model_config=ModelConfig(model=str(folder)), load_config=LoadConfig(load_format=each)
        ).state_dict()
        for each in ("safetensors", "pt", "npcache")
    ]
    for other in models[1:]:
        assert other.keys() == models[0].keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in models[0].items())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "safetensors",
            r"holds no \*\.safetensors file; there is config\.json, notes\.txt\. Check",
        ),
        ("pt", r"holds no \*\.bin or \*\.pt file; there is config\.json, notes\.txt\. Check"),
        ("npcache", r"holds no \*\.bin or \*\.pt file; there is config\.json, notes\.txt\. Check"),
        ("auto", r"holds no .*\*\.safetensors or \*\.bin or \*\.pt .*there is config\.json, notes"),
        ("layered", r"holds no .*\*\.safetensors or \*\.bin or \*\.pt .*is config\.json, notes"),
    ],
)
def test_a_format_that_is_not_there_is_refused(asked: str, message: str, folder: Path) -> None:
    """The refusal lists what there is."""
    (folder / SAFE).unlink()
    (folder / BIN).rename(folder / "notes.txt")
    with pytest.raises(CheckpointFormatError, match=message):
        open_checkpoint(folder, asked)


@pytest.mark.parametrize("asked", ["gguf", "mistral", "dcp", "pt"])
def test_a_folder_of_another_format_is_refused_by_that_format(asked: str, folder: Path) -> None:
    """The refusal says what to ask for; nothing has to be downloaded again."""
    (folder / BIN).unlink()
    message = f"no weights of load_format '{asked}', but of 'safetensors': ask for that, or for 'a"
    with pytest.raises(CheckpointFormatError, match=message):
        open_checkpoint(folder, asked)


def test_a_file_that_is_not_in_the_format_is_refused(folder: Path) -> None:
    """One file may be named, in a format of files."""
    assert open_checkpoint(folder / BIN, "pt").load_format == "pt"
    with pytest.raises(CheckpointFormatError, match=r"model\.bin is not a \.safetensors file"):
        open_checkpoint(folder / BIN, "safetensors")
    with pytest.raises(CheckpointFormatError, match="is a file, and npcache is a format of folder"):
        open_checkpoint(folder / BIN, "npcache")


def test_a_format_without_files_cannot_be_opened(folder: Path) -> None:
    """Dummy values are a model's, and a folder of files has none."""
    with pytest.raises(ValueError, match="'dummy' has no files to open: its values are made"):
        open_checkpoint(folder, "dummy")


class Remote:
    """A source that names no files."""

    folder: Path
    tensors: dict[str, torch.Tensor]

    def __init__(self, url: str) -> None:
        pass

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.tensors


def test_inspect_lists_a_registered_source(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Names, shapes and dtypes are the handles'; files are not known."""
    monkeypatch.setattr(source, "registered_sources", {})
    monkeypatch.setattr(Remote, "folder", folder, raising=False)
    monkeypatch.setattr(Remote, "tensors", tensors, raising=False)
    register_source("remote", Remote)
    assert main(["inspect", "remote://x", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["name"]: each["shape"] for each in found["tensors"]} == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    assert found["load_format"] is None
    assert found["files"] == {}
    assert found["architecture"]["supported"]
    assert {(each["file"], each["byte_range"]) for each in found["tensors"]} == {(None, None)}
    assert main(["inspect", "remote://x"]) == 0
    assert "in the format" not in capsys.readouterr().out
    assert main(["inspect", "other://x"]) == 1
    assert "no source of the scheme other://" in capsys.readouterr().err


def test_inspect_runs_a_file_of_the_users(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """--model-code registers the source that the URL names."""
    code = tmp_path / "sources.py"
    code.write_text(
        "from pathlib import Path\n"
        "from vllm_module import register_source\n"
        "from vllm_module.weights.source import Folder\n"
        "def opened(url):\n"
        "    return Folder(Path(url.partition('://')[2]))\n"
        "register_source('ours', opened)\n"
    )
    try:
        assert main(["inspect", f"ours://{folder}", "--model-code", str(code)]) == 0
    finally:
        source.registered_sources.pop("ours", None)
    assert ", in the format safetensors\n" in capsys.readouterr().out


def test_a_source_is_opened_in_its_format(folder: Path) -> None:
    """The format belongs to the source, which is pickled for other ranks."""
    found = ModelSource.find(ModelConfig(model=str(folder)), "pt")
    with found.open() as opened:
        assert opened.load_format == "pt"
        assert opened.files[0].name == BIN


def test_units_are_recognized_by_their_marker() -> None:
    """Each format of a folder has another marker, inside of the folder."""
    markers = [each.marker for each in FORMATS.values() if isinstance(each, Unit)]
    assert len(set(markers)) == len(markers)
    assert not any(Path(marker).is_absolute() or ".." in marker for marker in markers)
