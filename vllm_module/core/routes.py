"""Tables from checkpoint names to children, tensors and rules, built from declarations.

A table leads from the first component of a name, with the dot behind it if more follows, to a
route: to a child, to a tensor of the module or a slot of it, or to a rule that skips the name.
Where a declared name has several components, the first leads to another table, for the next.

Layers repeat, and their tables with them: modules that declare the same share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeAlias, Union

from torch import nn

from vllm_module.core.tree import Node, loads_itself


class Child(NamedTuple):
    """Names go to the child ``attr``, which is given ``prefix`` and the rest of each name.

    The prefix is empty for names below the child. It is ``"q_proj."`` for a slot of a fused child,
    which has to know the slot, and the rest of the path where an alias leads further down.
    """

    attr: str
    prefix: str


class Tensor(NamedTuple):
    """The name is that of a tensor of the module, or of a ``slot`` of one.

    ``attr`` is "" where the rest of the name is the tensor's, as for a slot of this module.
    """

    attr: str
    slot: str | None


class Skip(NamedTuple):
    """Names are not loaded, by the rule ``reason``."""

    reason: str


Route: TypeAlias = Child | Tensor | Skip
_UNDECLARED = Tensor("", None)
# A table within a table has, under "", the route of names that go on with none of its keys.
Routes: TypeAlias = dict[str, Union[Route, "Routes"]]


def routes_of(node: Node) -> Routes:
    """Return the module's table, built once a plan from what it and its children declare.

    Raises ``ValueError`` where two declarations claim one name, where one is empty, or where a
    module makes them that is no ``vLLMModule``.
    """
    if node.routes is None:
        node.routes = _built(node.module)
    return node.routes


def find(routes: Routes, name: str) -> tuple[Route, str]:
    """Return the route of the longest declared name that ``name`` begins with, and the rest.

    Without one, the whole name is taken for that of a tensor, which the module does not have.
    """
    found: tuple[Any, str] = _UNDECLARED, name
    component, dot, rest = name.partition(".")
    route = routes.get(component + dot)
    while isinstance(route, dict):
        if "" in route:
            found = route[""], rest  # unless more of the name is declared
        component, dot, rest = rest.partition(".")
        route = route.get(component + dot)
    return found if route is None else (route, rest)


def is_direct(routes: Routes, component: str) -> bool:
    """Tell whether all names that begin with ``component`` go to one child, which gets the rest."""
    route = routes.get(component)
    return isinstance(route, Child) and not route.prefix


# What a vLLMModule declares, and of any other module would be ignored.
DECLARATIONS = frozenset(
    (
        "shard_names", "stored_beside", "weight_aliases", "skipped_weights", "conversions",
        "held_elsewhere",
    )
)  # fmt: skip


def _built(module: Any) -> Routes:
    kind, tensors = type(module).__name__, tensor_names(module)
    children = tuple(_declared(*each) for each in module._modules.items() if each[1] is not None)
    if not loads_itself(module):
        _refuse_declarations(module)
        return _declared_routes(kind, tensors, children)
    slots, skipped, aliases = module.shard_names, module.skipped_weights, module.weight_aliases
    if not (skipped or aliases):
        if not (children or slots):  # a layer that is not fused, as most are
            return _of_tensors(tensors)
        return _declared_routes(kind, tensors, children, tuple(slots))
    if not (isinstance(skipped, Mapping) and isinstance(aliases, Mapping)):
        raise TypeError(
            f"{kind}: skipped_weights and weight_aliases map names, to reasons and to other names: "
            "expected two dicts"
        )
    return _declared_routes(
        kind, tensors, children, tuple(slots), (*skipped.items(),), (*aliases.items(),)
    )


class _Declared(NamedTuple):
    """The declarations of a child: names that lead to it beside its own."""

    attr: str
    shard_names: tuple[str, ...] = ()
    stored_beside: tuple[tuple[str, str], ...] = ()
    held_elsewhere: str = ""


def _declared(attr: str, child: Any) -> _Declared:
    # Not loads_itself: a call for each of many experts would show in every small update.
    if "load_state" not in child.__dict__:
        return _Declared(attr)
    slots, beside = child.shard_names, child.stored_beside
    beside = tuple(beside.items()) if beside else ()
    return _Declared(attr, tuple(slots), beside, child.held_elsewhere)


@lru_cache(maxsize=64)  # the same for all layers of a model, which may have hundreds of slots
def _declared_routes(
    kind: str,
    tensors: tuple[str, ...],
    children: tuple[_Declared, ...],
    shard_names: tuple[str, ...] = (),
    skipped: tuple[tuple[str, str], ...] = (),
    aliases: tuple[tuple[str, str], ...] = (),
) -> Routes:
    """Return the table of a module of class ``kind`` with these tensors, children and names."""
    routes: Routes = {}
    claims = [*tensors, *shard_names, *(name for name, _ in skipped)]  # each claimed once
    for attr, slots, beside, elsewhere in children:
        claims += (attr, *slots, *(name for _, name in beside))
        _add(routes, f"{attr}.", Skip(elsewhere) if elsewhere else Child(attr, ""))
        for slot in slots:
            _add(routes, f"{slot}.", Child(attr, f"{slot}."))
        for tensor, name in beside:
            _add(routes, name, Child(attr, tensor))
    for slot in shard_names:
        _add(routes, f"{slot}.", Tensor("", slot))
    for tensor in tensors:
        _add(routes, tensor, Tensor(tensor, None))
    for name, reason in skipped:
        _add(routes, name, Skip(reason))
        _add(routes, f"{name}.", Skip(reason))
    targets = [target for _, target in aliases]
    claims += _add_aliases(routes, _own(tensors, shard_names), aliases)
    _check_claims(kind, (*claims, *targets), claims, children)
    return routes


@lru_cache(maxsize=64)
def _of_tensors(tensors: tuple[str, ...]) -> Routes:
    return {**_own(tensors, ())}


def _own(tensors: Sequence[str], shard_names: Sequence[str]) -> dict[str, Tensor]:
    """Return the whole names of a module's tensors and of their slots."""
    own = {tensor: Tensor(tensor, None) for tensor in tensors}
    return own | {f"{s}.{tensor}": Tensor(tensor, s) for s in shard_names for tensor in tensors}


def _add(routes: Routes, name: str, route: Route) -> None:
    """Enter ``route`` under ``name``, which ends with a dot where more of a name follows."""
    component, dot, rest = name.partition(".")
    if not rest:
        longer = routes.get(component + dot)
        if isinstance(longer, dict):
            longer[""] = route
        else:
            routes[component + dot] = route
        return
    below = routes.get(component + dot)
    if not isinstance(below, dict):
        below = routes[component + dot] = {} if below is None else {"": below}
    _add(below, rest, route)


def _add_aliases(
    routes: Routes, own: Mapping[str, Tensor], aliases: Sequence[tuple[str, str]]
) -> list[str]:
    """Add a route for each alias, and return the aliases whose target is there."""
    found: dict[str, Route] = {}  # added at the end, because no alias leads to another
    known = []
    for alias, target in aliases:
        if target in own:
            found[alias] = own[target]
        for place in own.values():
            name = f"{place.slot}.{alias}"  # "q_proj.kernel"
            if place.slot and place.attr == target and find(routes, name)[1] == alias:
                found.setdefault(name, place)
        # Whether a target below a child is a tensor, or has tensors below it, the child knows.
        for dot in ("", "."):
            route, rest = find(routes, target + dot)
            if isinstance(route, Child):
                found[alias + dot] = Child(route.attr, route.prefix + rest)
            elif not rest or isinstance(route, Skip):  # an own tensor or slot, or a rule
                found[alias + dot] = route
        if alias in found or f"{alias}." in found:
            known.append(alias)
    for name, each in found.items():
        _add(routes, name, each)
    return known


def _refuse_declarations(module: nn.Module) -> None:
    """Raise ``ValueError`` for declarations of a module that does not load itself."""
    cls: Any = type(module)
    declared = DECLARATIONS & vars(module).keys() | _declared_by(cls)
    if declared:
        raise ValueError(
            f"{type(module).__name__} declares {', '.join(sorted(declared))}, which has no effect, "
            "because it is no vLLMModule: make it one, or declare on the vLLMModule above it"
        )


@cache
def _declared_by(cls: type) -> frozenset[str]:
    return frozenset(name for name in DECLARATIONS if hasattr(cls, name))


def _check_claims(
    kind: str, declared: Sequence[str], claims: Sequence[str], children: Sequence[_Declared]
) -> None:
    """Raise ``ValueError`` if a name is claimed twice, or a declared one has an empty component."""
    for name in declared:
        if not all(name.split(".")):
            raise ValueError(
                f"{kind} declares {name!r}, which is no name: expected components with one dot "
                "between two of them"
            )
    if len(set(claims)) < len(claims):
        twice = sorted({name for name in claims if claims.count(name) > 1})
        of = [
            child
            for child, slots, beside, _ in children
            if not {child, *slots, *dict(beside).values()}.isdisjoint(twice)
        ]
        raise ValueError(
            f"{kind}: two children, slots, tensors or rules claim the checkpoint name "
            f"{', '.join(twice)}" + f", which is of {', '.join(of)}" * bool(of)
        )


def tensor_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the module's own tensors that a checkpoint can store."""
    if not module._buffers:
        return tuple(module._parameters)
    computed = module._non_persistent_buffers_set
    return (*module._parameters, *(name for name in module._buffers if name not in computed))
