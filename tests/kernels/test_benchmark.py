"""What `make gpu` checks and times of kernels; tests of it that need no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vllm_module.kernels import choices
from vllm_module.kernels.rows import quantize

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    """Import the benchmark's modules, which import each other as a package beside them."""
    sys.path.insert(0, str(BENCH))
    try:
        from gpu import asking, candidates, ceilings, check, choosing, device, timing, trials
        from gpu.cases import operations

        yield SimpleNamespace(
            asking=asking, candidates=candidates, ceilings=ceilings, check=check,
            choosing=choosing, device=device, operations=operations, timing=timing, trials=trials,
            cpu=device.Cpu(),
        )  # fmt: skip
    finally:
        sys.path.remove(str(BENCH))


def test_what_a_gpu_will_run(gpu) -> None:
    """Case names are unique, small and large cases have the same operations, and bytes count."""
    for small in (False, True):
        cases = gpu.operations.all_cases(small)
        assert len({case.name for _, case in cases}) == len(cases)
        assert {operation for operation, _ in cases} == set(gpu.operations.OPERATIONS)
        assert all(case.moved > 0 for _, case in cases if case.bucket)
    large = {case.name for _, case in gpu.operations.all_cases(False)}
    for needed in ("1 x 128k", "64 of 256 to 128k", "prefill 1 x 8192", "matmul rows 8192"):
        assert any(needed in name for name in large), needed


def test_a_wrong_result_does_not_pass(gpu) -> None:
    """A wrong or unwritten element fails the check of any operation."""
    for operation, make in gpu.operations.OPERATIONS.items():
        case = next(iter(make(True)))
        wanted = gpu.check.expected(case, gpu.cpu, 1)
        for wrong in (torch.nan, 1e4):

            def broken(*inputs: object, case=case, wrong: float = wrong) -> object:
                result = case.ours(*inputs)
                first = gpu.check.tensors(result)[0]
                first[(0,) * first.dim()] = torch.tensor(wrong).to(first.dtype)
                return result

            with pytest.raises(AssertionError, match=r"error|bytes"):
                gpu.check.check(dataclasses.replace(case, ours=broken), gpu.cpu, 1, wanted)
            assert operation


def test_a_device_times_graphs_by_events(gpu, monkeypatch) -> None:
    """A graph calls an operation once on each set, and events surround its replays."""
    log: list[str] = []
    graph = SimpleNamespace(replay=lambda: log.append("replay"))
    event = SimpleNamespace(
        record=lambda: log.append("record"), synchronize=lambda: None, elapsed_time=lambda end: 60.0
    )
    for name, fake in {
        "CUDAGraph": lambda: graph, "graph": contextlib.nullcontext, "synchronize": lambda: None,
        "Event": lambda enable_timing: event,
        "get_device_properties": lambda index: SimpleNamespace(L2_cache_size=100),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    device = gpu.device.Gpu()
    calls: list[int] = []
    work = gpu.timing.replayed(device, calls.append, [(1,), (2,), (3,)])
    assert calls == [1, 1, 2, 3]  # the first compiles
    assert device.seconds(work.replay, 2) == 0.06
    assert log == ["replay", "record", "replay", "replay", "record"]
    times = gpu.timing.in_turns(device, {"ours": work}, rounds=2, seconds=0.1)
    assert times == {"ours": [0.06 / 2 / 3] * 2}


def test_the_device_is_busy_while_any_kernel_runs(gpu) -> None:
    """Spans that overlap count once, and gaps between them do not."""
    assert gpu.device.covered([(0, 2), (1, 3), (1, 2), (5, 6)]) == 4


def test_what_a_profiler_sees_is_the_devices(gpu, monkeypatch) -> None:
    """Time is that of the device's events alone, in seconds; without any it is unknown."""
    kinds = torch.autograd.DeviceType
    seen = [(kinds.CPU, 0, 100, "a"), (kinds.CUDA, 20, 30, "b"), (kinds.CUDA, 10, 15, "c")]
    events = [
        SimpleNamespace(
            device_type=kind, name=name, time_range=SimpleNamespace(start=start, end=end)
        )
        for kind, start, end, name in seen
    ]
    profile = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(
        torch.profiler, "profile", lambda activities: contextlib.nullcontext(profile)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    device = object.__new__(gpu.device.Gpu)
    assert device.busy(lambda: None) == (15e-6, [("b", 10e-6), ("c", 5e-6)])
    del events[1:]
    assert device.busy(lambda: None) == (None, [])


def test_ceilings_are_of_right_products(gpu, monkeypatch) -> None:
    """A wrong product gives no ceiling; rates are amounts over seconds."""
    said: list[dict[str, object]] = []
    found = gpu.ceilings.ceilings(lambda **result: said.append(result), gpu.cpu)
    assert list(found) == ["read", "copy", "bf16", "fp8"]
    assert found["copy"].amount == 2 * found["read"].amount
    assert gpu.ceilings.rates({"copy": [0.5]}, {"copy": found["copy"]})["copy"] == [2 * 2 * 2**16]
    monkeypatch.setattr(torch, "mm", lambda a, b: 2 * (a @ b))
    assert not any("failed" in each for each in said)
    left = gpu.ceilings.ceilings(lambda **result: said.append(result), gpu.cpu, ["read"])
    assert list(left) == ["copy", "fp8"]
    assert [each["name"] for each in said if "failed" in each] == ["ceiling: bf16"]


def choosing_case(gpu, monkeypatch) -> object:
    """Return a case of a kernel that has three candidates, of which one is wrong."""
    candidates = {"first": 1.0, "second": 1.0, "wrong": 2.0}
    # Kernels have the function under a name of their module.
    monkeypatch.setattr(quantize, "choose", choices.choose, raising=False)

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2 * quantize.choose("doubling", "of 8", candidates, x.device)

    _, case = gpu.operations.all_cases(True)[0]
    return dataclasses.replace(
        case, name="doubling", make=lambda: (torch.randn(8),), ours=double, meaning=lambda y: y,
        reference=lambda x: x * 2, truth=lambda x: x.double() * 2, bucket="doubling", moved=64,
        writes=False,
    )  # fmt: skip


def test_candidates_are_found_by_running_a_kernel(gpu, monkeypatch) -> None:
    """A choice shows its candidates; each is checked, and only right ones may be measured."""
    case = choosing_case(gpu, monkeypatch)
    with gpu.asking.asked() as found:
        gpu.check.check(case, gpu.cpu, 1, gpu.check.expected(case, gpu.cpu, 1))
    assert found == {("doubling", "of 8"): ["first", "second", "wrong"]}
    assert quantize.choose is choices.choose
    asked = [[*key, names] for key, names in found.items()]
    results = [{"name": "doubling", "operation": "x", "timed": True, "check": {}, "asked": asked}]
    assert len(gpu.trials.trials_of(results, True)) == 2
    wanted = gpu.check.expected(case, gpu.cpu, 1)
    for trial in gpu.trials.trials_of(results, False):
        what = {"of": trial[0], "kernel": trial[1], "case": trial[2], "candidate": trial[3]}
        with choices.trying({"doubling": trial[3]}):
            try:
                results.append(what | {"check": gpu.check.check(case, gpu.cpu, 1, wanted)})
            except AssertionError:
                results.append(what | {"failed": "wrong"})
    [choice] = gpu.trials.choices_of(results)
    assert choice == {"kernel": "doubling", "case": "of 8", "candidates": ["first", "second"],
                      "of": ["doubling"]}  # fmt: skip
    decision = gpu.candidates.decide(gpu.cpu, [case], choice, 1)
    assert decision["first"] == "first"
    assert set(decision["over_first"]) == {"first", "second"}
    results.append({"name": "y", "operation": "x", "failed": "wrong"})
    assert gpu.trials.choices_of(results) == []  # nothing is chosen where a check failed


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({"first": [[1.0], [1.0]], "second": [[0.8], [0.8]]}, "second"),
        ({"first": [[1.0], [1.1]], "second": [[0.95], [1.0]]}, "first"),  # within the spread
        ({"first": [[1.0], [1.0]], "second": [[0.5], [1.2]]}, "first"),  # not in each round
        ({"first": [[1.0, 1.0]] * 2, "second": [[0.5, 3.0]] * 2}, "first"),  # over all cases
        ({"a": [[1.0]] * 2, "b": [[0.9]] * 2, "c": [[0.7]] * 2, "d": [[0.8]] * 2}, "c"),
    ],
)
def test_a_candidate_has_to_be_faster_by_more_than_the_spread(gpu, times, best) -> None:
    """The first one stays unless another is faster on the cases together, beyond the noise."""
    assert gpu.choosing.chosen(times)[0] == best


def test_the_table_keeps_what_was_not_measured(gpu) -> None:
    """A decision replaces an entry or removes it, and other entries and GPUs stay."""
    committed = {"A": {"k": {"x": "b"}}, "B": {"k": {"x": "b", "y": "c", "z": "d"}}}
    decisions = [
        {"kernel": "k", "case": "x", "first": "a", "chosen": "a"},
        {"kernel": "k", "case": "y", "first": "a", "chosen": "b"},
    ]
    assert gpu.choosing.table(committed, "B", decisions) == {
        "A": {"k": {"x": "b"}},
        "B": {"k": {"y": "b", "z": "d"}},
    }
    assert gpu.choosing.table({}, "B", decisions[:1]) == {}


def test_transformers_is_not_told_of_our_kernels() -> None:
    """The benchmark's folder, which is on its path, has nothing that is named ``kernels``."""
    assert not list(BENCH.glob("kernels*"))
    assert isinstance(quantize, ModuleType)
