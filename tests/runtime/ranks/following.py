"""Engines under torchrun, one after another; ``following.py DIRECTORY``.

The checkpoint is in ``DIRECTORY/checkpoint``; the first rank saves logits in ``DIRECTORY``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vllm_module import DeviceConfig, LoadConfig, ModelConfig
from vllm_module.config import EngineConfig
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import RankError
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.step_inputs import StepInputs

FIVE = StepInputs(
    [3, 1, 4, 1, 5], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [5], [0, 5], [0], [(0, 0, [0])], 1, [4], 5
)


class Elsewhere(list[int]):
    """A list that pickles as another list."""

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([10**6],)


def executor(directory: Path, **settings: Any) -> Executor:
    return Executor(
        ModelConfig(model=str(directory / "checkpoint")),
        LoadConfig(),
        DeviceConfig(device="cpu"),
        EngineConfig(kv_cache_memory_bytes=1 << 20, **settings),
    )


def raised_by(call: Callable[..., object], *arguments: Any) -> BaseException:
    try:
        call(*arguments)
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def lead_or_follow(engine: Executor, result: Path) -> None:
    if engine.rank:
        engine.follow()
    else:
        engine.start(64)
        torch.save(engine.run(FIVE), result)
        engine.close()


def main(directory: Path) -> None:
    first = executor(directory)
    assert (first.rank, first.size) == (int(os.environ["RANK"]), 2)
    lead_or_follow(first, directory / "joined.pt")
    assert not dist.is_initialized()

    # Rank 0 waits in it for the other one, which runs a model until it learns why it should not.
    second = executor(directory)
    if second.rank:
        error = raised_by(second.follow)
        assert isinstance(error, RankError), error
        assert "it waits for the other ranks in torch.distributed.init_process_group" in str(error)
    dist.init_process_group("gloo")
    second.close()
    lead_or_follow(executor(directory, tensor_parallel_size=2), directory / "found.pt")
    assert dist.is_initialized()
    raised = raised_by(partial(executor, tensor_parallel_size=3), directory)
    assert "torchrun has started 2 ranks" in str(raised)

    group = dist.new_group()
    with tensor_parallel(group=group):
        lead_or_follow(executor(directory), directory / "surrounding.pt")
    with tensor_parallel(rank=0, size=1):
        assert executor(directory).size == 1

    failing = executor(directory)
    if failing.rank:
        assert isinstance(raised_by(failing.follow), IndexError)
    else:
        failing.start(64)
        FIVE.rows = Elsewhere(FIVE.rows)
        error = raised_by(failing.run, FIVE)
        assert isinstance(error, RankError), error
        assert str(error).startswith("rank 1: IndexError: index 1000000 is out of bounds"), error
        assert error.ranks == (1,)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
