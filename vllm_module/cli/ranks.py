"""The ranks of a command: simulated in this process, or this process itself under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import typer

from vllm_module.agreement import demand_alike, demand_same_tensors, describe
from vllm_module.cli.output import REFUSALS, CommandError
from vllm_module.config import LoadConfig, ModelConfig
from vllm_module.distributed import together
from vllm_module.errors import RankError
from vllm_module.model_source import ModelSource

T = TypeVar("T")
TIMEOUT = LoadConfig().timeout
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0.1,
        metavar="SECONDS",
        help="Under torchrun: how long ranks wait for each other to finish loading.",
    ),
]


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
    """Join torchrun's other ranks, over gloo, and NCCL on CUDA; a group that is there stays."""
    if dist.is_initialized():
        yield
        return
    # On CUDA too there is a gloo, by which ranks tell each other how they fare.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def find_alike(model_config: ModelConfig, timeout: float) -> ModelSource:
    """Return what every rank of the process group finds, if all of them find the same."""

    def find() -> tuple[ModelSource, dict[str, str]]:
        found = ModelSource.find(model_config)
        with found.open() as checkpoint:
            return found, describe(found.config, found.dtype, found.rules, checkpoint)

    found = on_every_rank(find, timeout)
    with _one_speaks():
        demand_alike([description for _, description in found])
    return found[dist.get_rank()][0]


def same(digests: Sequence[Mapping[str, str]]) -> None:
    """Refuse, in one rank's words, if tensors differ that every rank keeps whole."""
    with _one_speaks():
        demand_same_tensors(digests)


def on_every_rank(work: Callable[[], T], timeout: float) -> list[T]:
    """Run ``work`` on every rank of the process group and return all results, by rank.

    If any rank refuses, all do: the first one that can print shows what the first refusal was.
    """
    refusal: str | None = None

    def attempt() -> tuple[Any, str | None]:
        nonlocal refusal
        try:
            return work(), None
        except REFUSALS as error:
            refusal = str(error) or type(error).__name__
            return None, refusal

    with _one_speaks(lambda: refusal):
        outcomes = together(attempt, timeout=timeout)
    refusals = {rank: message for rank, (_, message) in enumerate(outcomes) if message is not None}
    if refusals:
        if dist.get_rank() != 0:
            raise typer.Exit(1)
        rank, message = next(iter(refusals.items()))
        raise CommandError(message if len(refusals) == len(outcomes) else f"rank {rank}: {message}")
    return [result for result, _ in outcomes]


@contextmanager
def _one_speaks(refusal: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Let the first rank that is well say which are not; a refusal of this one's is said too."""
    rank = dist.get_rank()
    try:
        yield
    except RankError as error:
        speaker = min(set(range(dist.get_world_size())) - set(error.ranks), default=0)
        said = [f"rank {rank}: {own}"] if (own := refusal()) is not None else []
        if rank == speaker:
            said.append(str(error))
        if said:
            raise CommandError("\n".join(said)) from error
        raise typer.Exit(1) from error
