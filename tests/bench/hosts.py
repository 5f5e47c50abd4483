"""What it costs hosts to meet and to watch each other, by number of hosts, on one machine.

    python tests/bench/hosts.py [--hosts 16 128 512] [--seconds 10] [--out FILE]

Each host is a thread with a connection of its own to one store, as ``--nnodes`` has it, and no
ranks. CPU time is that of all hosts together, and of the store: a real host has a part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[16, 128, 512])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--one", action="store_true", help="print one number of hosts, as JSON")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.hosts[0], given.seconds)), flush=True)
        os._exit(0)  # threads still watch
    rows = []
    for count in given.hosts:
        words = ["--one", "--hosts", str(count), "--seconds", str(given.seconds)]
        done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(", ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()))
    if given.out:
        write(given.out, rows)


if __name__ == "__main__":
    main()
