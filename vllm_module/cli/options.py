"""Arguments and options that several commands share, and an example of each command."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import torch
import typer

from vllm_module.config import DeviceConfig, ModelConfig

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's, or typer's copy of it


class DType(str, Enum):
    """The dtypes a model runs in."""

    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Quantization(str, Enum):
    """What a checkpoint is turned into while it is loaded, or is said to be."""

    fp8 = "fp8"
    fp8_per_tensor = "fp8_per_tensor"
    fp8_per_channel = "fp8_per_channel"
    fp8_per_block = "fp8_per_block"
    int8_per_channel_weight_only = "int8_per_channel_weight_only"
    compressed_tensors = "compressed-tensors"


Source = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A folder in Hugging Face layout, or a hub id (owner/name).",
        show_default=False,
    ),
]
SizeOption = Annotated[
    int | None,
    typer.Option(
        "--tp", min=1, metavar="N", help="Tensor-parallel size: how many ranks share the model."
    ),
]
DTypeOption = Annotated[
    DType, typer.Option("--dtype", help="Of the parameters; auto takes the checkpoint's.")
]
QuantizationOption = Annotated[
    Quantization | None,
    typer.Option(
        "--quantization",
        help="Quantize linear layers while loading; a checkpoint that is quantized says so itself.",
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1 …; auto takes CUDA if there is one.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead, and nothing else.")
]

EXAMPLES = {
    "inspect": "Example: vllm-module inspect Qwen/Qwen3-0.6B --all",
    "plan": "Example: vllm-module plan ./Qwen3-8B --tp 4",
    "load": "Example: vllm-module load ./Qwen3-8B --tp 2 --dtype bfloat16, "
    "or with a process a rank: torchrun --nproc-per-node 2 -m vllm_module.cli load ./Qwen3-8B",
    "generate": 'Example: vllm-module generate ./Qwen3-0.6B --tp 2 --prompt "The sky is"',
    "chat": "Example: vllm-module chat ./Qwen3-0.6B --temperature 0.7 --top-p 0.9",
    "bench": "Example: vllm-module bench ./Qwen3-0.6B --input-len 512 --concurrency 32",
    "demo": "Example: vllm-module demo --keep ./demo-checkpoint",
}


def model_config(source: str, dtype: DType, quantization: Quantization | None) -> ModelConfig:
    """Return what the options that a command shares with others say of a model."""
    entries: dict[str, Any] = {
        "model": source,
        "dtype": dtype.value,
        "quantization": quantization and quantization.value,
    }
    return ModelConfig(**entries)


def torch_device(name: str) -> torch.device:
    """Return the device of that name; raise a usage error if there is none here."""
    try:
        device = DeviceConfig(device=name).torch_device
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None
    if device.type == "meta":
        raise typer.BadParameter("meta has no memory to load into", param_hint="--device")
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if count <= (device.index or 0):
        here = f"the CUDA devices here number {count}"
        raise typer.BadParameter(f"{name} is not there: {here}", param_hint="--device")
    return device
