"""What it costs hosts to meet and to watch each other, and ranks to agree, on one machine.

    python tests/bench/hosts.py [--hosts 16 128 512] [--ranks 16 32 64] [--seconds 10] [--out FILE]

Each host is a thread with a connection of its own to one store, as ``--nnodes`` has it, and no
ranks. CPU time is that of all hosts together, and of the store: a real host has a part of it.
Each rank is a thread that calls ``together``, over gloo, or ``--in-memory`` over a network without
sockets and threads for them: then ``threads`` are those that gloo's connections would have.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import runpy
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from machine import write


def measured(count: int, seconds: float) -> dict[str, float]:
    """Let so many hosts meet, and watch for some seconds."""
    import torch.distributed as dist

    from vllm_module.cli import hosts
    from vllm_module.cli.host_watch import HostWatch

    hosts.announce = lambda *_: None
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(64) as connecting:  # a resolver may take seconds for some

        def connect(_: int) -> dist.TCPStore:
            return dist.TCPStore("127.0.0.1", first.port, is_master=False)

        stores = [first, *connecting.map(connect, range(count - 1))]
    names: dict[int, dict[int, str]] = {}

    def meet(number: int) -> None:
        options = hosts.HostOptions(nnodes=count, node_rank=number)
        names[number] = hosts._meet(stores[number], options, {}, 120)

    threads = [threading.Thread(target=meet, args=(number,)) for number in range(count)]
    cpu, begin = time.process_time(), time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    met = time.monotonic() - begin, time.process_time() - cpu
    if len(names) < count:
        raise SystemExit(f"{count - len(names)} hosts have not met: no figures")
    watches = [HostWatch(stores[number], number, names[number]) for number in range(count)]
    cpu = time.process_time()
    time.sleep(seconds)
    watching = (time.process_time() - cpu) / seconds
    if found := [watch.found for watch in watches if watch.found]:
        raise SystemExit(f"{found[0]}: no figures")
    return {"hosts": count, "met s": met[0], "met CPU s": met[1], "watching CPU s a s": watching}


def agreed(count: int, in_memory: bool) -> dict[str, float]:
    """Let so many ranks agree three times, and take the fastest."""
    import torch
    import torch.distributed as dist

    from vllm_module.base import waiting
    from vllm_module.base.process_groups import private_group
    from vllm_module.distributed import exchange

    waiting.SILENCE = 3600.0  # the ranks share this machine
    threads: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    if in_memory:
        path = Path(__file__).parents[1] / "distributed" / "in_memory.py"
        memory = runpy.run_path(str(path))
        memory["in_memory"]()
        groups: list[Any] = []
        exchange.rank_and_size = lambda group: (group[1], count)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def connect(rank: int) -> Any:
            own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
            limit = timedelta(seconds=120)
            return private_group(own, rank, count, torch.device("cpu"), limit)

        with ThreadPoolExecutor(count) as connecting:
            groups = list(connecting.map(connect, range(count)))

    # In place of the class, which counts nothing: a program that agrees has no use for it.
    class Counted(exchange.Peer):
        def __init__(self, rank: int, group: Any, *rest: Any) -> None:
            self.of = exchange.rank_and_size(group)[0]
            threads[self.of] += 1
            super().__init__(rank, group, *rest)

        def tell(self, frame: Any) -> None:
            sent[self.of] += 1
            super().tell(frame)

    exchange.Peer = Counted
    figures = []
    for _ in range(3):
        threads.clear()
        sent.clear()
        if in_memory:
            network = memory["Network"](count)
            groups = [(network, rank) for rank in range(count)]
        results: dict[int, Any] = {}
        start = threading.Barrier(count + 1)

        def agree(rank: int, place: Any = groups, at: Any = start, found: Any = results) -> None:
            at.wait()
            each = exchange._Exchange(place[rank], rank, count, 0)
            found[rank] = exchange._carry_out(lambda: (rank, pickle.dumps(rank)), 600, each)

        ranks = [threading.Thread(target=agree, args=(rank,)) for rank in range(count)]
        for each in ranks:
            each.start()
        start.wait()
        cpu, begin = time.process_time(), time.monotonic()
        for each in ranks:
            each.join()
        figures.append((time.monotonic() - begin, time.process_time() - cpu))
        if any(results.get(rank) != list(range(count)) for rank in range(count)):
            raise SystemExit("ranks have not agreed: no figures")
    seconds, cpu = min(figures)
    return {
        "ranks": count, "in memory": in_memory, "agreed s": seconds,
        "CPU ms a rank": 1000 * cpu / count, "messages a rank": max(sent.values()),
        "messages": sum(sent.values()), "threads a rank": max(threads.values()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=[16, 128, 512])
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 32, 64])
    parser.add_argument("--in-memory", action="store_true")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--one", action="store_true", help="print one number of hosts, as JSON")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.one:
        if given.ranks:
            print(json.dumps(agreed(given.ranks[0], given.in_memory)), flush=True)
        else:
            print(json.dumps(measured(given.hosts[0], given.seconds)), flush=True)
        os._exit(0)  # threads still watch
    rows = []
    counts = [("--hosts", each) for each in given.hosts]
    for option, count in [*counts, *(("--ranks", each) for each in given.ranks)]:
        other = "--ranks" if option == "--hosts" else "--hosts"
        words = ["--one", other, option, str(count)]
        words += ["--in-memory"] * given.in_memory + ["--seconds", str(given.seconds)]
        done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(", ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()))
    if given.out:
        write(given.out, rows)


if __name__ == "__main__":
    main()
