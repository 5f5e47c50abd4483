"""Hostile indexes and configurations give a CheckpointFormatError."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_module.build.model_source import read_config
from vllm_module.config import ModelConfig
from vllm_module.errors import CheckpointFormatError
from vllm_module.weights import open_checkpoint
from vllm_module.weights.strict_json import parse_object

INDEX = "model.safetensors.index.json"
FOUR_BYTES = {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}


def refused_words(act: Callable[[], object]) -> str:
    with pytest.raises(CheckpointFormatError) as refusal:
        act()
    return str(refusal.value)


def read_folder(folder: Path, name: str) -> object:
    if name == INDEX:
        return open_checkpoint(folder)
    return read_config(folder, ModelConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "not valid JSON"),
        (b'{"metadata": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "an integer has 100000 digits"),
        (b'{"a": ' + b"1" * 309 + b"}", "an integer has 309 digits"),
        (b'{"a": -' + b"12345678" * 38 + b"90123}", "an integer has 310 digits"),
        (b'{"a": [' + b"[]," * 3_100_000 + b"0]}", "brackets, colons and commas"),
        (b'{"a": 1, "a": 1}', "'a' occurs twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' occurs twice"),
        (b"\xff", "not valid JSON"),
        (b"\0" * 100, "not valid JSON"),
        (b"", "not valid JSON"),
        (b"null", "not a JSON object"),
    ],
)
@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_json_beside_the_weights_is_held_to_the_same(tmp_path, name, content, message) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=message) as refusal:
        read_folder(tmp_path, name)
    assert name in str(refusal.value)
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("digits", ["0", "1234567" * 44, "1" + "0" * 307])
@pytest.mark.parametrize("sign", ["", "-"])
def test_integers_are_those_of_pythons_parser(sign: str, digits: str) -> None:
    text = f'{{"a": {sign}{digits}, "b": [12, -7]}}'
    if len(sign + digits) > 308:
        with pytest.raises(CheckpointFormatError, match="an integer has 309 digits"):
            parse_object(text.encode(), "it", "")
        return
    value = parse_object(text.encode(), "it", "")
    assert value == json.loads(text)
    assert isinstance(value["a"], float) == (sign + digits == "-0")
    assert math.copysign(1, value["a"]) == (-1 if sign else 1)


def test_a_config_that_is_wrong_throughout_is_refused_in_a_few_words(tmp_path: Path) -> None:
    wrong = {"hidden_size": "y" * 10**6, "num_hidden_layers": [], "rope_scaling": "z" * 10**6}
    entries = {"architectures": ["LlamaForCausalLM", "x" * 10**6], **wrong}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointFormatError, match="does not describe a model") as refusal:
        read_config(tmp_path, ModelConfig(model=str(tmp_path)))
    assert len(str(refusal.value)) < 2000


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_json_without_end_is_not_read(tmp_path: Path, name: str) -> None:
    """A sparse file of a terabyte takes no space on disk and may take none in memory."""
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointFormatError, match="has 1099511627776 bytes, where at most"):
        read_folder(tmp_path, name)


@pytest.mark.parametrize(
    "file",
    [
        INDEX,
        "config.json",
        "C:model.safetensors",
        "//host/share.safetensors",
        "a/../model.safetensors",
        "./model.safetensors",
        "sub\\model.safetensors",
        "model.safetensors\0",
        "model.safetensors ",
        ".safetensors/..",
        ["model.safetensors"],
        {"model.safetensors": 1},
        True,
        None,
        -0.0,
    ],
    ids=ascii,
)
def test_an_index_names_plain_files_beside_it_only(tmp_path, write_file, file) -> None:
    write_file(FOUR_BYTES, b"1234").rename(tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointFormatError, match=r"should be in a \.safetensors file of the"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["\udbff\udfff.safetensors", "x" * 5000 + ".safetensors", "a\n.safetensors", ".safetensors"],
)
def test_an_index_may_name_what_no_disk_can_hold(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointFormatError, match="which is not there") as refusal:
        open_checkpoint(tmp_path)
    assert len(str(refusal.value)) < len(str(tmp_path)) + 500


def test_an_index_that_is_its_own_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "w.safetensors"}}))
    (tmp_path / "w.safetensors").symlink_to(INDEX)
    with pytest.raises(CheckpointFormatError, match="its header should be"):
        open_checkpoint(tmp_path)


def test_what_an_index_says_of_sizes_does_not_matter(tmp_path: Path, write_file) -> None:
    """Sizes come from the headers; total_size is ignored."""
    write_file(FOUR_BYTES, b"1234").rename(tmp_path / "w.safetensors")
    for total in (0, -1, 10**300, "many", None):
        index = {"metadata": {"total_size": total}, "weight_map": {"w": "w.safetensors"}}
        (tmp_path / INDEX).write_text(json.dumps(index))
        assert open_checkpoint(tmp_path).nbytes == 4


def test_an_index_of_many_names_opens(tmp_path: Path, write_file) -> None:
    count, header, weight_map = 20_000, {}, {}
    for index in range(count):
        name = f"model.layers.{index}.weight"
        header[name] = {"dtype": "U8", "shape": [1], "data_offsets": [index, index + 1]}
        weight_map[name] = "w.safetensors"
    write_file(header, b"\1" * count).rename(tmp_path / "w.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint) == checkpoint.nbytes == count


def test_an_index_of_many_absent_files_is_refused_at_the_first(tmp_path: Path) -> None:
    weight_map = {f"w{index}": f"{index}.safetensors" for index in range(20_000)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointFormatError, match=r"names 0\.safetensors, which is not there"):
        open_checkpoint(tmp_path)


def test_the_same_file_by_two_names_is_refused(tmp_path: Path, write_file) -> None:
    write_file(FOUR_BYTES, b"1234").rename(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    with pytest.raises(CheckpointFormatError, match=r"'w' is in .* too"):
        open_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}})
    )
    with pytest.raises(CheckpointFormatError, match="'w' is here, and"):
        open_checkpoint(tmp_path)
