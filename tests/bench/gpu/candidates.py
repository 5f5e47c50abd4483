"""Job: time the candidates of each choice in turns, on every case that makes it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpu.attempt import attempt
from gpu.cases.case import Case
from gpu.cases.operations import all_cases
from gpu.choosing import chosen
from gpu.device import Gpu
from gpu.timing import Work, in_turns, replayed, sets_of
from gpu.worker import Emit
from vllm_module.kernels.choices import trying


@torch.no_grad()
def main(emit: Emit, device: Gpu, small: bool, seed: int, choices: list[dict[str, Any]]) -> None:
    if device.dry:
        from gpu.interpreted import interpret

        interpret()
    emit(facts=device.facts())
    cases = {case.name: case for _, case in all_cases(small)}
    for choice in choices:
        what = {"kernel": choice["kernel"], "case": choice["case"]}
        of = [cases[name] for name in choice["of"]]
        attempt(emit, what, partial(decide, device, of, choice, seed))
        device.free()


def decide(
    device: Gpu, cases: list[Case], choice: dict[str, Any], seed: int
) -> dict[str, Any]:  # fmt: skip
    """Return the times of all candidates, for each case, and the one that follows."""
    by_case = {}
    candidates, refused = list(choice["candidates"]), {}
    for case in cases:
        sets = sets_of(case, device, seed)
        works: dict[str, Work] = {}
        for name in list(candidates):
            with trying({choice["kernel"]: name}):
                try:
                    works[name] = replayed(device, case.ours, sets)
                except Exception as problem:
                    if name == candidates[0]:
                        raise
                    candidates.remove(name)  # torch's own may not be captured
                    refused[name] = f"{type(problem).__name__}: {problem}"[:200]
                    continue
                if device.dry:  # a call and not a graph: it chooses when it is replayed
                    works[name].replay = partial(under, choice["kernel"], name, works[name].replay)
        by_case[case.name] = in_turns(device, works)
        del works, sets
        device.free()
    rounds = {
        name: list(zip(*(times[name] for times in by_case.values()), strict=True))
        for name in candidates
    }
    best, ratios, spread = chosen(rounds)
    return {
        "first": candidates[0], "chosen": best, "over_first": ratios, "spread": spread,
        "seconds": by_case, "refused": refused, "clocks": device.clocks(),
    }  # fmt: skip


def under(kernel: str, name: str, call: Any) -> None:
    with trying({kernel: name}):
        call()
