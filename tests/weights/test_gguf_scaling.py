"""The scaling of rotary embeddings: keys and factors of a GGUF file, and config.json beside it."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from vllm_module import ModelConfig
from vllm_module.build.model_source import ModelSource
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.rope_parameters import rope_parameters
from vllm_module.weights.source import find_source

# Pytest's importlib mode has no imports between test files.
ONE: Any = runpy.run_path(str(Path(__file__).with_name("gguf_by_hand.py")))
written, SMALL, IDS, model = (ONE[name] for name in ("written", "SMALL", "IDS", "model"))
logits, config_of = (ONE[name] for name in ("logits", "config_of"))


def llama3_factors(theta: float = 10000.0, count: int = 16) -> np.ndarray[Any, Any]:
    """Return what llama.cpp's converter writes for Llama 3.1's scaling, by its formula."""
    factors = []
    for at in range(count):
        wavelength = 2 * np.pi * theta ** (2 * at / (2 * count))
        low, high = 64 / 1.0, 64 / 4.0
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(factors, dtype=np.float32)


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A file with Llama 3.1's factors, and transformers' model with its four settings."""
    config = {**SMALL, "max_position_embeddings": 512, "rope_parameters": LLAMA3}
    model = written.new_model(config)
    path = tmp_path_factory.mktemp("scaled") / "model.gguf"
    written.write(path, model, change=lambda w: w.add_tensor("rope_freqs.weight", llama3_factors()))
    return path, model


def test_factors_on_frequencies_are_used(scaled: tuple[Path, Any]) -> None:
    """rope_freqs.weight gives the rotary embedding that Llama 3.1's settings give."""
    path, model = scaled
    torch.testing.assert_close(logits(path), written.logits(model, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("part", range(4))
def test_factors_may_be_in_any_part_of_a_split_model(
    scaled: tuple[Path, Any], tmp_path: Path, part: int
) -> None:
    """The logits are those of one file, whichever of the files has rope_freqs.weight."""
    _, model = scaled

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", llama3_factors())
        factors = writer.tensors[-1].pop("rope_freqs.weight")
        writer.tensors[part]["rope_freqs.weight"] = factors

    written.write(tmp_path / "m.gguf", model, change=add, split_max_tensors=4)
    assert len(list(tmp_path.iterdir())) == 4
    torch.testing.assert_close(logits(tmp_path), written.logits(model, IDS), rtol=0, atol=1e-4)


def test_a_configuration_beside_the_file_goes_first(
    scaled: tuple[Path, Any], tmp_path: Path
) -> None:
    """Entries of config.json are taken, but for those that say how the file stores weights."""
    path, model = scaled
    beside = tmp_path / "model.gguf"
    beside.symlink_to(path)
    config = model.config.to_dict()
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 0.5,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    entries = config_of(beside)
    assert entries["rms_norm_eps"] == 0.5
    assert entries["stored_rotary_pairs"] is True
    assert entries["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": None}, "which rope_scaling of .*config.json does not give"),
        ({"rope_parameters": {**LLAMA3, "factor": 32.0}}, "from 1 to 8, which rope_scaling"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config, and the"),
    ],
)
def test_a_configuration_that_contradicts_the_file_is_refused(
    scaled: tuple[Path, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Factors that the entry does not give, and another quantization, are refused."""
    path, model = scaled
    (tmp_path / "model.gguf").symlink_to(path)
    config = {**model.config.to_dict(), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFormatError, match=message):
        find_source(str(tmp_path / "model.gguf"))


def scaling_of(tmp_path: Path, model: Any, change: Callable[[gguf.GGUFWriter], object]) -> Any:
    return config_of(written.write(tmp_path / "m.gguf", model, change=change)).get("rope_scaling")


def test_rope_scalings_are_read(model: Any, tmp_path: Path) -> None:
    """Linear and YaRN scaling come from keys, longrope from tensors; factors of 1 are none."""

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    def longrope(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(16)
        writer.add_rope_scaling_attn_factors(1.5)
        for name, value in (("long", 2.0), ("short", 1.0)):
            factors = np.full(16, value, dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)

    assert scaling_of(tmp_path, model, linear) == {"rope_type": "linear", "factor": 2.0}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert scaling_of(tmp_path, model, yarn) == expected
    assert scaling_of(tmp_path, model, longrope) == {
        "rope_type": "longrope",
        "long_factor": [2.0] * 16,
        "short_factor": [1.0] * 16,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.5,
    }
    ones = np.ones(16, dtype=np.float32)
    assert scaling_of(tmp_path, model, lambda w: w.add_tensor("rope_freqs.weight", ones)) is None

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_factor(2.0)

    for other in (yarn, linear):

        def both(writer: gguf.GGUFWriter, other: Callable[..., None] = other) -> None:
            other(writer)
            writer.add_tensor("rope_freqs.weight", ones)

        with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight has a factor"):
            scaling_of(tmp_path, model, both)


def test_a_key_that_is_needed_and_missing_is_named(model: Any, tmp_path: Path) -> None:
    """Without config.json, the key and the file are in the message."""
    path = written.write(tmp_path / "m.gguf", model)
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_c0unt"))
    with pytest.raises(CheckpointFormatError, match=r"the metadata has no llama\.block_count"):
        config_of(path)


def test_a_scaling_without_a_type_is_linear(model: Any, tmp_path: Path) -> None:
    """A factor alone is linear scaling, as llama.cpp takes it, also by the older key."""
    for add in (
        lambda writer: writer.add_rope_scaling_factor(4.0),
        lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0),
    ):
        assert scaling_of(tmp_path, model, add) == {"rope_type": "linear", "factor": 4.0}


def test_a_multiplier_that_is_no_number_is_refused(model: Any, tmp_path: Path) -> None:
    """Not with an error of Python's."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)
        writer.add_string("llama.rope.scaling.yarn_log_multiplier", "0.1")

    with pytest.raises(CheckpointFormatError, match="yarn_log_multiplier should be a float"):
        scaling_of(tmp_path, model, change)


@pytest.mark.parametrize("key", ["attn_factor", "yarn_beta_fast", "yarn_ext_factor"])
def test_a_setting_of_scaling_that_is_not_taken_is_refused(
    model: Any, tmp_path: Path, key: str
) -> None:
    """What scores would be multiplied by, or which frequencies change, is not ignored."""
    with pytest.raises(UnsupportedModelError, match=rf"llama\.rope\.scaling\.{key} is 2\.5"):
        scaling_of(tmp_path, model, lambda w: w.add_float32(f"llama.rope.scaling.{key}", 2.5))

    def beside_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_float32(f"llama.rope.scaling.{key}", 2.5)
        writer.add_tensor("rope_freqs.weight", llama3_factors())

    with pytest.raises(UnsupportedModelError, match=rf"{key} is 2\.5"):
        scaling_of(tmp_path, model, beside_factors)


@pytest.mark.parametrize(
    "change",
    [
        {"low_freq_factor": 4.0},
        {"factor": 0},
        {"factor": [8.0]},
        {"rope_theta": "10000"},
        {"rope_type": "longrope", "long_factor": 8},
    ],
)
def test_a_scaling_that_has_no_value_is_another_one(
    scaled: tuple[Path, Any], tmp_path: Path, change: dict[str, Any]
) -> None:
    """Entries that the formula cannot take do not give the factors of the file."""
    path, model = scaled
    (tmp_path / "model.gguf").symlink_to(path)
    config = {**model.config.to_dict(), "rope_parameters": {**LLAMA3, **change}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointFormatError, match="which rope_scaling of"):
        find_source(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("inside", "above", "accepted"),
    [
        ({"rope_theta": 5e5}, {}, True),
        ({}, {"rope_theta": 5e5}, True),  # as Llama 3.1's files, by transformers 4
        ({"rope_theta": 5e5}, {"rope_theta": 1e4}, True),
        ({"rope_theta": 1e4}, {"rope_theta": 5e5}, False),
        ({}, {"rope_theta": 5.1e5}, False),
        ({}, {}, False),  # 10,000
    ],
)
@pytest.mark.parametrize("entry", ["rope_scaling", "rope_parameters"])
def test_factors_are_compared_with_the_base_wherever_it_stands(
    tmp_path: Path, entry: str, inside: dict[str, float], above: dict[str, float], accepted: bool
) -> None:
    """The base of the entry goes before that of the file, and each before the default."""
    model = written.new_model(SMALL)
    factors = llama3_factors(5e5)
    path = written.write(
        tmp_path / "m.gguf", model, change=lambda w: w.add_tensor("rope_freqs.weight", factors)
    )
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config = {name: value for name, value in config.items() if not name.startswith("rope_")}
    (tmp_path / "config.json").write_text(
        json.dumps({**config, **above, entry: {**scaling, **inside}})
    )
    if accepted:
        find_source(str(path))
        return
    with pytest.raises(CheckpointFormatError, match="which rope_scaling of"):
        find_source(str(path))


def test_a_file_of_gpt_oss_without_scaling_has_none(tmp_path: Path) -> None:
    """A config.json without settings would have YaRN's; llama.cpp goes by what the file says."""
    settings = written.CONFIGS["gpt-oss"] | {"rope_parameters": {"rope_type": "default"}}
    path = written.write(tmp_path / "model.gguf", written.new_model(settings))
    config = ModelSource.find(ModelConfig(model=str(path))).config
    assert rope_parameters(config).rope_type == "default"
