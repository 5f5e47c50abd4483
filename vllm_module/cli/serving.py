"""The engine of the commands that generate, and the parameters of its sampling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import typer
from pydantic import ValidationError

from vllm_module.cli.options import DType, Quantization, torch_device
from vllm_module.cli.output import REFUSALS, CommandError, console
from vllm_module.cli.ranks import is_first_rank, tensor_parallel_size
from vllm_module.config import LoadConfig
from vllm_module.errors import RankError
from vllm_module.runtime.llm import LLM
from vllm_module.runtime.sampling_params import SamplingParams


@contextmanager
def serving(
    source: str,
    dtype: DType,
    quantization: Quantization | None,
    device: str,
    tp: int | None,
    timeout: float,
    max_model_len: int | None,
    **engine: Any,
) -> Iterator[LLM]:
    """Load a checkpoint into an engine, and close it in the end.

    Under torchrun, all ranks but the first serve in here, and then leave the command.
    """
    size = tensor_parallel_size(tp)
    torch_device(device)  # wrong usage, if it is not there
    shown = LoadConfig(timeout=timeout, show_progress=console(stderr=True).is_terminal)
    try:
        llm = LLM(
            source,
            dtype=dtype.value,
            quantization=quantization and quantization.value,
            max_model_len=max_model_len,
            device=device,
            load_config=shown,
            tensor_parallel_size=size,
            **engine,
        )
    except SystemExit:  # a rank that has served
        raise typer.Exit from None
    except (RankError, ValueError, *REFUSALS) as error:
        _refuse(error)
    with llm:
        try:
            yield llm
        except RankError as error:
            raise CommandError(str(error)) from error


def _refuse(error: BaseException) -> NoReturn:
    """Refuse in the words of the first rank, unless it is the one that cannot speak."""
    refusal = isinstance(error, REFUSALS)
    told = refusal or (isinstance(error, RankError) and 0 not in error.ranks)
    if told and not is_first_rank():  # which is told what others refuse
        raise typer.Exit(1) from error
    if refusal:
        raise error
    raise CommandError(str(error)) from error


def sampling(**values: Any) -> SamplingParams:
    """Return how tokens are chosen; raise a usage error for a value that cannot be."""
    for text in values.get("stop") or ():
        check_text(text, "--stop")
    try:
        return SamplingParams(**values)
    except ValidationError as error:
        problem = error.errors()[-1]  # of several types that it could have, the most telling
        raise typer.BadParameter(
            f"{problem['msg']}, got {problem['input']!r}",
            param_hint=f"--{str(problem['loc'][0]).replace('_', '-')}",
        ) from None


def check_text(text: str, option: str) -> str:
    """Return ``text``; raise a usage error for bytes that are no text in the shell's encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{text!a} is no text", param_hint=option) from None
    return text


def built_as(llm: LLM) -> tuple[torch.dtype, torch.device]:
    """Return what the model computes in and where: what is not quantized says so."""
    parameters = llm.executor.worker.model.parameters()
    wide = next(parameter for parameter in parameters if parameter.dtype.itemsize > 1)
    return wide.dtype, wide.device
