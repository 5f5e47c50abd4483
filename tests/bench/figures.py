"""What of the committed results is shown: the rows of the picture and of the README's table.

    python tests/bench/figures.py

writes the table into README.md and docs/figures.md. ``draw.py`` draws the picture.
"""

from __future__ import annotations

import fnmatch
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests/bench/results"
PICTURE = ROOT / "docs/figures.svg"
OURS = "vllm-module"
BEGIN, END = "<!-- figures: make bench writes them -->\n", "<!-- end of figures -->"
PAGES = {ROOT / "README.md": "docs/figures.svg", ROOT / "docs/figures.md": "figures.svg"}

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One figure: the median of the rounds, the least and the greatest."""

    label: str
    median: float
    least: float
    greatest: float

    @property
    def ours(self) -> bool:
        return self.label.startswith(OURS)

    def __str__(self) -> str:
        least, median, greatest = map(rounded, (self.least, self.median, self.greatest))
        return median if least == greatest else f"{median} ({least} to {greatest})"


@dataclass(frozen=True)
class Group:
    """Figures in the same unit, all from one benchmark."""

    title: str
    unit: str
    benchmark: str
    rows: tuple[Row, ...]


# By title: the unit, the benchmark, and for each row the keys that lead to it in its results. A key
# may be a pattern, of which all matches count.
Rows = Mapping[str, tuple[str, ...]]
COSTS: Mapping[str, tuple[str, str, Rows]] = {
    "Load a whole model, warm": (
        "seconds over memcpy of its bytes",
        "load",
        {
            name: ("TP 1, rank 0", "over_memcpy", name)
            for name in (OURS, "vLLM", "safe_open + copy_", "transformers")
        },
    ),
    "Load one rank of 8, warm": (
        "seconds over memcpy of the bytes it keeps",
        "load",
        {
            name: ("TP 8, rank 3", "over_memcpy", name)
            for name in (OURS, "vLLM", "get_slice + copy_")
        },
    ),
    "Load one rank of 8, cold": (
        "bytes from disk over bytes it keeps",
        "cold",
        {
            OURS: ("3/8", "summary", "cold bytes / kept"),
            "get_slice + copy_": ("3/8", "summary", "cold bytes / kept, bare slices"),
            "OS pages that it touches": ("3/8", "summary", "touched / kept"),
        },
    ),
    "Time of that cold load": (
        "seconds over reading as many bytes in order",
        "cold",
        {
            OURS: ("3/8", "summary", "cold seconds / disk"),
            "get_slice + copy_": ("3/8", "summary", "cold seconds / disk, bare slices"),
        },
    ),
    "Load all 8 ranks, cold": (
        "bytes from disk over the model's",
        "cooperative",
        {
            OURS: ("disk, 8 ranks", "together", "read over model"),
            f"{OURS}, each rank by itself": ("disk, 8 ranks", "each by itself", "read over model"),
        },
    ),
    "Load in FP8": (
        "peak of memory over final size, 3 schemes",
        "quantization",
        {
            OURS: ("0.6B, fp8_*", "peak_over_final"),
            f"{OURS}, quantized after loading": ("0.6B, load, then quantize*", "peak_over_final"),
        },
    ),
    "Load a wrapped model": (
        "seconds over loading its wired twin",
        "wrapped",
        {OURS: ("*", "load, wrapped over native")},
    ),
    "A token of it": (
        "seconds over the wired twin's",
        "wrapped",
        {OURS: ("*", "tokens, wrapped over native")},
    ),
    "One rank of 8 of both": (
        "bytes read over bytes it keeps",
        "wrapped",
        {
            f"{OURS}, wired": ("*", "bytes read over kept, rank 0 of 8", "native"),
            f"{OURS}, wrapped": ("*", "bytes read over kept, rank 0 of 8", "transformers"),
        },
    ),
}
SIZES = "3M", "58M", "mamba2", "hybrid"  # see engine.py
SPEEDS: Mapping[str, tuple[str, str, Rows]] = {
    f"Generate, {title}": (
        "tokens/s over transformers'",
        "engine",
        {f"{OURS}, {size}": (size, case, "ratio") for size in SIZES},
    )
    for title, case in {
        "1 request": "1 request",
        "32 requests": "32 requests of 32 new tokens each",
    }.items()
}
PEERS: Mapping[str, tuple[str, str, Rows]] = {  # see peers.py; not in the picture
    f"Generate beside {peer}": (
        f"tokens/s over {peer}'s",
        "peers",
        {
            f"{OURS}, {weights}, {count} request{'s' if count > 1 else ''}": (
                f"58M, {count} requests",
                "ratios",
                f"ours {weights} to {ratio}",
            )
            for weights, ratio in pairs.items()
            for count in counts
        },
    )
    for peer, counts, pairs in (
        (
            "vLLM's CPU engine",
            (1, 8, 32),
            {each: f"vllm {each}" for each in ("float32", "bfloat16")},
        ),
        (
            "llama.cpp",
            (1, 8),
            {"float32": "llama float32", "int8": "llama Q8_0", "Q8_0": "llama Q8_0"}
            | {"int4": "llama Q4_0", "Q4_0": "llama Q4_0"},
        ),
    )
}


def read_results(folder: Path = RESULTS) -> dict[str, Results]:
    """Return what benchmarks wrote, by their names, as far as it names its processor."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {
        name: content
        for name, content in found.items()
        if isinstance(content.get("machine"), dict) and "processor" in content["machine"]
    }


def groups(
    results: Mapping[str, Results], wanted: Mapping[str, tuple[str, str, Rows]]
) -> list[Group]:
    """Return the rows of each group whose benchmark was run.

    A peer that was not there has no row. A figure of ours that is missing is a KeyError.
    """
    found = []
    for title, (unit, benchmark, rows) in wanted.items():
        if benchmark not in results:
            continue
        shown = []
        for label, keys in rows.items():
            values = list(at(results[benchmark]["results"], keys))
            if values:
                shown.append(Row(label, *combined(values)))
            elif label.startswith(OURS):
                raise KeyError(f"{benchmark}.json has nothing at {' / '.join(keys)}")
        found.append(Group(title, unit, benchmark, tuple(shown)))
    return found


def at(content: Any, keys: tuple[str, ...]) -> Iterator[Any]:
    """Yield what lies under the keys, the first of which may be a pattern."""
    if not keys:
        yield content
        return
    for key in content if isinstance(content, dict) else ():
        if fnmatch.fnmatchcase(key, keys[0]):
            yield from at(content[key], keys[1:])


def combined(values: list[Any]) -> tuple[float, float, float]:
    """Return the median, the least and the greatest of numbers or of spreads."""
    spreads = [
        value if isinstance(value, dict) else {"median": value, "least": value, "greatest": value}
        for value in values
    ]
    return (
        statistics.median(each["median"] for each in spreads),
        min(each["least"] for each in spreads),
        max(each["greatest"] for each in spreads),
    )


def rounded(value: float) -> str:
    """Return two digits after the point below 10, one below 100."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def names(results: Mapping[str, Results]) -> dict[str, list[tuple[int, float]]]:
    """Return what a name costs in bare copies, by the number of names; see ``routing.py``."""
    if "routing" not in results:
        return {}
    curves: dict[str, dict[int, list[float]]] = {"route and load": {}, "route": {}}
    for each in results["routing"]["results"]:
        if each["fused"] and not each["scales"]:
            copies = {"route and load": each["load_us"], "route": each["route_us"]}
            for label, microseconds in copies.items():
                points = curves[label].setdefault(each["names"], [])
                points.append(microseconds / each["copy_us"])
    return {
        label: [(count, statistics.median(points[count])) for count in sorted(points)]
        for label, points in curves.items()
    }


def memory(results: Mapping[str, Results]) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds of a cold load and the memory added until then, over the final size."""
    if "memory" not in results:
        return {}
    curves = {}
    for name, each in results["memory"]["results"].items():
        cold, kept = each["cold"], each["bytes_kept"]
        added = [sum(both) / kept for both in zip(cold["own"], cold["shared"], strict=True)]
        curves[name] = ([0.0, *cold["times"]], [0.0, *added])
    return curves


def measured_on(results: Mapping[str, Results]) -> str:
    """Return the processors of the results that are shown, with the benchmarks if several."""
    benchmarks: dict[str, list[str]] = {}
    shown = (
        "load", "cold", "cooperative", "quantization", "wrapped", "engine", "peers", "routing",
        "memory",
    )  # fmt: skip
    for name in shown:
        if name in results:
            about = results[name]["machine"]
            where = f"{about['processor']}, {about['cores']} cores"
            benchmarks.setdefault(where, []).append(name)
    if len(benchmarks) == 1:
        return next(iter(benchmarks))
    return "; ".join(f"{where} ({', '.join(each)})" for where, each in benchmarks.items())


def block(results: Mapping[str, Results], picture: str) -> str:
    """Return the picture and the table in Markdown."""
    lines = [
        f"![The ratios of the table, the cost of a name, and memory during a load]({picture})",
        "",
        f"Median of the rounds (least to greatest) on {measured_on(results)}.",
        "",
        "| work | in | vllm-module | beside it |",
        "|---|---|---|---|",
    ]
    for group in groups(results, {**COSTS, **SPEEDS, **PEERS}):
        ours = [
            f"{row.label.removeprefix(OURS).lstrip(', ')} {row}".strip()
            for row in group.rows
            if row.ours
        ]
        others = [f"{row.label} {row}" for row in group.rows if not row.ours]
        lines.append(f"| {group.title} | {group.unit} | {'; '.join(ours)} | {'; '.join(others)} |")
    return "\n".join(lines) + "\n"


def with_block(text: str, new: str) -> str:
    """Return a page's text with the block between the two marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"the page lacks {BEGIN!r} or {END!r}"
    return f"{before}{BEGIN}{new}{END}{after}"


def main() -> None:
    results = read_results()
    for page, picture in PAGES.items():
        page.write_text(with_block(page.read_text(), block(results, picture)))


if __name__ == "__main__":
    main()
