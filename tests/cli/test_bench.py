from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_module import LLM
from vllm_module.cli.commands.bench import Measurement, _spread, measure, serve
from vllm_module.cli.pictures.plots import plot_levels
from vllm_module.runtime.metrics import StepStats

Run = Callable[..., Any]
SHAPE = ("--input-len", 20, "--output-len", 6, "--num-prompts", 5, "--concurrency", 2)


def test_what_is_measured(run: Run, folder: Path) -> None:
    """Rates, latencies and pages are of the run with these options, without a tokenizer."""
    result = run("bench", folder, *SHAPE, "--device", "cpu", "--json").json
    assert (result["num_prompts"], result["concurrency"], result["seed"]) == (5, 2, 0)
    assert result["output_tokens_per_second"] == pytest.approx(5 * 6 / result["seconds"])
    # The steps that compute the five prompts take a part of all the time.
    prompt_seconds = 5 * 20 / result["prompt_tokens_per_second"]
    assert 0 < prompt_seconds < result["seconds"]
    assert result["decode_tokens_per_second"] > 0
    for key in ("first_token_seconds", "token_seconds"):
        assert 0 < result[key]["median"] <= result[key]["p99"] < result["seconds"]
    assert result["page_size"] == 16
    assert 2 < result["peak_pages"] <= 2 * 2 < result["pages"]  # two at a time, 26 tokens each
    assert result["preemptions"] == 0


def test_a_table_for_people(run: Run, folder: Path) -> None:
    """Each figure has a line and a unit; a figure without a value is a dash."""
    lines = run("bench", folder, *SHAPE).out.splitlines()
    assert lines[0].startswith("5 x (20 + 6) tokens, 2 at a time")
    assert len(lines) == 8
    assert lines[1].startswith("prompt tokens")
    assert lines[1].endswith("/s")
    assert "of 8 (" in lines[6]
    one = ("--input-len", 4, "--output-len", 1, "--num-prompts", 1)
    lines = run("bench", folder, *one).out.splitlines()
    assert [line for line in lines if line.endswith(" -")] == [lines[2], lines[5]]


def test_progress(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error has a line for each phase, and a live line on a terminal; output has none."""
    result = run("bench", folder, *SHAPE, "--json")
    assert result.json
    assert result.err == f"loading {folder}\nwarming up\nserving 5 prompts\n"
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats standard error as a terminal
    monkeypatch.setenv("TERM", "xterm")
    result = run("bench", folder, *SHAPE, "--json")
    assert result.json
    assert "importing torch" in result.err
    assert "5 of 5 prompts complete" in result.err


def test_what_cannot_be_measured(run: Run, folder: Path) -> None:
    """Sequences beyond the context are refused with the numbers; a size of 0 is wrong usage."""
    result = run("bench", folder, "--input-len", 60, "--output-len", 5)
    assert (result.code, result.out) == (1, "")
    assert (
        "at most 64 tokens of a sequence, fewer than --input-len 60 and --output-len 5 "
        "together: give smaller numbers" in result.err
    )
    assert run("bench", folder, "--concurrency", 0).code == 2


def test_no_memory_is_for_more_prompts_than_there_are(run: Run, folder: Path) -> None:
    """A concurrency without a limit serves all prompts at once."""
    shape = ("--input-len", 4, "--output-len", 2, "--num-prompts", 2)
    result = run("bench", folder, *shape, "--concurrency", 10**20, "--json").json
    assert (result["num_prompts"], result["concurrency"]) == (2, 10**20)


def test_levels_of_concurrency(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--plot measures each power of two below the concurrency too, and draws all of them."""
    drawn: list[Any] = []
    # Replaced: what is drawn is compared, not how.
    monkeypatch.setattr("vllm_module.cli.commands.bench.check_plot", drawn.append)
    monkeypatch.setattr("vllm_module.cli.commands.bench.plot_levels", lambda *a: drawn.extend(a))
    path = tmp_path / "levels.png"
    shape = ("--input-len", 8, "--output-len", 3, "--num-prompts", 4, "--concurrency", 3)
    result = run("bench", folder, *shape, "--plot", path, "--json").json
    assert [level["concurrency"] for level in result["levels"]] == [1, 2, 3]
    assert result["levels"][-1] == {key: result[key] for key in result if key != "levels"}
    assert all(level["output_tokens_per_second"] > 0 for level in result["levels"])
    asked, levels, title, written = drawn
    assert asked == written == path
    assert [level["seed"] for level in levels] == [1, 2, 0]
    assert title.endswith(": 4 prompts of 8 + 3 tokens")
    lines = run("bench", folder, *shape, "--plot", path).out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["1", "2", "3"]
    assert "levels" not in run("bench", folder, *shape, "--json").json


def test_levels_below_each_concurrency(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each level is measured once, also where the concurrency is a power of two itself."""
    module = "vllm_module.cli.commands.bench"

    def measured(llm: object, *shape: int, **_: int) -> dict[str, Any]:
        return {"checkpoint": "x", "concurrency": shape[3]}

    # Replaced: which levels are asked for is compared, and no engine has to run 45 of them.
    monkeypatch.setattr(f"{module}.serving", lambda *_, **__: nullcontext())
    monkeypatch.setattr(f"{module}.measure", measured)
    monkeypatch.setattr(f"{module}.plot_levels", lambda *_: None)
    plot = ("--plot", tmp_path / "levels.png", "--json")
    for most in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17):
        levels = run("bench", folder, "--concurrency", most, *plot).json["levels"]
        expected = [level for level in (1, 2, 4, 8, 16) if level < most]
        assert [level["concurrency"] for level in levels] == [*expected, most]


def test_figures_of_several_prompts_are_those_of_numpy() -> None:
    """Median and 99th percentile of each number of prompts, in any order."""
    assert _spread([]) is None
    for count in (*range(1, 103), 199, 200, 201, 1000, 1001):
        seconds = [float(i) for i in range(count)]
        random.Random(count).shuffle(seconds)
        highest = np.percentile(seconds, 99, method="inverted_cdf")  # the nearest rank
        assert _spread(seconds) == {"median": np.median(seconds), "p99": highest}


def test_preemptions_are_those_of_the_run(folder: Path) -> None:
    """A run after one with preemptions, as at a lower level, has none of its own."""
    cache: dict[str, Any] = {"block_size": 4, "kv_cache_memory_bytes": 12_500, "max_model_len": 32}
    with LLM(str(folder), device="cpu", skip_tokenizer_init=True, **cache) as llm:
        assert measure(llm, 8, 24, 4, 4, seed=0)["preemptions"] > 0
        assert measure(llm, 8, 24, 2, 1, seed=1)["preemptions"] == 0


def test_tokens_of_prompts_and_of_decoding(folder: Path) -> None:
    """What is decoded beside a prompt is not counted: that step's time is the prompts'."""
    with LLM(str(folder), device="cpu", skip_tokenizer_init=True, max_num_batched_tokens=32) as llm:
        # Five prompts together have steps of 20 + 12, (1) + 8 + 20 + 3, (3) + 17 + 12 and (4) + 8
        # tokens, of which those in parentheses decode. Of two, one ends before the other.
        for together, beside in ((1, 0), (2, 1 + 1 + 1 + 1), (5, 1 + 3 + 4), (9, 1 + 3 + 4)):
            run = serve(llm, random.Random(together), 5, together, 20, 6)
            assert run.prompting.tokens == 5 * 20
            assert run.decoding.tokens == 5 * (6 - 1) - beside


@pytest.mark.parametrize(
    ("counts", "prompts", "decoded"),
    [([1], 0, 1), ([1, 1, 1], 0, 3), ([2], 2, 0), ([1, 2, 1], 2, 0), ([3, 1, 2], 5, 0)],
)
def test_a_step_is_of_prompts_if_any_has_several_tokens(
    counts: list[int], prompts: int, decoded: int
) -> None:
    """Its whole time is theirs, also of the shortest piece of a prompt."""
    run = Measurement()
    run.add_step(StepStats(counts, used_pages=1, seconds=0.5))
    assert (run.prompting.tokens, run.decoding.tokens) == (prompts, decoded)
    assert (run.prompting.seconds, run.decoding.seconds) == ((0.5, 0) if prompts else (0, 0.5))


def test_a_plot_of_levels(tmp_path: Path) -> None:
    """There is a panel each for throughput and the two latencies, also where one has no value."""
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    spread = {"median": 0.1, "p99": 0.2}
    levels = [
        {
            "concurrency": level,
            "output_tokens_per_second": 10.0 * level,
            "first_token_seconds": spread,
            "token_seconds": None if level == 1 else spread,
        }
        for level in (1, 2, 3)
    ]
    plot_levels(levels, "a title", tmp_path / "levels.svg")
    assert (tmp_path / "levels.svg").read_text().count('id="axes_') == 3
