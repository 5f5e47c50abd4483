"""A driver of two ranks that says where they are and steps until it is ended.

``driving.py CHECKPOINT``; with ``idle``, it waits once it has started.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time

from vllm_module import DeviceConfig, LoadConfig, ModelConfig
from vllm_module.config import EngineConfig
from vllm_module.runtime.executor import Executor
from vllm_module.runtime.model_runner import StepInputs


def say_pids() -> None:
    """Say them as soon as all are there, which is before they have imported anything."""
    while not (workers := multiprocessing.active_children()):
        time.sleep(0.01)
    sys.stdout.write(" ".join(str(pid) for pid in [os.getpid(), *(w.pid for w in workers)]) + "\n")
    sys.stdout.flush()


def main(checkpoint: str, *options: str) -> None:
    threading.Thread(target=say_pids, daemon=True).start()
    executor = Executor(
        ModelConfig(model=checkpoint),
        LoadConfig(),
        DeviceConfig(device="cpu"),
        EngineConfig(tensor_parallel_size=2, kv_cache_memory_bytes=1 << 20),
    )
    executor.start(64)
    sys.stdout.write("started\n")
    sys.stdout.flush()
    if options:
        time.sleep(100)
    while True:
        executor.run(StepInputs([1], [0], [0], [[0]], [1], [0, 1], [0], 1, [], [], []))


if __name__ == "__main__":
    main(*sys.argv[1:])
