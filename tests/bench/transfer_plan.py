"""CPU seconds of plans between large layouts, and what they send: boxes, messages, bytes.

The target's layout is that of tests/bench/layout.py; the source has FSDP2's rows. Every byte that a
rank keeps is counted again from the target's layout, and has to be what the plan sends. Seconds are
simulated for 400 Gb/s a rank, 450 GB/s inside of a host, 10 us a message, and 0.2 us to pack a box
and as much to unpack it.

    python tests/bench/transfer_plan.py [--out tests/bench/results/transfer_plan.json]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from layout import CASES, source_of
from machine import write as write_results

from vllm_module.base.garbage import paused_gc
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.layout import Layout, TransferPlan, layout_of_shards, rows
from vllm_module.layout.makespan import Links, simulate

LINKS = Links(network=50e9, host=450e9, latency=10e-6, box=0.2e-6)


def layout_of(case: str) -> Layout:
    """Return the layout of a checkpoint that has names and shapes only."""
    tp_size, ep_size, _, _ = CASES[case]
    source, regions = source_of(case)
    spread = expert_parallel(rank=0, size=ep_size) if ep_size > 1 else nullcontext()
    with paused_gc(), tensor_parallel(rank=0, size=tp_size), spread:
        return source.build(torch.device("cpu")).plan_weights(regions).layout()


def kept_bytes(layout: Layout) -> list[int]:
    """Return the bytes that each rank keeps, by its boxes."""
    kept = [0] * layout.ranks
    for entry in layout.tensors:
        size = getattr(torch, entry.dtype).itemsize
        for held in layout.partitions[entry.partition].held:
            number = held.experts[1] if held.experts else 1
            for rank in held.ranks:
                kept[rank] += number * size * sum(box.numel for box in held.boxes)
    return kept


def measure(target: Layout, ranks: int, **nodes: int) -> dict[str, Any]:
    """Plan from FSDP2's rows on ``ranks`` ranks, and return figures."""
    begin = time.process_time()
    source = layout_of_shards(target.tensors, ranks, lambda _, shape, at: rows(shape, at, ranks))
    planned = time.process_time()
    with paused_gc():
        plan = TransferPlan(source, target, **nodes)
    end = time.process_time()
    assert plan.messages
    ordered = time.process_time()
    sent = plan.sent_bytes()
    begun = time.process_time()
    makespan, bound = simulate(plan, LINKS)
    simulated = time.process_time() - begun
    straggler, _ = simulate(plan, LINKS, slow={("source", 0): 2.0})
    out, arrives = Counter[int](), Counter[int]()
    for (rank, to), nbytes in sent.items():
        out[rank] += nbytes
        arrives[to] += nbytes
    for route in plan.routes:
        for hop in route.relayed:
            arrives[hop.target] += route.nbytes(hop)
    assert [arrives[rank] for rank in range(target.ranks)] == kept_bytes(target)
    inward = Counter[int]()
    for (_, to), nbytes in sent.items():
        inward[to] += nbytes
    return {
        "source layout": planned - begin,
        "plan": end - planned,
        "order of messages": ordered - end,
        "hops": sum(len(r.gathered) + len(r.sent) + len(r.relayed) for r in plan.routes),
        "boxes of a tensor": plan.descriptors(),
        "messages of a rank": math.ceil(len(sent) / target.ranks),
        "gathered GB of a rank": sum(
            route.nbytes(hop) for route in plan.routes for hop in route.gathered
            if hop.source != hop.target
        ) / ranks / 1e9,
        "in GB, most": max(inward.values()) / 1e9,
        "makespan": makespan,
        "makespan over busiest link": makespan / bound,
        "makespan, one sender at half speed": straggler,
        "simulation": simulated,
        "out GB, most over mean": max(out.values()) * ranks / sum(out.values()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for case, ranks in (("Kimi-K2's shape, EP 128", 256), ("a dense model of 70B, TP 8", 64)):
        target = layout_of(case)
        for nodes in ({}, {"source_node": 8}, {"source_node": 8, "target_node": 8}):
            name = f"{case}, from {ranks} ranks, {nodes or 'each rank a host'}"
            results[name] = measure(target, ranks, **nodes)
            print(f"{name}: {json.dumps(results[name])}", flush=True)
    if options.out:
        write_results(options.out, results)


if __name__ == "__main__":
    main()
