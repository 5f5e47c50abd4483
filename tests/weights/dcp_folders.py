"""Folders of torch.distributed.checkpoint, written as ranks of a trainer write them."""

from __future__ import annotations

import io
import pickle
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

# By name, a tensor and where its dimensions are cut: as FSDP cuts 5 rows on 2 ranks, a mesh of two
# dimensions, and a tensor that is whole.
STATE: dict[str, tuple[torch.Tensor, tuple[tuple[int, ...], ...]]] = {
    "model.rows.weight": (torch.arange(20.0).view(5, 4), ((3,), ())),
    "model.mesh.weight": (torch.randn(6, 8).bfloat16(), ((2, 4), (3,))),
    "model.whole": (torch.arange(7), ((),)),
    "model.number": (torch.tensor(2.5), ()),
    "model.columns": (torch.randn(4, 6).half().t(), ((), (1,))),
}


def write(folder: Path, state: Any = None, above: tuple[str, ...] = ("model",)) -> Metadata:
    """Write a folder as ranks of a trainer do, a file for each of two."""
    state = STATE if state is None else state
    files = [io.BytesIO(), io.BytesIO()]
    described, stored, paths = {}, {}, {}
    for name, (tensor, cuts) in state.items():
        key = ".".join((*above, name))
        paths[key] = (*above, name)
        chunks = []
        edges = [(0, *cut, size) for cut, size in zip(cuts, tensor.shape, strict=True)]
        for index, span in enumerate(product(*[list(pairwise(e)) for e in edges])):
            offsets = torch.Size(begin for begin, _ in span)
            part = tensor
            for dim, (begin, end) in enumerate(span):
                part = part.narrow(dim, begin, end - begin)
            chunks.append(ChunkStorageMetadata(offsets, part.shape))
            saved = io.BytesIO()
            # As torch's writer, which copies what is a part of a storage.
            torch.save(part.clone() if part.untyped_storage().nbytes() else part, saved)
            file = index % 2
            place = _StorageInfo(f"__{file}_0.distcp", files[file].tell(), len(saved.getvalue()))
            stored[MetadataIndex(key, offsets, index)] = place
            files[file].write(saved.getvalue())
        properties = TensorProperties.create_from_tensor(tensor)
        described[key] = TensorStorageMetadata(properties, tensor.shape, chunks)
    metadata = Metadata(described, paths, stored)  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for index, data in enumerate(files):
        (folder / f"__{index}_0.distcp").write_bytes(data.getvalue())
    return metadata
