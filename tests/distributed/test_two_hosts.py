"""Two hosts with a network between them, which fails."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_module.distributed import run_ranks

HERE = Path(__file__).parent
TIMEOUT = runpy.run_path(str(HERE / "over_a_link.py"))["TIMEOUT"]
MARGIN = 60.0  # seconds that a busy machine may take besides; TCP itself waits for minutes
SUPPORT = runpy.run_path(str(HERE.parent / "support.py"))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run four ranks in two network namespaces, and cut the link between them."""
    for tool in ("unshare", "ip"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool!r} (util-linux, iproute2) to make network namespaces")
    unshare = ["unshare", "--map-root-user", "--net", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("unshare may not make network namespaces here (user namespaces are disabled)")

    def run(directory: Path) -> None:
        script = [sys.executable, str(HERE / "two_hosts.py"), str(directory)]
        done = subprocess.run(
            [*unshare, *script], capture_output=True, text=True, timeout=3 * SUPPORT["LIMIT"]
        )
        if done.returncode == 77:
            # A container may forbid links between namespaces; the test needs two hosts.
            pytest.skip(f"no two hosts with a link: {done.stdout.strip()}")
        assert done.returncode == 0, done.stdout + done.stderr

    directory: Path = SUPPORT["fill_once"](tmp_path_factory.getbasetemp(), "hosts", run)
    return directory


def test_ranks_on_two_hosts_compute_what_simulated_ranks_do(hosts: Path) -> None:
    """Collectives and layers over a network give what they give simulated ranks."""
    compute = runpy.run_path(str(HERE / "one_rank.py"))["compute"]
    for rank, expected in enumerate(run_ranks(4, lambda rank: compute())):
        real = torch.load(hosts / f"rank{rank}.pt")
        assert real.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(real[name], tensor), (rank, name)


def test_hosts_that_lose_each_other_name_each_others_ranks(hosts: Path) -> None:
    """When the link goes down, each side names the ranks beyond it within the timeout."""
    cut = float((hosts / "cut").read_text())
    for rank in range(4):
        note = json.loads((hosts / f"rank{rank}.json").read_text())
        assert note["ranks"] == ([2, 3] if rank < 2 else [0, 1])
        assert note["at"] - cut < TIMEOUT + MARGIN
    assert json.loads((hosts / "codes.json").read_text()) == [1, 1]
