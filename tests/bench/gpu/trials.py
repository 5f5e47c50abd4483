"""What is checked of candidates, and what may be measured after the checks: names only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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


def out_of_memory(results: Sequence[Result]) -> list[str]:
    """Return the cases and candidates whose check had too little memory."""
    return [each["name"] for each in results if "OutOfMemory" in str(each.get("failed"))]


def doubts(checks: Sequence[Result], operations: Collection[str]) -> list[str]:
    """Return why figures of these operations are unverified; nothing if their checks passed.

    That is the names of failed checks, and the operations of which nothing was checked.
    """
    failed = [each for each in checks if "failed" in each and each.get("operation") in operations]
    seen = {each.get("operation") for each in checks if "check" in each or "failed" in each}
    names = [str(each["name"]) for each in failed]
    return names + [f"{each} (not checked)" for each in operations if each not in seen]


def operations_of(part: str, result: Result) -> list[str]:
    """Return the checked operations that a figure stands on."""
    if "operation" in result:
        return [result["operation"]]
    if part == "loading":
        return ["loading"]
    options = result.get("options")
    if part != "engine" or options is None:  # transformers' figures are its own
        return []
    eight = "quantization" in options or "kv_cache_dtype" in options
    rows = ["rows"] if "quantization" in options else []
    return ["tokens", *(["eight bits"] if eight else []), *rows]


def timed(results: Sequence[Result]) -> list[str]:
    """Return the cases to time, in the order of their value: right ones, and then the others."""
    found = [each for each in results if each.get("timed")]
    right = [each["name"] for each in found if "check" in each]
    return right + [each["name"] for each in found if "check" not in each]


def choices_of(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the choices whose default is right, with the candidates that are right on all cases.

    A case counts if it is timed and its candidates were tried, and if no check of its operation
    failed: what is chosen is committed.
    """
    right = {
        each["name"]
        for each in results
        if each.get("timed") and "check" in each and not doubts(results, [each["operation"]])
    }
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
