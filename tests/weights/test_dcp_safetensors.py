"""Folders of torch.distributed.checkpoint whose files are safetensors, as torch writes them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    SerializationFormat,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights import open_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def write_in_safetensors(folder: Path) -> None:
    """Write a folder of two chunks, each in a file as torch's writer makes it."""
    whole = torch.arange(24.0).view(6, 4)
    for half in range(2):
        writer = FileSystemWriter(
            folder / str(half), serialization_format=SerializationFormat.SAFETENSORS
        )
        state = {"model": {"w": whole[3 * half : 3 * half + 3], "b": torch.ones(5).bfloat16()}}
        dcp.save(state, storage_writer=writer, no_dist=True)
        (folder / str(half) / "__0_0.distcp").rename(folder / f"__{half}_0.distcp")
    metadata = pickle.loads((folder / "0" / ".metadata").read_bytes())
    described = metadata.state_dict_metadata["model.w"]
    described.size = torch.Size((6, 4))
    described.chunks.append(ChunkStorageMetadata(torch.Size((3, 0)), torch.Size((3, 4))))
    place = _StorageInfo("__1_0.distcp", 0, 48)
    metadata.storage_data[MetadataIndex("model.w", torch.Size((3, 0)), 1)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_chunks_in_safetensors_are_read(tmp_path: Path) -> None:
    """A file may be safetensors, whose header says where the chunk of a name is."""
    write_in_safetensors(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint) == {"w", "b"}
        assert torch.equal(checkpoint["w"].read(), torch.arange(24.0).view(6, 4))
        part = checkpoint["w"].narrow(0, 2, 3).narrow(1, 1, 2)
        assert torch.equal(part.read(), torch.arange(24.0).view(6, 4)[2:5, 1:3])
        assert torch.equal(checkpoint["b"].read(), torch.ones(5).bfloat16())
    path = tmp_path / "__1_0.distcp"
    for old, new, problem in (
        (b'"model.w"', b'"model.v"', "has no tensor 'model.w'"),
        (b"[3,4]", b"[4,3]", r"shape \[4, 3\], and .metadata says .* \[3, 4\]"),
    ):
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new))
        with (
            open_checkpoint(tmp_path) as checkpoint,
            pytest.raises(WeightReadError, match=problem),
        ):
            checkpoint["w"].read()
        path.write_bytes(data)


def test_tensors_of_one_shape_in_one_safetensors_file_are_told_apart(tmp_path: Path) -> None:
    """Torch's writer says of each that it is the whole file; the header has their places."""
    state = {name: torch.randn(3, 4) for name in ("q", "k", "v")}
    writer = FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"model": state}, storage_writer=writer, no_dist=True)
    assert len([*tmp_path.glob("*.distcp")]) == 1
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint) == {*state}
        for name in ("v", "q", "k", "v"):
            assert torch.equal(checkpoint[name].read(), state[name])


def test_two_chunks_of_one_safetensors_file_are_refused(tmp_path: Path) -> None:
    """torch's writer keeps the last of a rank's chunks, which would be read for each of them."""
    write_in_safetensors(tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    place = metadata.storage_data[MetadataIndex("model.w", torch.Size((3, 0)), 1)]
    place.relative_path = "__0_0.distcp"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(WeightReadError, match="several chunks of it"),
    ):
        checkpoint["w"].read()


def test_parts_that_ranks_wrote_as_safetensors_are_named(tmp_path: Path) -> None:
    """Files of Hugging Face's writer that nobody put together are refused with what to do."""
    info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0, 0]}}), "format": "pt"}
    for rank in range(2):
        name = f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        save_file({"w": torch.ones(2, 2)}, tmp_path / name, metadata=info)
    with pytest.raises(CheckpointFormatError, match="save with enable_consolidation=True, or put"):
        open_checkpoint(tmp_path)
