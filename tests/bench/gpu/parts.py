"""The parts of a run, most important first: engines, kernels, loading, candidates."""

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
from gpu.trials import choices_of, done, out_of_memory, timed, title, trials_of

Part = Callable[[Run, float], None]
KERNEL_PROCESSES = 12  # beside one for each group of checks of engines, on 16 cores
ENGINES_NEED = ("pydantic", "safetensors", "transformers")
TOP_P = {"temperature": 1.0, "top_p": 0.9, "top_k": 200}
LONG = 120_000  # tokens of a prompt
CHOICES = PACKAGE / "kernels" / "choices.json"


def tokens(run: Run, seconds: float) -> None:
    """Check that engines give transformers' tokens."""
    _check_engines(run, ["tokens"], seconds)


def engine(run: Run, seconds: float) -> None:
    """Serve models of real shapes, each in a process of its own; then transformers."""
    if lacks(run, "the engine"):
        return
    end = time.monotonic() + seconds
    few, some = ([1, 2], [1]) if run.dry else ([1, 64, 256], [1, 64])
    eager = {"enforce_eager": True}
    fp8, cache = {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}
    jobs: list[tuple[str, dict[str, Any]]] = [
        ("engine", {"model": "Llama-8B", "options": {}, "requests": few}),
        ("engine", {"model": "Qwen3-0.6B", "options": {}, "requests": few}),
        ("engine", {"model": "Llama-8B", "options": fp8, "requests": some}),
        ("engine", {"model": "Qwen3-0.6B", "options": eager, "requests": some}),
        ("transformers", {"model": "Llama-8B", "requests": some}),
        ("engine", {"model": "Llama-8B", "options": {}, "requests": some, "sampling": TOP_P}),
        ("engine", {"model": "Qwen3-30B-A3B, 8 layers", "options": {}, "requests": some}),
        ("engine", {"model": "Llama-8B, 4 layers", "options": {}, "requests": [1], "prompt": LONG}),
        ("engine", {"model": "Llama-8B", "options": cache, "requests": some}),
        ("transformers", {"model": "Qwen3-0.6B", "requests": some}),
        ("engine", {"model": "Llama-8B", "options": fp8, "requests": some, "rows": False}),
        ("engine", {"model": "Llama-8B", "options": eager, "requests": some}),
    ]
    for name, arguments in jobs:
        left = end - time.monotonic()
        if left < 1:
            run.results.leave(f"{name} of {arguments}: there was no time left")
            continue
        _measure(run, "engine", name, arguments, min(left, 60.0))


def checks(run: Run, seconds: float) -> None:
    """Check kernels and engines side by side, as most of the time is the compiler's.

    A case that ran out of memory beside the others is checked again alone.
    """
    end = time.monotonic() + seconds
    count = 1 if run.dry else min(KERNEL_PROCESSES, max(1, (os.cpu_count() or 1) - 4))
    jobs: list[Callable[[], None]] = [
        lambda i=i: _check_kernels(run, (i, count), [], seconds) for i in range(count)
    ]
    groups = ["eight bits", "rows", "hybrids", "loading", "ranks", "adapters", "updates"]
    if not run.wrapper:
        each = [groups] if run.dry else [[group] for group in groups]
        jobs += [lambda what=what: _check_engines(run, what, seconds) for what in each]
    with ThreadPoolExecutor(1 if run.dry else len(jobs)) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()
    if again := out_of_memory(run.results.parts.get("checks", [])):
        run.results.rewrite("checks", lambda each: None if each.get("name") in again else each)
        run.results.failed[:] = [
            each
            for each in run.results.failed
            if not each.startswith(tuple(f"{name}: " for name in again))
        ]
        planned = _planned(run)
        _check_kernels(run, (0, 1), sorted(planned - set(again)), end - time.monotonic())
    unchecked = sorted(_planned(run) - done(run.results.parts.get("checks", [])))
    if unchecked:
        run.results.fail(f"{len(unchecked)} kernels' cases were not checked: {unchecked}")


def _planned(run: Run) -> set[str]:
    found = run.results.parts.get("checks", [])
    return {name for each in found for name in each.get("planned", [])}


def _check_kernels(run: Run, share: tuple[int, int], over: list[str], seconds: float) -> None:
    """Check a share of the kernels' cases but those in ``over``, and their candidates."""

    def following(results: list[Result]) -> Mapping[str, Any] | None:
        names = done(results) | set(over)
        trials = [x for x in trials_of(results, run.dry) if title(x) not in names]
        planned = next((each["planned"] for each in results if "planned" in each), None)
        if planned is not None and names.issuperset(planned) and not trials:
            return None
        small = run.dry or bool(run.wrapper)
        return {"small": small, "seed": run.seed, "share": share,
                "over": sorted(names), "trials": trials}  # fmt: skip

    silence = seconds if run.wrapper else SILENCE
    run.jobs_until_done(
        "checks", "kernel checks", following, seconds, wrapper=run.wrapper, silence=silence
    )


def _check_engines(run: Run, groups: list[str], seconds: float) -> None:
    def following(results: list[Result]) -> Mapping[str, Any]:
        return {"what": groups, "over": sorted(done(results))}

    if not lacks(run, f"checks of {', '.join(groups)}"):
        run.jobs_until_done("checks", "engine checks", following, seconds)


def _measure(
    run: Run, part: str, job: str, arguments: Mapping[str, Any], seconds: float, **options: Any
) -> None:
    """Run a job that measures; what its time is over for is not done, and has not failed."""
    found, why = run.job(part, job, arguments, seconds, threads=8, **options)
    if why.startswith(OVER):
        run.results.leave(f"the rest of {job} of {arguments}: {why}")
    elif why and not any("failed" in each for each in found):
        run.results.fail(f"{job} of {arguments}: {why}")


def loading(run: Run, seconds: float) -> None:
    """Time loads onto the device."""
    if not lacks(run, "loading"):
        _measure(run, "loading", "loading", {}, seconds, silence=seconds)


def kernels(run: Run, seconds: float) -> None:
    """Time kernels one after another, in one process."""
    names = timed(run.results.parts.get("checks", []))
    if not names:
        run.results.leave("kernels: nothing was checked")

    def following(results: list[Result]) -> Mapping[str, Any] | None:
        left = [name for name in names if name not in done(results)]
        without = [
            each["name"].removeprefix("ceiling: ")
            for each in results
            if "failed" in each and each["name"].startswith("ceiling: ")
        ]
        small = {"small": run.dry, "seed": run.seed, "names": left, "without": without}
        return small if left else None

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
    "tokens": (tokens, 45.0),
    "engine": (engine, 135.0),
    "checks": (checks, 110.0),
    "kernels": (kernels, 85.0),
    "loading": (loading, 45.0),
    "candidates": (candidates, 60.0),
}


def lacks(run: Run, what: str) -> bool:
    """Return whether packages that engines need are missing, and keep that ``what`` is not done."""
    lacking = missing()
    if lacking:
        run.results.leave(
            f"{what}: {', '.join(lacking)} cannot be imported here; `make gpu-wheels` collects "
            "them on another machine"
        )
    return bool(lacking)


def missing() -> list[str]:
    """Return the packages that engines need and this machine lacks; kernels need none of them."""
    return [name for name in ENGINES_NEED if importlib.util.find_spec(name) is None]


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer, if it is installed."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
