"""An engine takes a trainer's updates from files, on one rank and on two."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_module import LLM
from vllm_module.errors import CheckpointFormatError, WeightLoadError, WeightReadError
from vllm_module.weights import find_changes, open_update, write_update
from vllm_module.weights.changes import Changes

servers: Any = runpy.run_path(str(Path(__file__).parents[1] / "weights" / "stores_server.py"))
ELEMENTS = runpy.run_path(str(Path(__file__).with_name("test_changes.py")))
llm = ELEMENTS["llm"]  # a fixture: an engine of one rank, and of two
load, tokens = ELEMENTS["load"], ELEMENTS["tokens"]
NORM, HEAD = "model.norm.weight", "lm_head.weight"
SPARSE = (
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.embed_tokens.weight",
    NORM,
)


def take(llm: LLM, path: Path | str, **options: Any) -> None:
    with open_update(path) as update:
        llm.update_weights(update, **options)


def stepped(old: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return weights of which one in fifty has changed, and all of one tensor."""
    generator = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name in SPARSE:
        flat = new[name].view(-1)
        at = torch.randperm(flat.numel(), generator=generator)[: max(1, flat.numel() // 50)]
        flat[at] += 1.5
    new[HEAD] = new[HEAD] * 1.25 + 0.1
    return new


def sent(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: find_changes(old[name], new[name]) for name in SPARSE} | {HEAD: new[HEAD]}


def saved(folder: Path, new: dict[str, torch.Tensor], path: Path) -> Path:
    """Write a checkpoint by safetensors' own writer."""
    path.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    save_file(new, path / "model.safetensors", {"format": "pt"})
    return path


def test_steps_of_a_trainer(folder: Path, llm: LLM, tmp_path: Path) -> None:
    """Each step gives the tokens and digests of a fresh load; one out of order is refused."""
    llm.reload_weights()
    weights = [load_file(folder / "model.safetensors")]
    take(llm, folder, weight_version="step-0")  # a checkpoint is an update of all
    for step in (1, 2, 3):
        weights.append(stepped(weights[-1], step))
        write_update(
            tmp_path / f"{step}.safetensors",
            sent(*weights[-2:]).items(),
            version=f"step-{step}",
            after=f"step-{step - 1}",
            digests=step == 2,
        )
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        f"{step}.safetensors" for step in (1, 2, 3)
    ]
    seen = [tokens(llm)]
    for step in (1, 2):
        late = tmp_path / f"{step + 1}.safetensors"
        message = rf"{late.name} changes the weights 'step-{step}', and the engine has 'step-"
        with pytest.raises(WeightReadError, match=message):
            take(llm, late)
        take(llm, tmp_path / f"{step}.safetensors")
        assert llm.weight_version == f"step-{step}"
        with load(saved(folder, weights[step], tmp_path / f"whole-{step}")) as fresh:
            seen.append(tokens(fresh))
            assert tokens(llm) == seen[-1] != seen[-2]
            assert llm.digest().tensors == fresh.digest().tensors
    for path in (tmp_path / "2.safetensors", tmp_path / "1.safetensors"):  # twice, and late
        with pytest.raises(WeightReadError, match="and the engine has 'step-2'"):
            take(llm, path)
    with pytest.raises(WeightReadError, match="has the weights 'step-3', and 'mine' were asked"):
        take(llm, tmp_path / "3.safetensors", weight_version="mine")
    assert tokens(llm) == seen[-1]


def test_a_web_server(folder: Path, llm: LLM, tmp_path: Path) -> None:
    """By ranges of one file, without asking for files of a model."""
    llm.reload_weights()
    old = load_file(folder / "model.safetensors")
    new = stepped(old, 9)
    write_update(tmp_path / "a.safetensors", sent(old, new), version="a", after=llm.weight_version)
    with servers["serving"](tmp_path) as server:
        take(llm, f"{server.url}/a.safetensors")
        assert {path for path, _ in server.requests} == {"/a.safetensors"}
        with pytest.raises(CheckpointFormatError, match=r"b\.safetensors"):
            open_update(f"{server.url}/b.safetensors")
    with load(saved(folder, new, tmp_path / "whole")) as fresh:
        assert tokens(llm) == tokens(fresh)
        assert llm.digest().tensors == fresh.digest().tensors


def edited(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]) -> None:
    """Write the file again with another description or other tensors."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described = json.loads(file.metadata()["update"])
    found = change(described, tensors)
    text = found if isinstance(found, str) else json.dumps(described)
    save_file(tensors, path, {"format": "pt", "update": text})


STEPS, VALUES = f"steps/{NORM}", f"values/{NORM}"
DAMAGES: dict[str, tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], str]] = {
    "no steps": (lambda d, t: t.pop(STEPS), f"needs the tensor {STEPS}"),
    "no values": (lambda d, t: t.pop(VALUES), f"needs the tensor {VALUES}"),
    "another number": (
        lambda d, t: t.update({VALUES: torch.ones(3)}),
        rf"(?s){NORM}: .*as many values",
    ),
    "floating steps": (
        lambda d, t: t.update({STEPS: t[STEPS].float()}),
        rf"{NORM} has steps of torch\.float32",
    ),
    "steps of a table": (
        lambda d, t: t.update({STEPS: t[STEPS][None], VALUES: t[VALUES][None]}),
        rf"{NORM}: expected indices of int64 \[n\]",
    ),
    "out of range": (
        lambda d, t: t.update({STEPS: torch.tensor([3, 200], dtype=torch.uint8)}),
        rf"{NORM}: expected indices from 0 to 15, got 203",
    ),
    "steps that overflow": (
        lambda d, t: t.update({STEPS: torch.tensor([1, 2**63 - 1])}),
        rf"{NORM}: expected indices from 0 to 15, got -",
    ),
    "twice": (
        lambda d, t: t.update({STEPS: torch.tensor([3, 0], dtype=torch.uint8)}),
        rf"{NORM}: .* got 3 twice",
    ),
    "another shape": (
        lambda d, t: d["shapes"].update({NORM: [4, 5]}),
        rf"(?s){NORM}.*expected shape \[16\], got \[4, 5\]",
    ),
    "no shape": (lambda d, t: d["shapes"].update({NORM: "16"}), "should have version and after"),
    "negative": (lambda d, t: d["shapes"].update({NORM: [-16]}), "should have version and after"),
    "another dtype": (
        lambda d, t: t.update({VALUES: t[VALUES].half()}),
        rf"(?s){NORM}.*expected elements of the dtype",
    ),
    "NaN": (lambda d, t: t[VALUES].fill_(float("nan")), f"{NORM} has a NaN"),
    "whole too": (lambda d, t: t.update({NORM: torch.ones(16)}), f"{NORM} is there whole and"),
    "unknown": (lambda d, t: t.update({"steps/x": torch.ones(2)}), "(?s)steps/x"),
    "unknown elements": (
        lambda d, t: (
            d["shapes"].update({"x": [16]}),
            t.update({"steps/x": t[STEPS].clone(), "values/x": t[VALUES].clone()}),
        ),
        r"(?s)\bx\b",
    ),
    "no version": (lambda d, t: d.update(version=None), "should have version and after"),
    "no after": (lambda d, t: d.update(after=None), "should have version and after"),
    "another after": (lambda d, t: d.update(after="other"), "changes the weights 'other'"),
    "an entry of later": (lambda d, t: d.update(scale=2), "should have version and after"),
    "two versions": (
        lambda d, t: json.dumps(d).replace('"after"', '"version": "b", "after"'),
        "version.* twice",
    ),
    "not JSON": (lambda d, t: "{", "its update"),
    "digests of others": (lambda d, t: d.update(digests={NORM: "0" * 32}), "its digests should"),
    "digests of no digits": (lambda d, t: d.update(digests={NORM: 3}), "should have version and"),
}


@pytest.fixture(scope="module")
def held(llm: LLM) -> tuple[Any, Any]:
    """Return the tokens and digests of the checkpoint."""
    llm.reload_weights()
    return tokens(llm), llm.digest().tensors


@pytest.fixture
def written(llm: LLM, held: tuple[Any, Any], tmp_path: Path) -> Path:
    path = tmp_path / "u.safetensors"
    elements = Changes(torch.tensor([3, 9]), torch.tensor([1.5, 2.5]), (16,))
    write_update(path, {NORM: elements, HEAD: torch.ones(60, 16)}, version="b", after="0")
    if llm.digest().tensors != held[1]:
        llm.reload_weights()
    llm.engine.weight_version = "0"
    return path


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_named(llm: LLM, held: tuple[Any, Any], written: Path, case: str) -> None:
    """Nothing is written, and the engine goes on."""
    damage, message = DAMAGES[case]
    edited(written, damage)
    with pytest.raises(WeightLoadError, match=message):
        take(llm, written)
    assert (tokens(llm), llm.digest().tensors) == held
    assert llm.weight_version == "0"


def test_a_torn_file(llm: LLM, written: Path) -> None:
    """A file without its end or its middle is refused when it is opened."""
    data = written.read_bytes()
    for torn in (data[:-1], data[: len(data) // 2], data[:20], b"", data + b"\0"):
        written.write_bytes(torn)
        with pytest.raises(CheckpointFormatError, match=r"u\.safetensors"):
            take(llm, written)


def test_two_updates_in_a_folder(llm: LLM, written: Path) -> None:
    write_update(written.with_name("v.safetensors"), {"other": torch.ones(1)}, version="c")
    with pytest.raises(CheckpointFormatError, match="an update is one file, and here are 2"):
        open_update(written.parent)


def test_a_digest_finds_a_bit(llm: LLM, folder: Path, tmp_path: Path) -> None:
    """In elements before anything is written; in a whole tensor, and then nothing is served."""
    llm.reload_weights()
    llm.engine.weight_version = "0"
    before = tokens(llm)
    path = tmp_path / "u.safetensors"
    elements = Changes(torch.tensor([3, 9]), torch.tensor([1.5, 2.5]), (16,))
    whole = torch.full((60, 16), 3.25)
    write_update(path, {NORM: elements, HEAD: whole}, version="b", after="0", digests=True)
    good = path.read_bytes()
    marks = {
        "elements": torch.tensor([1.5, 2.5]).numpy().tobytes(),
        "whole": whole.numpy().tobytes()[:64],
    }
    for what, mark in marks.items():
        at = good.index(mark)
        path.write_bytes(good[:at] + bytes([mark[0] ^ 1]) + good[at + 1 :])
        with pytest.raises(WeightReadError, match=f"values/{NORM}" if what == "elements" else HEAD):
            take(llm, path)
        if what == "elements":
            assert tokens(llm) == before
    with pytest.raises(RuntimeError, match=HEAD):
        tokens(llm)
    take(llm, folder)  # a whole checkpoint repairs it
    assert tokens(llm) == before
