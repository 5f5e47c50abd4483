"""From configurations to a loaded model: resolve, read config.json, build, load."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vllm_module.agreement import (
    demand_alike,
    demand_same_tensors,
    describe,
    digests,
    in_step,
    loading_group,
)
from vllm_module.config import DeviceConfig, HFConfig, LoadConfig, ModelConfig
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.module import vLLMModule
from vllm_module.quantization import Rules, quantize, rules_for
from vllm_module.registry import model_class
from vllm_module.weights import Checkpoint, open_checkpoint, read_json, resolve

if TYPE_CHECKING:
    from rich.console import Console

# The default dtype is the process's, and simulated ranks build in threads of their own.
_one_default_dtype = threading.Lock()


def get_model(
    *,
    model_config: ModelConfig,
    load_config: LoadConfig | None = None,
    device_config: DeviceConfig | None = None,
) -> vLLMModule:
    """Build the model a checkpoint describes, load it, and return it in evaluation mode.

    The rank and size are those of the surrounding :func:`tensor_parallel` or process group. The
    ranks of a process group load together: all of them get their model, or none does.

    Raises:
        WeightLoadError: the checkpoint, its configuration or its architecture is refused.
        RankError: other ranks refused, ended or hang, or have another checkpoint.

    """
    load_config = load_config or LoadConfig()
    timeout = load_config.timeout

    opened = ExitStack()

    def find() -> tuple[HFConfig, torch.dtype, Rules | None, Checkpoint]:
        folder = resolve(model_config.model, model_config.revision)
        config = read_config(folder, model_config)
        rules = quantization_rules(model_config, config)
        checkpoint = opened.enter_context(open_checkpoint(folder))
        return config, parameter_dtype(model_config, config, checkpoint), rules, checkpoint

    def load() -> vLLMModule:
        device = (device_config or DeviceConfig()).torch_device
        model = build_model(config, dtype, device, rules)
        with progress(model, checkpoint) if load_config.show_progress else nullcontext():
            model.load_weights(checkpoint.items())  # pairs, as an override expects them
        return model

    with opened, loading_group(timeout) as group:
        config, dtype, rules, checkpoint = in_step(
            find, lambda found: describe(*found), timeout, group, demand_alike
        )
        return in_step(load, digests, timeout, group, demand_same_tensors).eval()


def read_config(folder: Path, model_config: ModelConfig) -> HFConfig:
    """Read and check ``config.json`` in ``folder``, with the overrides of ``model_config``."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        raise CheckpointFormatError(
            f"{folder} has no config.json: expected a folder in Hugging Face layout with "
            "config.json beside the .safetensors files"
        )
    entries: dict[str, Any] = read_json(path, folder) | model_config.hf_overrides
    try:
        config = HFConfig(**entries)
    except ValidationError as error:
        problems = "; ".join(map(_in_words, error.errors()))[:1000]  # values of any length in it
        raise CheckpointFormatError(f"{path} does not describe a model: {problems}") from None
    try:
        limit = config.context_length
    except (ArithmeticError, TypeError, ValueError):
        limit = -1
    if limit is not None and (type(limit) is not int or limit < 0):
        raise CheckpointFormatError(
            f"{path}: max_position_embeddings and rope scaling give no number of positions"
        )
    if limit and model_config.max_model_len and model_config.max_model_len > limit:
        raise UnsupportedModelError(
            f"max_model_len {model_config.max_model_len} exceeds the {limit} positions of {path}: "
            "lower it, or set rope scaling in hf_overrides"
        )
    return config


def _in_words(problem: ErrorDetails) -> str:
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{name} is missing"
    if not name:  # a check of ours, which names the entry itself
        return problem["msg"].removeprefix("Value error, ")
    return f"{name}: {problem['msg']}, got {problem['input']!r}"


def parameter_dtype(
    model_config: ModelConfig, config: HFConfig, checkpoint: Checkpoint
) -> torch.dtype:
    """Return the dtype to build with: the one asked for, config.json's, or the first tensor's."""
    name: str | None = model_config.dtype
    if name == "auto":
        name = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        name = name or next((str(handle.dtype) for handle in checkpoint.values()), "float32")
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedModelError(
            f"{name} is not a dtype a model runs in: choose float32, float16 or bfloat16"
        )
    assert isinstance(dtype, torch.dtype)
    return dtype


def quantization_rules(model_config: ModelConfig, config: HFConfig) -> Rules | None:
    """Return how layers are quantized: as asked for, or as config.json says they are stored."""
    return rules_for(model_config.quantization, getattr(config, "quantization_config", None))


def build_model(
    config: HFConfig, dtype: torch.dtype, device: torch.device, rules: Rules | None = None
) -> vLLMModule:
    """Build the architecture of ``config``: parameters on meta, to be loaded onto ``device``."""
    build = model_class(config.architectures)
    with _one_default_dtype:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                model = build(config)  # type: ignore[call-arg]  # every registered class takes it
            if rules is not None:
                quantize(model, rules)
            return model
        except AttributeError as error:
            if "config.json" not in str(error):
                raise
            raise CheckpointFormatError(
                f"{config.architectures[0]} cannot be built: {error}"
            ) from None
        finally:
            torch.set_default_dtype(before)


@contextmanager
def progress(
    model: vLLMModule,
    checkpoint: Checkpoint,
    label: str = "loading",
    console: Console | None = None,
) -> Iterator[None]:
    """Draw bytes and rate, on standard error or ``console``, while the block loads ``model``."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    total = sum(
        read.source.shape.numel() * read.source.dtype.itemsize
        for read in model.plan_weights(checkpoint).reads()
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    done = threading.Event()
    console = console or Console(stderr=True)
    with Progress(*columns, TransferSpeedColumn(), console=console) as bar:
        task = bar.add_task(label, total=total)

        def follow() -> None:
            while not done.wait(0.1):
                bar.update(task, completed=checkpoint.bytes_read)

        follower = threading.Thread(target=follow, name="progress", daemon=True)
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()
            bar.update(task, completed=checkpoint.bytes_read)
