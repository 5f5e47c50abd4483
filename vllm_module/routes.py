"""Where the components of checkpoint names lead, by what a module and its children declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from vllm_module.messages import shorten


class Declaring(nn.Module):
    """A module that says what checkpoints call its weights; ``vLLMModule`` documents how."""

    shard_names: Sequence[str] = ()
    stored_beside: Sequence[str] = ()
    weight_aliases: Mapping[str, str] = MappingProxyType({})
    skipped_weights: Mapping[str, str] = MappingProxyType({})


class Route(NamedTuple):
    """Where a component leads: to the child or tensor ``attr``, to a slot, or to a skip rule.

    ``beside``: it is the child's own tensor, which a checkpoint stores beside the child.
    """

    attr: str = ""
    child: nn.Module | None = None
    slot: str | None = None
    skip: str | None = None
    beside: bool = False


def routes_of(module: nn.Module) -> dict[str, Route]:
    """Build the table from component to route out of what the module's children declare.

    Its own tensors need no entry. Raises ``ValueError`` where two claim one component.
    """
    if not module._modules and not (
        isinstance(module, Declaring)
        and (module.shard_names or module.skipped_weights or module.weight_aliases)
    ):
        return {}
    claims: list[tuple[str, Route]] = []
    for attr, child in module._modules.items():
        if child is not None:
            claims.append((attr, Route(attr, child)))
            if isinstance(child, Declaring):
                claims += [(slot, Route(attr, child, slot)) for slot in child.shard_names]
                claims += [(own, Route(attr, child, beside=True)) for own in child.stored_beside]
    if isinstance(module, Declaring):
        claims += [(slot, Route(slot=slot)) for slot in module.shard_names]
        claims += [(name, Route(skip=rule)) for name, rule in module.skipped_weights.items()]
        if module.weight_aliases:
            known = {attr: Route(attr) for attr in tensor_names(module)} | dict(claims)
            aliases = module.weight_aliases.items()
            claims += [(alias, known[name]) for alias, name in aliases if name in known]
    if not claims:
        return {}
    routes = dict(claims)
    if len(routes) < len(claims) or not routes.keys().isdisjoint(tensor_names(module)):
        components = [*(component for component, _ in claims), *tensor_names(module)]
        twice = sorted({name for name in components if components.count(name) > 1})
        raise ValueError(
            f"{type(module).__name__}: two children, slots, tensors or rules claim the checkpoint "
            f"component {', '.join(twice)}"
        )
    return routes


def tensor_names(module: nn.Module) -> list[str]:
    """Return the names of the tensors that a checkpoint can store for ``module`` itself."""
    computed = module._non_persistent_buffers_set
    return [*module._parameters, *(name for name in module._buffers if name not in computed)]


def no_route(module: nn.Module, component: str, routes: Mapping[str, Route]) -> str:
    """Say that ``module`` has no place for a component, and what it has."""
    known = [*routes, *tensor_names(module)]
    if component in known:
        return f"{type(module).__name__}.{component} is known, but not with a name like this"
    listed = ", ".join(known) if len(known) <= 16 else f"{len(known)} other components"
    has = listed or "no weights"
    return f"{type(module).__name__} has no {shorten(component)}; it has {has}"
