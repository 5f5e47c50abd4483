"""What is measured on: a GPU with its graphs, events and clocks, and a CPU that stands for it."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from machine import machine

Call = Callable[[], object]
_QUERY = "clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,driver_version"


class Gpu:
    """The first CUDA device.

    Attributes:
        dry: whether this is the stand-in, on which everything is small.
        l2: bytes of its cache.

    """

    name = "cuda"
    dry = False

    def __init__(self) -> None:
        self.l2 = torch.cuda.get_device_properties(0).L2_cache_size

    def facts(self) -> dict[str, Any]:
        """Return the names and versions of the machine, and the device's clocks."""
        properties = torch.cuda.get_device_properties(0)
        return machine() | {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "l2": self.l2,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "clocks": self.clocks(),
        }

    def clocks(self) -> dict[str, str]:
        """Return MHz, degrees and watts as nvidia-smi prints them; nothing without it."""
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return {}
        values = done.stdout.strip().split(", ")
        return dict(zip(_QUERY.split(","), values, strict=False))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free(self) -> None:
        """Return unused memory, for the processes beside this one."""
        torch.cuda.empty_cache()

    def graph(self, call: Call) -> Call:
        """Return what replays the call, which has to have run before."""
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()

        def replay(_: object = (call, result)) -> None:  # what it reads and writes stays allocated
            graph.replay()

        return replay

    def seconds(self, replay: Call, count: int) -> float:
        """Return the seconds that the device takes for ``count`` replays."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replay()  # the device is busy until the first event
        begin.record()
        for _ in range(count):
            replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def busy(self, work: Call) -> tuple[float | None, list[tuple[str, float]]]:
        """Return the seconds in which the device worked during a call, and those of each kernel.

        The seconds are ``None`` where the profiler sees none.
        """
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            work()
            self.synchronize()
        events = [
            (event.time_range.start, event.time_range.end, event.name)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        spans = sorted((start, end) for start, end, _ in events)
        each = [(name, (end - start) / 1e6) for start, end, name in events]
        return covered(spans) / 1e6 if spans else None, each


class Cpu(Gpu):
    """Stands for a GPU: calls in place of graphs, and the clock of the host."""

    name = "cpu"
    dry = True

    def __init__(self) -> None:
        self.l2 = 1 << 10

    def facts(self) -> dict[str, Any]:
        return machine() | {"gpu": f"none ({platform.machine()})", "gpus": 0, "clocks": {}}

    def clocks(self) -> dict[str, str]:
        return {}

    def synchronize(self) -> None:
        pass

    def free(self) -> None:
        pass

    def graph(self, call: Call) -> Call:
        return call

    def seconds(self, replay: Call, count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            replay()
        return time.perf_counter() - begin

    def busy(self, work: Call) -> tuple[float | None, list[tuple[str, float]]]:
        begin = time.process_time()
        work()
        return time.process_time() - begin, []


def covered(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one of the spans, sorted by their starts, lasts."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
