"""Files of updates: what is written, what is read of it, and what no trainer may write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vllm_module.weights import find_changes, open_update, write_update
from vllm_module.weights.changes import Changes
from vllm_module.weights.digests import digest_weight
from vllm_module.weights.handle import TensorHandle

NORM = "model.norm.weight"
ONE = torch.ones(1)


def some(*indices: int, values: torch.Tensor = ONE, shape: tuple[int, ...] = (16,)) -> Changes:
    return Changes(torch.tensor(indices), values, shape)


def test_bits_of_the_file(tmp_path: Path) -> None:
    """Another reader finds steps of a byte and values; other dtypes come back bit for bit."""
    old = torch.zeros(30, 40, dtype=torch.bfloat16)
    new = old.clone()
    new.view(-1)[torch.tensor([3, 7, 255])] = torch.tensor([1.0, -0.0, 2.0]).bfloat16()
    far = Changes(torch.tensor([2, 70_000]), torch.tensor([3, -4], dtype=torch.int8), (90_000,))
    weights = {"w": find_changes(old, new), "far": far, "none": find_changes(old, old)}
    path = tmp_path / "u.safetensors"
    write_update(path, weights | {"whole": old.T}, version="b", after="a", digests=True)
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.get_tensor("steps/w").tolist() == [3, 4, 248]
        assert file.get_tensor("steps/w").dtype == torch.uint8
        assert file.get_tensor("steps/far").dtype == torch.int32
        assert file.get_tensor("whole").shape == (40, 30)
    with open_update(path) as update:
        assert sorted(update) == ["far", "none", "w", "whole"]
        assert len(update) == 4
        assert (update.version, update.after) == ("b", "a")
        assert list(update.digests) == ["whole"]
        for name, each in weights.items():
            assert torch.equal(update[name].indices, each.indices)
            assert torch.equal(update[name].values, each.values)
            assert update[name].shape == each.shape


def test_views_of_a_larger_tensor_are_written(tmp_path: Path) -> None:
    """Of any strides, also those of a single element; safetensors reads them."""
    base = torch.arange(12.0).view(3, 4)
    views = {
        "row": base[1:2, 2], "cell": base.T[2:3, 1:2], "scalar": base[2, 3],
        "columns": base[:, 1::2], "repeated": base[:1].expand(3, 4),
        "one": base[0, 0].expand(1), "none": base[:0], "a" * 1024: base,
    }  # fmt: skip
    path = tmp_path / "u.safetensors"
    write_update(path, views, version="a", digests=True)
    written = load_file(path)
    assert all(torch.equal(written[name], view) for name, view in views.items())
    with open_update(path) as update:
        assert {name: digest_weight(update[name]).hex for name in views} == update.digests


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    """While it is written nothing has its name; who has opened the older one reads that."""
    path = tmp_path / "u.safetensors"
    seen: list[bool] = []

    class Late(TensorHandle):
        def read(self) -> torch.Tensor:
            seen.append(path.exists())
            return super().read()

    weights = {"a": torch.ones(1 << 16), "b": Late("b", torch.ones(3))}
    write_update(path, weights, version="a")
    with open_update(path) as update:
        write_update(path, {"a": torch.zeros(1 << 16)}, version="b")
        assert torch.equal(update["a"].read(), weights["a"])
    assert seen == [False]


def test_what_a_trainer_may_not_write(tmp_path: Path) -> None:
    """Nothing is left in the folder, and an older file of the name stays."""
    path = tmp_path / "u.safetensors"
    write_update(path, {NORM: ONE}, version="a")
    before = path.read_bytes()
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ({NORM: some(3)}, {"after": None}, "pass after="),
        ({NORM: some(3, 3, values=torch.ones(2))}, {}, rf"{NORM}: .* got 3 twice"),
        ({NORM: some(16)}, {}, "from 0 to 15, got 16"),
        ([(NORM, ONE), (NORM, ONE)], {}, "comes twice"),
        ([(NORM, ONE), (NORM, some(3))], {}, "comes twice"),
        ([(NORM, some(3)), (NORM, some(4))], {}, "comes twice"),
        ([(NORM, some(3)), (f"steps/{NORM}", ONE)], {}, "comes twice"),
        ({5: ONE}, {}, "name of a tensor should be text, got 5"),
        ({"__metadata__": ONE}, {}, "__metadata__ cannot be the name of a tensor"),
        ({"a\udc80": ONE}, {}, "cannot be the name of a tensor"),
        ({"a" * 1025: ONE}, {}, "cannot be the name of a tensor"),
        ({"a" * 1018: some(3)}, {}, "cannot be the name of a tensor"),  # values/aaa...
        ({NORM: torch.ones(3, device="meta")}, {}, f"{NORM} cannot be written"),
        ({NORM: torch.eye(3).to_sparse()}, {}, f"{NORM} cannot be written"),
        ({NORM: ONE}, {"version": 3}, "should be text"),
        ({NORM: ONE * float("nan")}, {}, f"{NORM} has a NaN"),
        ({NORM: some(3, values=ONE * float("nan"))}, {}, f"values/{NORM} has a NaN"),
    ]
    for weights, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            write_update(path, weights, **{"version": "b", "after": "a"} | options)
    with pytest.raises(ValueError, match=r"end with \.safetensors"):
        write_update(tmp_path / "u", {NORM: ONE}, version="b")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (before, [path])
