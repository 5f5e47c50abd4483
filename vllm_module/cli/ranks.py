"""The ranks of a command: simulated in this process, or this process itself under torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import typer

from vllm_module.base.messages import describe_error, printable, shorten
from vllm_module.cli.output import REFUSALS, CommandError, is_out_of_memory
from vllm_module.errors import RankError

if TYPE_CHECKING:
    import torch

    from vllm_module.build.model_source import ModelSource
    from vllm_module.config import ModelConfig

T = TypeVar("T")


def under_torchrun() -> bool:
    """Tell whether this process is one rank of several that torchrun started."""
    return "WORLD_SIZE" in os.environ


def _from_torchrun(name: str, least: int = 0) -> int:
    """Return a number that torchrun sets in the environment; a usage error if it is none."""
    value = os.environ.get(name, "0")
    if not (value.isascii() and value.isdecimal() and least <= int(value[:10])):
        raise typer.BadParameter(
            f"it is {shorten(value)} in the environment: expected a number from {least} on, as "
            "torchrun sets it; unset it to load in one process",
            param_hint=name,
        )
    return int(value)


def is_first_rank() -> bool:
    """Tell whether this process prints."""
    return os.environ.get("RANK", "0") == "0"


def tensor_parallel_size(tp: int | None, stages: int = 1) -> int:
    """Return the size asked for, or torchrun's; raise a usage error where the two differ.

    Torchrun has started this size for each of so many pipeline stages.
    """
    if not under_torchrun():
        return tp or 1
    world = _from_torchrun("WORLD_SIZE", least=1)
    if stages > 1:
        if world % stages or tp not in (None, world // stages):
            of_each = "" if tp is None else f" of {tp} ranks each"
            raise typer.BadParameter(
                f"torchrun started {world} processes, which are not {stages} stages{of_each}: "
                "start one for each rank of each stage",
                param_hint="--pp",
            )
        return world // stages
    if tp not in (None, world):
        raise typer.BadParameter(
            f"torchrun started {world} ranks: leave --tp {tp} out, or start {tp}",
            param_hint="--tp",
        )
    return world


def rank_device(device: torch.device) -> torch.device:
    """Return this rank's own device: under torchrun, the CUDA device of its local rank."""
    import torch

    if under_torchrun() and str(device) == "cuda":
        device = torch.device("cuda", _from_torchrun("LOCAL_RANK"))
        torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join torchrun's other ranks, over gloo, and NCCL on CUDA; a group that is there stays."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    # On CUDA too there is a gloo, by which ranks tell each other how they fare.
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    except (ValueError, RuntimeError) as error:  # a variable is missing, or no address is free
        address = ":".join(os.environ.get(f"MASTER_{each}", "?") for each in ("ADDR", "PORT"))
        raise CommandError(
            f"the ranks cannot meet at {printable(address)} (MASTER_ADDR and MASTER_PORT): "
            f"{describe_error(error)}. Start them with torchrun, or name a port that is free"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def find_alike(model_config: ModelConfig, load_format: str, timeout: float) -> ModelSource:
    """Return the model source that this rank finds; refuse unless every rank finds the same."""
    import torch.distributed as dist

    from vllm_module.build.consistency import demand_alike, describe
    from vllm_module.build.model_source import ModelSource

    def find() -> tuple[ModelSource, dict[str, str]]:
        source = ModelSource.find(model_config, load_format)
        with source.open() as checkpoint:
            fingerprint = checkpoint.fingerprint
            return source, describe(source.config, source.dtype, source.rules, fingerprint)

    sources, descriptions = zip(*on_every_rank(find, timeout), strict=True)
    with _one_rank_prints():
        demand_alike(descriptions)
    source: ModelSource = sources[dist.get_rank()]
    return source


def same(digests: Sequence[Mapping[str, str]]) -> None:
    """Refuse on every rank if tensors differ that every rank keeps whole."""
    from vllm_module.build.consistency import demand_same_tensors

    with _one_rank_prints():
        demand_same_tensors(digests)


def on_every_rank(work: Callable[[], T], timeout: float) -> list[T]:
    """Run ``work`` on every rank and return all results, by rank; refuse if any rank refuses."""
    from vllm_module.distributed import together

    def attempt() -> T:
        try:
            return work()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise

    with _one_rank_prints():
        return together(attempt, timeout=timeout, refusals=REFUSALS)


@contextmanager
def _one_rank_prints() -> Iterator[None]:
    """Let one rank print why all of them stop.

    It is the first rank, or the next one if that has ended. A refusal of a rank that cannot tell
    the others is printed by itself.
    """
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        yield
    except REFUSALS as error:  # which the others know of
        if rank:
            raise typer.Exit(1) from error
        raise
    except RankError as error:
        gone = () if error.recoverable else error.ranks
        refusal, lines = error.__cause__, []
        if isinstance(refusal, REFUSALS):
            lines.append(f"rank {rank}: {str(refusal) or type(refusal).__name__}")
        if rank == min(set(range(size)).difference(gone), default=0):
            lines.append(str(error))
        if lines:
            raise CommandError("\n".join(lines)) from error
        raise typer.Exit(1) from error
