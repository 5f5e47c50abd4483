"""The simulated time of a transfer plan beside that of a run: 2 + 2 processes over gloo.

What the simulation is given, the time of a small message and the bandwidth of both pairs at once
with a copy on each side, is measured in the same run, before each of its rounds.

    python tests/bench/moving.py [--rounds 3] [--out tests/bench/results/moving.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from machine import machine, spread, write

from vllm_module.cooperative import receive_boxes, send_boxes
from vllm_module.layout import StoredTensorLayout, TransferPlan, layout_of_shards, rows
from vllm_module.layout.makespan import Links, simulate

LARGE, BATCH = 1 << 26, 1 << 26  # bytes
ROWS, COLUMNS, TENSORS = 4096, 2048, 8


def seconds_of(nbytes: int, rank: int, times: int) -> float:
    """Return the seconds of a message between the ranks of each pair."""
    memory = torch.ones(nbytes, dtype=torch.uint8)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        if rank < 2:
            dist.send(memory.clone(), rank + 2)
        else:
            dist.recv(memory, rank - 2)
            memory.clone()
    dist.barrier()
    return (time.perf_counter() - begin) / times


def run(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=4)
    names = [f"w{number}" for number in range(TENSORS)]
    entries = [StoredTensorLayout(n, (ROWS, COLUMNS), "float32", n, 0) for n in names]
    half = COLUMNS // 2
    source = layout_of_shards(entries, 2, lambda _, shape, at: rows(shape, at, 2))
    target = layout_of_shards(entries, 2, lambda _, shape, at: ((0, at * half), (ROWS, half)))
    plan = TransferPlan(source, target)
    shards = {name: torch.ones(ROWS // 2, COLUMNS) for name in names}
    found = []
    for _ in range(rounds):
        latency, large = seconds_of(32, rank, 50), seconds_of(LARGE, rank, 4)
        dist.barrier()
        begin = time.perf_counter()
        if rank < 2:
            send_boxes(plan, source, shards, bucket_bytes=BATCH)
        else:
            for name, tensor in receive_boxes(plan, bucket_bytes=BATCH):
                kept = tensor[:, (rank - 2) * half : (rank - 1) * half]
                assert int(kept.sum()) == kept.numel(), name
        dist.barrier()
        took = time.perf_counter() - begin
        links = Links(LARGE / large, 1e12, 2 * latency)  # a message and the one before it
        batches = ROWS * COLUMNS * 4 * TENSORS // BATCH
        found.append((took, simulate(plan, links, batches=batches).makespan))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(run, (folder, options.rounds), nprocs=4)
        found: list[Any] = json.loads(Path(folder, "found.json").read_text())
    result = {
        "seconds": [took for took, _ in found],
        "simulated seconds": [simulated for _, simulated in found],
        "seconds over simulated": spread([took / simulated for took, simulated in found]),
    }
    print(json.dumps(result))
    if options.out:
        write(options.out, result)


if __name__ == "__main__":
    main()
