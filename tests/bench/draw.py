"""Draw the committed results into docs/figures.svg; needs matplotlib, which the extra plot brings.

    python tests/bench/draw.py [--results tests/bench/results] [--out docs/figures.svg]

``figures.py`` chooses what is shown. The same results give the same file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import figures

from vllm_module.base.messages import install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREY, DARK, PALE = "#0060a8", "#656d76", "#1f2328", "#d1d9e0"
STYLE = {
    # matplotlib brings DejaVu Sans; where the file is looked at, Verdana is as wide.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 8.5,
    "text.color": DARK,
    "axes.edgecolor": PALE,
    "axes.spines.top": False,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "xtick.labelcolor": DARK,
    "ytick.labelcolor": DARK,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "figures",  # otherwise identifiers change with each run
}
WIDTH, LINE = 8.8, 0.178  # inches: of the picture, and of one row
LABELS, VALUES = 2.0, 1.35  # inches at the left and the right of a panel of ratios


def draw_ratios(axes: Axes, groups: Sequence[figures.Group], labels: float, values: float) -> None:
    """Draw each row as a dot at the median and a bar from the least to the greatest.

    ``labels`` and ``values`` are the inches that the text at the left and at the right has.
    """
    for y, group, row in lines(groups):
        place = {"textcoords": "offset points", "va": "center"}
        if row is None:
            left = {"xycoords": ("axes fraction", "data"), **place}
            axes.annotate(group.title, (0, y), (-72 * labels, 0), weight="bold", **left)
            if not group.unit:
                continue
            unit = axes.annotate(group.unit, (0, y), (2, 0), color=GREY, **left)
            unit.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
            continue
        color = BLUE if row.ours else GREY
        label = row.label.removeprefix(f"{figures.OURS}, ")
        axes.plot([row.least, row.greatest], [y, y], color=color, linewidth=3, alpha=0.4,
                  solid_capstyle="butt")  # fmt: skip
        axes.plot([row.median], [y], "o" if row.ours else "D", color=color, markersize=5)
        text = {"color": color, "xycoords": ("axes fraction", "data"), **place}
        axes.annotate(label, (0, y), (-72 * labels + 8, 0), **text)
        axes.annotate(str(row), (1, y), (72 * values, 0), ha="right", **text)
    rows = [row for group in groups for row in group.rows]
    least, greatest = min(row.least for row in rows), max(row.greatest for row in rows)
    axes.set_xscale("log")
    axes.set_xlim(min(least, 1) / 1.15, max(greatest, 1) * 1.15)
    axes.set_ylim(height(groups) - 0.5, -0.5)
    axes.set_yticks([])
    ticks = [
        x for x in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if least <= x <= greatest or x == 1
    ]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.axvline(1, color=DARK, linewidth=1)
    axes.set_axisbelow(True)


def lines(groups: Sequence[figures.Group]) -> list[tuple[float, figures.Group, figures.Row | None]]:
    """Return where each group's title (a row of None) and each row is, from the top."""
    y, result = 0.0, []
    for group in groups:
        for row in (None, *group.rows):
            result.append((y, group, row))
            y += 1
        y += 0.4
    return result


def height(groups: Sequence[figures.Group]) -> float:
    """Return the lines of the groups, and half of one below."""
    return lines(groups)[-1][0] + 1.3 if groups else 0


def draw_names(axes: Axes, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Draw what a name costs over how many names there are."""
    for (label, points), dash in zip(curves.items(), ("-", "--"), strict=True):
        x, y = zip(*points, strict=True)
        axes.plot([each / 1000 for each in x], y, dash, marker="o", markersize=4, color=BLUE)
        axes.annotate(label, (x[0] / 1000, y[0]), (0, 7), textcoords="offset points", color=BLUE)
    axes.axhline(1, color=DARK, linewidth=1)
    axes.annotate("a bare copy_", (1, 1), (0, 3), xycoords=("axes fraction", "data"),
                  textcoords="offset points", ha="right", fontsize=7.5)  # fmt: skip
    greatest = max(y for points in curves.values() for _, y in points)
    axes.set_ylim(0, 1.25 * max(greatest, 2))
    axes.set_xlim(0, None)
    axes.set_xlabel("thousand names, shuffled")
    axes.grid(axis="y", color=PALE, linewidth=0.6)


def draw_memory(axes: Axes, curves: Mapping[str, tuple[list[float], list[float]]]) -> None:
    """Draw the memory that a load adds over time; labels are in the order of the lines' ends."""
    greatest = max(max(added) for _, added in curves.values())
    free, last = 1.2 * greatest, max(times[-1] for times, _ in curves.values())
    dashes = iter(("--", ":", "-."))
    for label, (times, added) in sorted(curves.items(), key=lambda curve: -curve[1][1][-1]):
        ours = label == figures.OURS
        color, dash = (BLUE, "-") if ours else (GREY, next(dashes))
        axes.plot(times, added, dash, color=color, linewidth=1.6)
        axes.plot(times[-1:], added[-1:], "o", color=color, markersize=3.5)
        free = min(free - 0.1 * greatest, added[-1])
        sample = [1.04 * last, 1.16 * last]
        axes.plot(sample, [free, free], dash, color=color, linewidth=1.6, clip_on=False)
        axes.annotate(label, (1.2 * last, free), color=color, va="center", annotation_clip=False)
    axes.axhline(1, color=DARK, linewidth=1)
    axes.set_ylim(0, 1.15 * greatest)
    axes.set_xlim(0, last)
    axes.set_xlabel("seconds, files not cached")
    axes.set_yticks([0, 0.5, 1])
    axes.grid(axis="y", color=PALE, linewidth=0.6)


def draw(results: Mapping[str, figures.Results], path: Path) -> None:
    """Draw all panels whose results there are."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"draw.py needs matplotlib: {install('plot')}") from error
    costs, speeds = figures.groups(results, figures.COSTS), figures.groups(results, figures.SPEEDS)
    with mpl.rc_context(STYLE):
        measured = figures.measured_on(results).replace("; ", ";\n")
        measured = f"Median of the rounds, least to greatest. {measured}"
        top, middle, bottom = height(costs) * LINE, 9 * LINE, 0.7 + 0.14 * measured.count("\n")
        tall = 0.4 + top + 0.75 + middle + bottom
        figure = Figure(figsize=(WIDTH, tall), facecolor="white")
        if costs:
            text = "Loading over its limit: 1 is the limit, less is better"
            title(figure, 0, tall - 0.22, text)
            axes = panel(figure, LABELS, tall - 0.4 - top, WIDTH - LABELS - VALUES - 0.1, top)
            draw_ratios(axes, costs, LABELS - 0.1, VALUES)
        y = bottom
        heading = y + middle + 0.15
        if speeds:
            title(figure, 0, heading, "Tokens/s over transformers'")
            axes = panel(figure, 0.85, y, 0.95, middle)
            named = [replace(each, title=each.title.split(", ")[1], unit="") for each in speeds]
            draw_ratios(axes, named, 0.75, 1.25)
            axes.set_xlabel("more is better")
        if curves := figures.names(results):
            title(figure, 3.25, heading, "Cost of a name, in bare copies")
            draw_names(panel(figure, 3.55, y, 2.0, middle), curves)
        if curves := figures.memory(results):
            title(figure, 5.95, heading, "Memory added, over the final size")
            draw_memory(panel(figure, 6.25, y, 1.2, middle), curves)
        figure.text(0.1 / WIDTH, 0.1 / tall, measured, color=GREY, fontsize=7.5)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
    if path.suffix == ".svg":  # matplotlib ends some lines with blanks
        text = path.read_text()
        path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def title(figure: Figure, x: float, y: float, text: str) -> None:
    width, tall = figure.get_size_inches()
    figure.text((x + 0.1) / width, y / tall, text, weight="bold", fontsize=9.5)


def panel(figure: Figure, x: float, y: float, width: float, tall: float) -> Axes:
    """Return new axes at these inches from the lower left corner."""
    whole = figure.get_size_inches()
    axes = figure.add_axes((x / whole[0], y / whole[1], width / whole[0], tall / whole[1]))
    axes.tick_params(length=0)
    return axes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=figures.RESULTS)
    parser.add_argument("--out", type=Path, default=figures.PICTURE)
    options = parser.parse_args()
    draw(figures.read_results(options.results), options.out)


if __name__ == "__main__":
    main()
