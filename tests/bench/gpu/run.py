"""A run: its jobs in processes, its results, and what of them may be measured."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.child import OVER, Process, Result, new_process, run_child
from gpu.results import Results

BENCH = Path(__file__).parents[1]
PACKAGE = BENCH.parents[1] / "vllm_module"
SILENCE = 60.0  # seconds in which a job that works has a result, however slow a compiler is


@dataclass
class Run:
    """What the parts share.

    Attributes:
        results: what was found so far.
        dry: whether everything is small and on a CPU.
        seed: of random inputs.
        environment: of the processes.
        command: what begins a process of a job.
        wrapper: a command before it, of processes that check kernels.
        start: starts a process.

    """

    results: Results
    dry: bool
    seed: int
    environment: Mapping[str, str]
    command: Sequence[str] = (sys.executable, "-m", "gpu.worker")
    wrapper: Sequence[str] = ()
    start: Callable[[Sequence[str], Mapping[str, str] | None], Process] = new_process

    def job(
        self,
        part: str,
        job: str,
        arguments: Mapping[str, Any],
        seconds: float,
        *,
        silence: float = SILENCE,
        threads: int = 1,
        wrapper: Sequence[str] = (),
    ) -> tuple[list[Result], str]:
        """Run a job in a process; return its results, and why it did not end well, or ""."""
        found: list[Result] = []

        def keep(result: Result) -> None:
            found.append(result)
            if "begin" in result:
                return
            if "facts" in result:
                self.results.facts = result["facts"] | self.results.facts
            self.results.add(part, result)
            if "failed" in result:
                self.results.fail(f"{_name(result)}: {result['failed']}")

        given = {**arguments, "seconds": max(1.0, seconds), "dry": self.dry}
        why = run_child(
            [*wrapper, *self.command, job, json.dumps(given)],
            seconds,
            keep,
            silence=silence,
            environment={**self.environment, "OMP_NUM_THREADS": str(threads)},
            start=self.start,
        )
        return found, why

    def jobs_until_done(
        self,
        part: str,
        job: str,
        following: Callable[[list[Result]], Mapping[str, Any] | None],
        seconds: float,
        **options: Any,
    ) -> None:
        """Run a job, and again with what is left each time that its process ends badly.

        ``following`` returns the arguments of the next process from all results so far, or ``None``
        if nothing is left. What a process was at when it ended has failed, unless the time was over
        for what is only measured, or for a candidate.
        """
        end = time.monotonic() + seconds
        results: list[Result] = []
        while (arguments := following(results)) is not None:
            left = end - time.monotonic()
            if left <= 0:
                break
            found, why = self.job(part, job, arguments, left, **options)
            results += found
            if not why:
                return
            is_trial = "candidate" in found[-1].get("begin", {}) if found else False
            if why.startswith(OVER) and (part != "checks" or is_trial):
                break
            if not any("begin" in result for result in found):
                self.results.fail(f"{job}: {why}")
                return
            if "begin" in found[-1]:
                culprit = found[-1]["begin"] | {"failed": why}
                results.append(culprit)
                self.results.add(part, culprit)
                self.results.fail(f"{_name(culprit)}: {why}")
            else:
                self.results.fail(f"{job}: {why}")
        else:
            return
        self.results.leave(f"the rest of {job}: there was no time left")


def collected(build: Path = BENCH.parents[1] / "build") -> list[str]:
    """Return the folder that `make gpu-wheels` made for this Python, if pydantic is missing."""
    folder = build / "gpu-wheels" / "{}.{}".format(*sys.version_info)
    needed = importlib.util.find_spec("pydantic") is None
    return [str(folder)] if needed and folder.is_dir() else []


def _name(result: Mapping[str, Any]) -> str:
    return str(result.get("name") or f"{result.get('kernel')} for {result.get('case')}")


@contextmanager
def source_tree(dry: bool) -> Iterator[dict[str, str]]:
    """Yield the environment in which the package is imported from this tree, not installed.

    The tree's root cannot be on the path: transformers would take its folder ``kernels`` for
    Hugging Face's package. So a new folder has a link to the package alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / PACKAGE.name).symlink_to(PACKAGE)
        path = [str(BENCH), folder, *filter(None, [os.environ.get("PYTHONPATH")]), *collected()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        environment |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        if dry:
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        else:
            environment.pop("TRITON_INTERPRET", None)
        yield environment
