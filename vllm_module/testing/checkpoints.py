"""Checkpoints made up for a module: their values, the forms they come in, and files of them."""

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

from vllm_module.conversions import Conversion
from vllm_module.module import vLLMModule
from vllm_module.parameters import BasevLLMParameter
from vllm_module.tree import locations

Tensors: TypeAlias = dict[str, torch.Tensor]


def random_weights(expected: Mapping[str, torch.Tensor], *, seed: int = 0) -> Tensors:
    """Return a tensor of random values for each name, of the shape and dtype given with it.

    ``expected`` is what :meth:`vLLMModule.expected_weights` returns. Matrices are normal, scaled by
    the root of their last dimension, so that outputs stay of the order of inputs; vectors are
    positive, for they may be variances, and so is what is called a scale.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _random(like, generator, positive="scale" in name.rpartition(".")[2])
        for name, like in expected.items()
    }


def _random(like: torch.Tensor, generator: torch.Generator, positive: bool) -> torch.Tensor:
    if like.dtype.is_floating_point:
        unsigned = torch.finfo(like.dtype).min >= 0
        if positive or unsigned or like.dim() < 2:
            return (torch.rand(like.shape, generator=generator) + 0.5).to(like.dtype)
        values = torch.randn(like.shape, generator=generator)
        return (values / like.shape[-1] ** 0.5).to(like.dtype)
    most = 2 if like.dtype == torch.bool else 127
    return torch.randint(1, most, like.shape, generator=generator).to(like.dtype)


@dataclass(frozen=True)
class Fused:
    """A fused parameter: its own name, and the names and dimension that its parts are stored by."""

    name: str
    parts: tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class Names:
    """The names a checkpoint of a module may use, beside those it expects.

    Attributes:
        fused: the fused parameters, which may be stored as one tensor each.
        tied: for each expected name, the other names of the same tensor, if it has any.
        aliases: for each name, the other spellings that the tree declares for it.
        skipped: names that some owner's rule leaves out, with all that lies below them.

    """

    fused: tuple[Fused, ...]
    tied: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, tuple[str, ...]]
    skipped: tuple[str, ...]

    @classmethod
    def of(cls, module: vLLMModule) -> Names:
        """Read them off what the modules of a tree declare, shared ones under each of their paths.

        Raises ``AssertionError`` for an alias of something that is not there.
        """
        fused: dict[str, Fused] = {}
        first: dict[tuple[int, str], list[str]] = {}
        spelled: list[tuple[str, str]] = []
        skipped: list[str] = []
        for prefix, owner in module.named_modules(remove_duplicate=False):
            at = f"{prefix}." if prefix else ""
            unstored = made(owner)
            beside = getattr(owner, "stored_beside", ())
            own = [*owner._parameters.items(), *owner._buffers.items()]
            for attr, tensor in own:
                if tensor is None or attr in unstored:
                    continue
                path = f"{at}{attr}"
                if attr in beside:
                    path = f"{prefix.rpartition('.')[0]}.{attr}".lstrip(".")
                slots = tensor.slots if isinstance(tensor, BasevLLMParameter) else ("",)
                for slot in slots:
                    name = part_name(path, slot) if slot else path
                    first.setdefault((id(tensor), slot), []).append(name)
                if isinstance(tensor, BasevLLMParameter) and any(slots):
                    assert isinstance(owner, vLLMModule), f"{path} has slots that nobody declares"
                    # The layer's declaration has the order, which the parameter has to follow.
                    parts = tuple(part_name(path, slot) for slot in owner.shard_names)
                    fused[path] = Fused(path, parts, tensor.slot_dim)
            if isinstance(owner, vLLMModule):
                skipped += [f"{at}{component}" for component in owner.skipped_weights]
                children = {*owner._modules, *owner._parameters, *owner._buffers}
                children |= {s for c in owner.children() for s in getattr(c, "shard_names", ())}
                for alias, meant in owner.weight_aliases.items():
                    assert meant in children, (
                        f"{prefix or type(owner).__name__} has the alias {alias!r} of {meant!r}, "
                        "which is not there"
                    )
                    spelled.append((f"{at}{meant}", f"{at}{alias}"))
        groups = {names[0]: tuple(names[1:]) for names in first.values()}
        tied = {name: others for name, others in groups.items() if others}
        again = {name for others in tied.values() for name in others}
        aliases: dict[str, tuple[str, ...]] = {}
        for name in [*groups, *again, *fused]:
            spellings = {name}
            for meant, alias in spelled:
                spellings |= {
                    alias + each[len(meant) :]
                    for each in spellings
                    if each == meant or each.startswith(f"{meant}.")
                }
            if others := tuple(sorted(spellings - {name})):
                aliases[name] = others
        whole = tuple(f for f in fused.values() if not again & {*f.parts})
        return cls(whole, tied, aliases, tuple(skipped))

    def resolve(self, name: str) -> bool:
        """Tell whether the tree knows ``name``, as a tensor, a part, an alias or by a skip rule."""
        known = {*self.tied, *self.aliases, *(name for f in self.fused for name in f.parts)}
        known = known.union(*self.tied.values(), *self.aliases.values())
        for layer in self.fused:
            above, _, attr = layer.name.rpartition(".")
            # By way of the layer itself, which knows its slots.
            known |= {
                layer.name,
                *(f"{above}.{part.split('.')[-2]}.{attr}" for part in layer.parts),
            }
        return name in known or any(
            name == skipped or name.startswith(f"{skipped}.") for skipped in self.skipped
        )


def made(module: nn.Module, *, below: bool = False) -> set[str]:
    """Return the tensors of ``module`` that are made or computed, and never stored.

    Its own, by name, or with ``below`` those of the whole tree, by path.
    """
    if below:
        modules = module.named_modules(remove_duplicate=False)
        return {f"{path}.{attr}".lstrip(".") for path, each in modules for attr in made(each)}
    conversions = getattr(module, "conversions", {}) if isinstance(module, vLLMModule) else {}
    makes = {attr for conversion in conversions.values() for attr in conversion.makes}
    return makes | module._non_persistent_buffers_set


def converted(module: vLLMModule) -> dict[str, Conversion]:
    """Return, by path, what is kept otherwise than a checkpoint stores it."""
    found = {location.path: location.conversion for location in locations(module)}
    return {path: conversion for path, conversion in found.items() if conversion is not None}


def part_name(path: str, slot: str) -> str:
    """Return the name by which a checkpoint stores slot ``slot`` of the parameter at ``path``.

    ``layers.0.qkv_proj.weight`` and ``q_proj`` give ``layers.0.q_proj.weight``: a part is stored
    where its layer is.
    """
    above, _, attr = path.rpartition(".")
    layers, dot, _ = above.rpartition(".")
    return f"{layers}{dot}{slot}.{attr}"


def fuse(tensors: Mapping[str, torch.Tensor], layers: Sequence[Fused]) -> Tensors:
    """Return ``tensors`` with the parts of each of ``layers`` stored as the one fused tensor."""
    stored = dict(tensors)
    for layer in layers:
        parts = [stored.pop(part) for part in layer.parts]
        stored[layer.name] = torch.cat(parts, dim=layer.dim)
    return stored


@dataclass(frozen=True)
class CheckpointForm:
    """One of the forms in which a module's checkpoint may be stored.

    Attributes:
        fused: the layers whose parts are stored as one tensor.
        tied: for each tied tensor, the names it is stored by.
        spelled: for names that are stored under an alias, which.
        order: all names, in the order in which they are stored.
        files: how many files they are dealt out to.

    """

    fused: tuple[Fused, ...]
    tied: Mapping[str, tuple[str, ...]]
    spelled: Mapping[str, str]
    order: tuple[str, ...]
    files: int

    @classmethod
    def choose(cls, module: vLLMModule, random: Random) -> CheckpointForm:
        """Choose one for ``module``."""
        names = Names.of(module)
        fused = [layer for layer in names.fused if random.random() < 0.5]
        parts = {part for layer in fused for part in layer.parts}
        tied = {
            name: tuple(random.sample([name, *others], random.randint(1, 1 + len(others))))
            for name, others in names.tied.items()
            if name not in parts
        }
        stored = fuse(module.expected_weights(), fused).keys() - tied.keys()
        own = sorted(stored.union(*tied.values()))
        spelled = {
            name: random.choice([name, *names.aliases[name]])
            for name in own
            if name in names.aliases
        }
        order = [spelled.get(name, name) for name in own]
        random.shuffle(order)
        files = random.randint(1, min(4, len(order)))
        return cls(tuple(fused), tied, spelled, tuple(order), files)

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Return ``tensors``, by the names the module expects, in this form."""
        stored = fuse(tensors, self.fused)
        for name, names in self.tied.items():
            if name in stored:
                stored |= dict.fromkeys(names, stored.pop(name))
        stored = {self.spelled.get(name, name): tensor for name, tensor in stored.items()}
        return {name: stored[name] for name in self.order}


def checkpoint_forms(module: vLLMModule) -> st.SearchStrategy[CheckpointForm]:
    """Draw how a checkpoint of ``module`` is stored: fused or split, tied or not, order and files.

    All of them have to load as the same model.
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
    """Write a checkpoint in Hugging Face's layout into ``folder``, and return it.

    Args:
        folder: is made if it is not there.
        tensors: by name, in the order in which they are stored; tensors that share memory are
            stored each on their own.
        files: how many files they are dealt out to; several get an index.
        fused: layers whose parts are stored as one tensor.
        renamed: other names for some of the tensors.
        config: the entries of ``config.json``, which is not written without them.

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
        held = names[index::files]
        save_file({name: stored[name] for name in held}, folder / file)
        weight_map |= dict.fromkeys(held, file)
    index_file = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return folder


def state(module: nn.Module) -> Tensors:
    """Return a copy of every parameter and buffer, by path, those too that are computed."""
    tensors = module.state_dict() | dict(module.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are alike in shape, dtype and every bit, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def assert_same_state(got: Tensors, expected: Tensors, what: str) -> None:
    """Compare two models' tensors bit by bit; ``what`` ends the message."""
    assert got.keys() == expected.keys(), f"{sorted(got.keys() ^ expected.keys())} {what}"
    for path, tensor in expected.items():
        assert same_bits(got[path], tensor), f"{path} has other bits {what}"
