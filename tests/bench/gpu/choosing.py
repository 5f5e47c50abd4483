"""Which of a kernel's candidates should be chosen, from the times of all."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def chosen(times: Mapping[str, Sequence[Sequence[float]]]) -> tuple[str, dict[str, float], float]:
    """Return the candidate to run, each one's time over the first's, and the spread of that.

    Args:
        times: of each candidate, the default first: for each round, the seconds of each case that
            makes this choice. Rounds of all candidates are interleaved.

    The ratio of a round is the geometric mean over the cases. A candidate replaces the first only
    if the median of its ratios is below 1 by more than the spread of either's repeated times.

    """
    first, *others = times
    # How far the default's own rounds are apart, in the case where that is most.
    columns = list(zip(*times[first], strict=True))
    spread = max((max(x) - min(x)) / statistics.median(x) for x in columns)
    best, ratios = first, {first: 1.0}
    for name in others:
        each = [
            statistics.geometric_mean(a / b for a, b in zip(mine, default, strict=True))
            for mine, default in zip(times[name], times[first], strict=True)
        ]
        ratios[name] = statistics.median(each)
        noise = max(spread, max(each) - min(each))
        if ratios[name] < min(1 - noise, ratios[best]):
            best = name
    return best, ratios, spread


def table(
    committed: Mapping[str, Mapping[str, Mapping[str, str]]],
    gpu: str,
    decisions: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, dict[str, str]]]:
    """Return the table of choices that follows from decisions: those not measured stay."""
    result = {
        name: {kernel: dict(cases) for kernel, cases in kernels.items()}
        for name, kernels in committed.items()
    }
    here = result.setdefault(gpu, {})
    for each in decisions:
        cases = here.setdefault(each["kernel"], {})
        if each["chosen"] == each["first"]:
            cases.pop(each["case"], None)  # the first is chosen without an entry
        else:
            cases[each["case"]] = each["chosen"]
    kept = {kernel: cases for kernel, cases in here.items() if cases}
    return {name: kernels for name, kernels in (result | {gpu: kept}).items() if kernels}
