"""Trainers that die, stop, are late, doubled or wrong in the middle of an update."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SUPPORT = runpy.run_path(str(HERE.parent / "support.py"))
SAID = {
    "good": "it raised nothing",
    "sends elements": "it raised nothing",
    "dies": "WeightReadError: .*(: rank 0 of 2 ended|ended, left or hangs)",
    "stops": "WeightReadError: .*(: rank 0 of 2 ended, or hung longer|ended, left or hangs)",
    "raises": "WeightReadError: the sender of the weights failed: .*ValueError: of the trainer",
    "has NaN": r"WeightReadError: .*\.weight has a NaN",
    "has another shape": r"MisshapenWeightError: .*\.weight: expected shape",
    "has another name": r"UnexpectedWeightError: .*another\.",
    "is another version": "(expects the weights 'step-|another version than 'step-)",
    "is not named": "rank 0 sends some without a weight_version",
    "is two": r"of 3 ranks 2 send: \[0, 1\]",
    "sends twice": "WeightReadError: rank 0 sends weights of another version than .step-",
    "has another plan": "WeightReadError: rank 0 sends weights by another plan",
}
WHOLE = "good", "sends elements", "sends twice"  # rounds that bring all weights


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def run(directory: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "scenarios.py"), str(directory)]
        subprocess.run(
            [*command, "updates_together.py"], check=True, timeout=SUPPORT["LIMIT"], env=environment
        )

    directory: Path = SUPPORT["fill_once"](tmp_path_factory.getbasetemp(), "updates", run)
    return directory


@pytest.mark.parametrize(
    ("name", "ranks"), [("streams_that_fail", 1), ("boxes_that_fail", 2)], ids=["streams", "boxes"]
)
def test_what_an_engine_serves_is_whole(directory: Path, name: str, ranks: int) -> None:
    """A round that fails leaves the tokens and version of the last one, or no tokens, and says why.

    The next round works. Tokens are compared with those of an engine of one rank.
    """
    module: Any = runpy.run_path(str(HERE / "updates_together.py"))
    faults = module["STREAMED" if name.startswith("streams") else "BOXES"]
    folder = directory / name
    notes = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    with module["engine"](folder) as alone:
        expected, version = module["tokens"](alone), "0"
        for turn, fault in enumerate(faults):
            outcomes = [note["returned"][turn] for note in notes]
            if fault in WHOLE:
                alone.update_weights(module["weights_of"](folder, turn))
                expected, version = module["tokens"](alone), f"step-{turn}"
            for outcome in outcomes:
                assert outcome["fault"] == fault
                assert outcome["version"] == version
                assert outcome["tokens"] in ([], [expected]), outcome
                refuses = outcome["refused"].startswith("ModelNotReadyError")
                assert refuses == (not outcome["tokens"]), outcome
            assert len({str(outcome["tokens"]) for outcome in outcomes}) == 1
            whole = "\n".join(outcome["said"] for outcome in outcomes)
            assert re.search(SAID[fault], whole, re.DOTALL), outcomes
            if fault in WHOLE:
                assert outcomes[0]["tokens"]


def test_boxes_are_gathered_and_relayed(directory: Path) -> None:
    """Each rank of a host gets its columns, through one rank of its host and one of the other's."""
    folder = directory / "boxes_by_hosts"
    notes = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(8)]
    (gathered, sent, relayed), *_ = (note["returned"] for note in notes[:4])
    assert {(one // 2, other // 2) for one, other in gathered} == {(0, 0), (1, 1)}
    assert {(one // 2, other // 2) for one, other in sent} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {(one // 2, other // 2) for one, other in relayed} == {(0, 0), (1, 1)}
    for note in notes[4:]:
        assert note["returned"] == dict.fromkeys(("w0", "w1", "w2", "w3"), True)
