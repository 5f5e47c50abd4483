"""What a Hopper GPU says of this tree: checks, the engine, kernels over ceilings, candidates.

    make gpu [OUT=FOLDER] [DRY=1] [COMPUTE_SANITIZER=1]

Each part runs in processes of its own, which are killed when its share of the time is over, and
every result is a line in FOLDER as soon as it is there. A figure of an operation that failed a
check says so. The exit status is 1 if a check failed, and 2 without a GPU. ``--dry`` runs all of
it small on a CPU. Nothing is installed, and the card's settings stay as they are.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from gpu import forked
from gpu.budget import Budget
from gpu.child import kill_all
from gpu.parts import PARTS, Part, sanitizer
from gpu.report import report
from gpu.results import Result, Results
from gpu.run import Run, collected, source_tree
from gpu.trials import doubts, operations_of


def run_parts(run: Run, parts: Mapping[str, tuple[Part, float]], budget: Budget) -> int:
    """Run the parts in their order, whatever happens in one; return the exit status."""
    results, times = run.results, {}
    for name, (part, _) in parts.items():
        limit, begin = budget.limit(name), time.monotonic()
        print(f"{name}: at most {limit:.0f} s", flush=True)
        try:
            part(run, limit)
        except Exception as problem:  # the other parts run
            results.fail(f"{name}: {type(problem).__name__}: {problem}")
        finally:
            kill_all()
        times[name] = {"seconds": round(time.monotonic() - begin, 1), "limit": round(limit, 1)}
        results.facts["parts"] = times
        mark(results)
        results.write_summary()
        results.write_text("report.txt", report(results))
    return int(bool(results.failed))


def mark(results: Results) -> None:
    """Say beside each figure which checks failed of what it stands on, or are missing."""
    checked = results.parts.get("checks", [])
    for part in ("engine", "kernels", "loading"):

        def marked(each: Result, part: str = part) -> Result:
            why = doubts(checked, operations_of(part, each))
            rest = {key: value for key, value in each.items() if key != "unverified"}
            return rest | ({"unverified": why} if why else {})

        if part in results.parts:
            results.rewrite(part, marked)


def stop_well(results: Results) -> None:
    """Kill the processes of jobs, and keep a summary, when this one is told to end."""

    def stop(number: int, _: object) -> None:
        kill_all()
        results.leave(f"the rest: signal {number}")
        results.write_summary()
        os._exit(128 + number)  # threads that wait for jobs would start others

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def has_gpu() -> bool:
    import torch  # slow, and not needed without a GPU's being asked for

    return bool(torch.cuda.is_available())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--dry", action="store_true", help="small, on a CPU")
    parser.add_argument("--sanitize", action="store_true", help="check under compute-sanitizer")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=480.0, help="of the whole run")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of random inputs")
    options = parser.parse_args()
    if not options.dry and not has_gpu():
        print("make gpu: torch sees no CUDA device here; DRY=1 runs all of it small on a CPU")
        return 2
    parts = {name: part for name, part in PARTS.items() if name in options.only}
    results = Results(options.out)
    stop_well(results)
    results.facts = {"seed": options.seed, "dry": options.dry, "seconds": options.seconds}
    wrapper: list[str] = []
    if options.sanitize and not options.dry:
        tool = sanitizer()
        if tool is None:
            results.leave("compute-sanitizer: it is not installed")
        else:  # it slows kernels down many times: small inputs, and no times
            wrapper = [tool, "--tool", "memcheck", "--error-exitcode", "9"]
            parts = {"checks": PARTS["checks"]}
    budget = Budget(options.seconds, {name: share for name, (_, share) in parts.items()})
    with source_tree(options.dry) as environment:
        sys.path += collected()  # whether engines can run is found out in this process
        run = Run(results, options.dry, options.seed, environment, wrapper=wrapper)
        if options.dry:  # most of its time would go into imports
            forked.prepare(environment)
            run.start = forked.Forked
        try:
            status = run_parts(run, parts, budget)
        finally:
            kill_all()
            results.write_summary()
    lines = report(results)
    results.write_text("report.txt", lines)
    print("\n".join(lines))
    print(f"results are in {results.folder}")
    return status


if __name__ == "__main__":
    sys.exit(main())
