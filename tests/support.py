"""What tests of several rooms share.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def free_port() -> int:
    """Return a port below those that the system hands out, or a connection could take it first."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def start_torchrun(
    size: int,
    script: Path,
    directory: Path,
    *,
    host: int = 0,
    hosts: int = 1,
    address: str = "127.0.0.1",
    port: int,
    interval: float = 0.1,
    within: Sequence[str] = (),
    **environment: str,
) -> subprocess.Popen[str]:
    """Start the ranks of ``script directory`` that one of several hosts has, ``size`` in all.

    When one fails, torchrun ends the others ``interval`` seconds later at most.
    """
    options = {
        "nnodes": hosts,
        "node-rank": host,
        "nproc-per-node": size // hosts,
        "master-addr": address,
        "master-port": port,
        "monitor-interval": interval,
    }
    return subprocess.Popen(
        [
            *(*within, sys.executable, "-m", "torch.distributed.run"),
            *(f"--{name}={value}" for name, value in options.items()),
            *(str(script), str(directory)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def torchrun(size: int, script: Path, directory: Path, *, hosts: int = 1) -> None:
    """Run ``script directory`` in ``size`` processes; if they fail, show what they printed.

    With several ``hosts``, each is an agent of its own on this machine.
    """
    port = free_port()
    agents = [
        start_torchrun(size, script, directory, host=host, hosts=hosts, port=port)
        for host in range(hosts)
    ]
    try:
        output = "".join(agent.communicate(timeout=120)[0] for agent in agents)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * hosts, output
