"""The ranks of a command: simulated in this process, or this process itself under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import typer

from vllm_module.cli.output import REFUSALS, CommandError

T = TypeVar("T")


def under_torchrun() -> bool:
    """Tell whether this process is one rank of several that torchrun started."""
    return "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Tell whether this process prints."""
    return os.environ.get("RANK", "0") == "0"


def tensor_parallel_size(tp: int | None) -> int:
    """Return the size asked for, or torchrun's; raise a usage error where the two differ."""
    if not under_torchrun():
        return tp or 1
    world = int(os.environ["WORLD_SIZE"])
    if tp not in (None, world):
        raise typer.BadParameter(
            f"torchrun started {world} ranks: leave --tp {tp} out, or start {tp}",
            param_hint="--tp",
        )
    return world


def rank_device(device: torch.device) -> torch.device:
    """Return this rank's own device: under torchrun, the CUDA device of its local rank."""
    if under_torchrun() and str(device) == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join torchrun's other ranks, over NCCL on CUDA, else gloo; a group that is there stays."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def together(work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank of the process group and return all results, by rank.

    If any rank refuses, all do: the first one that can print shows what the first refusal was.
    """
    outcome: tuple[Any, str | None]
    try:
        outcome = (work(), None)
    except REFUSALS as error:
        outcome = (None, str(error) or type(error).__name__)
    outcomes: list[tuple[Any, str | None]] = [outcome] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    refusals = {rank: message for rank, (_, message) in enumerate(outcomes) if message is not None}
    if refusals:
        if not is_first_rank():
            raise typer.Exit(1)
        rank, message = next(iter(refusals.items()))
        raise CommandError(message if len(refusals) == len(outcomes) else f"rank {rank}: {message}")
    return [result for result, _ in outcomes]
