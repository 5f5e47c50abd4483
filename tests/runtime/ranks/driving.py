"""A driver of two ranks: ``driving.py CHECKPOINT``.

It prints the process ids of itself and its worker as soon as there is one, and ``started`` when
the engine runs. Interrupted before that, it makes another engine, which steps until it is ended;
with ``idle`` the first one waits.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time

from vllm_module import DeviceConfig, LoadConfig, ModelConfig
from vllm_module.config import EngineConfig
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.step_inputs import StepInputs


def say(words: object) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def say_pids() -> None:
    """Print them when the worker begins, which is before it has imported anything."""
    while not (workers := multiprocessing.active_children()):
        time.sleep(0.01)
    say(f"{os.getpid()} {workers[0].pid}")


def start(checkpoint: str) -> Executor:
    saying = threading.Thread(target=say_pids)
    saying.start()
    executor = Executor(
        ModelConfig(model=checkpoint),
        LoadConfig(),
        DeviceConfig(device="cpu"),
        EngineConfig(tensor_parallel_size=2, kv_cache_memory_bytes=1 << 20),
    )
    saying.join()
    executor.start(64)
    say("started")
    return executor


def main(checkpoint: str, *options: str) -> None:
    # A shell has its background jobs ignore Ctrl-C, and what they start inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options:
        executor = start(checkpoint)
        signal.pause()
    try:
        start(checkpoint)
    except KeyboardInterrupt:
        say("interrupted")
    executor = start(checkpoint)
    while True:
        executor.run(StepInputs([1], [0], [0], [1], [0, 1], [0], [(0, 0, [0])], 1, [0], 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
