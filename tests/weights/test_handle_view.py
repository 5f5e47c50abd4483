"""A handle of a file in another shape: the same bytes, cut and read by the new dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_module.weights import open_checkpoint
from vllm_module.weights.gguf.turned_handle import TurnedHandle


@pytest.mark.parametrize("stored", [(24,), (24, 1), (4, 6), (2, 3, 4)])
def test_a_view_is_cut_by_its_own_dimensions(tmp_path: Path, stored: tuple[int, ...]) -> None:
    """Columns of a matrix are read from a tensor of any shape, as torch's view has them."""
    tensor = torch.arange(24, dtype=torch.int16).view(stored)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as weights:
        view = weights["x"].view(torch.Size((6, 4)))
        assert torch.equal(view.read(), tensor.view(6, 4))
        part = view.narrow(1, 1, 2).narrow(0, 2, 3)
        assert torch.equal(part.read(), tensor.view(6, 4)[2:5, 1:3])


@given(data=st.data())
def test_parts_of_parts_of_turned_heads(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Rows and columns of any part are those of torch's transpose, and few heads are read."""
    stored = torch.arange(4 * 5 * 3, dtype=torch.float32).view(4, 5, 3)
    whole = stored.mT.flatten(0, 1)
    folder = tmp_path_factory.mktemp("turned")
    save_file({"x": stored}, folder / "model.safetensors")
    with open_checkpoint(folder) as weights:
        handle: Any = TurnedHandle(weights["x"], lambda x: x, torch.Size((4, 5, 3)), whole.dtype)
        for _ in range(3):
            dim = data.draw(st.integers(0, 1))
            start = data.draw(st.integers(0, whole.shape[dim] - 1))
            length = data.draw(st.integers(1, whole.shape[dim] - start))
            handle, whole = handle.narrow(dim, start, length), whole.narrow(dim, start, length)
            assert torch.equal(handle.read(), whole)


@given(data=st.data())
def test_a_part_knows_its_box_however_the_tensor_is_stored(
    tmp_path_factory: Any, data: st.DataObject
) -> None:
    """Dimensions are stored in any order, and one of a single entry with any stride."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    strides, step = [0] * len(sizes), 1
    for dim in data.draw(st.permutations(range(len(sizes)))):
        strides[dim], step = step, step * sizes[dim]
        if sizes[dim] == 1:
            strides[dim] = data.draw(st.integers(1, 9))
    stored = torch.arange(step).as_strided(sizes, strides)
    folder = tmp_path_factory.mktemp("boxes")
    torch.save({"x": stored}, folder / "pytorch_model.bin")
    places = torch.arange(step).view(sizes)  # of each element in the whole tensor
    with open_checkpoint(folder) as weights:
        handle: Any = weights["x"]
        for _ in range(3):
            dim = data.draw(st.integers(0, len(sizes) - 1))
            start = data.draw(st.integers(0, places.shape[dim] - 1))
            length = data.draw(st.integers(1, places.shape[dim] - start))
            handle, places = (each.narrow(dim, start, length) for each in (handle, places))
            first = torch.unravel_index(places.reshape(-1)[0], sizes)
            starts = [int(each) for each in first]
            assert handle.region.box == tuple(zip(starts, places.shape, strict=True))
        for dim, size in enumerate(places.shape):
            box = handle.narrow(dim, size, 0).region.box
            assert [length for _, length in box].count(0) == 1
            for (begin, count), most in zip(box, sizes, strict=True):
                assert 0 <= begin <= begin + count <= most


def test_what_is_no_view_is_refused(tmp_path: Path) -> None:
    """Another number of elements, and a region with gaps, have no view."""
    save_file({"x": torch.zeros(6, 4)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as weights:
        handle = weights["x"]
        with pytest.raises(ValueError, match=r"x .*\[5, 5\] is no view"):
            handle.view(torch.Size((5, 5)))
        with pytest.raises(ValueError, match="is no view"):
            handle.narrow(1, 0, 2).view(torch.Size((12,)))
        rows = handle.narrow(0, 1, 2)
        assert rows.view(torch.Size((8,))).shape == (8,)
