"""What it takes four ranks on two hosts to start and load, beside plain torch under torchrun.

    python tests/bench/starting.py [CKPT] [--rounds 3] [--out FILE]

Hosts are two commands on this machine, with two ranks each. Ours is ``vllm-module load --tp 4
--nnodes 2``. The floor is the same world under ``torch.distributed.run``: each rank imports torch
and safetensors, joins a group of gloo, reads a fourth of each tensor, and meets the others once.
Both take turns. Reading is the sum of what ranks take for it, of ours. CKPT is by default a model
of 58M parameters that is made for this, and read from the page cache.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import write_qwen3
from engine import SHAPES
from machine import machine, over, rounds, spread, write

FLOOR = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
kept = 0
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(file, "pt") as opened:
        for name in opened.keys():
            stored = opened.get_slice(name)
            rows = stored.get_shape()[0]
            shard = stored[rows * rank // size : rows * (rank + 1) // size].clone()
            kept += shard.nbytes
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def of_children() -> float:
    """Return the seconds of CPU time that processes have taken that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def together(*hosts: list[str]) -> str:
    """Run the commands of all hosts at once; return what the first one printed."""
    processes = [
        subprocess.Popen(host, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for host in hosts
    ]
    ends = [process.communicate(timeout=600) for process in processes]
    for process, (_, errors) in zip(processes, ends, strict=True):
        if process.returncode:
            raise SystemExit(f"{errors[-2000:]}\nno figures")
    return ends[0][0]


def ours(folder: Path, loaded: list[dict[str, Any]]) -> None:
    command = [sys.executable, "-m", "vllm_module.cli", "load", str(folder), "--tp", "4", "--json"]
    command += ["--dtype", "bfloat16", "--nnodes", "2", "--master-port", str(free_port())]
    printed = together(*([*command, "--node-rank", host] for host in "01"))
    loaded.append(json.loads(printed.splitlines()[-1]))


def torchrun(folder: Path, program: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(free_port())]
    together(*([*command, "--node-rank", host, str(program), str(folder)] for host in "01"))


def planned(folder: Path) -> dict[str, int]:
    """Return the bytes that hosts read and keep, by the plan: kept in the file's own dtype."""
    command = [sys.executable, "-m", "vllm_module.cli", "plan", str(folder), "--tp", "4"]
    command += ["--dtype", "bfloat16", "--nodes", "2", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    hosts = json.loads(done.stdout)["hosts"]
    return {name: sum(host[name] for host in hosts) for name in ("bytes_read", "device_bytes")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    loaded: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        folder = given.checkpoint or write_qwen3(Path(directory) / "model", **SHAPES["58M"])
        program = Path(directory) / "floor.py"
        program.write_text(FLOOR)
        plan = planned(folder)
        cpu: dict[str, list[float]] = {"vllm-module": [], "torchrun": []}

        def counted(name: str, work: Callable[[], None]) -> Callable[[], None]:
            def call() -> None:
                before = of_children()
                work()
                cpu[name].append(of_children() - before)

            return call

        works = {
            "vllm-module": counted("vllm-module", lambda: ours(folder, loaded)),
            "torchrun": counted("torchrun", lambda: torchrun(folder, program)),
        }
        seconds = rounds(works, given.rounds)
    ranks = [rank for each in loaded for rank in each["ranks"]]
    if len(ranks) != 4 * len(loaded):
        raise SystemExit(f"{len(ranks)} ranks of {len(loaded)} loads: no figures")
    read = sum(rank["bytes_read"] for rank in ranks) / len(loaded)
    results = {
        "seconds": {name: spread(each) for name, each in seconds.items()},
        "to torchrun": spread(over(seconds, "vllm-module", "torchrun")),
        "CPU seconds": {name: spread(each) for name, each in cpu.items()},
        "reading, all ranks": sum(rank["seconds"] for rank in ranks) / len(loaded),
        "bytes read": read,
        "bytes read, planned": plan["bytes_read"],
        "bytes kept": plan["device_bytes"],
    }
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(json.dumps(results, indent=1))
    if given.out:
        write(given.out, results)


if __name__ == "__main__":
    main()
