"""Weights that four ranks of a trainer send to four of an engine, of many families, in 8 processes.

Without ``AT_LENGTH`` each way of sharing is tried, of some families.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("moves_together.py")
TOGETHER: Any = runpy.run_path(str(SCRIPT))
SUPPORT = TOGETHER["SUPPORT"]
RANKS, HEAD = TOGETHER["RANKS"], TOGETHER["HEAD"]
CASES = [*map(str, TOGETHER["cases"]())]
FRAMES = 8 * 64  # bytes that gloo adds to a head and a message: 192, 432 if both ranks wait
MORE = 1 << 20  # bytes of memory that Python and gloo take beside tensors


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    def run(directory: Path) -> None:
        log = directory / "log"
        variables = TOGETHER["write_configurations"](directory / "configurations.json")
        code = SUPPORT["run_program"](SCRIPT, directory, log=log, environment=variables)
        assert code == 0, log.read_text()

    directory = SUPPORT["fill_once"](tmp_path_factory.getbasetemp(), "moves", run)
    return [json.loads((directory / f"rank{at}.json").read_text()) for at in range(2 * RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_each_rank_has_the_bits_of_a_load_in_the_same_memory(
    notes: list[dict[str, Any]], case: str
) -> None:
    """Whoever had the weights, an update leaves what loading them under the same rank does."""
    for note in (each[case] for each in notes[RANKS:]):
        assert not note["wrong"]
        assert not note["moved"]
        # Tables of positions and experts are as before, and padding.
        assert note["unlike"] > note["parameters"] / 2


@pytest.mark.parametrize("case", CASES)
def test_the_transport_is_given_what_the_plan_says(notes: list[dict[str, Any]], case: str) -> None:
    """A rank gets the bytes that a load would read, and the kernel sends those and short heads."""
    for note in (each[case] for each in notes[RANKS:]):
        assert note["comes"] == note["kept"]
    for rank, note in enumerate(each[case] for each in notes):
        planned = note.get("planned", {})
        assert note.get("given", {}) == planned
        for to, sent in note["kernel"].items():
            number = note.get("messages", {}).get(str(int(to) - RANKS), 0)
            more = sent - planned.get(str(int(to) - RANKS), 0) - HEAD * number
            if rank < RANKS <= int(to):
                assert 0 <= more <= FRAMES * number
            elif (rank < RANKS) == (int(to) < RANKS):
                assert sent == 0


def test_a_batch_takes_the_memory_of_what_moves(notes: list[dict[str, Any]]) -> None:
    """A sender has its messages and one box more, a receiver boxes of a batch and one message."""
    for rank, note in enumerate(each["memory"] for each in notes):
        one = note["batch"] // (2 * RANKS if rank < RANKS else RANKS)  # two tensors are a batch
        assert note["batch"] < note["peak"] <= note["batch"] + one + MORE
        assert note["peak"] < note["tensor"]
