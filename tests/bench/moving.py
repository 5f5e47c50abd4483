"""The simulated time of a transfer plan beside that of a run: 2 + 2 processes over gloo.

Boxes go directly; or are joined by the two ranks of the source first; or all that both ranks of the
target keep is sent to one of them and relayed. What the simulation is given is measured in the same
run, before each of its rounds: the time of a small message, and the bandwidth of large ones with a
copy on each side, where as many go at once as in that stage of the plan, because all processes
share the cores. ``send_boxes`` ends a batch before the next, so the simulation has one batch, with
the latency of all.

    python tests/bench/moving.py [--rounds 3] [--out tests/bench/results/moving.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from machine import machine, spread, write

from vllm_module.cooperative import receive_boxes, send_boxes
from vllm_module.layout import (
    Layout,
    Links,
    StoredTensorLayout,
    TransferPlan,
    layout_of_shards,
    rows,
    simulate,
)
from vllm_module.layout.messages import GATHERED, RELAYED, SENT

LARGE, BATCH = 1 << 26, 1 << 26  # bytes
ROWS, COLUMNS = 4096, 2048
Pairs: TypeAlias = list[tuple[int, int]]
NAMES = [f"w{number}" for number in range(8)]


def seconds_of(nbytes: int, rank: int, times: int, pairs: Pairs) -> float:
    """Return the seconds of a message from each pair's first rank to its second, all at once."""
    to = [target for source, target in pairs if source == rank]
    come = [source for source, target in pairs if target == rank]
    memory = torch.ones(nbytes, dtype=torch.uint8)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        arrived = [torch.empty_like(memory) for _ in come]
        works = [dist.irecv(each, source) for each, source in zip(arrived, come, strict=True)]
        works += [dist.isend(memory.clone(), target) for target in to]
        for work in works:
            work.wait()
        for each in arrived:
            each.clone()
    dist.barrier()
    return (time.perf_counter() - begin) / times


def at_once(plan: TransferPlan, stage: int) -> Pairs:
    """Return the messages of a stage that begin at once: the first of each source and target."""
    pairs: Pairs = []
    for source, target, *_ in plan.messages[stage]:
        pair = source + 2 * (stage == RELAYED), target + 2 * (stage != GATHERED)
        if not any(one == pair[0] or other == pair[1] for one, other in pairs):
            pairs.append(pair)
    return pairs


def plans() -> dict[str, tuple[Layout, TransferPlan]]:
    """Return the source's layout and the plan of each kind."""
    entries = [StoredTensorLayout(n, (ROWS, COLUMNS), "float32", n, 0) for n in NAMES]
    half = COLUMNS // 2
    source = layout_of_shards(entries, 2, lambda _, shape, at: rows(shape, at, 2))
    columns = layout_of_shards(entries, 2, lambda _, shape, at: ((0, at * half), (ROWS, half)))
    whole = layout_of_shards(entries, 2, lambda _, shape, at: ((0, 0), shape))
    return {
        "direct": (source, TransferPlan(source, columns)),
        "gathered": (source, TransferPlan(source, columns, source_node=2, most=1)),
        "relayed": (source, TransferPlan(source, whole, target_node=2)),
        "gathered and relayed": (
            source, TransferPlan(source, whole, source_node=2, target_node=2, most=1),
        ),
    }  # fmt: skip


def run(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=4)
    shards = {name: torch.ones(ROWS // 2, COLUMNS) for name in NAMES}
    found: dict[str, list[tuple[float, float]]] = {}
    batches = ROWS * COLUMNS * 4 * len(NAMES) // BATCH
    for _ in range(rounds):
        for kind, (source, plan) in plans().items():
            latency = seconds_of(32, rank, 50, [(0, 2), (1, 3)])
            within = at_once(plan, GATHERED) or at_once(plan, RELAYED)
            network, host = (
                LARGE / seconds_of(LARGE, rank, 4, pairs) for pairs in (at_once(plan, SENT), within)
            )
            dist.barrier()
            begin = time.perf_counter()
            if rank < 2:
                send_boxes(plan, source, shards, bucket_bytes=BATCH)
            else:
                for name, tensor in receive_boxes(plan, bucket_bytes=BATCH):
                    first, end = (0, 2) if "relayed" in kind else (rank - 2, rank - 1)
                    kept = tensor[::61, first * COLUMNS // 2 : end * COLUMNS // 2]  # for speed
                    assert int(kept.sum()) == kept.numel(), name
            dist.barrier()
            took = time.perf_counter() - begin
            # A message, and the one before it.
            links = Links(network, host, 2 * latency * batches)
            simulated = simulate(plan, links, batches=1).makespan
            found.setdefault(kind, []).append((took, simulated))
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
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    result = {}
    for kind, each in found.items():
        over = spread([took / simulated for took, simulated in each])
        print(f"{kind:21} {over['median']:.2f} ({over['least']:.2f} to {over['greatest']:.2f})")
        result[kind] = {
            "seconds": [took for took, _ in each],
            "simulated seconds": [simulated for _, simulated in each],
            "seconds over simulated": over,
        }
    if options.out:
        write(options.out, result)


if __name__ == "__main__":
    main()
