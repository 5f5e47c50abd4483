"""`make gpu`: its time limits, its failures, what is kept of them, and all of it on a CPU."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCH = Path(__file__).parent / "bench"
PRINT = "import json, sys, threading\nsay = lambda **x: print(json.dumps(x), flush=True)\n"


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    """Import the harness, which needs no torch."""
    sys.path.insert(0, str(BENCH))
    try:
        from gpu import __main__ as command
        from gpu import budget, child, parts, report, results, run, trials

        yield SimpleNamespace(
            budget=budget, child=child, command=command, parts=parts, report=report,
            results=results, run=run, trials=trials,
        )  # fmt: skip
    finally:
        sys.path.remove(str(BENCH))


class Clock:
    """A clock that only moves when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_a_part_leaves_is_divided_among_the_next(gpu) -> None:
    """A part has its share of the time that is left, and nothing is left after the deadline."""
    clock = Clock()
    budget = gpu.budget.Budget(100, {"a": 1, "b": 1, "c": 2}, clock)
    assert budget.limit("a") == 25
    clock.now = 10
    assert budget.limit("b") == 30
    clock.now = 101
    assert budget.left == budget.limit("c") == 0


def python(code: str) -> list[str]:
    """Return a command that has ``say``, which prints a result."""
    before = "import json, sys, threading\nsay = lambda **x: print(json.dumps(x), flush=True)\n"
    return [sys.executable, "-c", before + code]


def test_results_of_a_process_that_hangs_are_kept(gpu) -> None:
    """A process is killed with its children when its time is over, and its lines count."""
    clock, found = Clock(), []
    code = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("a library says so")
say(name="one", child=child.pid)
threading.Event().wait()
"""

    def keep(result: dict[str, Any]) -> None:
        found.append(result)
        clock.now = 9.99  # of 10 seconds

    why = gpu.child.run_child(python(code), 10, keep, now=clock)
    assert why == "killed at its limit: its 10 s were over"
    assert [result["name"] for result in found] == ["one"]
    assert has_ended(found[0]["child"])


def has_ended(pid: int) -> bool:
    """Tell whether a process that was killed has ended, or does so within a minute."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60)[0])  # also if nobody waits for it
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("code", "silence", "why"),
    [
        ("say(name='one')", 60.0, ""),
        ("sys.exit(3)", 60.0, "it ended with status 3"),
        ("threading.Event().wait()", 0.01, "killed: it was silent for 0 s"),
    ],
)
def test_how_a_process_ended_is_said(gpu, code, silence, why) -> None:
    """A good end, a status, and silence are told apart."""
    assert gpu.child.run_child(python(code), 60, lambda _: None, silence=silence) == why


def made_run(gpu, folder: Path, code: str) -> Any:
    """Return a run whose jobs are a program, which finds its arguments in ``given``."""
    command = python("given = json.loads(sys.argv[2])\n" + code)
    results = gpu.results.Results(folder)
    return gpu.run.Run(results, True, 1, dict(os.environ), command=command)


def test_what_a_process_dies_of_fails_and_the_rest_is_done(gpu, tmp_path) -> None:
    """Another process goes on after one that died, and what that was at has failed."""
    code = """
for name in given["names"]:
    say(begin={"name": name, "operation": "x"})
    if name == "b":
        sys.exit(9)
    say(name=name, operation="x", check={}, timed=True)
"""
    run = made_run(gpu, tmp_path, code)

    def following(results: list[dict[str, Any]]) -> dict[str, Any] | None:
        left = [name for name in "abc" if name not in {x.get("name") for x in results}]
        return {"names": left} if left else None

    run.jobs_until_done("checks", "job", following, 60)
    lines = [json.loads(line) for line in (tmp_path / "checks.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["a", "b", "c"]
    assert lines[1]["failed"] == "it ended with status 9"
    assert run.results.failed == ["b: it ended with status 9"]
    # Without time left, a check has failed and a measurement is only not done.
    run.jobs_until_done("checks", "job", following, 0)
    run.jobs_until_done("kernels", "job", following, 0)
    assert len(run.results.unfinished) == 2
    # A process that cannot even begin is not started again for ever.
    other = made_run(gpu, tmp_path / "other", "sys.exit(1)")
    other.jobs_until_done("checks", "job", following, 60)
    assert other.results.failed == ["job: it ended with status 1"]


@pytest.mark.parametrize(
    ("part", "what", "failed"),
    [
        ("checks", {"name": "a"}, True),
        ("checks", {"name": "a", "candidate": "b"}, False),
        ("kernels", {"name": "a"}, False),
    ],
)
def test_only_a_check_fails_when_time_is_over(
    gpu, monkeypatch, tmp_path, part, what, failed
) -> None:
    """What was measured, or tried, when its time was over is not done, and is not wrong."""
    run, begun = made_run(gpu, tmp_path, ""), [what, None]

    def killed(command: list[str], seconds: float, on_result: Any, **_: Any) -> str:
        on_result({"begin": what})
        return f"{gpu.child.OVER} its time was over"

    monkeypatch.setattr(gpu.run, "run_child", killed)
    run.jobs_until_done(part, "job", lambda results: {} if begun.pop(0) else None, 60)
    assert bool(run.results.failed) == failed
    assert bool(run.results.unfinished) != failed


def test_a_tool_around_a_process_can_fail_it(gpu, tmp_path) -> None:
    """What compute-sanitizer finds is its exit status, also if all results are good."""
    run = made_run(gpu, tmp_path, "say(begin={}); say(name='good', check={})")
    tool = "import subprocess, sys; print('an error'); sys.exit(subprocess.call(sys.argv[1:]) or 9)"
    run.jobs_until_done(
        "checks", "job", lambda results: None if results else {}, 60,
        wrapper=[sys.executable, "-c", tool],
    )  # fmt: skip
    assert [each["name"] for each in run.results.parts["checks"]] == ["good"]
    assert run.results.failed == ["job: it ended with status 9"]


def test_a_part_that_fails_leaves_the_others(gpu, tmp_path, capsys) -> None:
    """The exit status is 1 after a failure, and later parts ran with the time that was left."""
    run = made_run(gpu, tmp_path, "say(name='found', facts={'gpu': 'X'})")
    limits = []

    def broken(run: Any, seconds: float) -> None:
        raise RuntimeError("no such kernel")

    def works(run: Any, seconds: float) -> None:
        limits.append(seconds)
        assert run.job("second", "job", {}, seconds)[1] == ""

    parts = {"first": (broken, 1.0), "second": (works, 1.0)}
    budget = gpu.budget.Budget(60, {"first": 1, "second": 1}, Clock())
    assert gpu.command.run_parts(run, parts, budget) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["failed"] == ["first: RuntimeError: no such kernel"]
    assert list(summary["parts"]) == ["first", "second"]
    assert limits == [60]
    assert "X" in "\n".join(gpu.report.report(run.results))
    assert gpu.command.run_parts(run, {}, budget) == 1
    assert "FAILED first" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(gpu, monkeypatch, tmp_path, capsys) -> None:
    """One line says what is missing, the exit status is 2, and no results are written."""
    monkeypatch.setattr(gpu.command, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "out")])
    assert gpu.command.main() == 2
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_engine_is_not_measured_without_its_packages(gpu, monkeypatch, tmp_path) -> None:
    """What is missing is named, with the command that collects it; without, nothing runs."""
    run = made_run(gpu, tmp_path, "say(name='measured')")
    monkeypatch.setattr(gpu.parts, "ENGINES_NEED", ("json", "no_such_package"))
    for part in (gpu.parts.tokens, gpu.parts.engine, gpu.parts.loading):
        part(run, 60)
    assert run.results.parts == {}
    assert len(run.results.unfinished) == 3
    for said in run.results.unfinished:
        assert "no_such_package" in said
        assert "make gpu-wheels" in said


def test_collected_packages_are_used_where_pydantic_is_missing(gpu, monkeypatch, tmp_path) -> None:
    """They are of this Python's version, and come after what the machine has."""
    folder = tmp_path / "gpu-wheels" / "{}.{}".format(*sys.version_info)
    assert gpu.run.collected(tmp_path) == []
    folder.mkdir(parents=True)
    assert gpu.run.collected(tmp_path) == [], "this environment has pydantic"
    monkeypatch.setattr(gpu.run.importlib.util, "find_spec", lambda name: None)
    assert gpu.run.collected(tmp_path) == [str(folder)]
    monkeypatch.setattr(gpu.run, "collected", lambda: [str(folder)])
    with gpu.run.source_tree(True) as environment:
        assert environment["PYTHONPATH"].split(os.pathsep)[-1] == str(folder)


def test_figures_say_which_of_their_checks_failed(gpu, tmp_path) -> None:
    """A figure of FP8 stands on checks of tokens, eight bits and rows; a right one has no mark."""
    results = gpu.results.Results(tmp_path)
    results.add("checks", {"name": "tokens: a", "operation": "tokens", "check": {}})
    results.add("checks", {"name": "rows: b", "operation": "rows", "failed": "other bits"})
    results.add("checks", {"name": "c", "operation": "decode", "check": {}, "timed": True})
    results.add("engine", {"name": "wide", "options": {}, "step": 1})
    results.add("engine", {"name": "narrow", "options": {"quantization": "fp8"}, "step": 1})
    results.add("engine", {"name": "transformers", "step": 1})
    results.add("kernels", {"name": "c", "operation": "decode", "time": 1})
    gpu.command.mark(results)
    results.add("checks", {"name": "d", "operation": "decode", "failed": "wrong", "timed": True})
    assert gpu.trials.timed(results.parts["checks"]) == ["c", "d"]
    gpu.command.mark(results)
    lines = (tmp_path / "engine.jsonl").read_text().splitlines()
    found = {each["name"]: each for each in map(json.loads, lines)}
    assert "unverified" not in found["wide"]
    assert found["narrow"]["unverified"] == ["rows: b", "eight bits (not checked)"]
    assert "unverified" not in found["transformers"]
    assert results.parts["kernels"] == [
        {"name": "c", "operation": "decode", "time": 1, "unverified": ["d"]}
    ]


def test_a_case_that_ran_out_of_memory_is_checked_again_alone(gpu, monkeypatch, tmp_path) -> None:
    """Its first failure is forgotten, and no other; what fails alone, too, has failed."""
    code = """
say(planned=["a", "b", "c"])
for name in ["a", "b", "c"]:
    if name in given["over"]:
        continue
    say(begin={"name": name})
    if name == "a" and given["share"] != [0, 1] or name == "b":
        say(name=name, operation="x", failed="OutOfMemoryError: CUDA out of memory")
    else:
        say(name=name, operation="x", check={}, timed=True, asked=[])
"""
    run = made_run(gpu, tmp_path, code)
    run.dry = False
    monkeypatch.setattr(gpu.parts, "ENGINES_NEED", ("no_such_package",))
    monkeypatch.setattr(gpu.parts.os, "cpu_count", lambda: 6)
    gpu.parts.checks(run, 60)
    outcomes = {
        each["name"]: "check" in each for each in run.results.parts["checks"] if "name" in each
    }
    assert outcomes == {"a": True, "b": False, "c": True}
    assert [each.split(":")[0] for each in run.results.failed] == ["b"]


@pytest.mark.at_length
def test_a_failure_in_each_part_leaves_the_figures_of_the_others(tmp_path) -> None:
    """Figures are there, and those whose checks failed or whose rates are missing say so."""
    program = """
import sys
from gpu import forked
from gpu.__main__ import main
preload = forked._context.set_forkserver_preload
forked._context.set_forkserver_preload = lambda names: preload([*names, "gpu.planted"])
sys.exit(main())
"""
    command = [sys.executable, "-c", program, "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    parts = {
        path.stem: {each["name"]: each for each in map(json.loads, path.read_text().splitlines())
                    if "name" in each}
        for path in tmp_path.glob("*.jsonl") if path.stem != "candidates"
    }  # fmt: skip
    checks, kernels = parts["checks"], parts["kernels"]
    groups = {each["operation"] for each in checks.values() if "operation" in each}
    assert groups >= {"tokens", "eight bits", "rows", "hybrids", "loading", "ranks"}
    assert groups >= {"decode", "matmul", "experts"}
    wrong = {name for name, each in checks.items() if each.get("failed") == "RuntimeError: planted"}
    assert "tokens: planted" in wrong
    assert wrong == {name for name, each in checks.items() if "failed" in each}
    engine = {name: each for name, each in parts["engine"].items() if "step" in each}
    assert {"Llama-8B, 1 requests", "transformers, Qwen3-0.6B, 1 requests"} <= engine.keys()
    assert not any(name.startswith("Qwen3-0.6B") for name in engine)
    kinds = (
        "quantization",
        "quantization, rows apart",
        "kv_cache_dtype",
        "temperature, top_p, top_k",
    )
    assert {f"Llama-8B, {kind}, 1 requests" for kind in kinds} <= engine.keys()
    assert {"Llama-8B, 2 requests", "Qwen3-30B-A3B, 8 layers, 1 requests"} <= engine.keys()
    assert engine["Llama-8B, 1 requests"]["unverified"] == ["tokens: planted"]
    assert engine["Llama-8B, 1 requests"]["fraction"] is None
    assert engine["Llama-8B, 1 requests"]["tokens_per_second"] > 0
    (case,) = wrong - {"tokens: planted"}
    of = checks[case]["operation"]
    times = [each for each in kernels.values() if "time" in each]
    assert {each["operation"] for each in times} > {of, "matmul", "experts"}
    assert kernels.keys() >= {name for name, each in checks.items() if each.get("timed")}
    refused = {peer for each in times for peer in each["refused"]}
    # Of torch's ways, these need a GPU; torch 2.11 takes scales of rows on a GPU only, too.
    assert refused <= {"sdpa cudnn", "sdpa flash", "_scaled_mm blocks", "_scaled_mm rows",
                       "_scaled_mm rows fast", "_grouped_mm", "_weight_int4pack_mm"}  # fmt: skip
    for each in times:
        assert each.get("unverified") == ([case] if each["operation"] == of else None)
        assert each["fraction"] is None
    decided = list(map(json.loads, (tmp_path / "candidates.jsonl").read_text().splitlines()))
    assert {"chosen", "failed"} <= {key for each in decided for key in each}
    summary = json.loads((tmp_path / "summary.json").read_text())
    for said in ("ceiling: read", "ceiling: copy", "loads of", "Qwen3-0.6B", case):
        assert any(said in each for each in summary["failed"]), said
    assert "UNVERIFIED: tokens: planted" in (tmp_path / "report.txt").read_text()
    assert (tmp_path / "choices.json").exists()
    assert "say nothing of a GPU" in done.stdout
    (loads,) = [each["over_limit"] for each in parts["loading"].values() if "over_limit" in each]
    assert {"as stored", "to FP8 per channel", "safetensors' load_file"} <= loads.keys()
