"""Arguments and options that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import Enum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_module.base.messages import printable
from vllm_module.cli.choices import (
    FORMATS,
    SHORT_SCHEMES,
    CacheDType,
    DType,
    LoadFormat,
    ModelImpl,
    Quantization,
)
from vllm_module.cli.output import plural

if TYPE_CHECKING:
    import torch

    from vllm_module.config import ModelConfig

EMPTY = "it is empty: is a variable of the shell unset?"
TIMEOUT = 1800.0  # as in LoadConfig, which help does not import
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's, or typer's copy of it


def _listed(choices: Iterable[Enum]) -> str:
    """List the values of an option, which are too long for the column of its name."""
    return ", ".join(choice.value for choice in choices)


def _there(source: str) -> str:
    """Return a path that is there, or what is no path; before torch is imported, which takes long.

    Raises ``CheckpointFormatError`` for a path without a file or folder, and a usage error for "".
    """
    if not source:  # pathlib's name of the current folder
        raise typer.BadParameter(EMPTY)
    from vllm_module.weights.source import local_path

    if "://" not in source:
        local_path(source)
    return source


def _check_timeout(seconds: float) -> float:
    if math.isnan(seconds):
        raise typer.BadParameter("nan is no number of seconds")
    return seconds


Source = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        callback=_there,
        help="A folder, a .gguf file, a hub id (owner/name), or a URL: s3://, gs://, az://, "
        "https://, hf://.",
        show_default=False,
    ),
]
OutOption = Annotated[
    Path,
    typer.Option(
        "--out", metavar="DIR", help="The folder to write: new, or empty.", show_default=False
    ),
]
AdapterOption = Annotated[
    Path | None,
    typer.Option(
        "--adapter",
        metavar="DIR",
        help="A LoRA adapter of the model, as PEFT saves it.",
        show_default=False,
    ),
]
AllOption = Annotated[
    bool,
    typer.Option("--all", help="Print a line for each tensor; default: one line for all layers."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")]
LengthOption = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=1,
        metavar="L",
        help="Most tokens of a prompt and its answer together; default: the model's limit.",
    ),
]
CacheDTypeOption = Annotated[
    CacheDType,
    typer.Option(
        "--kv-cache-dtype",
        metavar="DTYPE",
        help=f"Dtype of the KV cache: {_listed(CacheDType)}; auto takes the model's.",
    ),
]


_SIZE = typer.Option(
    min=1,
    metavar="N",
    help="Tensor-parallel size: the number of ranks that share the model.",
)
_RECOMMENDED = "; default: generation_config.json's, or"


@dataclass(frozen=True)
class Options:
    """Options that several commands take. Each field declares one of them; see :func:`expanded`."""

    def entries(self) -> dict[str, Any]:
        """Return the values by name, as settings of an engine or a model take them."""
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class RankOptions(Options):
    """The ranks that share a model; without ``tp``, one or torchrun's."""

    tp: Annotated[int | None, _SIZE] = None
    enable_expert_parallel: Annotated[
        bool,
        typer.Option(
            "--enable-expert-parallel",
            help="Let each rank hold whole experts, not a part of every expert.",
        ),
    ] = False


@dataclass(frozen=True)
class EngineRankOptions(RankOptions):
    """The ranks of an engine."""

    pp: Annotated[
        int,
        typer.Option(
            "--pp",
            min=1,
            metavar="N",
            help="Pipeline stages: parts of the layers, each on as many ranks as --tp says.",
        ),
    ] = 1


@dataclass(frozen=True)
class SimulatedRankOptions(RankOptions):
    """The ranks of a command that runs in one process."""

    tp: Annotated[int, _SIZE] = 1


@dataclass(frozen=True)
class DTypeOptions(Options):
    """The dtype of parameters."""

    dtype: Annotated[
        DType,
        typer.Option(
            metavar="DTYPE",
            help=f"Dtype of the parameters: {_listed(DType)}; auto takes the checkpoint's.",
        ),
    ] = DType.auto


@dataclass(frozen=True)
class PrecisionOptions(DTypeOptions):
    """The dtype of parameters, and how they are quantized."""

    quantization: Annotated[
        Quantization | None,
        typer.Option(
            metavar="SCHEME",
            # The longest name has no comma, so that it is not broken in a narrow terminal.
            help=f"Quantize linear layers while loading: {_listed(SHORT_SCHEMES)} or "
            "int8_per_channel_weight_only (fp8 is fp8_per_tensor). A quantized checkpoint is "
            "loaded in the format that its config.json names, without this option: only that "
            f"format's name may be given (fp8, bitsandbytes, {_listed(FORMATS)}), and any other "
            "is refused.",
        ),
    ] = None


@dataclass(frozen=True)
class WeightOptions(Options):
    """How the weights of a checkpoint are found and read."""

    load_format: Annotated[
        LoadFormat,
        typer.Option(
            metavar="FORMAT",
            help=f"Format of the weights: {_listed(LoadFormat)}; auto takes the first that there "
            "is, and dummy makes values up and reads only config.json.",
        ),
    ] = LoadFormat.auto
    model_code: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A Python file with models of your own: the file is run, and its classes are used "
            "for the architectures of their names.",
            show_default=False,
        ),
    ] = None
    download_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Keep here what is fetched: models of the hub, instead of in its cache, and "
            "weights of URLs, which are not kept without it.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class ModelOptions(WeightOptions):
    """How a checkpoint becomes a model."""

    model_impl: Annotated[
        ModelImpl,
        typer.Option(
            metavar="WHOSE",
            help=f"Whose model is built: {_listed(ModelImpl)}; auto takes ours where there is one.",
        ),
    ] = ModelImpl.auto
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run Python files of the checkpoint where no other code defines its model or its "
            "tokenizer. Read them first: they can do anything.",
        ),
    ] = False


@dataclass(frozen=True)
class DeviceOptions(Options):
    """The device of each rank, and how long ranks wait for each other."""

    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="cpu, cuda, cuda:1 …; auto takes CUDA if there is a CUDA device.",
        ),
    ] = "auto"
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=31_536_000,  # a year: the system's clocks hold no number of seconds
            callback=_check_timeout,
            metavar="SECONDS",
            help="Under torchrun: how long ranks wait for each other to finish loading.",
        ),
    ] = TIMEOUT


@dataclass(frozen=True)
class SamplingOptions(Options):
    """How tokens are chosen; what is not given is the checkpoint's recommendation."""

    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T",
            help="0 takes the most probable token; higher values draw more evenly"
            f"{_RECOMMENDED} 0.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Draw from the most probable tokens that together have probability P"
            f"{_RECOMMENDED} 1.",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            help=f"Draw from the K most probable tokens; 0 takes all tokens{_RECOMMENDED} 0.",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(metavar="S", help="Draw the same tokens each time for the same S."),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Stop before this text; may be repeated."),
    ] = None


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` as typer reads it: with the fields of :class:`Options` as parameters."""
    groups: dict[str, type[Options]] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and issubclass(group, Options):
            groups[parameter.name] = group
            parameters += signature(group, eval_str=True).parameters.values()
        else:
            parameters.append(parameter)

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        command(**given)

    parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # functions may have it
    run.__annotations__ = {}
    return run


def check_out(out: Path) -> None:
    """Raise a usage error if ``out`` cannot be a new folder."""
    from vllm_module.export.folder import demand_free

    try:
        demand_free(Path(os.path.expanduser(out)))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None


def check_file(path: Path | None, option: str) -> Path | None:
    """Return the path of a file that is written at the end, with the folder that ``~`` stands for.

    Raises a usage error if it has no place to be written to.
    """
    if path is None:
        return None
    path = Path(os.path.expanduser(path))  # a shell leaves --plot=~/a.png as it is
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        problem = "is a folder: name a file in it"
    elif not os.path.isdir(folder):
        problem = f"cannot be written: there is no folder {printable(folder)}; make it first"
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        problem = "cannot be written here: name another place"
    else:
        return path
    raise typer.BadParameter(f"{printable(path)} {problem}", param_hint=option)


def model_config(
    source: str,
    precision: PrecisionOptions,
    model: ModelOptions,
    enable_expert_parallel: bool = False,
) -> ModelConfig:
    """Return the configuration of a model from the options that describe it."""
    from vllm_module.config import ModelConfig

    entries = precision.entries() | model.entries()
    del entries["load_format"]
    return ModelConfig(model=source, enable_expert_parallel=enable_expert_parallel, **entries)


def torch_device(name: str) -> torch.device:
    """Return the device of this name; raise a usage error if this machine does not have it."""
    from vllm_module.config import DeviceConfig

    if name == "meta":
        raise typer.BadParameter("meta has no memory to load into", param_hint="--device")
    try:
        device = DeviceConfig(device=name).torch_device
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None
    import torch

    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if count <= (device.index or 0):
        raise typer.BadParameter(
            f"{name} does not exist: this machine has {plural(count, 'CUDA device')}",
            param_hint="--device",
        )
    return device
