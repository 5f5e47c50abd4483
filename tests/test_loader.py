"""From configurations to a loaded model: which are refused, and with which message."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from vllm_module import DeviceConfig, LoadConfig, ModelConfig, WeightLoadError, get_model
from vllm_module.build.loader import progress
from vllm_module.build.model_source import build_model, read_config
from vllm_module.distributed import run_ranks
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError, WeightReadError
from vllm_module.hf_config import HFConfig
from vllm_module.rope_parameters import rope_parameters
from vllm_module.weights import Checkpoint
from vllm_module.weights.digests import digests_file

BIN = "pytorch_model.bin"
CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, ["NoSuchForCausalLM", "supported: ", "Qwen3"]),
        ({"architectures": []}, ["architectures", "at least 1"]),
        ({"hidden_size": None}, ["hidden_size", "got None"]),
        ({"hidden_size": 10**30}, ["hidden_size"]),
        ({"head_dim": "wide"}, ["head_dim", "got 'wide'"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps", "got None"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "got 'linear'"]),
        ({"rope_scaling": {"type": "linear", "factor": "3"}}, ["rope_scaling.factor", "got '3'"]),
        ({"max_position_embeddings": "64"}, ["max_position_embeddings", "got '64'"]),
        ({"architectures": ["\x1b[2J"]}, ["\\x1b[2J"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["rope_scaling.factor", "got 0"]),
        ({"rope_scaling": {"rope_type": "own", "factor": 2.0}}, ["'own'", "llama3"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor is missing"]),
        ({"rope_theta": -1}, ["rope_theta", "got -1"]),
        ({"hidden_act": "relu"}, ["'relu'", "silu"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
    ],
)
def test_a_configuration_that_makes_no_model_is_refused(
    tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    """Each refusal names the entry, what came, and is a WeightLoadError."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightLoadError) as refused:
        get_model(model_config=ModelConfig(model=str(tmp_path)))
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "[" * 100_000])
def test_a_config_json_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    """Damaged JSON, JSON that is no object, and another object: the error names the file."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointFormatError, match=r"config\.json"):
        get_model(model_config=ModelConfig(model=str(tmp_path)))


def test_a_folder_without_config_says_what_is_expected(tmp_path: Path) -> None:
    """A folder without config.json is one error, which names the file that is missing."""
    with pytest.raises(CheckpointFormatError, match=r"has no config\.json: expected a folder"):
        get_model(model_config=ModelConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 128),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 256),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                }
            },
            128,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8,
                    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                }
            },
            64,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 64),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                },
                "layer_types": ["sliding_attention", "full_attention"],
            },
            64,
        ),
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, 64),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16}}, 64),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 4.0},
                "original_max_position_embeddings": 32,
            },
            128,
        ),
    ],
)  # fmt: skip
def test_the_context_length_follows_the_scaling(entries: dict[str, Any], expected: int) -> None:
    """Scalings that extend the context multiply it; llama3's limit is already extended."""
    config = HFConfig(**CONFIG | entries)
    assert config.context_length == expected
    dynamic = "'dynamic'" in str(entries)  # longer sequences are by request only
    assert config.max_model_len == (config.max_position_embeddings if dynamic else expected)


def test_a_longer_context_than_the_model_has_is_refused(tmp_path: Path) -> None:
    """``max_model_len`` is compared with the configuration."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="65 exceeds the 64 positions"):
        get_model(model_config=ModelConfig(model=str(tmp_path), max_model_len=65))


def test_configurations_are_closed_and_frozen() -> None:
    """A misspelt setting is an error, not a default."""
    with pytest.raises(ValueError, match="dtipe"):
        ModelConfig(model="x", dtipe="float16")
    with pytest.raises(ValueError, match="frozen"):
        ModelConfig(model="x").dtype = "float16"
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="finds no CUDA"):
            _ = DeviceConfig(device="cuda").torch_device


@pytest.mark.parametrize("devices", [0, 1, 2, 8])
def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    """One is enough. torch names its device without a number: the current one."""
    # The machine of the tests has as many GPUs as it has.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    expected = torch.device("cuda") if devices else torch.device("cpu")
    assert DeviceConfig().torch_device == DeviceConfig(device="auto").torch_device == expected


def test_ranks_that_build_at_once_build_in_their_own_dtype() -> None:
    """The default dtype is global: no rank gets another rank's, and it is restored."""
    config, cpu = HFConfig(**CONFIG), torch.device("cpu")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            models = run_ranks(4, lambda rank: build_model(config, torch.bfloat16, cpu))
            assert {p.dtype for model in models for p in model.parameters()} == {torch.bfloat16}
    finally:
        sys.setswitchinterval(interval)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("entries", "message"), [({}, "int8"), ({"dtype": "float32", "hidden_act": "relu"}, "relu")]
)
def test_a_refused_model_leaves_no_file_open(
    tmp_path: Path, monkeypatch, entries: dict[str, Any], message: str
) -> None:
    """The files are closed if the checkpoint is valid and its dtype or activation is refused."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | entries))
    save_file({"x": torch.zeros(1, dtype=torch.int8)}, tmp_path / "model.safetensors")
    closed: list[Checkpoint] = []
    monkeypatch.setattr(Checkpoint, "close", lambda checkpoint: closed.append(checkpoint))
    with pytest.raises(UnsupportedModelError, match=message):
        get_model(model_config=ModelConfig(model=str(tmp_path)))
    assert len(closed) == 1


def test_an_override_replaces_what_is_inside_of_rope_parameters(tmp_path: Path) -> None:
    """``rope_theta`` is found where transformers 5 writes it; for one layer type it is refused."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    model = ModelConfig(model=str(tmp_path), hf_overrides={"rope_theta": 50.0})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_parameters": rope}))
    assert rope_parameters(read_config(tmp_path, model)).rope_theta == 50.0
    rope = {"full_attention": rope, "sliding_attention": rope}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_parameters": rope}))
    with pytest.raises(CheckpointFormatError, match="override rope_parameters as a whole"):
        read_config(tmp_path, model)
    model = ModelConfig(model=str(tmp_path), hf_overrides={"rope_parameters": {"rope_theta": -1}})
    with pytest.raises(CheckpointFormatError, match=r"rope_theta: expected .* got -1"):
        read_config(tmp_path, model)


def test_a_dtype_may_be_torchs_own() -> None:
    """``torch.bfloat16`` is accepted; a dtype that models are not built in is refused by name."""
    assert ModelConfig(model="any", dtype=torch.bfloat16).dtype == "bfloat16"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^dtype should be .*, got 'float64'$"):
        ModelConfig(model="any", dtype=torch.float64)  # type: ignore[arg-type]


@pytest.mark.parametrize("indexed", [True, False])
def test_files_of_torch_save_load_as_safetensors_do(tmp_path: Path, indexed: bool) -> None:
    """A model has the same parameters on every rank, whichever format holds them."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = read_config(tmp_path, ModelConfig(model=str(tmp_path)))
    model = build_model(config, torch.float32, torch.device("cpu"))
    weights = {name: torch.randn(like.shape) for name, like in model.expected_weights().items()}
    save_file(weights, tmp_path / "model.safetensors")
    config = ModelConfig(model=str(tmp_path))
    wanted = run_ranks(2, lambda _: get_model(model_config=config).state_dict())
    (tmp_path / "model.safetensors").unlink()
    names, index = sorted(weights), {}
    for part, begin in enumerate((0, len(names) // 2)):
        kept = names[begin:] if part else names[: len(names) // 2]
        file = f"pytorch_model-0000{part + 1}-of-00002.bin"
        torch.save({name: weights[name] for name in kept}, tmp_path / file)
        index.update(dict.fromkeys(kept, file))
    if indexed:
        text = json.dumps({"weight_map": index})
        (tmp_path / "pytorch_model.bin.index.json").write_text(text)
    loaded = run_ranks(2, lambda _: get_model(model_config=config).state_dict())
    for one, other in zip(loaded, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_format_that_is_asked_for_is_read(tmp_path: Path) -> None:
    """With weights in two formats, ``load_format`` chooses; ``auto`` takes safetensors."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"dtype": "float32"}))
    model = build_model(read_config(tmp_path, ModelConfig(model=str(tmp_path))), torch.float32, CPU)
    names = model.expected_weights()
    for file, value, save in (("model.safetensors", 1.0, save_file), (BIN, 2.0, torch.save)):
        tensors = {name: torch.full(tuple(e.shape), value) for name, e in names.items()}
        save(tensors, tmp_path / file)
    for asked, value in (("auto", 1.0), ("safetensors", 1.0), ("pt", 2.0)):
        loading = LoadConfig(load_format=asked)  # type: ignore[arg-type]
        loaded = get_model(model_config=ModelConfig(model=str(tmp_path)), load_config=loading)
        assert bool((loaded.get_parameter("model.norm.weight") == value).all())


def test_one_process_compares_the_digests_beside_the_weights(tmp_path: Path) -> None:
    """Any tensor with another bit than the digests were made of is named, if that is asked for."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"dtype": "float32"}))
    model = build_model(read_config(tmp_path, ModelConfig(model=str(tmp_path))), torch.float32, CPU)
    names = model.expected_weights()
    tensors = {name: torch.rand(tuple(each.shape)) for name, each in names.items()}
    path, digests = tmp_path / "model.safetensors", tmp_path / "digests.json"
    save_file(tensors, path)

    def load(*, compared: bool) -> Any:
        asked = LoadConfig(digests=compared)
        return get_model(model_config=ModelConfig(model=str(tmp_path)), load_config=asked)

    found = load(compared=True).load_report.digests.tensors
    assert found.keys() == tensors.keys()
    digests.write_text(json.dumps(digests_file([found])))
    load(compared=True)
    for name, tensor in tensors.items():
        bits = tensor.view(torch.int32).clone()
        bits.view(-1)[-1] ^= 1
        save_file(tensors | {name: bits.view(torch.float32)}, path)
        load(compared=False)
        with pytest.raises(WeightReadError, match=rf"^{re.escape(name)}: .* read values whose"):
            load(compared=True)


@pytest.mark.parametrize("read", [0, 1, 700, 1000])
@pytest.mark.parametrize("ending", [None, OSError])
def test_a_progress_bar_ends_with_what_was_read(read: int, ending: type[Exception] | None) -> None:
    """The last bytes show, however short the time in which they came and however the load ends."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    reads = [SimpleNamespace(nbytes=600), SimpleNamespace(nbytes=400)]
    plan: Any = SimpleNamespace(reads=lambda: reads)
    checkpoint: Any = SimpleNamespace(bytes_read=0)
    with suppress(OSError), progress(checkpoint, "loading", console) as planned:
        planned(plan)
        checkpoint.bytes_read = read
        if ending is not None:
            raise ending
    sizes = re.findall(r"([0-9.]+)/1\.0 kB", console.file.getvalue())
    assert sizes[-1] == f"{read / 1000:.1f}"
    assert "progress" not in [each.name for each in threading.enumerate()]
