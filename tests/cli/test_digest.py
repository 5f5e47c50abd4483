"""``vllm-module digest``: equal for equal tensors, in whatever files they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_module.kernels.digest.digest import digest_box
from vllm_module.weights import digests
from vllm_module.weights.handle import TensorHandle

Run = Callable[..., Any]


def test_digests_are_of_the_tensors_and_not_of_their_files(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    """Files joined to one, in another order and in another format, have the same digests."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    found = run("digest", folder, "--json").json
    listed = {each["name"]: each["digest"] for each in found["tensors"]}
    assert listed == {name: digest_box(tensor).hex for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "one.safetensors")
    torch.save(dict(reversed(tensors.items())), tmp_path / "pytorch_model.bin")
    for file in ("one.safetensors", "pytorch_model.bin"):
        other = run("digest", tmp_path / file, "--json").json
        assert (other["digest"], other["tensors"]) == (found["digest"], found["tensors"])
    text = run("digest", folder).out
    assert f"\n{found['digest']}  all tensors\n" in text

    name, last = next(iter(tensors)), list(tensors)[-1]
    changed = {
        "a value": tensors | {name: tensors[name] + 1},
        "a name": {f"{key}x" if key == last else key: value for key, value in tensors.items()},
        "a missing tensor": {key: value for key, value in tensors.items() if key != last},
    }
    results = {found["digest"]}
    for each in changed.values():
        save_file(each, tmp_path / "one.safetensors")
        results.add(run("digest", tmp_path / "one.safetensors", "--json").json["digest"])
    assert len(results) == 4


@pytest.mark.parametrize("piece", [1, 100, 1000])
def test_a_tensor_is_read_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece is larger than allowed unless it is one element, and the digest is the whole's."""
    read: list[int] = []

    class Counted(TensorHandle):
        def narrow(self, dim: int, start: int, length: int) -> Counted:
            return Counted(self.name, self.tensor.narrow(dim, start, length))

        def read(self) -> torch.Tensor:
            read.append(self.tensor.nbytes)
            return self.tensor

    monkeypatch.setattr(digests, "_PIECE", piece)
    for shape in [(), (5,), (3, 130), (1, 4, 7, 9)]:
        tensor = torch.randn(shape)
        read.clear()
        assert digests.digest_weight(Counted("a", tensor)) == digest_box(tensor)
        assert digests.digest_weight(tensor) == digest_box(tensor)
        assert sum(read) == tensor.nbytes
        assert max(read) <= max(piece, 4)


def test_dummy_weights_have_no_digest(run: Run, folder: Path) -> None:
    """Values that are made up are refused."""
    result = run("digest", folder, "--load-format", "dummy")
    assert result.code == 2
    assert "dummy weights are not stored" in result.err


def test_a_sharded_state_keeps_the_digests_of_its_ranks(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    """Those of rank 0 alone are not written: a load of all ranks would refuse them."""
    out = tmp_path / "out"
    assert run("shard", folder, "--tp", 2, "--out", out).code == 0
    result = run("digest", out, "--out", out / "digests.json")
    assert (result.code, result.out) == (1, "")
    assert "has a part for each rank" in " ".join(result.err.split())
    assert run("load", out, "--tp", 2, "--digests").code == 0


def test_files_are_compared_with_the_digests_beside_them(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    """What ``--out`` writes is found, compared by name, and by a load; convert writes it, too."""
    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(folder, copy)
    assert run("digest", copy, "--out", copy / "digests.json", "--json").json["different"] is None
    assert run("digest", copy, "--json").json["different"] == []
    of_all = run("digest", copy, "--json").json
    found = run("load", copy, "--digests", "--tp", 2, "--json").json["report"]["digests"]
    assert found == {each["name"]: each["digest"] for each in of_all["tensors"]}
    assert of_all["digest"] in run("load", copy, "--digests", "--dtype", "bfloat16").out
    assert run("convert", copy, "--quantization", "fp8", "--out", out).code == 0
    assert run("digest", out, "--json").json["different"] == []
    assert run("load", out, "--digests").code == 0

    path = next(copy.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("proj.weight"))
    tensors[name][2] = tensors[name][2].roll(1)
    save_file(tensors, path)
    result = run("digest", copy, "--json")
    assert (result.code, result.json["different"]) == (1, [name])
    assert f"has other digests of {name}" in " ".join(result.err.split())
    assert run("load", copy).code == 0
    result = run("load", copy, "--digests", "--tp", 2)
    assert result.code == 1
    assert f"{name}: ranks 0, 1 read values whose digests" in " ".join(result.err.split())
    # The change was meant.
    assert run("digest", copy, "--out", copy / "digests.json", "--json").json["different"] is None
    assert run("digest", copy, "--json").json["different"] == []


def test_tensors_that_only_one_side_has_are_named(run: Run, folder: Path, tmp_path: Path) -> None:
    """A tensor that is gone, one that is new, and both at once have no equal digests."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    out, (gone, *_) = tmp_path / "digests.json", tensors
    less = {name: each for name, each in tensors.items() if name != gone}
    for stored, now, different in (
        (tensors, less, [gone]),
        (less, tensors, [gone]),
        (tensors, less | {"new": tensors[gone]}, sorted((gone, "new"))),
        (less, less | {"new": torch.zeros(0)}, ["new"]),
        (less, less, []),
    ):
        out.unlink(missing_ok=True)
        save_file(stored, tmp_path / "model.safetensors")
        assert run("digest", tmp_path, "--out", out).code == 0
        save_file(now, tmp_path / "model.safetensors")
        result = run("digest", tmp_path, "--json")
        assert (result.code, result.json["different"]) == (int(bool(different)), different)
        for name in different:
            assert name in " ".join(result.err.split())


@pytest.mark.parametrize("way", ["by its path", "through a link", "from its folder"])
def test_digests_that_are_to_be_replaced_are_not_compared(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """However --out names the digests.json of the weights, what was in it is no reason to fail."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (tmp_path / "link").symlink_to(copy)
    assert run("digest", copy, "--out", copy / "digests.json").code == 0
    right = (copy / "digests.json").read_bytes()
    path = next(copy.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 1}, path)
    assert run("digest", copy).code == 1
    assert run("digest", copy, "--out", tmp_path / "elsewhere.json").code == 1
    monkeypatch.chdir(copy)
    places = {
        "by its path": copy / "digests.json",
        "through a link": tmp_path / "link" / "digests.json",
        "from its folder": Path("digests.json"),
    }
    result = run("digest", copy, "--out", places[way])
    assert result.code == 0, result.err
    assert (copy / "digests.json").read_bytes() != right
    assert run("digest", copy).code == 0
