"""What is checked of candidates, and what may be measured after the checks: names only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
Trial = list[str]  # a case, a kernel that it calls, what the kernel chooses for, and a candidate


def trials_of(results: Sequence[Result], few: bool) -> list[Trial]:
    """Return a trial of each candidate of the choices that timed cases make.

    If ``few``, of the first choice of each kernel only the first two candidates.
    """
    found: list[Trial] = []
    for each in results:
        if each.get("timed") and "check" in each:
            for kernel, key, candidates in each["asked"]:
                met = any(trial[1] == kernel for trial in found)
                if len(candidates) > 1 and not (few and met):
                    chosen = candidates[: 2 if few else None]
                    found += [[each["name"], kernel, key, candidate] for candidate in chosen]
    return found


def title(trial: Trial) -> str:
    name, kernel, key, candidate = trial
    return f"{name}, {kernel} for {key} by {candidate}"


def done(results: Sequence[Result]) -> set[str]:
    """Return the names of what has a result, good or bad."""
    return {result["name"] for result in results if "name" in result}


def right_operations(results: Sequence[Result]) -> set[str]:
    """Return the operations that were checked, and of which no check failed."""
    checked = {each["operation"] for each in results if "check" in each and "operation" in each}
    return checked - {each.get("operation") for each in results if "failed" in each}


def passed(results: Sequence[Result]) -> list[str]:
    """Return the timed cases that are right, of operations of which no check failed."""
    right = right_operations(results)
    return [
        each["name"]
        for each in results
        if each.get("timed") and "check" in each and each["operation"] in right
    ]


def choices_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the choices whose default is right, with the candidates that are right on all cases.

    A case counts if it may be timed and its candidates were tried.
    """
    right = set(passed(results))
    tried: dict[tuple[str, str], dict[str, dict[str, bool]]] = {}  # by choice, candidate and case
    for each in results:
        if each.get("of") in right:
            candidates = tried.setdefault((each["kernel"], each["case"]), {})
            candidates.setdefault(each["candidate"], {})[each["of"]] = "check" in each
    found = []
    for (kernel, key), candidates in tried.items():
        cases = list(next(iter(candidates.values())))  # of the default, which is tried first
        good = [
            name
            for name, outcomes in candidates.items()
            if all(outcomes.get(case) for case in cases)
        ]
        if len(good) > 1 and good[0] == next(iter(candidates)):
            found.append({"kernel": kernel, "case": key, "candidates": good, "of": cases})
    return found
