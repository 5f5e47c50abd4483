"""A driver of two ranks, for tests that end one of its processes.

``driving.py CHECKPOINT`` prints the process ids, then ``started``, and runs steps until it is
ended. With ``idle``, it runs no steps.
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
    """Print the ids as soon as the worker processes exist, before they import anything."""
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
