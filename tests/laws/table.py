"""Hold every law against every subject at length, and print what was tried: ``make laws``.

Cases are new each time; a failure prints the code that replays it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from hypothesis import Phase, settings

from vllm_module import testing

_HERE = Path(__file__).parent
_CASES = runpy.run_path(str(_HERE / "wrapped.py"))
_WRAPPED = _CASES["WRAPPED"]  # whose models take longer to build, so fewer cases are tried
_SUBJECTS = runpy.run_path(str(_HERE / "subjects.py"))["SUBJECTS"] | _WRAPPED
_TABLE = runpy.run_path(str(_HERE / "faults.py"))
_FAULTS = {fault.name: fault for fault in _TABLE["FAULTS"]}
_LAWS = {law.__name__: law for law in testing.LAWS}


def prepare(examples: int) -> None:
    torch.set_num_threads(1)
    common = {"deadline": None, "print_blob": True}
    settings.register_profile("laws", max_examples=examples, **common)
    settings.register_profile("wrapped", max_examples=max(1, examples // 20), **common)
    faults = {"deadline": None, "derandomize": True, "phases": [Phase.generate]}
    settings.register_profile("other faults", max_examples=50, **faults)
    settings.register_profile("its faults", max_examples=200, **faults)


def hold(law: str, subject: str) -> tuple[str, int, str]:
    """Return the law, how many cases it was tried on, and how it fails, if it does."""
    settings.load_profile("wrapped" if subject in _WRAPPED else "laws")
    if not _CASES["is_held"](subject, law):
        return law, 0, ""
    try:
        return law, _SUBJECTS[subject].hold(_LAWS[law]), ""
    except Exception:
        return law, 0, f"{law} does not hold for {subject}\n{traceback.format_exc()}"


def catches(law: str, fault: str) -> tuple[str, str, bool]:
    """Return whether the law fails with this fault in the running code."""
    _, own, subject, applied = _FAULTS[fault]
    settings.load_profile("its faults" if law == f"assert_{own}" else "other faults")
    with applied():
        try:
            _SUBJECTS[subject].hold(_LAWS[law])
        except Exception as error:
            return law, fault, _TABLE["caught"](error)
    return law, fault, False


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200, help="cases of a law and subject")
    parser.add_argument("--law", choices=_LAWS, help="hold this one alone, and try its own faults")
    options = parser.parse_args(arguments)
    laws = _LAWS if options.law is None else [options.law]
    faults = [f for f, fault in _FAULTS.items() if options.law in (None, f"assert_{fault.law}")]
    began = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    with context.Pool(os.cpu_count(), prepare, (options.examples,), maxtasksperchild=100) as pool:
        caught = pool.starmap(catches, [(law, f) for law in laws for f in faults], chunksize=1)
        tried = pool.starmap(hold, [(law, s) for law in laws for s in _SUBJECTS], chunksize=1)
    by = {law: {f for of, f, was in caught if of == law and was} for law in laws}
    missed = {name for name in faults if name not in by[f"assert_{_FAULTS[name].law}"]}
    cases_each = f"{options.examples} cases each (of wrapped models a twentieth)"
    print(f"{len(_SUBJECTS)} subjects, {cases_each}; {len(faults)} faults\n")
    print("| law | cases tried | faults caught | no other law caught |\n|---|---|---|---|")
    for number, law in enumerate(_LAWS, 1):
        if law not in laws:
            continue
        cases = sum(count for of, count, _ in tried if of == law)
        others = set().union(*(found for other, found in by.items() if other != law))
        print(
            f"| {number} `{law}` | {cases} | {len(by[law])} | {len(by[law] - others)} |",
        )
    total = sum(count for _, count, _ in tried)
    print(f"| all | {total} | {len(faults) - len(missed)} of {len(faults)} | |")
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes on {os.cpu_count()} cores")
    failures = [failure for _, _, failure in tried if failure]
    if missed:
        failures.append(f"faults that their law did not catch: {', '.join(sorted(missed))}")
    if failures:
        sys.exit("\n\n".join(failures))


if __name__ == "__main__":
    main()
