"""Layouts of state dicts: what each rank holds, by torch's own tensors, and what is refused."""

from __future__ import annotations

import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.layout import Layout, layout_of_state_dict, parse_layout

SCRIPT = Path(__file__).with_name("state_dicts.py")
SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that gives the notes of each rank of a number of processes."""

    def of(processes: int) -> list[dict[str, Any]]:
        def run(directory: Path) -> None:
            log = directory / "log"
            code = SUPPORT["run_program"](SCRIPT, processes, directory, log=log)
            assert code == 0, log.read_text()

        name = f"state_dicts{processes}"
        directory = SUPPORT["fill_once"](tmp_path_factory.getbasetemp(), name, run)
        return [torch.load(directory / f"{rank}.pt") for rank in range(processes)]

    return of


def part_of(whole: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    return whole[tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))]


def demand_boxes(layout: Layout, rank: int, note: dict[str, Any]) -> None:
    """Fail unless the boxes of a rank are what it holds of each whole tensor, bit for bit."""
    held = {name: each for name, each in note["held"].items() if each.numel()}
    boxes = {entry.parameter: boxes for _, entry, boxes in layout.held_on(rank)}
    assert boxes.keys() == held.keys()
    for path, (box,) in boxes.items():
        part = part_of(note["full"][path], box.start, box.size)
        assert part.shape == held[path].shape == layout.shape_of(path, rank)
        assert part.dtype == held[path].dtype == getattr(torch, layout.parameters[path].dtype)
        assert torch.equal(part, held[path]), (path, rank)


@pytest.mark.parametrize("trainers", [2, 4])
def test_boxes_of_a_state_dict_arrive(notes: Any, trainers: int) -> None:
    """FSDP2, HSDP, FSDP2 on TP, stages, any placements: all get the layout, and it is true."""
    script = runpy.run_path(str(SCRIPT))
    *ranks, receiver = notes(trainers + 1)
    for case in script["CASES"][trainers]:
        assert len({note[case]["layout"] for note in ranks}) == 1
        layout = parse_layout(ranks[0][case]["layout"])
        assert layout.ranks == trainers
        full: dict[str, torch.Tensor] = {}
        for rank, note in enumerate(ranks):
            demand_boxes(layout, rank, note[case])
            full |= note[case]["full"]
        assert sorted(full) == sorted(layout.parameters)
        expected = {name: full[entry.parameter] for name, entry, _ in layout.names()}
        torch.testing.assert_close(receiver[case], expected, rtol=0, atol=0)
    orders = "fsdp", "fsdp in another order", "hsdp", "hsdp in another order"
    for case in receiver.keys() & orders:
        trained = script["trained"]().state_dict()
        expected = {f"model.layers.{name}": each for name, each in trained.items()}
        torch.testing.assert_close(receiver[case], expected, rtol=0, atol=0)
    assert "w.plain" in receiver["placed"]


def test_any_placements_on_three_axes(notes: Any) -> None:
    """Also those where an axis divides what axes to its right have divided before."""
    (every,) = notes(1)
    assert len(every) == 12 * (3 * 27 + 5)
    for note, (boxes, held, numbered) in every.items():
        assert len(boxes) == bool(held.numel()), note
        for first, second, rows, columns in boxes:
            assert torch.equal(part_of(numbered, (first, second), (rows, columns)), held), note


REFUSED = {
    "partial": r"rank 0: .*w has the placements \(Partial\(sum\),\), .* leaves this rank no box",
    "strided": r"rank 0: .*w has the placements .*sf=3.* leaves this rank no box.*redistribute it",
    "divided otherwise": r"rank 0: .*w: of shape \[4, 4\] and \(Shard\(dim=0\),\) this rank should "
    r"hold \[2, 4\], and has \[1, 4\]: .*layout_of_shards",
    "no tensor": r"rank 1: .*extra is a bytes, expected .*leave it out of the state dict",
    "a subclass": r"rank 0: .*w is a Wrapped, expected a DTensor of plain tensors or a plain",
    "shards of a subclass": "rank 0: .*w is a Wrapped of ranks, expected a DTensor of plain",
    "no name": r"rank 0: .*names gives None for v, expected its name in the checkpoint: add it",
    "a function": "rank 1: KeyError: 'w'",
    "two names": "w and v are both weight in the checkpoint: leave one of them out",
    "two names on two ranks": "w and v are both weight in the checkpoint: leave one of them out",
    "one name for two": r"w is w\.1 with shape \[4, 4\] in float32 on rank 1, and w\.0 with shape",
    "two shapes": r"w is w with shape \[4, 4\] in float32 on rank 1, and w with shape \[4, 3\]",
    "two dtypes": r"in bfloat16 on rank 1, and w with shape \[4, 4\] in float32",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_rank_refuses_all_refuse(notes: Any, case: str) -> None:
    """The error names the tensor, the rank, what is expected, and what to do."""
    for note in notes(3)[:2]:
        assert re.search(REFUSED[case], note[case]), note[case]


def test_one_process_needs_no_group() -> None:
    """A trainer of one process meets an engine in a group of both, and may have no other."""
    tensors = {"a.weight": torch.zeros(3, 2), "b": torch.tensor(1, dtype=torch.int64)}
    layout = layout_of_state_dict(tensors)
    assert layout.ranks == 1
    assert [(name, entry.shape, entry.dtype) for name, entry, _ in layout.names()] == [
        ("a.weight", (3, 2), "float32"),
        ("b", (), "int64"),
    ]
