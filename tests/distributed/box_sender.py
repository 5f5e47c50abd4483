"""A rank of a trainer that sends boxes and halts in the middle, for ``test_sent_boxes.py``.

``box_sender.py FOLDER RANK LAYOUT_PORT PORT SIGNAL``, in a directory where rank 0 writes the layout
and then reads the plan. ``SIGNAL`` is the number of the signal that the rank sends itself; with 0
it waits without end, and with -1 it does not halt.
"""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from vllm_module.cooperative import rank_transfer, send_boxes
from vllm_module.distributed import together
from vllm_module.layout import layout_of_state_dict
from vllm_module.weights import init_weight_transfer

SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
BUCKET = 8192  # bytes: small, so that tensors move in several batches
HALTS = 6  # at which stage of a transfer


def halting(sign: int) -> None:
    """Have this process halt in the middle of its next transfer."""
    stage, count = rank_transfer.RankTransfer.stage, 0

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == HALTS:
            Path("halts").touch()
            if not sign:
                threading.Event().wait()
            os.kill(os.getpid(), sign)
        return stage(self, *arguments)

    # This process is a program alone, and nothing in the product halts it at a given moment.
    rank_transfer.RankTransfer.stage = counted  # type: ignore[method-assign]


def main(folder: str, rank: int, layout_port: int, port: int, sign: int) -> None:
    weights = load_file(Path(folder) / "model.safetensors")
    group = init_weight_transfer("127.0.0.1", layout_port, rank, 2, timeout=60)
    layout = layout_of_state_dict(weights, group)
    if rank == 0:
        Path("layout.part").write_bytes(pickle.dumps(layout))
        Path("layout.part").rename("layout")
    SUPPORT["wait_until"](Path("plan").exists, "the plan is made")
    plan = pickle.loads(Path("plan").read_bytes())
    if sign >= 0:
        halting(sign)
    size = plan.source_ranks + plan.target_ranks
    group = init_weight_transfer("127.0.0.1", port, rank, size, timeout=60)

    def send() -> None:
        send_boxes(plan, layout, weights, group=group, bucket_bytes=BUCKET, timeout=30)

    together(send, timeout=30, group=group)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
