"""A handle of a file in another shape: the same bytes, cut and read by the new dimensions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_module.weights import open_checkpoint


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
