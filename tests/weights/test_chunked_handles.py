"""Tensors in chunks of files, narrowed again and again, beside torch's ``narrow``."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_module.errors import WeightLoadError
from vllm_module.weights import open_checkpoint
from vllm_module.weights.chunked_handle import ChunkedHandle, TensorChunk


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chunks")


@settings(max_examples=40, deadline=None)
@given(
    edges=st.lists(st.sets(st.integers(1, 6), max_size=3), min_size=1, max_size=3), data=st.data()
)
def test_what_is_left_of_a_tensor(edges: list[set[int]], data: st.DataObject, folder: Path) -> None:
    """In any dimension, the same one several times, from either end; also nothing at all."""
    sizes = [7] * len(edges)
    whole = torch.arange(7 ** len(edges)).view(sizes)
    sides = [[*itertools.pairwise([0, *sorted(each), 7])] for each in edges]
    boxes = [*itertools.product(*sides)]
    parts = {
        str(at): whole[tuple(slice(*side) for side in box)].contiguous()
        for at, box in enumerate(boxes)
    }
    save_file(parts, folder / "model.safetensors")
    with open_checkpoint(folder) as stored:
        chunks = [
            TensorChunk([a for a, _ in box], parts[str(at)].shape, lambda at=at: stored[str(at)])
            for at, box in enumerate(boxes)
        ]
        handle = ChunkedHandle("w", torch.int64, whole.shape, chunks, folder)
        for _ in range(4):
            dim = data.draw(st.integers(-len(sizes), len(sizes) - 1))
            start = data.draw(st.integers(0, whole.shape[dim]))
            length = data.draw(st.integers(0, whole.shape[dim] - start))
            handle, whole = handle.narrow(dim, start, length), whole.narrow(dim, start, length)
            assert handle.shape == whole.shape
            assert torch.equal(handle.read(), whole)
            wide = torch.full((*whole.shape, 2), -1.0, dtype=torch.float64)
            handle.read_into(wide[..., 1])
            assert torch.equal(wide[..., 1], whole.double())
            if whole.numel():
                assert handle.region.ends == (whole.min(), whole.max())


DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [1, 100, 1e6])
def test_casts_are_those_of_a_whole_tensor(
    value: float, dtype: torch.dtype, target: torch.dtype, folder: Path
) -> None:
    """A cast that a tensor of one piece is refused is refused, in whichever chunk the value is."""
    if torch.tensor(value).to(dtype).double() != value:
        return  # the dtype does not have it
    for at in range(4):
        whole = torch.zeros(4, 3, dtype=dtype)
        whole[at, 1] = value
        save_file(
            {"w": whole, "a": whole[:2].clone(), "b": whole[2:].clone()}, folder / "c.safetensors"
        )
        with open_checkpoint(folder / "c.safetensors") as stored:
            chunks = [
                TensorChunk([first, 0], (2, 3), lambda name=name: stored[name])
                for first, name in ((0, "a"), (2, "b"))
            ]
            handle = ChunkedHandle("w", dtype, whole.shape, chunks, folder)
            found = []
            for each in (stored["w"], handle):
                read = torch.zeros(4, 3, dtype=target)
                try:
                    each.read_into(read)
                    found.append(None)
                except WeightLoadError as error:
                    found.append(type(error))
                    continue
                assert torch.equal(read.double(), whole.to(target).double())
            assert found[0] == found[1]
