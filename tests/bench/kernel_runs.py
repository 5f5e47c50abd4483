"""How tests/bench/kernels.py checks cases, times them and prints the results."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_case import Case, Peer
from kernel_cases import OPERATIONS

COLD = 8  # times the L2 cache, what the inputs of one case have together at least
MOST_SETS = 256
CLOSE = 0.05  # relative difference to a peer's result, beyond which it computes something else
SMALLEST = 1e-6  # an error that float32 may have, whatever the reference's
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there, checks are tested
# What is aimed at on an H200: of the floor, or of the speed of torch's best.
TARGETS = {
    "decode, batch 8": ("floor", 0.70),
    "decode, batch >= 32, context >= 4k": ("floor", 0.85),
    "prefill, bf16 kv": ("torch", 0.70),
    "reshape_and_cache, 8192 tokens": ("floor", 0.85),
    "copy_blocks": ("floor", 0.85),
    "rms_norm, 8192 tokens": ("floor", 0.85),
    "rotary, 8192 tokens": ("floor", 0.85),
    "act_and_mul, 8192 tokens": ("floor", 0.85),
    "quantize, 8192 tokens": ("floor", 0.85),
    "fused quantize, 8192 tokens": ("floor", 0.85),
    "matmul rows, < 512 tokens": ("torch", 1.0),
    "matmul blocks, < 512 tokens": ("torch", 1.0),
    "matmul rows, >= 512 tokens": ("torch", 0.85),
    "matmul blocks, >= 512 tokens": ("torch", 0.85),
}


# Checks


def tensors(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result that have elements."""
    results = [result] if isinstance(result, torch.Tensor) else result
    return [x for x in results if x is not None and x.numel()]


def made(case: Case, seed: int) -> tuple[Any, ...]:
    """Make a case's inputs, the same for the same seed, since an operation may write to them."""
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        return case.make()


def poisoned(operation: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Call with new memory full of NaN, so that unwritten elements show."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic", UserWarning)
        before = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("warn")
        try:
            return operation(*inputs)
        finally:
            torch.set_deterministic_debug_mode(before)


def error(result: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the norm of the difference over that of the truth."""
    if result.shape != truth.shape:
        raise AssertionError(f"its shape is {list(result.shape)}, and not {list(truth.shape)}")
    exact = truth.double()
    difference = (result.double() - exact).norm() / exact.norm().clamp(min=1e-30)
    return float(difference)


def check(case: Case, seed: int) -> dict[str, float]:
    """Return the errors of an operation and of its reference; raise if the operation is wrong."""
    inputs = made(case, seed)
    results = poisoned(case.ours, inputs)
    if case.writes:
        inputs = made(case, seed)
    if case.truth is None:
        expected = case.reference(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs))
        for result, wanted in zip(tensors(results), tensors(expected), strict=True):
            assert result.shape == wanted.shape, f"{list(result.shape)} {list(wanted.shape)}"
            got, want = (x.cpu().contiguous().view(torch.uint8) for x in (result, wanted))
            differ = int((got != want).sum())
            assert not differ, f"{differ} of {want.numel()} bytes are not the reference's"
        return {"error": 0.0, "allowed": 0.0}
    plain = case.meaning(case.reference(*inputs))
    if case.writes:
        inputs = made(case, seed)
    truths = case.truth(*inputs)
    worst = {"error": 0.0, "allowed": math.inf}
    lists = (tensors(x) for x in (case.meaning(results), plain, truths))
    for result, low, truth in zip(*lists, strict=True):
        found, allowed = error(result, truth), 2 * error(low, truth) + SMALLEST
        assert found <= allowed, f"its error is {found:.3g}, and {allowed:.3g} is allowed"
        if found / allowed >= worst["error"] / worst["allowed"]:
            worst = {"error": found, "allowed": allowed}
    return worst


# Times


def clock(call: Callable[..., Any], sets: list[tuple[Any, ...]], seconds: float) -> dict[str, Any]:
    """Time a call on the device, in seconds, by replaying a graph of calls on all sets."""
    for _ in range(2):
        call(*sets[0])  # compiles
    torch.cuda.synchronize()
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for inputs in sets:
            results.append(call(*inputs))  # kept: none is written where another was

    def replays(count: int) -> list[float]:
        """Replay without waiting, so that the device is never idle."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        graph.replay()
        for begin, end in events:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]

    count = min(500, max(7, int(seconds / statistics.median(replays(3)))))
    times = [total / len(sets) for total in replays(count)]
    fifths = statistics.quantiles(times, n=5)
    return {"median": statistics.median(times), "fifths": [fifths[0], fifths[-1]],
            "replays": count, "sets": len(sets)}  # fmt: skip


def measure_ceilings(size: int = 8192, copied: int = 2 << 30) -> dict[str, Any]:
    """Measure the rates of the device: bytes copied, and products of large matrices."""
    with torch.device(DEVICE):
        source = torch.randint(256, (copied,), dtype=torch.uint8)
        a, b = (torch.randn(size, size, dtype=torch.bfloat16) for _ in range(2))
        ones = torch.ones(size, 1)
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()

    def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x, y, scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16,
                                use_fast_accum=True)  # fmt: skip

    assert error(torch.mm(a, b)[:64], a[:64].float() @ b.float()) < CLOSE
    assert error(multiply(x, y)[:64], x[:64].float() @ y.float()) < CLOSE
    copy = clock(lambda x, y: y.copy_(x), [(source, torch.empty_like(source))], 0.5)
    bf16, fp8 = (
        clock(call, [pair], 0.5) for call, pair in ((torch.mm, (a, b)), (multiply, (x, y)))
    )
    properties = torch.cuda.get_device_properties(0)
    return {
        "copy": 2 * copied / copy["median"],
        "bf16": 2 * size**3 / bf16["median"],
        "fp8": 2 * size**3 / fp8["median"],
        "l2": properties.L2_cache_size,
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
    }


def sets_of(case: Case, l2: int, seed: int) -> list[tuple[Any, ...]]:
    count = min(MOST_SETS, math.ceil(COLD * l2 / case.moved))
    return [made(case, seed + index) for index in range(count)]


def time_case(case: Case, ceilings: dict[str, Any], seed: int, quick: bool) -> dict[str, Any]:
    """Time an operation and its peers that work and give the same."""
    seconds = 0.02 if quick else 0.05
    floor = max(case.moved / ceilings["copy"], case.flops / ceilings[case.rate])
    sets = sets_of(case, ceilings["l2"], seed)
    ours = clock(case.ours, sets, seconds)
    result: dict[str, Any] = {"time": ours, "floor": floor, "moved": case.moved,
                              "flops": case.flops, "peers": {}}  # fmt: skip
    expected = [x.clone() for x in tensors(case.ours(*made(case, seed)))]
    for name, peer in case.peers.items():
        if quick and peer.compiled:
            continue
        try:
            result["peers"][name] = time_peer(case, peer, sets, expected, seed, seconds)
        except Exception as problem:  # torch's refusals are of every kind
            result["peers"][name] = {"refused": f"{type(problem).__name__}: {problem}"[:200]}
    return result


def time_peer(
    case: Case, peer: Peer, sets: list[Any], expected: list[torch.Tensor], seed: int, seconds: float
) -> dict[str, Any]:
    results = tensors(peer.call(*peer.prepare(*made(case, seed))))
    if peer.judged:
        for result, wanted in zip(results, expected, strict=False):
            difference = error(result.float().view(wanted.shape), wanted.float())
            assert difference < CLOSE, f"gives something else: {difference:.3g}"
    return clock(peer.call, [peer.prepare(*inputs) for inputs in sets], seconds)


# One operation, in a process of its own


def cases_of(operation: str, quick: bool) -> list[Case]:
    """Return an operation's cases; if ``quick``, two timed cases of each bucket and every check."""
    kept: list[Case] = []
    for case in OPERATIONS[operation](False):
        alike = [x.bucket for x in kept].count(case.bucket)
        if not (quick and case.bucket) or alike < 2:
            kept.append(case)
    return kept


def each(cases: list[Case], what: str, work: Callable[[Case], dict[str, Any]]) -> None:
    """Print a line of JSON for each case: its result, or how it failed."""
    for case in cases:
        try:
            found = work(case)
        except Exception as problem:
            found = {"failed": f"{what}: {type(problem).__name__}: {problem}"}
        print(json.dumps({"name": case.name, "bucket": case.bucket, **found}), flush=True)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


# The whole run


def row(result: dict[str, Any]) -> str:
    """Return the printed line of a result, and add the ratios to the result."""
    time_s, floor = result["time"]["median"], result["floor"]
    peers = {n: p["median"] for n, p in result["peers"].items() if "median" in p}
    result["fraction_of_floor"] = floor / time_s
    beside = ""
    if peers:
        best = min(peers, key=peers.__getitem__)
        result["times_torch"] = peers[best] / time_s
        beside = f"{result['times_torch']:6.2f}x {best}"
    by_bytes = f"{result['moved'] / time_s / 1e9:6.0f} GB/s"
    by_flops = f"{result['flops'] / time_s / 1e12:6.1f} TFLOP/s" if result["flops"] else ""
    return (
        f"{result['name']:58} {time_s * 1e6:9.1f} us {by_bytes} {by_flops:15} "
        f"{result['fraction_of_floor']:4.0%} {beside}"
    )


def summary(results: list[dict[str, Any]]) -> list[str]:
    """Return a line for each bucket, with its worst and median case."""
    lines = [f"{'':38} cases  of the floor  of torch's best  target on an H200"]
    timed = [result for result in results if "time" in result]
    for bucket in dict.fromkeys(result["bucket"] for result in timed):
        here = [result for result in timed if result["bucket"] == bucket]
        columns = {
            "floor": [result["fraction_of_floor"] for result in here],
            "torch": [result["times_torch"] for result in here if "times_torch" in result],
        }
        shown = [
            f"{min(x):5.0%}, {statistics.median(x):5.0%}" if x else "" for x in columns.values()
        ]
        target = ""
        if bucket in TARGETS:
            kind, value = TARGETS[bucket]
            missed = [x for x in columns[kind] if x < value]
            reached = len(columns[kind]) - len(missed)
            target = f">= {value:.0%} of {kind}: {reached} of {len(columns[kind])}"
        lines.append(f"{bucket:38} {len(here):5}  {shown[0]:>12}  {shown[1]:>15}  {target}")
    return [*lines, "the worst case of each and the middle one"]


def child(arguments: list[str], seconds: float) -> tuple[list[dict[str, Any]], int]:
    """Run this program in a process; print times as they come, and return results and status."""
    command = [sys.executable, str(Path(__file__).with_name("kernels.py")), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    alarm = threading.Timer(max(1.0, seconds), process.kill)
    alarm.start()
    found = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            found.append(json.loads(line))
            if "time" in found[-1]:
                print(row(found[-1]), flush=True)
    status = process.wait()
    alarm.cancel()
    return found, status


def main(description: str) -> None:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=OPERATIONS, help="one operation")
    parser.add_argument("--quick", action="store_true", help="few cases, shortly, none compiled")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the inputs")
    parser.add_argument("--minutes", type=float, default=9.5, help="what runs longer is ended")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if DEVICE != "cuda":
        raise SystemExit("kernels.py measures on a GPU, and torch sees no CUDA device here")
    if not options.child:
        sys.exit(whole(options))
    what, operation = options.child
    with torch.no_grad():
        if what == "ceilings":
            print(json.dumps(measure_ceilings()))
            return
        cases = cases_of(operation, options.quick)
        if what == "check":
            each(cases, what, lambda case: {"check": check(case, options.seed)})
        else:
            timed = [case for case in cases if case.bucket]
            given = options.ceilings, options.seed, options.quick
            each(timed, what, lambda case: time_case(case, *given))


def whole(options: argparse.Namespace) -> int:
    """Check all operations in parallel, which compiles kernels, and then time one after another."""
    end = time.monotonic() + 60 * options.minutes
    operations = [options.only] if options.only else list(OPERATIONS)
    shared = ["--seed", str(options.seed), *["--quick"] * options.quick]
    results: dict[str, dict[str, Any]] = {}
    failed: list[str] = []

    def collect(what: str, operation: str, found: list[dict[str, Any]], status: int) -> bool:
        wrong = [f"{operation}: {x['name']}: {x['failed']}" for x in found if "failed" in x]
        if status:
            why = "as time was up" if time.monotonic() >= end else "by itself"
            wrong.append(f"{operation}: its {what} ended with status {status}, {why}")
        for result in found:
            results.setdefault(result["name"], {}).update(result)
        failed.extend(wrong)
        print("".join(f"FAILED {line[:300]}\n" for line in wrong), end="", flush=True)
        return not wrong

    def checks(operation: str) -> tuple[list[dict[str, Any]], int]:
        return child(["--child", "check", operation, *shared], end - time.monotonic())

    with ThreadPoolExecutor(len(operations)) as pool:
        checked = dict(zip(operations, pool.map(checks, operations), strict=True))
    right = [name for name, found in checked.items() if collect("check", name, *found)]
    report = {"machine": {"torch": torch.__version__, "triton": triton.__version__,
                          "cuda": torch.version.cuda, "python": platform.python_version(),
                          "machine": platform.platform()},
              "seed": options.seed, "failed": failed}  # fmt: skip

    def write(**more: Any) -> None:
        """Write the report so far: the next operation may crash the machine."""
        if options.out:
            report.update(more, results=list(results.values()))
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1))

    write()
    print(f"seed {options.seed}: {len(results)} cases of {len(operations)} operations checked; "
          f"{len(operations) - len(right)} operations are wrong and not timed")  # fmt: skip

    found, status = child(["--child", "ceilings", "", *shared], end - time.monotonic())
    if status or not found:
        print("FAILED: the rates of the device itself could not be measured")
        return 1
    ceilings = found[-1]
    print(
        f"{ceilings['device']}: copies {ceilings['copy'] / 1e9:.0f} GB/s, multiplies "
        f"{ceilings['bf16'] / 1e12:.0f} TFLOP/s in bf16 and {ceilings['fp8'] / 1e12:.0f} in fp8"
    )
    for operation in right:
        given = ["--child", "time", operation, *shared, "--ceilings", json.dumps(ceilings)]
        collect("time", operation, *child(given, end - time.monotonic()))
        write(ceilings=ceilings)
    print("\n".join(["", *summary(list(results.values()))]))
    for line in failed:
        print("FAILED", line[:300])
    return bool(failed)
