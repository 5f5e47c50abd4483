"""What a load is given: pairs of name and tensor, in groups for modules, and the names in them.

An override of ``load_weights`` gets names relative to its module and may pass on others. Reports
show what the checkpoint calls a tensor, so both are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any, TypeAlias, Union

import torch
from torch import nn

from vllm_module.base.messages import printable_name, shorten
from vllm_module.core.report import Problem
from vllm_module.core.routes import Child, find, is_direct, routes_of
from vllm_module.core.tree import Node
from vllm_module.weights import Weight
from vllm_module.weights.handle import Pairs

# What a user gives, or what a module hands to a module below it.
Weights: TypeAlias = Union[Pairs, "Group"]

_NO_PAIRS = (str, bytes, PathLike, torch.Tensor, nn.Module)


class Group(list[tuple[str, Weight, str]]):
    """Weights that a module above hands to the module at ``node``.

    Each has its name relative to the module, the tensor or handle, and the checkpoint's full name.
    """

    __slots__ = ("node",)

    def __init__(self, node: Node, weights: Iterable[tuple[str, Weight, str]] = ()) -> None:
        if weights:
            self.extend(weights)
        self.node = node


class Renamed(str):
    """A name that knows the checkpoint's full name, which reports show.

    An override of ``load_weights`` may pass on such names for what it renames.
    """

    __slots__ = ("stored",)

    stored: str

    def __new__(cls, name: str, stored: str) -> Renamed:
        """Return ``name``, which reports call ``stored``."""
        self = super().__new__(cls, name)
        self.stored = stored
        return self

    def __reduce__(self) -> tuple[type[Renamed], tuple[str, str]]:
        return Renamed, (str(self), self.stored)


class GivenNames:
    """The names that modules with a ``load_weights`` of their own were given and passed on."""

    def __init__(self) -> None:
        self._given: dict[nn.Module, dict[str, str]] = {}  # by module, full names by given names
        self._passed_on: dict[nn.Module, list[str]] = {}  # by module, full names
        self._renamed: dict[str, list[Renamed]] = {}  # by full name, what became of it
        self._stored: dict[nn.Module, Callable[[str], str | None]] = {}  # its stored_names

    def give(self, group: Group) -> list[tuple[str, Weight]]:
        """Return the group's pairs, and keep the full names."""
        given = self._given.setdefault(group.node.module, {})
        given.update((name, full_name) for name, _, full_name in group)
        return [(name, weight) for name, weight, _ in group]

    def full_name(self, node: Node, name: str) -> str:
        """Return the checkpoint's full name of what the module at ``node`` is given as ``name``."""
        return self._given.get(node.module, {}).get(name) or node.path + name

    def passed_on(self, node: Node, name: str) -> str:
        """Return the full name of what the module at ``node`` passes on as ``name``."""
        if type(name) is Renamed:
            full_name = name.stored
            self._renamed.setdefault(full_name, []).append(name)
        elif node.overrides:
            full_name = self.full_name(node, name)
        else:
            return node.path + name
        self._passed_on.setdefault(node.module, []).append(full_name)
        return full_name

    def problem(self, name: str, detail: str) -> Problem:
        """Return a problem of the tensor ``name``; what was renamed has both names."""
        renamed = ", ".join(map(printable_name, self._renamed.get(name, ())))
        return Problem(name, f"{detail} (renamed: {renamed})" if renamed else detail)

    def missing(self, node: Node | None, name: str, detail: str) -> Problem:
        """Return the problem that nothing has ``name``, with what modules above rename to it."""
        while node is not None:
            if node.overrides and name.startswith(node.path):
                other = self._stored_name(node, name[len(node.path) :])
                detail += f" (or {node.path}{other})" if other else ""
            node = node.parent
        return Problem(name, detail)

    def _stored_name(self, node: Node, name: str) -> str | None:
        found = self._stored.get(node.module)
        if found is None:
            module: Any = node.module
            given, above = self._passed_on.get(module, ()), len(node.path)
            found = self._stored[module] = module.stored_names([each[above:] for each in given])
        return found(name)


def follow(reached: dict[str, Node], name: str) -> tuple[Node, str]:
    """Return the module that ``name`` leads to, and the name that it gets.

    It has the tensor or the rule, or overrides ``load_weights``, or it lacks the name. What earlier
    names have ``reached`` is kept by the components that led there, each that of a child.
    """
    end = name.rfind(".") + 1
    while (node := reached.get(name[:end])) is None:
        end = name.rfind(".", 0, end - 1) + 1
    rest, by_child = name[end:], True
    while node.module._modules:
        routes = routes_of(node)
        route, below = find(routes, rest)
        if not isinstance(route, Child):
            break
        node = node.child(route.attr)
        by_child = by_child and is_direct(routes, rest[: -len(below)])
        rest = route.prefix + below
        if node.overrides:
            break
        if by_child:
            reached[name[: -len(below)]] = node
    return node, rest


def refuse_no_pairs(weights: object) -> None:
    """Raise ``TypeError`` if ``weights`` are neither a mapping nor an iterable of pairs."""
    if isinstance(weights, _NO_PAIRS) or not isinstance(weights, Iterable):
        raise TypeError(
            f"expected pairs of name and tensor, got {described(weights)}: open a checkpoint "
            "with vllm_module.weights.open_checkpoint, let get_model do all of it, or pass a "
            "module's state_dict()"
        )


def described(value: object) -> str:
    """Say what a value is that is not what a load expects."""
    if isinstance(value, str | bytes | PathLike):
        return shorten(value)
    kind = type(value).__name__
    if not isinstance(value, tuple | list):
        return f"an object of type {kind}"
    return f"a {kind} of {len(value)} ({', '.join(type(each).__name__ for each in value[:4])})"
