"""Random checkpoints of a module: their values, the forms they are stored in, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.quantization import valid_weights
from vllm_module.testing.names import Fused, Names

Tensors: TypeAlias = dict[str, torch.Tensor]


def random_weights(expected: Mapping[str, torch.Tensor], *, seed: int = 0) -> Tensors:
    """Return a random tensor for each name, of the given tensor's shape and dtype.

    ``expected`` is the result of :meth:`vLLMModule.expected_weights`. Matrices are normal, divided
    by the root of their last dimension, so that outputs are about as large as inputs. Vectors and
    scales are positive, because a vector may be a variance.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _random(like, generator, positive="scale" in name.rpartition(".")[2])
        for name, like in expected.items()
    }


def made_up_weights(module: vLLMModule, *, seed: int = 0) -> Tensors:
    """Return :func:`random_weights` of a module, with values that its quantization methods accept.

    A method may accept few values of a tensor (:attr:`StoredTensor.valid`).
    """
    expected = module.expected_weights()
    valid = valid_weights(module)
    return random_weights(expected, seed=seed) | {
        name: valid[name].clone() for name in expected if name in valid
    }


def _random(like: torch.Tensor, generator: torch.Generator, positive: bool) -> torch.Tensor:
    if like.dtype.is_floating_point:
        unsigned = torch.finfo(like.dtype).min >= 0
        if positive or unsigned or like.dim() < 2:
            return (torch.rand(like.shape, generator=generator) + 0.5).to(like.dtype)
        values = torch.randn(like.shape, generator=generator)
        return (values / like.shape[-1] ** 0.5).to(like.dtype)
    end = 2 if like.dtype == torch.bool else 127
    return torch.randint(1, end, like.shape, generator=generator).to(like.dtype)


def fuse(tensors: Mapping[str, torch.Tensor], layers: Sequence[Fused]) -> Tensors:
    """Return ``tensors`` with the slots of each of ``layers`` stored as one tensor."""
    slots = {name for layer in layers for name in layer.slot_names}
    stored = {name: tensor for name, tensor in tensors.items() if name not in slots}
    return stored | {layer.name: layer.join(tensors) for layer in layers}


@dataclass(frozen=True)
class CheckpointForm:
    """A form in which a module's checkpoint may be stored.

    Attributes:
        fused: layers whose slots are stored as one tensor.
        tied: for each tied tensor, the names that store it.
        spelled: for each name with aliases, the spelling that stores it.
        order: all names, in the order in which they are stored.
        files: number of files.

    """

    fused: tuple[Fused, ...]
    tied: Mapping[str, tuple[str, ...]]
    spelled: Mapping[str, str]
    order: tuple[str, ...]
    files: int

    @classmethod
    def choose(cls, module: vLLMModule, random: Random) -> CheckpointForm:
        """Choose a form for ``module``."""
        names = Names.of(module)
        fused = [layer for layer in names.fused if random.random() < 0.5]
        fused_slots = {name for layer in fused for name in layer.slot_names}
        tied = {
            name: tuple(random.sample([name, *others], random.randint(1, 1 + len(others))))
            for name, others in names.tied.items()
            if name not in fused_slots
        }
        stored = fuse(module.expected_weights(), fused).keys() - tied.keys()
        all_names = sorted(stored.union(*tied.values()))
        spelled = {
            name: random.choice([name, *names.aliases[name]])
            for name in all_names
            if name in names.aliases
        }
        order = [spelled.get(name, name) for name in all_names]
        random.shuffle(order)
        files = random.randint(1, min(4, len(order)))
        return cls(tuple(fused), tied, spelled, tuple(order), files)

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return ``tensors``, which have the names that the module expects, in this form."""
        stored = fuse(tensors, self.fused)
        for name, names in self.tied.items():
            if name in stored:
                stored |= dict.fromkeys(names, stored.pop(name))
        stored = {self.spelled.get(name, name): tensor for name, tensor in stored.items()}
        return {name: stored[name] for name in self.order}


def checkpoint_forms(module: vLLMModule) -> st.SearchStrategy[CheckpointForm]:
    """Draw a form of a checkpoint of ``module``: fused or split, tied names, order and files.

    All forms must load as the same model.
    """
    seeds = st.integers(0, 2**16 - 1)
    return seeds.map(lambda seed: CheckpointForm.choose(module, Random(seed)))


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    files: int = 1,
    fused: Sequence[Fused] = (),
    renamed: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint in Hugging Face's layout into ``folder``, and return the folder.

    Args:
        folder: the folder, which is created if it does not exist.
        tensors: tensors by name, in the order in which they are stored. Tensors that share memory
            are stored separately.
        files: number of files; several files get an index.
        fused: layers whose slots are stored as one tensor.
        renamed: other names for some of the tensors.
        config: entries of ``config.json``; by default the file is not written.

    """
    folder.mkdir(parents=True, exist_ok=True)
    renamed = renamed or {}
    stored = {
        renamed.get(name, name): tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in fuse(tensors, fused).items()
    }
    if config is not None:
        (folder / "config.json").write_text(json.dumps(dict(config), indent=2))
    if files == 1:
        save_file(stored, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    names = list(stored)
    for index in range(files):
        file = f"model-{index + 1:05}-of-{files:05}.safetensors"
        file_names = names[index::files]
        save_file({name: stored[name] for name in file_names}, folder / file)
        weight_map |= dict.fromkeys(file_names, file)
    index_file = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return folder


def state(module: nn.Module) -> Tensors:
    """Return a copy of every parameter and buffer, with computed ones, by path."""
    tensors = module.state_dict() | dict(module.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def assert_same_state(got: Tensors, expected: Tensors, what: str) -> None:
    """Compare the tensors of two models bit by bit; ``what`` ends the message."""
    assert got.keys() == expected.keys(), f"{sorted(got.keys() ^ expected.keys())} {what}"
    for path, tensor in expected.items():
        assert same_bits(got[path], tensor), f"{path} has different bits {what}"
