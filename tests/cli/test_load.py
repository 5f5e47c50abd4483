from __future__ import annotations

import json
import runpy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

Run = Callable[..., Any]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_each_rank_reads_what_was_planned(run: Run, folder: Path, tp_size: int) -> None:
    """Each rank reads the bytes of its plan, whatever the dtype of the model."""
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


def test_the_report(run: Run, folder: Path) -> None:
    """It says how much was loaded, and has a line with units for each rank."""
    result = run("load", folder, "--tp", 2)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].startswith("The ranks were loaded one after another in this process")
    assert lines[1].startswith("model_impl: native; ")
    assert lines[2] == "loaded 36 tensors to 27 parameters"
    assert lines[3] == "format: safetensors"
    assert lines[4].split() == ["rank", "read", "time", "rate", "peak", "resident", "(added)"]
    assert [line.split()[0] for line in lines[5:]] == ["0", "1"]
    assert result.err == ""  # the bar is only for terminals


def test_one_rank_alone(run: Run, folder: Path) -> None:
    """--rank loads only that rank; a rank that does not exist is wrong usage."""
    every = run("load", folder, "--tp", 2, "--json").json
    alone = run("load", folder, "--tp", 2, "--rank", 1, "--json").json
    assert [rank["rank"] for rank in alone["ranks"]] == [1]
    assert alone["ranks"][0]["bytes_read"] == every["ranks"][1]["bytes_read"]
    result = run("load", folder, "--tp", 2, "--rank", 2)
    assert (result.code, "cannot load rank 2; the ranks are 0 to 1" in result.err) == (2, True)


def test_a_bar_is_drawn_on_terminals(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the bytes and the rate, and standard output has only the JSON."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats standard error as a terminal
    result = run("load", folder, "--json")
    assert result.json["ranks"]
    assert "rank 0" in result.err
    assert "kB" in result.err


@pytest.fixture(scope="module")
def torchrun(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Path]:
    """Run ``under_torchrun.py`` with two ranks; return exit code, output and folder of results."""
    directory = tmp_path_factory.mktemp("torchrun")
    (directory / "folder").write_text(str(folder))
    support = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
    script = Path(__file__).with_name("under_torchrun.py")
    (code,) = support["torchrun"](2, script, directory, log=directory / "log")
    return code, (directory / "log").read_text(), directory


def test_under_torchrun_each_process_loads_its_rank(
    run: Run, folder: Path, torchrun: tuple[int, str, Path]
) -> None:
    """The first rank prints for all ranks; a refusal is one message, though every rank has it."""
    _, output, directory = torchrun
    files = [directory / f"rank{rank}.json" for rank in (0, 1)]
    assert all(file.exists() for file in files), output
    first, other = (json.loads(file.read_text()) for file in files)
    assert [result["code"] for result in first.values()] == [0, 0, 1, 2, 0, 0]
    # Only the first rank knows that a prompt was refused.
    assert [result["code"] for result in other.values()] == [0, 0, 0, 2, 0, 0]
    assert {result["out"] + result["err"] for result in other.values()} == {""}
    loaded = json.loads(first["load"]["out"])
    assert loaded["simulated"] is False
    expected = run("load", folder, "--tp", 2, "--json").json["ranks"]
    assert [r["bytes_read"] for r in loaded["ranks"]] == [r["bytes_read"] for r in expected]
    alone = run("generate", folder, "--prompt-ids", "1,2,3", "--dtype", "float32",
                "--max-new-tokens", 6).out  # fmt: skip
    assert first["generate"]["out"] == alone
    assert first["refused"]["err"].count("error: ") == 1
    assert "token 130 is outside" in first["refused"]["err"]
    assert "leave --tp 4 out" in first["usage"]["err"]
    quantized = json.loads(first["quantized"]["out"])  # each rank computes its own scales
    assert [r["bytes_read"] for r in quantized["ranks"]] == [r["bytes_read"] for r in expected]
    assert first["quantized text"]["out"].count(",") == 5


def test_torchrun_fails_when_a_rank_dies(torchrun: tuple[int, str, Path]) -> None:
    """The other rank names the rank that was killed, and torchrun's exit code is 1."""
    code, output, directory = torchrun
    assert code == 1, output
    assert "Signal 9 (SIGKILL)" in output
    assert not (directory / "rank0-dying.json").exists()
    left = json.loads((directory / "rank1-dying.json").read_text())
    assert (left["code"], left["out"]) == (1, "")
    assert left["err"] == "error: rank 0 of 2 ended, or left: its connection is closed\n"


def test_a_device_that_is_not_there(run: Run, folder: Path) -> None:
    """The message says what is expected."""
    for device in ("meta", "nonsense", *([] if torch.cuda.is_available() else ["cuda"])):
        result = run("load", folder, "--device", device)
        assert result.code == 2
        assert result.err.startswith("error: Invalid value for --device: ")
        assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", "x"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-1")]
)
def test_numbers_of_torchrun_are_checked(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """What is no number of ranks is a usage error that names the variable."""
    monkeypatch.setenv(name, value)
    result = run("load", folder)
    assert result.code == 2
    assert f"{name}: it is '{value}' in the environment" in result.err


def test_a_port_that_is_taken_is_named(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank cannot listen there, which is one message and not a traceback."""
    monkeypatch.setattr(dist.distributed_c10d, "_group_count", 0)  # torch counts it all the same
    with socket.create_server(("127.0.0.1", 0)) as other:
        address, port = other.getsockname()
        entries = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": address, "MASTER_PORT": port}
        for entry, number in entries.items():
            monkeypatch.setenv(entry, str(number))
        result = run("load", folder)
    assert (result.code, result.out) == (1, "")
    assert f"the ranks cannot meet at {address}:{port} (MASTER_ADDR and MASTER_PORT)" in result.err
