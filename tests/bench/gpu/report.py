"""The tables that a run prints last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gpu.results import Results


def report(results: Results) -> list[str]:
    """Return the lines: what was found of each part, what failed, what was not done."""
    parts = results.parts
    facts = results.facts
    lines = ["", f"{facts.get('gpu', 'no GPU')}, commit {facts.get('commit', 'unknown')}"]
    if facts.get("dry"):
        lines.append("a dry run: these times are of stand-ins on a CPU and say nothing of a GPU")
    found = parts.get("checks", [])
    right = sum("check" in each for each in found)
    lines.append(f"checks: {right} passed, {sum('failed' in each for each in found)} failed")
    lines += ["", *_engines(parts.get("engine", []))]
    lines += ["", *_kernels(parts.get("kernels", []))]
    lines += ["", *_loads(parts.get("loading", []))]
    lines += ["", *_candidates(parts.get("candidates", []))]
    lines += [f"not done: {each[:200]}" for each in results.unfinished]
    lines += [f"FAILED {each[:300]}" for each in results.failed]
    times = facts.get("parts", {})
    lines.append(", ".join(f"{name} {each['seconds']} s" for name, each in times.items()))
    return lines


def _engines(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'engine':52} {'step':>9} {'idle':>9} {'first':>9} {'tokens/s':>9}  of the floor"
        f" {'mixed':>9} {'idle':>9}"
    ]
    for each in found:
        if "step" not in each:
            continue
        step, first = each["step"], each["first_token"]
        if isinstance(step, float):  # of transformers, which has fewer figures
            lines.append(
                f"{each['name']:52} {_ms(step)} {'':>9} {_ms(first)} "
                f"{each['tokens_per_second']:9.0f}"
            )
            continue
        lines.append(
            f"{each['name']:52} {_ms(step['median'])} {_ms(each['host_gap'] or math.nan)} "
            f"{_ms(first['median'])} {each['tokens_per_second']:9.0f}  {_share(each['fraction'])}"
            f" {_ms(each['mixed']['step']['median'])} {_ms(each['mixed']['host_gap'] or math.nan)}"
            f"{_doubts(each)}"
        )
    return lines


def _loads(found: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'load':52} over pinned copies (least, greatest)"]
    for each in found:
        if "over_limit" not in each:
            continue
        rate = each["limit_bytes_per_second"] / 1e9
        size = f"{each['bytes_read'] / 1e6:.0f} MB, copies {rate:.1f} GB/s"
        lines.append(f"{each['name']}: {size}{_doubts(each)}")
        lines += [
            f"{name:52} {ratio['median']:.2f} ({ratio['least']:.2f}, {ratio['greatest']:.2f})"
            for name, ratio in each["over_limit"].items()
        ]
    return lines


def _kernels(found: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'kernel':60} {'time':>9}  of the floor (least, greatest)  best of torch"]
    for each in found:
        if "time" not in each:
            continue
        fraction, best = each["fraction"], ""
        shown = (
            "    ?"
            if fraction is None
            else (
                f"{fraction['median']:5.0%} ({fraction['least']:.0%}, {fraction['greatest']:.0%})"
            )
        )
        if "times_peer" in each:
            best = f"{each['times_peer']['median']:.2f}x {each['best_peer']}"
        lines.append(
            f"{each['name']:60} {_us(each['time']['median'])}  {shown}  {best}{_doubts(each)}"
        )
    return lines


def _candidates(found: list[dict[str, Any]]) -> list[str]:
    lines = ["candidates: time over the first's; what is chosen is marked"]
    for each in found:
        if "chosen" not in each:
            continue
        ratios: Mapping[str, float] = each["over_first"]
        shown = "  ".join(
            f"{'*' * (name == each['chosen'])}{name} {ratio:.3f}" for name, ratio in ratios.items()
        )
        lines.append(f"{each['kernel']} for {each['case']}: {shown}  (spread {each['spread']:.3f})")
    return lines


def _share(fraction: float | None) -> str:
    return f"{'?':>12}" if fraction is None else f"{fraction:12.0%}"


def _doubts(result: Mapping[str, Any]) -> str:
    """Return the checks that failed of what a figure stands on, for the end of its line."""
    why = result.get("unverified")
    return f"  UNVERIFIED: {'; '.join(why)[:160]}" if why else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:6.2f} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:6.1f} us"
