"""The parts of a run, most important first: checks, engines, loading, kernels, candidates."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu.child import OVER, Result
from gpu.choosing import table
from gpu.run import PACKAGE, SILENCE, Run
from gpu.trials import choices_of, done, passed, right_operations, title, trials_of

Part = Callable[[Run, float], None]
KERNEL_PROCESSES = 12  # beside one for each group of checks of engines, on 16 cores
ENGINES_NEED = ("pydantic", "safetensors", "transformers")
CHOICES = PACKAGE / "kernels" / "choices.json"


def checks(run: Run, seconds: float) -> None:
    """Check kernels and engines side by side, as most of the time is the compiler's."""
    small = run.dry or bool(run.wrapper)
    count = 1 if run.dry else min(KERNEL_PROCESSES, max(1, (os.cpu_count() or 1) - 4))
    groups = ["tokens", "eight bits", "rows", "hybrids", "loading", "ranks"]

    def kernels(share: int) -> None:
        def following(results: list[Result]) -> Mapping[str, Any] | None:
            over = done(results)
            trials = [x for x in trials_of(results, run.dry) if title(x) not in over]
            planned = next((each["planned"] for each in results if "planned" in each), None)
            if planned is not None and over.issuperset(planned) and not trials:
                return None
            return {"small": small, "seed": run.seed, "share": (share, count),
                    "over": sorted(over), "trials": trials}  # fmt: skip

        silence = seconds if run.wrapper else SILENCE
        run.jobs_until_done(
            "checks", "kernel checks", following, seconds, wrapper=run.wrapper, silence=silence
        )

    def engines(what: list[str]) -> None:
        def following(results: list[Result]) -> Mapping[str, Any] | None:
            return None if results else {"what": what}

        run.jobs_until_done("checks", "engine checks", following, seconds)

    jobs: list[Callable[[], None]] = [lambda i=i: kernels(i) for i in range(count)]
    lacking = missing()
    if lacking:
        run.results.leave(f"engines: {', '.join(lacking)} cannot be imported here")
    elif not run.wrapper:
        each = [groups] if run.dry else [[group] for group in groups]
        jobs += [lambda what=what: engines(what) for what in each]
    with ThreadPoolExecutor(1 if run.dry else len(jobs)) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()
    results = run.results.parts.get("checks", [])
    planned = {name for each in results for name in each.get("planned", [])}
    unchecked = sorted(planned - done(results))
    if unchecked:
        run.results.fail(f"{len(unchecked)} kernels' cases were not checked: {unchecked}")


def engine(run: Run, seconds: float) -> None:
    """Serve models of real shapes, each in a process of its own; then transformers."""
    right = right_operations(run.results.parts.get("checks", []))
    lacking = missing()
    if lacking:
        run.results.leave(f"the engine: {', '.join(lacking)} cannot be imported here")
        return
    if "tokens" not in right:
        run.results.leave("the engine: no check has found its tokens right")
        return
    end = time.monotonic() + seconds
    requests = [1, 2] if run.dry else [1, 64, 256]
    jobs: list[tuple[str, dict[str, Any]]] = [
        ("engine", {"model": "Llama-8B", "options": {}, "requests": requests}),
        ("engine", {"model": "Qwen3-0.6B", "options": {}, "requests": requests}),
        ("engine", {"model": "Qwen3-0.6B", "options": {"enforce_eager": True},
                    "requests": requests[:2]}),
        ("transformers", {"model": "Llama-8B", "requests": requests[:2]}),
        ("transformers", {"model": "Qwen3-0.6B", "requests": requests[:2]}),
        ("engine", {"model": "Llama-8B", "options": {"quantization": "fp8"},
                    "requests": requests[:2]}),
        ("engine", {"model": "Llama-8B", "options": {"quantization": "fp8"},
                    "requests": requests[:2], "rows": False}),
        ("engine", {"model": "Llama-8B", "options": {"enforce_eager": True},
                    "requests": requests[:2]}),
    ]  # fmt: skip
    if run.dry:
        jobs = [jobs[0], jobs[2], jobs[4], *jobs[5:7]]
    if not {"eight bits", "rows"} <= right:
        jobs = [job for job in jobs if "quantization" not in job[1].get("options", {})]
    for name, arguments in jobs:
        left = end - time.monotonic()
        if left < 1:
            run.results.leave(f"{name} of {arguments}: there was no time left")
            continue
        found, why = run.job("engine", name, arguments, min(left, 80.0), threads=8)
        if why.startswith(OVER):
            run.results.leave(f"the rest of {name} of {arguments}: {why}")
        elif why and not any("failed" in each for each in found):
            run.results.fail(f"{name} of {arguments}: {why}")


def loading(run: Run, seconds: float) -> None:
    """Time loads onto the device."""
    lacking = missing()
    if lacking:
        run.results.leave(f"loading: {', '.join(lacking)} cannot be imported here")
    elif "loading" not in right_operations(run.results.parts.get("checks", [])):
        run.results.leave("loading: no check has found its bits right")
    else:
        found, why = run.job("loading", "loading", {}, seconds, threads=8, silence=seconds)
        if why.startswith(OVER):
            run.results.leave(f"loading: {why}")
        elif why and not any("failed" in each for each in found):
            run.results.fail(f"loading: {why}")


def kernels(run: Run, seconds: float) -> None:
    """Time kernels one after another, in one process."""
    names = passed(run.results.parts.get("checks", []))
    if not names:
        run.results.leave("kernels: no check has found any of them right")

    def following(results: list[Result]) -> Mapping[str, Any] | None:
        left = [name for name in names if name not in done(results)]
        return {"small": run.dry, "seed": run.seed, "names": left} if left else None

    run.jobs_until_done("kernels", "kernels", following, seconds, threads=4)


def candidates(run: Run, seconds: float) -> None:
    """Time candidates, and write the table of choices that follows."""
    choices = choices_of(run.results.parts.get("checks", []))
    if not choices:
        run.results.leave("candidates: no kernel whose checks passed lists any")

    def following(results: list[Result]) -> Mapping[str, Any] | None:
        over = {(each.get("kernel"), each.get("case")) for each in results}
        left = [each for each in choices if (each["kernel"], each["case"]) not in over]
        return {"small": run.dry, "seed": run.seed, "choices": left} if left else None

    run.jobs_until_done("candidates", "candidates", following, seconds, threads=4)
    decisions = [each for each in run.results.parts.get("candidates", []) if "chosen" in each]
    committed = json.loads(CHOICES.read_text())
    gpu = str(run.results.facts.get("gpu", "unknown"))
    run.results.write_json("choices.json", table(committed, gpu, decisions))


PARTS: dict[str, tuple[Part, float]] = {  # with its share of the time
    "checks": (checks, 150.0),
    "engine": (engine, 180.0),
    "loading": (loading, 45.0),
    "kernels": (kernels, 110.0),
    "candidates": (candidates, 80.0),
}


def missing() -> list[str]:
    """Return the packages that engines need and this machine lacks; kernels need none of them."""
    return [name for name in ENGINES_NEED if importlib.util.find_spec(name) is None]


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer, if it is installed."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
