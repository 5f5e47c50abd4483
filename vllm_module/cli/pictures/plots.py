"""Plots in a file, by matplotlib, which the extra ``plot`` installs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_module.base.messages import install
from vllm_module.cli.output import CommandError, size
from vllm_module.cli.ranks import is_first_rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vllm_module.cli.pictures.load_trace import RankTrace

_BLUE, _ORANGE = "#0072b2", "#d55e00"


def check_plot(path: Path) -> None:
    """Refuse, before anything is measured, a plot that could not be drawn or written."""
    kinds = _new_figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        names = ", ".join(f".{kind}" for kind in sorted(kinds))
        raise typer.BadParameter(f"{path} must end in one of {names}", param_hint="--plot")


def _new_figure(width: float, height: float) -> Figure:
    """Return a figure of that many inches."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which keeps figures and needs a screen
    except ImportError as error:
        if not is_first_rank():
            raise typer.Exit(1) from error
        raise CommandError(f"--plot needs matplotlib: {install('plot')}") from error
    return Figure(figsize=(width, height), layout="constrained")


def memory_curve(trace: RankTrace) -> dict[str, Any]:
    """Return what the plot of a rank's memory shows, in seconds and bytes."""
    added = trace.added()
    peak = max(nbytes for _, nbytes in added)
    on_device = trace.samples[0].device is not None
    return {
        "label": f"rank {trace.rank}: peak {peak / max(trace.final_bytes, 1):.2f} of the weights",
        "memory": "device memory" if on_device else "resident memory",
        "seconds": [seconds for seconds, _ in added],
        "bytes": [nbytes for _, nbytes in added],
        "final": trace.final_bytes,
        "peak": peak,
    }


def plot_memory(traces: Sequence[RankTrace], path: Path) -> None:
    """Draw the memory that loading added over time, one panel a rank, into ``path``.

    Lines mark the final size of the weights and 1.05 of it.
    """
    figure = _new_figure(8, 1.2 + 2.4 * len(traces))
    panels = figure.subplots(len(traces), 1, squeeze=False, sharey=True)[:, 0]
    for axes, trace in zip(panels, traces, strict=True):
        curve = memory_curve(trace)
        unit, name = _unit(max(curve["peak"], 1.05 * curve["final"]))
        axes.plot(curve["seconds"], [each / unit for each in curve["bytes"]], color=_BLUE)
        axes.axhline(curve["final"] / unit, color="black", linewidth=1, label="weights")
        over = f"1.05 x {size(curve['final'])}"
        axes.axhline(
            1.05 * curve["final"] / unit, color=_ORANGE, linewidth=1, linestyle="--", label=over
        )
        axes.set_title(curve["label"], loc="left", fontsize="medium")
        axes.set_ylabel(f"{curve['memory']}\nadded, {name}")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, curve["seconds"][-1])
        axes.legend(loc="lower right", frameon=False)
        axes.grid(alpha=0.25)
    panels[-1].set_xlabel("seconds since the load began")
    figure.savefig(path, dpi=150)


def plot_levels(levels: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw throughput and latency over concurrency into ``path``.

    Each of ``levels`` has the entries that ``bench --json`` prints for a level.
    """
    figure = _new_figure(7, 8)
    throughput, first, later = figure.subplots(3, 1, sharex=True)
    x = [level["concurrency"] for level in levels]
    figure.suptitle(title, x=0.02, ha="left")
    throughput.plot(x, [level["output_tokens_per_second"] for level in levels], "o-", color=_BLUE)
    throughput.set_ylabel("generated tokens\na second")
    for axes, key, label in (
        (first, "first_token_seconds", "time to first\ntoken, ms"),
        (later, "token_seconds", "time per later\ntoken, ms"),
    ):
        for which, style, color in (("median", "o-", _BLUE), ("p99", "s--", _ORANGE)):
            points = [(level["concurrency"], level[key]) for level in levels if level[key]]
            y = [1e3 * spread[which] for _, spread in points]
            axes.plot([at for at, _ in points], y, style, color=color, label=which)
        axes.set_ylabel(label)
        axes.legend(frameon=False)
    later.set_xlabel("prompts served at the same time")
    later.set_xscale("log", base=2)
    later.set_xticks(x, [str(each) for each in x])
    for axes in (throughput, first, later):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def _unit(nbytes: float) -> tuple[int, str]:
    """Return the unit in which ``nbytes`` is at least 1, and its name."""
    for power, name in ((4, "TB"), (3, "GB"), (2, "MB")):
        if nbytes >= 1000**power:
            return 1000**power, name
    return 1000, "kB"
