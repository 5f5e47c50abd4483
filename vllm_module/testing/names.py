"""The names that a checkpoint has for the tensors of a module."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from vllm_module.core.conversions import Conversion
from vllm_module.core.module import vLLMModule
from vllm_module.core.tree import locations
from vllm_module.parameters import BasevLLMParameter, FlattenedParameter

# Pairs of a prefix and its alias, declared by one module.
_Aliases: TypeAlias = list[tuple[str, str]]


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
        apart: set[str] = set()  # of these, those that are refused as one tensor
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
                    if any(slot.pairs for dim in tensor.dims for slot in dim.slots):
                        apart.add(layer.name)
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
        unshared = tuple(
            each for each in fused if each.name not in apart and not repeated & {*each.slot_names}
        )
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
