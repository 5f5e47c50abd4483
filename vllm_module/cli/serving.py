"""The engine of the commands that generate, and the parameters of its sampling."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from vllm_module.cli.options import (
    DeviceOptions,
    DTypeOptions,
    EngineRankOptions,
    ModelOptions,
    SamplingOptions,
    torch_device,
)
from vllm_module.cli.output import REFUSALS, CommandError, announce, console, working
from vllm_module.cli.ranks import is_first_rank, tensor_parallel_size, under_torchrun
from vllm_module.errors import RankError

if TYPE_CHECKING:
    from vllm_module.runtime.llm import LLM
    from vllm_module.runtime.sampling_params import SamplingParams


@contextmanager
def serving(
    source: str,
    ranks: EngineRankOptions,
    precision: DTypeOptions,
    model: ModelOptions,
    devices: DeviceOptions,
    encoders: bool = False,
    **engine: Any,
) -> Iterator[LLM]:
    """Load a checkpoint into an engine, and close the engine at the end of the block.

    Encoders, which generate no text, are refused unless ``encoders`` is true.

    Under torchrun, only rank 0 gets to the block. The other ranks run the model until rank 0
    closes the engine, and then exit from the command.
    """
    size = tensor_parallel_size(ranks.tp, ranks.pp)
    with working("importing torch") if is_first_rank() else nullcontext():
        torch_device(devices.device)  # a usage error if there is no such device
        # Imported here because usage errors and help need no torch.
        from vllm_module.config import LoadConfig
        from vllm_module.runtime.llm import LLM

    terminal = console(stderr=True).is_terminal
    if terminal and size * ranks.pp > 1 and not under_torchrun():
        announce(f"starting {size * ranks.pp} processes")
    if not is_first_rank():  # LLM says that this process exits, which a command does in any case
        logging.getLogger(LLM.__module__).setLevel(logging.ERROR)
    load_config = LoadConfig(timeout=devices.timeout, show_progress=terminal)
    try:
        llm = LLM(
            source,
            device=devices.device,
            load_config=load_config,
            tensor_parallel_size=size,
            pipeline_parallel_size=ranks.pp,
            seed=None,  # only --seed draws the same tokens again
            enable_expert_parallel=ranks.enable_expert_parallel,
            **precision.entries(),
            **model.entries(),
            **engine,
        )
    except SystemExit:  # raised by LLM on the other ranks, when the engine has closed
        if is_first_rank():
            raise
        raise typer.Exit from None
    except (RankError, ValueError, *REFUSALS) as error:
        _refuse(error)
    if not is_first_rank():  # it has run the model until rank 0 closed the engine
        llm.close()
        raise typer.Exit
    with llm:
        if llm.no_text and not encoders:
            raise CommandError(llm.no_text)
        try:
            yield llm
        except RankError as error:
            raise CommandError(str(error)) from error


def _refuse(error: BaseException) -> NoReturn:
    """Exit with the error, which one rank prints: the first of those that can."""
    if isinstance(error, REFUSALS):  # the first rank is told of it, or refuses as well
        if is_first_rank():
            raise error
        raise typer.Exit(1) from error
    if isinstance(error, RankError):
        gone = () if error.recoverable else error.ranks
        rank, size = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
        if rank != min(set(range(size)).difference(gone), default=0):
            raise typer.Exit(1) from error
    raise CommandError(str(error)) from error


def loaded_adapter(llm: LLM, adapter: Path | None) -> str | None:
    """Load the adapter of ``--adapter``, and return the name by which prompts ask for it."""
    if adapter is None:
        return None
    with working("loading the adapter"):
        return llm.load_adapter("adapter", adapter).name


def given_params(sampling: SamplingOptions, max_tokens: int | None) -> dict[str, Any]:
    """Return the options that were given; raise a usage error for an invalid value."""
    from vllm_module.runtime.sampling_params import SamplingParams

    options = {**sampling.entries(), "max_tokens": max_tokens}
    given = {name: value for name, value in options.items() if value is not None}
    for text in given.get("stop", ()):
        check_text(text, "--stop")
    try:
        SamplingParams(**given)
    except ValueError as error:
        name, _, problem = str(error).splitlines()[0].partition(" ")  # the name comes first
        option = name.partition("[")[0].replace("_", "-")
        raise typer.BadParameter(problem, param_hint=f"--{option}") from None
    return given


def sampling_params(llm: LLM, given: dict[str, Any], max_tokens: int) -> SamplingParams:
    """Return what is given, else what the checkpoint recommends, which is printed, else greedy."""
    from vllm_module.runtime.sampling_params import SamplingParams

    defaults = llm.get_default_sampling_params()
    names = sorted(defaults.model_fields_set - given.keys())
    taken = {name: getattr(defaults, name) for name in names}
    if taken:
        listed = ", ".join(f"{name} {value}" for name, value in taken.items())
        announce(f"sampling: {listed} (generation_config.json)")
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **taken, **given})


def check_text(text: str, option: str) -> str:
    """Return ``text``; raise a usage error if it has bytes that the shell's encoding has not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{text!a} is no text", param_hint=option) from None
    return text
