"""The machine that a benchmark runs on, rounds that alternate, and the file that keeps the figures.

A benchmark writes ``{"machine": ..., "results": ...}``. A ratio in its results is a number or a
:func:`spread`, at the keys by which ``figures.py`` finds it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

Spread = dict[str, float]


def machine() -> dict[str, object]:
    """Return the processor, its cores, the versions and, in a checkout, the commit."""
    return {
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    } | commit()


def cores() -> int | None:
    """Return how many cores this process may use, which ``taskset`` may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def processor() -> str:
    """Return the processor's name, with numbers where the name has none ("AMD EPYC")."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    entries = dict(map(str.strip, line.split(":", 1)) for line in reversed(lines) if ":" in line)
    name = " ".join(entries.get("model name", platform.machine()).split())
    numbers = [f"{each} {entries[key]}" for each, key in (
        ("family", "cpu family"), ("model", "model"), ("stepping", "stepping"),
    ) if key in entries]  # fmt: skip
    if any(character.isdigit() for character in name) or not numbers:
        return name
    return f"{name} ({', '.join(numbers)})"


def commit() -> dict[str, object]:
    """Return the commit of the checkout, with "+" where tracked code differs from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"],
                              capture_output=True, text=True, check=True)  # fmt: skip
        # Results that an earlier benchmark of the same run wrote do not count.
        code = [*git, "diff", "--quiet", "HEAD", "--", ":/", ":!results"]
        changed = subprocess.run(code, capture_output=True, check=False).returncode
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return {}
    return {"commit": head.stdout.strip() + "+" * bool(changed)}


def clock(work: Callable[[], object]) -> float:
    """Return the seconds that the work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def memory_in_use(entry: str = "VmRSS") -> int:
    """Return an entry of /proc/self/status in bytes: memory in use (VmRSS) or its peak (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if entry in line).split()[1]) * 1024


def memory_peak() -> Callable[[], int]:
    """Return what gives the peak of memory from now on, beyond what is in use now, in bytes.

    What the imports took for a while and freed would else hide as much of the work's memory.
    """
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak: proc(5)
    start = memory_in_use()
    return lambda: memory_in_use("VmHWM") - start


def by_one_thread(work: Callable[[], object]) -> None:
    """Do the work with one thread of torch's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work()
    torch.set_num_threads(threads)


def rounds(works: Mapping[str, Callable[[], object]], n: int = 5) -> dict[str, list[float]]:
    """Run every work once a round, for ``n`` rounds; return the seconds of each, by name.

    Each round starts with another work, so none always runs after the same one. The caller runs
    each once before, where the first run is to be left out.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for first in range(n):
        shift = first % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(clock(works[name]))
    return seconds


def over(seconds: Mapping[str, Sequence[float]], work: str, peer: str) -> list[float]:
    """Return the ratio of a work's seconds to its peer's, round by round."""
    return [one / other for one, other in zip(seconds[work], seconds[peer], strict=True)]


def spread(values: Sequence[float]) -> Spread:
    """Return the median of values, the least and the greatest."""
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def write(path: Path, results: object) -> None:
    """Write results with the machine, in an order that does not change between runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "results": results}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
