"""The figures of README, of the documentation and of the picture are those of committed results."""

from __future__ import annotations

import html
import importlib
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parent / "bench"


@pytest.fixture(scope="module", name="bench")
def bench_modules() -> Iterator[dict[str, ModuleType]]:
    """Benchmarks import each other by name, as scripts in one folder do."""
    sys.path.insert(0, str(BENCH))
    try:
        yield {name: importlib.import_module(name) for name in ("machine", "figures", "draw")}
    finally:
        sys.path.remove(str(BENCH))


def spread(value: float) -> dict[str, float]:
    return {"median": value, "least": value - 0.125, "greatest": value + 0.5}


MACHINE = {"processor": "A processor 1", "cores": 2}


@pytest.fixture
def results() -> dict[str, Any]:
    """Results in the form of each benchmark, with a figure for every row."""
    cold = {"seconds": 2.0, "times": [0.5, 2.0], "own": [10, 100], "shared": [50, 0]}
    name = {"fused": True, "scales": False, "route_us": 3.0, "load_us": 8.0, "copy_us": 1.0}
    size = {
        case: {"ratio": spread(1.5)} for case in ("1 request", "32 requests of 32 new tokens each")
    }
    by_name = {
        "load": {
            "TP 1, rank 0": {"over_memcpy": {"vllm-module": spread(0.93), "vLLM": spread(2.5)}},
            "TP 8, rank 3": {"over_memcpy": {"vllm-module": spread(1.25)}},
        },
        "cold": {
            "3/8": {
                "summary": {
                    "cold bytes / kept": spread(2.75),
                    "cold seconds / disk": spread(1.5),
                    "touched / kept": 2.5,
                }
            }
        },
        "cooperative": {
            "disk, 8 ranks": {
                way: {"read over model": spread(value)}
                for way, value in (("together", 1.0), ("each by itself", 6.0))
            }
        },
        "quantization": {
            f"0.6B, {way}": {"peak_over_final": value}
            for way, value in (
                ("fp8_per_tensor", 1.05),
                ("fp8_per_channel", 1.02),
                ("fp8_per_block", 1.01),
                ("load, then quantize: fp8_per_channel", 1.59),
            )
        },
        "wrapped": {
            kind: {
                "load, wrapped over native": spread(1.25),
                "tokens, wrapped over native": spread(1.125),
                "bytes read over kept, rank 0 of 8": {"native": 1.0, "transformers": 1.5},
            }
            for kind in ("llama", "qwen3_moe")
        },
        "engine": dict.fromkeys(("3M", "58M", "0.6B", "mamba2", "hybrid"), size),
        "peers": {
            f"58M, {count} requests": {
                "ratios": {
                    f"ours {pair}": spread(1.75)
                    for pair in (
                        "float32 to vllm float32",
                        "bfloat16 to vllm bfloat16",
                        "float32 to llama float32",
                        "int8 to llama Q8_0",
                        "Q8_0 to llama Q8_0",
                        "int4 to llama Q4_0",
                        "Q4_0 to llama Q4_0",
                    )
                }
            }
            for count in (1, 8, 32)
        },
        "routing": [name | {"names": count} for count in (36096, 144384)],
        "memory": {
            who: {"bytes_kept": 100, "cold": cold} for who in ("vllm-module", "transformers")
        },
    }
    return {name: {"machine": MACHINE, "results": each} for name, each in by_name.items()}


def texts(svg: Path) -> list[str]:
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)<", svg.read_text())]


def test_pages_show_the_committed_results(bench: dict[str, ModuleType]) -> None:
    """The tables of README and the documentation are what tests/bench/figures.py writes."""
    figures = bench["figures"]
    results = figures.read_results()
    for page, picture in figures.PAGES.items():
        text = page.read_text()
        assert figures.with_block(text, figures.block(results, picture)) == text


def test_the_picture_shows_the_committed_results(bench: dict[str, ModuleType]) -> None:
    """Each figure of the tables, its label and the processor are in the committed picture."""
    figures = bench["figures"]
    results, shown = figures.read_results(), texts(figures.PICTURE)
    groups = [*figures.groups(results, figures.COSTS), *figures.groups(results, figures.SPEEDS)]
    assert groups
    missing = [str(row) for group in groups for row in group.rows if str(row) not in shown]
    assert missing == []
    assert figures.measured_on(results) in " ".join(shown)


def test_readme_has_no_other_figures(bench: dict[str, ModuleType]) -> None:
    """What README says of speed and memory is in its table, which is written from results."""
    figures = bench["figures"]
    before, _, rest = (figures.ROOT / "README.md").read_text().partition(figures.BEGIN)
    prose = before + rest.partition(figures.END)[2]
    assert re.findall(r"\d\.\d+ times|times \d|\d\.\d+x", prose) == []


def test_a_table_of_results(bench: dict[str, ModuleType], results: dict[str, Any]) -> None:
    """A row has the median and the spread; a peer that was not there has none."""
    table = bench["figures"].block(results, "a.svg").splitlines()
    assert table[0].endswith("(a.svg)")
    assert table[2].endswith("on A processor 1, 2 cores.")
    assert table[6] == (
        "| Load a whole model, warm | seconds over memcpy of its bytes | 0.93 (0.81 to 1.43) "
        "| vLLM 2.50 (2.38 to 3.00) |"
    )
    assert "| 1.02 (1.01 to 1.05); quantized after loading 1.59 |  |" in table[11]
    assert table[12].endswith("| seconds over loading its wired twin | 1.25 (1.12 to 1.75) |  |")
    assert "wired 1.00; wrapped 1.50" in table[14]
    assert len(table) == 6 + 9 + 2 + 2
    assert table[17].startswith("| Generate beside vLLM's CPU engine |")
    assert "float32, 1 request 1.75 (1.62 to 2.25); float32, 8 requests 1.75" in table[17]
    results["cold"]["machine"] = MACHINE | {"processor": "Another"}
    *_, last = bench["figures"].measured_on(results).split("; ")
    assert last == "Another, 2 cores (cold)"


def test_results_that_are_not_shown(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    """Results without their processor are left out; a figure of ours that lacks is an error."""
    figures = bench["figures"]
    for name, about in (("engine", {"cores": 2}), ("load", MACHINE)):
        content = {"machine": about, "results": {"TP 1, rank 0": {}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    results = figures.read_results(tmp_path)
    assert list(results) == ["load"]
    with pytest.raises(KeyError, match=r"load\.json has nothing at TP 1, rank 0 / over_memcpy"):
        figures.groups(results, figures.COSTS)


def test_the_picture(bench: dict[str, ModuleType], results: dict[str, Any], tmp_path: Path) -> None:
    """All figures are drawn as text, panels without results are left out, and runs agree."""
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    one, other, part = (tmp_path / f"{name}.svg" for name in ("one", "other", "part"))
    draw, figures = bench["draw"].draw, bench["figures"]
    draw(results, one)
    draw(results, other)
    assert one.read_bytes() == other.read_bytes()
    groups = [*figures.groups(results, figures.COSTS), *figures.groups(results, figures.SPEEDS)]
    assert {str(row) for group in groups for row in group.rows} < set(texts(one))
    assert {"route and load", "transformers", "a bare copy_"} < set(texts(one))
    assert len(re.findall(r'id="axes_', one.read_text())) == 4
    draw({"memory": results["memory"]}, part)
    assert len(re.findall(r'id="axes_', part.read_text())) == 1


def test_without_matplotlib(
    bench: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the package, which an index has, and the extra."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    with pytest.raises(SystemExit, match=r"pip install 'matplotlib\S+' \(the extra"):
        bench["draw"].draw({}, tmp_path / "one.svg")


def test_rounds_alternate(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    """Each round runs all works, from another one on; a file names the processor, sorted."""
    machine, ran = bench["machine"], []
    seconds = machine.rounds({name: partial(ran.append, name) for name in "abc"}, 4)
    assert "".join(ran) == "abcbcacababc"
    assert {name: len(each) for name, each in seconds.items()} == {"a": 4, "b": 4, "c": 4}
    ratios = machine.over({"a": [1.0, 6.0, 3.0], "b": [2.0, 2.0, 2.0]}, "a", "b")
    assert machine.spread(ratios) == {"median": 1.5, "least": 0.5, "greatest": 3.0}
    machine.write(tmp_path / "new" / "b.json", {"z": 1, "a": 2})
    text = (tmp_path / "new" / "b.json").read_text()
    assert text.endswith('"results": {\n  "a": 2,\n  "z": 1\n }\n}\n')
    assert json.loads(text)["machine"]["processor"]
