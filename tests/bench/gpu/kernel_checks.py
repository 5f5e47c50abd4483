"""Job: check kernels, and every candidate that they may choose.

This compiles what the jobs that measure run, whose processes find it in Triton's cache.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from gpu.asking import asked
from gpu.cases.case import Case
from gpu.cases.operations import all_cases
from gpu.check import check
from gpu.device import Gpu
from gpu.trials import Trial, title, trials_of
from gpu.worker import Emit
from vllm_module.kernels.choices import trying


@torch.no_grad()
def main(
    emit: Emit,
    device: Gpu,
    small: bool,
    seed: int,
    share: tuple[int, int],
    over: list[str],
    trials: list[Trial],
) -> None:
    """Check cases, then trials: those given, and those that the cases are found to have.

    Args:
        emit, device: as for every job.
        small: whether inputs are small.
        seed: of the inputs.
        share: the index of a process, and how many there are. Each has neighbouring cases, because
            they run the same compiled kernels.
        over: names of what is done.
        trials: to do beside.

    """
    if device.dry:
        from gpu.interpreted import interpret

        interpret()
    cases = {case.name: (operation, case) for operation, case in all_cases(small)}
    index, of = share
    names = list(cases)[index * len(cases) // of : (index + 1) * len(cases) // of]
    emit(planned=names)
    for name in [each for each in names if each not in over]:
        operation, case = cases[name]
        what = {"name": name, "operation": operation, "timed": bool(case.bucket)}
        emit(begin=what)
        with asked() as found:
            passed = checked(emit, device, case, seed, what, found)
        if passed:
            trials += trials_of(name, found) if case.bucket else []
    for trial in trials:
        name, kernel, key, candidate = trial
        what = {"name": title(trial), "of": name, "kernel": kernel, "case": key,
                "candidate": candidate}  # fmt: skip
        emit(begin=what)
        with trying({kernel: candidate}):
            checked(emit, device, cases[name][1], seed + 1, what, {})


def checked(
    emit: Emit, device: Gpu, case: Case, seed: int, what: dict[str, Any], found: dict[Any, Any]
) -> bool:
    """Check a case, emit what was found, and return whether it is right."""
    try:
        errors = check(case, device, seed)
    except Exception as problem:  # whatever it is, the others are checked
        emit(**what, failed=f"{type(problem).__name__}: {problem}"[:500])
        if "CUDA error" in str(problem):
            sys.exit(3)  # this process cannot use the device any more: another one goes on
        return False
    finally:
        device.free()
    emit(**what, check=errors, asked=[[*key, names] for key, names in found.items()])
    return True
