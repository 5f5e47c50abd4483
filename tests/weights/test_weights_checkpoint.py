"""open_checkpoint opens the right files, and refuses a folder that is not a checkpoint."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights import open_checkpoint

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files and an index."""
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / ONE)
    save_file({"c": torch.ones(4)}, tmp_path / TWO)
    write_index(tmp_path, {"a": ONE, "b": ONE, "c": TWO})
    return tmp_path


def test_the_files_of_the_index_are_opened_and_no_other(folder: Path) -> None:
    (folder / "broken.safetensors").write_bytes(b"not opened")
    with open_checkpoint(str(folder)) as checkpoint:
        assert isinstance(checkpoint, Mapping)
        assert sorted(checkpoint) == ["a", "b", "c"]
        assert len(checkpoint) == 3
        assert "d" not in checkpoint
        assert checkpoint.files == (folder / ONE, folder / TWO)
        assert (checkpoint.nbytes, checkpoint.bytes_read) == (36, 0)
        assert checkpoint["c"].read().tolist() == [1, 1, 1, 1]
        assert checkpoint.bytes_read == 16
        handle = checkpoint["a"]
    with pytest.raises(WeightReadError, match="was closed"):
        handle.read()


def test_without_an_index_the_single_file_then_all_but_consolidated(tmp_path: Path) -> None:
    save_file({"z": torch.ones(1)}, tmp_path / "z.safetensors")
    save_file({"y": torch.ones(1)}, tmp_path / "y.safetensors")
    save_file({"z": torch.ones(1)}, tmp_path / "consolidated.00.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert [path.name for path in checkpoint.files] == ["y.safetensors", "z.safetensors"]
    save_file({"m": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(open_checkpoint(tmp_path)) == ["m"]
    assert list(open_checkpoint(tmp_path / "z.safetensors")) == ["z"]


def test_an_index_that_a_later_save_left_over_is_not_followed(tmp_path: Path) -> None:
    """transformers, which saves into one folder twice, reads the whole file too."""
    logging.disable_progress_bar()
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=1, **sizes))
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    (part, *_) = sorted(tmp_path.glob("model-*"))
    data = part.read_bytes()
    torch.nn.init.constant_(model.model.norm.weight, 3.0)
    model.save_pretrained(tmp_path)
    assert (tmp_path / INDEX).exists()
    again = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.keys() == again.keys()
        assert all(torch.equal(checkpoint[name].read(), again[name]) for name in again)
    part.write_bytes(data)  # some of the index's files: which of the two was meant is not known
    with pytest.raises(CheckpointFormatError, match=r"index\.json names .*, which is not there"):
        open_checkpoint(tmp_path)


def test_a_broken_link_is_refused_and_not_worked_around(folder: Path) -> None:
    (folder / INDEX).rename(folder / "gone")
    (folder / INDEX).symlink_to("nowhere")
    with pytest.raises(CheckpointFormatError, match=r"index\.json is a link that leads nowhere"):
        open_checkpoint(folder)
    (folder / INDEX).unlink()
    (folder / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(
        CheckpointFormatError, match=r"model\.safetensors is a link that leads nowhere"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": ONE, "b": ONE, "c": "absent.safetensors"}, "names absent.safetensors, which is not"),
        ({"a": ONE, "b": ONE, "c": TWO, "d": TWO}, f"'d' should be in {TWO}, and is not"),
        ({"a": ONE, "c": TWO}, r"'b' is here, and .* does not know it"),
        ({"a": ONE, "b": TWO, "c": TWO}, f"'b' is here, and .* says it is in {TWO}"),
        ({"a": f"../{ONE}"}, "should be in a .safetensors file of the same folder"),
        ({"a": f"sub/{ONE}"}, "should be in a .safetensors file of the same folder"),
        ({"a": f"/etc/{ONE}"}, "should be in a .safetensors file of the same folder"),
        ({"a": f"C:{ONE}"}, "should be in a .safetensors file of the same folder"),
        ({"a": f"..\\{ONE}"}, "should be in a .safetensors file of the same folder"),
        ({"a": f"{ONE}\0"}, "should be in a .safetensors file of the same folder"),
        ({"a": ".."}, "should be in a .safetensors file of the same folder"),
        ({"a": ""}, "should be in a .safetensors file of the same folder"),
        ({"a": "pytorch_model.bin"}, "should be in a .safetensors file of the same folder"),
        ({"a": 1}, "should be in a .safetensors file of the same folder, and is in 1"),
        ([ONE], "weight_map should map names of tensors to files"),
        ({}, "weight_map should map names of tensors to files"),
        (None, "weight_map should map names of tensors to files"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(folder: Path, weight_map, message) -> None:
    write_index(folder, weight_map)
    with pytest.raises(CheckpointFormatError, match=message) as refusal:
        open_checkpoint(folder)
    assert str(folder) in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "is not a JSON object but"),
        ("{}", "weight_map should map"),
        ('{"weight_map": {}, "weight_map": {}}', "'weight_map' occurs twice"),
        (f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}', "'a' occurs twice"),
    ],
)
def test_an_index_that_is_no_index_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointFormatError, match=message):
        open_checkpoint(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file({"a": torch.zeros(2)}, folder / TWO)
    with pytest.raises(CheckpointFormatError, match=f"{TWO}: tensor 'a' is in .*{ONE} too"):
        open_checkpoint(folder)


def test_a_damaged_second_file_is_refused_before_anything_is_read(folder: Path) -> None:
    os.truncate(folder / TWO, (folder / TWO).stat().st_size - 1)
    with pytest.raises(CheckpointFormatError, match=r"was cut off.*download it again"):
        open_checkpoint(folder)


def test_a_folder_without_weights_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match=r"there is nothing\. Check the path"):
        open_checkpoint(tmp_path)
    for index in range(25):
        (tmp_path / f"file{index:02}.txt").touch()
    with pytest.raises(CheckpointFormatError, match=r"file00\.txt, .*file19\.txt and 5 more"):
        open_checkpoint(tmp_path)
    (tmp_path / "a_model.npz").touch()
    with pytest.raises(CheckpointFormatError, match=r"a_model\.npz is in a format that is not"):
        open_checkpoint(tmp_path)


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "model.h5").touch()
    with pytest.raises(
        CheckpointFormatError, match=r"is not a \.safetensors or \.bin or \.pt or \.gguf file"
    ):
        open_checkpoint(tmp_path / "model.h5")
    with pytest.raises(CheckpointFormatError, match="is not a file"):
        open_checkpoint(tmp_path / "absent.safetensors")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_files_are_given_back_when_nobody_holds_a_handle(folder: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = open_checkpoint(folder)
    handle = checkpoint["b"].narrow(0, 0, 1)
    del checkpoint
    assert handle.read().tolist() == [1]
    del handle
    write_index(folder, {"a": ONE, "b": ONE})
    save_file({"c": torch.ones(4)}, folder / ONE)
    with pytest.raises(CheckpointFormatError):
        open_checkpoint(folder)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before  # what other tests left may be closed, too
