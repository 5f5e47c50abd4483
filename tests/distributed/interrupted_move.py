"""Interrupt a rank that waits for another one while weights move: ``interrupted_move.py STORE R``.

The other one of two ranks sends and takes nothing. Without ``together`` nothing else ends the wait.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from vllm_module.base.process_groups import private_group
from vllm_module.cooperative import receive_boxes, send_boxes
from vllm_module.layout import StoredTensorLayout, TransferPlan, layout_of_shards, rows

LIMIT = 3600.0  # seconds of a message


def group_of(store: str, rank: int) -> dist.ProcessGroup:
    limit = timedelta(seconds=LIMIT)
    return private_group(dist.FileStore(store, 2), rank, 2, torch.device("cpu"), limit)


def main(store: str, rank: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = group_of(store, rank)
    entry = StoredTensorLayout("w", (64, 8), "float32", "w", 0)
    layout = layout_of_shards([entry], 1, lambda _, shape, at: rows(shape, at, 1))
    plan = TransferPlan(layout, layout)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    if rank == 0:
        send_boxes(plan, layout, {"w": torch.ones(64, 8)}, group=group, timeout=LIMIT)
    else:
        list(receive_boxes(plan, group=group, timeout=LIMIT))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
