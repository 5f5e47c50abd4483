"""Ways to load a Qwen3-shaped checkpoint: ours, and others to measure beside it.

``load`` loads any number of times, and opens the files each time. ``tensors`` are then the
parameters by name. ``fuses`` says whether q, k and v are one parameter, and gate and up.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from vllm_module import ModelConfig, tensor_parallel
from vllm_module.build.model_source import build_model, read_config
from vllm_module.weights import open_checkpoint

Tensors = dict[str, torch.Tensor]


class Loader(Protocol):
    fuses: bool

    def load(self) -> None: ...

    @property
    def tensors(self) -> Tensors: ...


# The dimension that tensor parallelism cuts, by the component before ".weight"; norms stay whole.
CUT = dict.fromkeys(("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj"), 0)
CUT |= {"gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Ours:
    fuses = True

    def __init__(self, folder: Path, rank: int = 0, size: int = 1) -> None:
        config = read_config(folder, ModelConfig(model=str(folder)))
        with tensor_parallel(rank=rank, size=size):
            self.model = build_model(config, torch.bfloat16, torch.device("cpu"))
        self.folder = folder
        self.bytes_read = 0

    def load(self) -> None:
        with open_checkpoint(self.folder) as checkpoint:
            self.model.load_weights(checkpoint)
            self.bytes_read = checkpoint.bytes_read

    @property
    def tensors(self) -> Tensors:
        return {name: parameter.data for name, parameter in self.model.named_parameters()}


class Safetensors:
    """``safe_open`` with ``get_tensor`` at size 1, else ``get_slice``, and ``copy_``."""

    fuses = False

    def __init__(self, folder: Path, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        self.files: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            self.files.setdefault(folder / file, []).append(name)
        self.tensors: Tensors = {}

    def load(self) -> None:
        for path, names in self.files.items():
            with safe_open(path, "pt") as file:
                for name in names:
                    tensor = self.read(file, name)
                    if name not in self.tensors:
                        self.tensors[name] = torch.empty_like(
                            tensor, memory_format=torch.contiguous_format
                        )
                    self.tensors[name].copy_(tensor)

    def read(self, file: safe_open, name: str) -> torch.Tensor:
        dim = CUT.get(name.split(".")[-2])
        if self.size == 1 or dim is None:
            return file.get_tensor(name)
        stored = file.get_slice(name)
        length = stored.get_shape()[dim] // self.size
        index = slice(self.rank * length, (self.rank + 1) * length)
        return stored[index] if dim == 0 else stored[:, index]


class Transformers:
    """``from_pretrained`` and a read of every byte, since it may leave pages unread."""

    fuses = False

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen3ForCausalLM  # the class itself: its imports are not timed
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.folder, self.model_class = folder, Qwen3ForCausalLM
        self.model: torch.nn.Module | None = None

    def load(self) -> None:
        self.model = None  # free the last one first
        self.model = self.model_class.from_pretrained(self.folder, dtype=torch.bfloat16)
        for parameter in self.model.parameters():
            parameter.data.view(torch.int64).sum()

    @property
    def tensors(self) -> Tensors:
        assert self.model is not None
        return {name: parameter.data for name, parameter in self.model.named_parameters()}


class VLLM:
    """The default loader of vLLM at a faked rank, into parameters that are there already."""

    fuses = True
    missing = importlib.util.find_spec("vllm") is None

    def __init__(self, folder: Path, rank: int = 0, size: int = 1) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.utils import initialize_model

        config = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
            load_format="safetensors",
        ).create_engine_config()  # fmt: skip
        config.load_config.use_tqdm_on_load = False
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                parallel_state.init_distributed_environment(
                    1, 0, f"file://{folder}/rendezvous", 0, "gloo"
                )
                parallel_state.initialize_model_parallel(1)
            # No collective runs in a load: the layers only ask for their rank and size.
            group = parallel_state.get_tp_group()
            group.rank_in_group, group.world_size = rank, size
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                self.model = initialize_model(vllm_config=config)
            finally:
                torch.set_default_dtype(default)
        self.config, self.loader = config, get_model_loader(config.load_config)

    def load(self) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config):
            self.loader.load_weights(self.model, self.config.model_config)

    @property
    def tensors(self) -> Tensors:
        return {name: parameter.data for name, parameter in self.model.named_parameters()}


def fused(tensors: Tensors) -> Tensors:
    """Return the tensors with those that our layers and vLLM's keep as one concatenated."""
    result = dict(tensors)
    for into, parts in FUSED.items():
        for name in [name for name in tensors if f".{parts[0]}." in name]:
            names = [name.replace(parts[0], part) for part in parts]
            result[name.replace(parts[0], into)] = torch.cat([result.pop(each) for each in names])
    return result


def check(loader: Loader, stored: Tensors) -> None:
    """Compare all parameters with what is stored, bit for bit; zeros may pad a vocabulary."""
    who = type(loader).__name__
    got, expected = loader.tensors, fused(stored) if loader.fuses else stored
    assert got.keys() == expected.keys(), f"{who}: {sorted(got.keys() ^ expected.keys())[:5]}"
    for name, tensor in got.items():
        rows = len(expected[name])
        assert torch.equal(tensor[:rows], expected[name]), f"{who}: {name} differs"
        assert not tensor[rows:].any(), f"{who}: {name} is padded with other values than 0"
