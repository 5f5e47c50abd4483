"""One of two hosts, each with two ranks, whose link is cut: ``over_a_link.py DIRECTORY HOST``."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from vllm_module.distributed import together
from vllm_module.errors import RankError

support = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
compute = runpy.run_path(str(Path(__file__).with_name("one_rank.py")))["compute"]
TIMEOUT = 5.0


def run_rank(directory: Path, rank: int) -> None:
    dist.init_process_group("gloo")
    torch.save(compute(), directory / f"rank{rank}.pt")

    def work() -> int:
        (directory / f"working{rank}").touch()
        support["wait_until"]((directory / "cut").exists, "the link is cut")
        return rank

    note = {}
    try:
        note["returned"] = together(work, timeout=TIMEOUT)
    except RankError as error:
        note["ranks"] = error.ranks
        raise
    finally:
        note["at"] = time.time()
        (directory / f"rank{rank}.json").write_text(json.dumps(note))


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory, host = Path(sys.argv[1]), int(sys.argv[2])
    pids = support["fork_ranks"](
        4,
        lambda rank: run_rank(directory, rank),
        port=29500,
        address="10.99.0.1",
        ranks=[2 * host, 2 * host + 1],
    )
    sys.exit(max(support["exit_codes"](pids)))
