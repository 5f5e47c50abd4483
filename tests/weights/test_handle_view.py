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
