from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Run = Callable[..., Any]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_each_rank_reads_what_was_planned(run: Run, folder: Path, tp_size: int) -> None:
    """Bytes read are the plan's, rank by rank, in whatever dtype the model is."""
    plan = run("plan", folder, "--tp", tp_size, "--json").json
    for dtype in ("auto", "float32"):
        result = run("load", folder, "--tp", tp_size, "--dtype", dtype, "--device", "cpu", "--json")
        loaded = result.json
        assert [rank["bytes_read"] for rank in loaded["ranks"]] == [
            rank["bytes_read"] for rank in plan["ranks"]
        ]
    assert loaded["dtype"] == "float32"
    assert loaded["simulated"] is True
    assert loaded["tensor_parallel_size"] == tp_size
    for rank in loaded["ranks"]:
        assert rank["seconds"] > 0
        assert rank["peak_resident_bytes"] >= rank["resident_before_bytes"] > 50_000_000
        assert rank["peak_cuda_bytes"] is None
    names = [name for sources in loaded["report"]["loaded"].values() for name in sources]
    assert len(names) == len(set(names)) == 36


def test_the_report_is_for_people(run: Run, folder: Path) -> None:
    """What was loaded, and a line for each rank, with units."""
    result = run("load", folder, "--tp", 2)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].startswith("ranks loaded in this process, one after another")
    assert lines[1] == "loaded 36 tensors to 27 parameters"
    assert lines[2].split() == ["rank", "read", "time", "rate", "peak", "resident"]
    assert [line.split()[0] for line in lines[3:]] == ["0", "1"]
    assert result.err == ""  # the bar is for terminals


def test_one_rank_alone(run: Run, folder: Path) -> None:
    """--rank loads that one; one that is not there is wrong usage."""
    every = run("load", folder, "--tp", 2, "--json").json
    alone = run("load", folder, "--tp", 2, "--rank", 1, "--json").json
    assert [rank["rank"] for rank in alone["ranks"]] == [1]
    assert alone["ranks"][0]["bytes_read"] == every["ranks"][1]["bytes_read"]
    result = run("load", folder, "--tp", 2, "--rank", 2)
    assert (result.code, "rank 2: 0 to 1 are there" in result.err) == (2, True)


def test_a_bar_is_drawn_on_terminals(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has bytes and rate, and standard output stays clean."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take standard error for a terminal
    result = run("load", folder, "--json")
    assert result.json["ranks"]
    assert "rank 0" in result.err
    assert "kB" in result.err


def test_under_torchrun_each_process_loads_its_rank(run: Run, folder: Path, tmp_path: Path) -> None:
    """The first rank prints for all; a refusal is one message, though every rank has it."""
    torchrun = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))["torchrun"]
    (tmp_path / "folder").write_text(str(folder))
    torchrun(2, Path(__file__).with_name("under_torchrun.py"), tmp_path)
    expected = run("load", folder, "--tp", 2, "--json").json["ranks"]
    first, other = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert [result["code"] for result in first.values()] == [0, 0, 1, 2, 0]
    # What an engine refuses of a prompt is between the first rank and who asked.
    assert [result["code"] for result in other.values()] == [0, 0, 0, 2, 0]
    assert {result["out"] + result["err"] for result in other.values()} == {""}
    loaded = json.loads(first["load"]["out"])
    assert loaded["simulated"] is False
    assert [r["bytes_read"] for r in loaded["ranks"]] == [r["bytes_read"] for r in expected]
    alone = run("generate", folder, "--prompt-ids", "1,2,3", "--dtype", "float32",
                "--max-new-tokens", 6).out  # fmt: skip
    assert first["generate"]["out"] == alone
    assert first["refused"]["err"].count("error: ") == 1
    assert "token 130 is outside" in first["refused"]["err"]
    assert "leave --tp 4 out" in first["usage"]["err"]
    quantized = json.loads(first["quantized"]["out"])  # each rank's scales are its own
    assert [r["bytes_read"] for r in quantized["ranks"]] == [r["bytes_read"] for r in expected]


def test_torchrun_fails_when_a_rank_dies(folder: Path, tmp_path: Path) -> None:
    """The rank that is left names the one that was killed, and torchrun's exit code is not 0."""
    support = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
    (tmp_path / "folder").write_text(str(folder))
    script = Path(__file__).with_name("dying_under_torchrun.py")
    launcher = support["start_torchrun"](2, script, tmp_path, port=support["free_port"]())
    output = launcher.communicate(timeout=support["LIMIT"])[0]
    assert launcher.returncode == 1, output
    assert "Signal 9 (SIGKILL)" in output
    assert not (tmp_path / "rank0.json").exists()
    left = json.loads((tmp_path / "rank1.json").read_text())
    assert (left["code"], left["out"]) == (1, "")
    assert left["err"] == "error: rank 0 of 2 ended, or left: its connection is closed\n"


def test_a_device_that_is_not_there(run: Run, folder: Path) -> None:
    """The message says what there is."""
    for device in ("meta", "nonsense", *([] if torch.cuda.is_available() else ["cuda"])):
        result = run("load", folder, "--device", device)
        assert result.code == 2
        assert result.err.startswith("error: Invalid value for --device: ")
        assert "Traceback" not in result.err
