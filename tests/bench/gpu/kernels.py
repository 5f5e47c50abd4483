"""Job: time kernels beside torch's own, over what the device does in the same minute.

The floor of a case is the fewest bytes that it moves (each input read once, each output written
once) over the rate at which the device reads or copies, whichever is greater, or its products over
the rate of a large matrix product, whichever takes longer. Rates are measured in each round, in
turns with the case, so a fraction is of one moment.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from machine import spread

from gpu import ceilings
from gpu.attempt import attempt
from gpu.cases.case import Case, Peer
from gpu.cases.operations import all_cases
from gpu.ceilings import Ceiling, rates
from gpu.check import CLOSE, error, made, tensors
from gpu.device import Gpu
from gpu.timing import Work, in_turns, replayed, sets_of
from gpu.worker import Emit


@torch.no_grad()
def main(
    emit: Emit, device: Gpu, small: bool, seed: int, names: list[str], without: list[str]
) -> None:
    """Time the cases with these names, the most important first, without some ceilings."""
    emit(facts=device.facts())
    limits = ceilings.ceilings(emit, device, without)
    cases = {case.name: (operation, case) for operation, case in all_cases(small)}
    wanted = set(names)
    for operation, case in (each for name, each in cases.items() if name in wanted):
        what = {"name": case.name, "operation": operation, "bucket": case.bucket}
        attempt(emit, what, partial(time_case, case, device, limits, seed))
        device.free()
    emit(clocks_after=device.clocks())


def time_case(
    case: Case, device: Gpu, limits: Mapping[str, Ceiling], seed: int
) -> dict[str, Any]:  # fmt: skip
    """Time an operation, its peers that work and give the same, and the device's own rates."""
    wanted = ("read", "copy", *[case.rate] * bool(case.flops))
    counted = {name: limits[name] for name in wanted if name in limits}
    works = {name: ceiling.work for name, ceiling in counted.items()}
    sets = sets_of(case, device, seed)
    works["ours"] = replayed(device, case.ours, sets)
    expected = [x.clone() for x in tensors(case.ours(*made(case, device, seed)))]
    refused = {}
    for name, peer in case.peers.items():
        try:
            works[name] = peer_work(case, peer, device, sets, expected, seed)
        except Exception as problem:  # torch's refusals are of every kind
            refused[name] = f"{type(problem).__name__}: {problem}"[:200]
    times = in_turns(device, works)
    measured = rates(times, counted)
    ours, peers = times["ours"], {name: times[name] for name in case.peers if name in times}
    result = {
        "time": spread(ours),
        "fraction": fraction_of(case, measured, ours),
        "moved": case.moved,
        "flops": case.flops,
        "sets": len(sets),
        "rates": {name: spread(each) for name, each in measured.items()},
        "peers": {name: spread(each) for name, each in peers.items()},
        "refused": refused,
        "clocks": device.clocks(),
    }
    if peers:
        best = min(peers, key=lambda name: statistics.median(peers[name]))
        ratios = [their / our for their, our in zip(peers[best], ours, strict=True)]
        result |= {"best_peer": best, "times_peer": spread(ratios)}
    return result


def fraction_of(
    case: Case, rates: Mapping[str, list[float]], seconds: list[float]
) -> dict[str, float] | None:
    """Return the floor over the time of each round; ``None`` if a rate that counts is missing."""
    moving = [rates[name] for name in ("read", "copy") if name in rates]
    if not moving or (case.flops and case.rate not in rates):
        return None
    floors = [case.moved / max(each) for each in zip(*moving, strict=True)]
    if case.flops:
        floors = [
            max(floor, case.flops / rate)
            for floor, rate in zip(floors, rates[case.rate], strict=True)
        ]
    return spread([floor / each for floor, each in zip(floors, seconds, strict=True)])


def peer_work(
    case: Case, peer: Peer, device: Gpu, sets: list[Any], expected: list[torch.Tensor], seed: int
) -> Work:
    """Check a peer against ours, and return what replays it."""
    results = tensors(peer.call(*peer.prepare(*made(case, device, seed))))
    if peer.judged:
        for result, wanted in zip(results, expected, strict=False):
            difference = error(result.float().view(wanted.shape), wanted.float())
            assert difference < CLOSE, f"gives something else: {difference:.3g}"
    return replayed(device, peer.call, [peer.prepare(*inputs) for inputs in sets])
