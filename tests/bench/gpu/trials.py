"""What is checked of candidates, and what may be measured after the checks: names only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]
Trial = list[str]  # a case, a kernel that it calls, what the kernel chooses for, and a candidate


def trials_of(name: str, asked: Sequence[tuple[str, str, list[str]]]) -> list[Trial]:
    """Return a trial for each candidate of the choices that a case makes."""
    return [
        [name, kernel, key, candidate]
        for kernel, key, candidates in asked
        for candidate in candidates
        if len(candidates) > 1
    ]


def title(trial: Trial) -> str:
    name, kernel, key, candidate = trial
    return f"{name}, {kernel} for {key} by {candidate}"


def done(results: Sequence[Result]) -> set[str]:
    """Return the names of what has a result, good or bad."""
    return {result["name"] for result in results if "name" in result}


def passed(results: Sequence[Result]) -> list[str]:
    """Return the timed cases that are right, of operations of which no check failed."""
    wrong = {each["operation"] for each in results if "failed" in each and "operation" in each}
    return [
        each["name"]
        for each in results
        if each.get("timed") and "check" in each and each["operation"] not in wrong
    ]


def choices_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the choices that passed cases make, with the candidates that are right on all."""
    right = passed(results)
    candidates: dict[tuple[str, str], list[str]] = {}
    cases: dict[tuple[str, str], list[str]] = {}
    for each in results:
        if each.get("name") in right:
            for kernel, key, names in each.get("asked", []):
                if len(names) > 1:
                    candidates[kernel, key] = names
                    cases.setdefault((kernel, key), []).append(each["name"])
    tried = {
        (each["of"], each["kernel"], each["case"], each["candidate"]): "check" in each
        for each in results
        if "candidate" in each
    }
    found = []
    for (kernel, key), names in candidates.items():
        good = [
            name
            for name in names
            if all(tried.get((case, kernel, key, name)) for case in cases[kernel, key])
        ]
        if names[0] in good and len(good) > 1:
            found.append({"kernel": kernel, "case": key, "candidates": good,
                          "of": cases[kernel, key]})  # fmt: skip
    return found
