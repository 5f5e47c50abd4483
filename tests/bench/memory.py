"""Resident memory over time while a 1.2 GB checkpoint loads, ours and others', and its peak.

Each loader has a process of its own, in which a thread samples /proc/self/statm. "cold" is the
first load, from files that are not in the page cache into new memory; "warm" loads again, from the
page cache. Memory that other processes use as well (pages of mapped files) is counted apart, since
the system can take it back. A figure is printed only if what was loaded is what the files hold.

    python tests/bench/memory.py [--layers 28] [--out tests/bench/results/memory.json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import evict_pages, read_pages, write_qwen3
from loaders import Ours, Safetensors, Transformers, check
from machine import write

LOADERS = {"vllm-module": Ours, "safe_open + copy_": Safetensors, "transformers": Transformers}
SAMPLE_SECONDS = 0.002
POINTS = 60


def memory() -> tuple[int, int]:
    """Return the bytes of this process in memory: its own, and those that it shares."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    page = resource.getpagesize()
    return (resident - shared) * page, shared * page


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


def sampled(work: Callable[[], object]) -> dict[str, Any]:
    """Run the work; return its seconds, and the memory it adds over time."""
    base, ended = memory(), threading.Event()
    samples: list[tuple[float, int, int]] = []
    begin = time.perf_counter()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            samples.append((time.perf_counter() - begin, *memory()))

    thread = threading.Thread(target=sample)
    thread.start()
    work()
    seconds = time.perf_counter() - begin
    ended.set()
    thread.join()
    samples.append((seconds, *memory()))
    own, shared = ([each[column] - base[column - 1] for each in samples] for column in (1, 2))
    # Of each stretch of time, the sample with the most memory of its own.
    stretch = [int(at / seconds * (POINTS - 1)) for at, *_ in samples]
    most = {part: max(
        (own[i], i) for i in range(len(samples)) if stretch[i] == part
    )[1] for part in sorted(set(stretch))}  # fmt: skip
    return {
        "seconds": seconds,
        "peak": max(own),
        "peak_with_shared": max(map(sum, zip(own, shared, strict=True))),
        "times": [round(samples[i][0], 4) for i in most.values()],
        "own": [own[i] for i in most.values()],
        "shared": [shared[i] for i in most.values()],
    }


def child(folder: Path, name: str) -> dict[str, Any]:
    loader = LOADERS[name](folder)
    evict_pages(folder)
    before = bytes_from_disk()
    cold = sampled(loader.load)
    from_disk = bytes_from_disk() - before
    read_pages(folder)
    warm = sampled(loader.load)
    kept = sum(tensor.nbytes for tensor in loader.tensors.values())
    assert from_disk > 0.95 * kept, f"{from_disk} bytes from the disk: the load was not cold"
    stored = Safetensors(folder)
    stored.load()
    check(loader, stored.tensors)
    return {"bytes_kept": kept, "cold": cold, "warm": warm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.folder, options.child)))
        return
    results = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:  # /tmp may be memory
        changes = {"num_hidden_layers": options.layers, "tie_word_embeddings": True}
        folder = write_qwen3(Path(temporary), files=3, **changes)
        for name in LOADERS:
            command = [sys.executable, __file__, "--folder", str(folder), "--child", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            result = json.loads(done.stdout.splitlines()[-1])
            results[name] = result
            cold, kept = result["cold"], result["bytes_kept"]
            print(
                f"{name:20} keeps {kept / 1e6:.0f} MB; the cold load takes "
                f"{cold['seconds']:.2f} s and adds at most {cold['peak'] / kept:.2f} of them, "
                f"{cold['peak_with_shared'] / kept:.2f} with mapped files"
            )
    if options.out:
        write(options.out, results)


if __name__ == "__main__":
    main()
