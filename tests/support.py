"""What tests of several rooms share.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def torchrun(size: int, script: Path, directory: Path) -> None:
    """Run ``script directory`` in ``size`` processes; if they fail, show what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    result = subprocess.run(
        [*launcher, *address, str(script), str(directory)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
