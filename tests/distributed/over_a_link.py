"""One of four ranks on two hosts whose link is cut: ``over_a_link.py DIRECTORY``, by torchrun."""

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

TIMEOUT = 3.0


def main(directory: Path) -> None:
    compute = runpy.run_path(str(Path(__file__).with_name("one_rank.py")))["compute"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.save(compute(), directory / f"rank{rank}.pt")

    def work() -> int:
        (directory / f"loading{rank}").touch()
        while not (directory / "cut").exists():
            time.sleep(0.05)
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
    main(Path(sys.argv[1]))
