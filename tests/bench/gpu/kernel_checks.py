"""Job: check kernels, and every candidate that they may choose.

This compiles what the jobs that measure run, whose processes find it in Triton's cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpu.asking import asked
from gpu.attempt import attempt
from gpu.cases.case import Case
from gpu.cases.operations import all_cases
from gpu.check import Expected, check, expected
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
        share: the index of a process, and how many there are. Neighbouring cases, which run the
            same kernels, are in different ones: so are the candidates that all of them have.
        over: names of what is done.
        trials: to do beside.

    """
    if device.dry:
        from gpu.interpreted import interpret

        interpret()
    cases = {case.name: (operation, case) for operation, case in all_cases(small)}
    index, of = share
    names = list(cases)[index::of]
    emit(planned=names)
    if index == 0:
        emit(facts=device.facts())
    results: list[dict[str, Any]] = []
    known: dict[str, Expected] = {}  # of cases with candidates, which are compared with the same

    def keep(**result: Any) -> None:
        results.append(result)
        emit(**result)

    for name in [each for each in names if each not in over]:
        operation, case = cases[name]
        what = {"name": name, "operation": operation, "timed": bool(case.bucket)}
        attempt(keep, what, partial(checked, case, device, seed, known))
        if not results or not trials_of(results[-1:], device.dry):
            known.pop(name, None)
        device.free()
    trials = trials + trials_of(results, device.dry)
    for trial in trials:
        name, kernel, key, candidate = trial
        what = {"name": title(trial), "of": name, "kernel": kernel, "case": key,
                "candidate": candidate}  # fmt: skip
        with trying({kernel: candidate}):
            attempt(emit, what, partial(checked, cases[name][1], device, seed, known))
        device.free()


def checked(case: Case, device: Gpu, seed: int, known: dict[str, Expected]) -> dict[str, Any]:
    """Check a case, and return the choices that it made beside the errors."""
    if case.name not in known:
        known[case.name] = expected(case, device, seed)
    with asked() as choices:
        errors = check(case, device, seed, known[case.name])
    found = [[kernel, key, names] for (kernel, key), names in choices.items()]
    return {"check": errors, "asked": found}
