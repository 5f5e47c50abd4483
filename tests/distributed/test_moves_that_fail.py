"""Drawn faults of weights that move: all other ranks name who failed, and nothing mixed is served.

``make laws`` sets ``AT_LENGTH``, and tries 100 draws. ``DRAWS=3,17`` are those alone.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("moves_that_fail.py")
INTERRUPTED = SCRIPT.with_name("interrupted_move.py")
FAILING: Any = runpy.run_path(str(SCRIPT))
SUPPORT, KINDS = FAILING["SUPPORT"], FAILING["KINDS"]
FEW = [1, 2, 10, 12, 15, 18, 46, 85]  # other kinds; the last two are interrupted, on each side
SOON = 30.0  # seconds in which others are told on a busy machine, where a message may take 60
NAMED = "has NaN", "lacks it", "has another shape", "has another dtype"  # with the tensor
OWN = {  # what the rank itself raises, where it is left
    "fails": "ValueError",
    "is interrupted": "KeyboardInterrupt",
    "lacks it": "ValueError",
    "has another shape": "ValueError",
    "has another dtype": "ValueError",
}


def chosen() -> list[int]:
    if given := os.environ.get("DRAWS"):
        return [int(each) for each in given.split(",")]
    return list(range(100)) if os.environ.get("AT_LENGTH") else FEW


def blames(rank: int, note: dict[str, Any]) -> bool:
    """Return whether what was raised says of a rank that it failed, and not only mentions it."""
    how = "failed|ended|had not finished|sent (or took )?nothing|sends weights|hangs|stopped"
    return bool(re.search(rf"rank {rank} (of \d+ )?({how})", note["said"])) or (
        rank in note["ranks"] and "rank" in note["said"]
    )


def verdict(directory: Path, draw: Any) -> str:
    """Return what is wrong with the ranks of a draw, or ``""``."""
    paths = {rank: directory / f"rank{rank}.json" for rank in range(draw.source + draw.target)}
    is_left = draw.fault not in ("is killed", "is stopped", "hangs")
    if missing := [r for r, path in paths.items() if not path.exists() and r != draw.rank]:
        return f"hung: ranks {missing}"
    notes = {r: json.loads(path.read_text()) for r, path in paths.items() if path.exists()}
    if (draw.rank in notes) != is_left:
        return "the rank itself goes on"
    own = notes.get(draw.rank, {})
    if (kind := OWN.get(draw.fault)) and own["kind"] != kind:
        return f"the rank itself raised {own['kind']}"
    if draw.fault == "is interrupted":
        begin = float((directory / "interrupted").read_text())
        if own["at"] - begin > SOON or not own["waited"]:
            return f"interrupted {own['at'] - begin:.1f} s later, or while it did not wait"
    others = {rank: note for rank, note in notes.items() if rank != draw.rank}
    unsent = json.loads(path.read_text()) if (path := directory / "met.json").exists() else []
    if draw.alone:  # some may have sent or taken everything, or name one that left for the fault
        sides = [note for r, note in others.items() if (r < draw.source) != draw.is_trainer]
        if not any(blames(draw.rank, note) for note in sides if note["said"]):
            return "not named by any rank of the other side"
    for rank, note in () if draw.alone else others.items():
        if not note["said"]:
            return f"rank {rank} did not raise"
        if draw.fault != "has NaN" and not blames(draw.rank, note):
            return f"not named by rank {rank}"
        if draw.fault in NAMED and unsent[0] not in note["said"]:
            return f"tensor not named by rank {rank}: {unsent[0]}"
        text = note["said"] + note["causes"]
        if draw.is_trainer and not is_left and not any(name in text for name in unsent):
            return f"tensor not named by rank {rank}: none from {unsent[0]} on"
    engine = {rank: note for rank, note in notes.items() if "holds" in note}
    if mixed := [r for r, note in engine.items() if not note["holds"] and "refuses" not in note]:
        return f"mixed: ranks {mixed}"
    if is_left:
        for rank in paths:
            path = directory / f"again{rank}"
            if not path.exists() or path.read_text() != "True":
                return f"the next round failed: rank {rank}"
    return ""


def test_drawn_faults_are_named(tmp_path: Path) -> None:
    """All other ranks name the rank, and some tensors; they are whole, or refuse; they go on."""
    seeds, log = chosen(), tmp_path / "log"
    variables = FAILING["MOVES"]["write_configurations"](tmp_path / "configurations.json")
    options = {"log": log, "limit": 3000, "environment": variables}
    code = SUPPORT["run_program"](SCRIPT, tmp_path, *seeds, **options)
    assert code == 0, log.read_text()
    table: dict[tuple[str, str], Counter[str]] = {}
    wrong = []
    for seed in seeds:
        draw = FAILING["drawn"](seed)
        said = verdict(tmp_path / str(seed), draw)
        side = "trainer" if draw.is_trainer else "engine"
        table.setdefault((draw.fault, side), Counter())[said.partition(":")[0] or "named"] += 1
        if said:
            wrong.append(f"{seed}: {said}: {draw}")
    for (fault, side), counts in sorted(table.items()):
        sys.stdout.write(f"{fault:18} {side:8} {dict(counts)}\n")
    assert not wrong, "\n".join(wrong)


def test_an_interrupt_ends_a_program_that_waits_for_weights(tmp_path: Path) -> None:
    """On each side, at once, and as an interrupt does: a thread left in gloo would abort it."""
    group_of = runpy.run_path(str(INTERRUPTED))["group_of"]
    stores = [str(tmp_path / f"store{rank}") for rank in range(2)]
    started = [
        subprocess.Popen([sys.executable, str(INTERRUPTED), store, str(rank)], stderr=-1)
        for rank, store in enumerate(stores)
    ]
    groups = [group_of(store, 1 - rank) for rank, store in enumerate(stores)]
    for each in started:
        _, said = each.communicate(timeout=SUPPORT["LIMIT"])
        assert (each.returncode, said.splitlines()[-1]) == (-signal.SIGINT, b"KeyboardInterrupt")
    assert groups  # which were silent, and open
