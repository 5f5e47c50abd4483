"""Two hosts compare fingerprints to see that they opened the same checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from itertools import permutations
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_module.errors import WeightReadError
from vllm_module.weights import open_checkpoint
from vllm_module.weights.pairs import PairsCheckpoint

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(3000.0).view(50, 60), "b": torch.arange(7.0), "c": torch.zeros(0, 3)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files and an index."""
    folder = tmp_path / "here"
    folder.mkdir()
    weights = tensors()
    save_file({name: weights[name] for name in "ab"}, folder / ONE)
    save_file({"c": weights["c"]}, folder / TWO)
    index = {"metadata": {}, "weight_map": {"a": ONE, "b": ONE, "c": TWO}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def fingerprint(path: Path) -> str:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.fingerprint


def fingerprint_of(tmp_path: Path, weights: dict[str, torch.Tensor], name: str = "one") -> str:
    save_file(weights, tmp_path / f"{name}.safetensors")
    return fingerprint(tmp_path / f"{name}.safetensors")


def test_a_copy_elsewhere_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    """It depends on neither the path nor the times of the files, and reads no weights."""
    shutil.copytree(folder, tmp_path / "elsewhere" / "there")
    os.utime(tmp_path / "elsewhere" / "there" / ONE, ns=(0, 0))
    (tmp_path / "link").symlink_to(folder)
    with open_checkpoint(folder) as checkpoint:
        expected = checkpoint.fingerprint
        assert (checkpoint.fingerprint, checkpoint.bytes_read) == (expected, 0)
    assert len(bytes.fromhex(expected)) == 32
    assert fingerprint(tmp_path / "elsewhere" / "there") == expected
    assert fingerprint(tmp_path / "link") == expected


@pytest.mark.parametrize("place", [0, 1, 29, 2999])
def test_a_value_that_was_sampled_shows(tmp_path: Path, place: int) -> None:
    """The first and the last bytes of the data are among the samples."""
    flat = torch.arange(3000.0)
    expected = fingerprint_of(tmp_path, {"a": flat})
    flat[place] = -1
    assert (fingerprint_of(tmp_path, {"a": flat}) != expected) == (place != 29)


@pytest.mark.parametrize("size", [1, 15, 255, 256, 257, 271, 272, 273, 300])
def test_of_little_data_every_byte_shows(tmp_path: Path, size: int) -> None:
    whole = torch.zeros(min(size, 256))
    expected = fingerprint_of(tmp_path, {"a": whole})
    for place in range(0, len(whole), 17):
        other = whole.clone()
        other[place] = 1
        assert fingerprint_of(tmp_path, {"a": other}) != expected
    # Near the size from which only samples are read, no sample lies outside of the file.
    assert fingerprint_of(tmp_path, {"a": torch.zeros(size)})


def test_another_fine_tune_of_the_same_names_and_shapes_shows(tmp_path: Path) -> None:
    weights = tensors()
    expected = fingerprint_of(tmp_path, weights)
    assert fingerprint_of(tmp_path, {**weights, "a": weights["a"] * 1.0001}) != expected


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {**{n: w[n] for n in "bc"}, "other": w["a"]},
        lambda w: {**w, "a": w["a"].view(60, 50)},
        lambda w: {**w, "b": w["b"].view(torch.int32)},
        lambda w: {**w, "c": w["c"].view(3, 0)},
        lambda w: {**w, "d": torch.zeros(0)},
    ],
    ids=["name", "shape", "dtype", "shape of nothing", "one more"],
)
def test_another_header_shows(tmp_path: Path, change) -> None:
    """The data is the same in each case; a name, shape or dtype differs."""
    expected = fingerprint_of(tmp_path, tensors())
    assert fingerprint_of(tmp_path, change(tensors())) != expected


def test_another_name_of_a_file_or_one_more_file_shows(folder: Path) -> None:
    expected = fingerprint(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert fingerprint(folder) == expected
    save_file({}, folder / "more.safetensors")
    assert fingerprint(folder) != expected
    (folder / "more.safetensors").unlink()
    (folder / ONE).rename(folder / "first.safetensors")
    assert fingerprint(folder) != expected


def test_of_a_file_that_changed_or_was_closed_there_is_none(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    os.utime(folder / ONE, ns=(0, 0))
    with pytest.raises(WeightReadError, match="was changed since it was opened"):
        checkpoint.fingerprint  # noqa: B018
    checkpoint.close()
    with pytest.raises(WeightReadError, match="was closed"):
        checkpoint.fingerprint  # noqa: B018


def test_the_order_of_a_source_changes_no_fingerprint(tmp_path: Path) -> None:
    """Names, shapes and dtypes do: ranks may be given the same tensors in another order."""
    pairs = [(name, torch.zeros(size)) for name, size in (("b", 2), ("a", 3), ("c", 2))]
    found = {PairsCheckpoint(tmp_path, each).fingerprint for each in permutations(pairs)}
    assert len(found) == 1
    others = (
        pairs[:2],
        [("d", pairs[0][1]), *pairs[1:]],
        [("b", torch.zeros(3)), *pairs[1:]],
        [("b", torch.zeros(2).half()), *pairs[1:]],
    )
    found |= {PairsCheckpoint(tmp_path, each).fingerprint for each in others}
    assert len(found) == 1 + len(others)
