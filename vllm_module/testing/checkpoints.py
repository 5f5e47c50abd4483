"""Random checkpoints of a module: their values, the forms they are stored in, and their files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from vllm_module.core.conversions import Conversion
from vllm_module.core.module import vLLMModule
from vllm_module.core.tree import locations
from vllm_module.parameters import BasevLLMParameter, FlattenedParameter
from vllm_module.quantization import valid_weights

Tensors: TypeAlias = dict[str, torch.Tensor]
# Pairs of a prefix and its alias, declared by one module.
_Aliases: TypeAlias = list[tuple[str, str]]


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


@dataclass(frozen=True)
class Fused:
    """A parameter whose slots a checkpoint stores apart, or as one tensor.

    Attributes:
        path: path of the parameter in the tree.
        name: name of all slots as one tensor.
        names: for each dimension with slots that are stored apart, the slots' names in order. A
            slot of the parameter has one name of each dimension.
        dims: for each of these dimensions, its index in a slot's tensor, counted from the end;
            ``None`` for experts, because the tensor of one expert lacks their dimension.

    """

    path: str
    name: str
    names: tuple[tuple[str, ...], ...]
    dims: tuple[int | None, ...]

    @property
    def slots(self) -> tuple[str, ...]:
        """Slots, in the order of their declaration."""
        return tuple(".".join(names) for names in itertools.product(*self.names))

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Name of each slot in a checkpoint."""
        return tuple(slot_name(self.path, slot) for slot in self.slots)

    def join(self, tensors: Mapping[str, torch.Tensor], chosen: tuple[str, ...] = ()) -> Any:
        """Return the tensor of all slots whose names begin with ``chosen``."""
        if len(chosen) == len(self.names):
            return tensors[slot_name(self.path, ".".join(chosen))]
        parts = [self.join(tensors, (*chosen, name)) for name in self.names[len(chosen)]]
        dim = self.dims[len(chosen)]
        return torch.stack(parts) if dim is None else torch.cat(parts, dim)


@dataclass(frozen=True)
class Names:
    """Names that a module's checkpoint may use, besides those that the module expects.

    Attributes:
        fused: fused parameters, each of which may be stored as one tensor.
        tied: for each expected name of a tied tensor, its other names.
        aliases: for each name with aliases in the tree, the other spellings.
        skipped: names that a module's rule skips, with all names below them.
        elsewhere: modules that other pipeline stages hold; the names below them are skipped.
        known: every name of a tensor or slot, in every spelling.

    """

    fused: tuple[Fused, ...]
    tied: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, tuple[str, ...]]
    skipped: tuple[str, ...]
    elsewhere: tuple[str, ...]
    known: frozenset[str]

    @classmethod
    def of(cls, module: vLLMModule) -> Names:
        """Collect the declarations of a tree's modules, those of a shared module for each path.

        Raises ``AssertionError`` for an alias of a name that does not exist.
        """
        fused: list[Fused] = []
        names: dict[tuple[int, str], list[str]] = {}  # names of each tensor and slot
        below: list[str] = []  # names of slots below their layer, which are accepted too
        aliases: list[_Aliases] = []
        skipped: list[str] = []
        elsewhere: list[str] = []
        for prefix, owner in module.named_modules(remove_duplicate=False):
            if isinstance(owner, vLLMModule):
                # Aliases of the same module do not lead to these names.
                if owner.held_elsewhere:
                    elsewhere += [prefix, *_other_spellings(prefix, aliases)]
                for name in owner.skipped_weights:
                    name = _joined(prefix, name)
                    skipped += [name, *_other_spellings(name, aliases)]
                aliases.append(
                    [
                        (_joined(prefix, name), _joined(prefix, alias))
                        for alias, name in owner.weight_aliases.items()
                    ]
                )
            for path, whole, tensor in stored_tensors(prefix, owner):
                slots = [""]
                if isinstance(tensor, BasevLLMParameter) and any(tensor.slots):
                    assert isinstance(owner, vLLMModule), f"{path} has slots that nobody declares"
                    layer = _fused(path, whole, tensor)
                    slots = list(layer.slots)
                    # A method may hold slots of different types in separate parameters.
                    assert slots == [each for each in owner.shard_names if each in slots], (
                        f"{path} has the slots {slots}, and shard_names are {owner.shard_names}"
                    )
                    fused.append(layer)
                    below += [_joined(prefix, slot, path.rpartition(".")[2]) for slot in slots]
                for slot in slots:
                    name = slot_name(path, slot) if slot else whole
                    names.setdefault((id(tensor), slot), []).append(name)
                aliases += _aliases_of(prefix, owner, path, whole, slots)
        tied = {first: tuple(others) for first, *others in names.values() if others}
        repeated = {name for others in tied.values() for name in others}
        own = {name for each in names.values() for name in each} | {each.name for each in fused}
        known = own.union(below)
        known |= {other for name in known for other in _other_spellings(name, aliases)}
        _check_aliases(known.union(elsewhere), aliases, module)
        spellings = {name: others for name in own if (others := _other_spellings(name, aliases))}
        unshared = tuple(each for each in fused if not repeated & {*each.slot_names})
        rules = tuple(skipped), tuple(elsewhere)
        return cls(unshared, tied, spellings, *rules, frozenset(known))

    def resolve(self, name: str) -> bool:
        """Return whether ``name`` is known: as a tensor, a slot, an alias or by a skip rule."""
        below = (*self.skipped, *self.elsewhere)
        return (
            name in self.known
            or name in self.skipped
            or any(name.startswith(f"{each}.") for each in below)
        )


def _fused(path: str, whole: str, parameter: BasevLLMParameter) -> Fused:
    names, dims = [], list[int | None]()
    count = len(parameter.dims)
    for dim, declared in enumerate(parameter.dims):
        if not declared.names:
            continue
        stored = dim - count
        if parameter.transposed and stored >= -2:
            stored = -3 - stored
        names.append(declared.names)
        if isinstance(parameter, FlattenedParameter):
            stored = -2 if parameter.column else -1
        dims.append(None if parameter.experts is not None and dim == 0 else stored)
    return Fused(path, whole, tuple(names), tuple(dims))


def stored_tensors(prefix: str, owner: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield each tensor of the module at ``prefix`` that a checkpoint stores.

    It comes with its path and the name that a checkpoint has for the whole tensor.
    """
    unstored = made(owner)
    beside = getattr(owner, "stored_beside", {}) if prefix else {}
    for attr, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
        if tensor is None or attr in unstored:
            continue
        path = _joined(prefix, attr)
        yield path, _joined(_above(prefix), beside[attr]) if attr in beside else path, tensor


def _aliases_of(
    prefix: str, owner: nn.Module, path: str, whole: str, slots: Sequence[str]
) -> Iterator[_Aliases]:
    """Yield the aliases that the tensor at ``path`` has beside those of its path.

    ``whole`` is its own name, stored as one tensor, and ``slots`` are those stored apart.
    """
    attr = path.rpartition(".")[2]
    aliases = getattr(owner, "weight_aliases", {})
    beside: Mapping[str, str] = getattr(owner, "stored_beside", {})
    found = []
    for alias in (alias for alias, target in aliases.items() if target == attr):
        for slot in filter(None, slots):
            found.append((slot_name(path, slot), slot_name(_joined(prefix, alias), slot)))
            found.append((_joined(prefix, slot, attr), _joined(prefix, slot, alias)))
        if prefix and alias in beside:
            found.append((whole, _joined(_above(prefix), beside[alias])))
    yield found
    if whole != path:
        yield [(whole, path)]


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _above(path: str) -> str:
    return path.rpartition(".")[0]


def _check_aliases(known: set[str], aliases: Sequence[_Aliases], module: vLLMModule) -> None:
    """Raise ``AssertionError`` for an alias of what no known name begins with."""
    prefixes = set()
    for name in known:
        components = name.split(".")
        prefixes |= {".".join(components[: end + 1]) for end in range(len(components))}
    for name, alias in itertools.chain(*aliases):
        assert name in prefixes, (
            f"{type(module).__name__} has the alias {alias!r} of {name!r}, which does not exist"
        )


def _other_spellings(name: str, aliases: Sequence[_Aliases]) -> tuple[str, ...]:
    """Return ``name`` with its prefixes replaced by their aliases, in every combination.

    ``aliases`` has those of each module, inner modules last. No alias of a module leads to another.
    """
    spellings = {name}
    for of_module in reversed(aliases):
        spellings |= {
            alias + spelling[len(prefix) :]
            for prefix, alias in of_module
            for spelling in spellings
            if spelling == prefix or spelling.startswith(f"{prefix}.")
        }
    return tuple(sorted(spellings - {name}))


def made(module: nn.Module, *, below: bool = False) -> set[str]:
    """Return the tensors of ``module`` that are computed and never stored.

    By name those of ``module`` itself; with ``below``, by path those of the whole tree.
    """
    if below:
        modules = module.named_modules(remove_duplicate=False)
        return {f"{path}.{attr}".lstrip(".") for path, each in modules for attr in made(each)}
    conversions = getattr(module, "conversions", {}) if isinstance(module, vLLMModule) else {}
    makes = {attr for conversion in conversions.values() for attr in conversion.makes}
    return makes | module._non_persistent_buffers_set


def converted(module: vLLMModule) -> dict[str, Conversion]:
    """Return, by path, the conversions of tensors that a checkpoint stores in another form."""
    found = {location.path: location.conversion for location in locations(module)}
    return {path: conversion for path, conversion in found.items() if conversion is not None}


def slot_name(path: str, slot: str) -> str:
    """Return the checkpoint's name of slot ``slot`` of the parameter at ``path``.

    ``layers.0.qkv_proj.weight`` and ``q_proj`` give ``layers.0.q_proj.weight``: the slot replaces
    its layer.
    """
    layer, _, attr = path.rpartition(".")
    return _joined(_above(layer), slot, attr)


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
