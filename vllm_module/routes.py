"""Where checkpoint names lead, by what a module and its children declare.

A table leads from a whole name, or from its first component with the dot behind it, to a route:
``"norm.weight"`` and ``"q_proj.weight"`` to tensors of this module or of a layer below it,
``"mlp."`` to a child. Where a declared name has several components, the first leads to another
table, for the next.

Layers repeat, and their tables with them: modules that declare the same share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeAlias, Union

from torch import nn

from vllm_module.messages import shorten
from vllm_module.report import fold
from vllm_module.tree import Location, Node, is_typed, loads_itself


class Child(NamedTuple):
    """Names go to the child ``attr``, which is given ``prefix`` and the rest of each name.

    The prefix is empty for names below the child. It is ``"q_proj."`` for a slot of a fused child,
    which has to know the slot, and the rest of the path where an alias leads further down.
    """

    attr: str
    prefix: str


class Place(NamedTuple):
    """The name is that of a tensor, or of a slot of it.

    ``child`` and ``attr`` are where it is: ``child`` is empty for the module's own, and else a
    layer without children of its own, which leaves the loading to this class. ``attr`` is empty
    for all names of an own slot: the rest of each is the tensor's.
    """

    child: str
    attr: str
    slot: str | None


class Skip(NamedTuple):
    """Names are not loaded, by the rule ``reason``."""

    reason: str


Route: TypeAlias = Child | Place | Skip
# A table within a table may have the route of the names that match no longer path, under "".
Routes: TypeAlias = dict[str, Union[Route, "Routes"]]


def routes_of(node: Node) -> Routes:
    """Return the module's table, built once a load from what it and its children declare.

    Raises ``ValueError`` where two declarations claim one name, where one is empty, or where a
    module makes them that is no ``vLLMModule``.
    """
    if node.routes is None:
        node.routes = _built(node)
    return node.routes


def find(routes: Routes, name: str) -> tuple[Route | None, str]:
    """Return the route of the longest declared name that ``name`` begins with, and the rest."""
    component, dot, rest = name.partition(".")
    route = routes.get(component + dot)
    ends_here: Any = None  # of the longest name so far that may have more behind it
    rest_there = rest
    while isinstance(route, dict):
        if "" in route:
            ends_here, rest_there = route[""], rest
        component, dot, deeper = rest.partition(".")
        route, rest = route.get(component + dot), deeper
    return (route, rest) if route is not None else (ends_here, rest_there)


# What a vLLMModule declares, and of any other module would be ignored.
DECLARATIONS = frozenset(
    ("shard_names", "stored_beside", "weight_aliases", "skipped_weights", "conversions")
)


def _built(node: Node) -> Routes:
    module: Any = node.module
    ours = loads_itself(module)
    if not ours:
        _refuse_declarations(module)
    elif module.skipped_weights or module.weight_aliases:
        _check_mappings(module)
    elif not module._modules and not module.shard_names:
        return _of_tensors(tensor_names(module))  # a layer that is not fused, as most are
    children = tuple(_declared(*each) for each in module._modules.items() if each[1] is not None)
    if not ours:
        return _declared_routes(type(module).__name__, tensor_names(module), children)
    return _declared_routes(
        type(module).__name__,
        tensor_names(module),
        children,
        tuple(module.shard_names),
        tuple(module.skipped_weights.items()) if module.skipped_weights else (),
        tuple(module.weight_aliases.items()) if module.weight_aliases else (),
    )


class _Declared(NamedTuple):
    """What a child declares; ``tensors`` are those that the module above may route names to."""

    attr: str
    shard_names: tuple[str, ...] = ()
    stored_beside: tuple[tuple[str, str], ...] = ()
    tensors: tuple[str, ...] = ()


def _declared(attr: str, child: Any) -> _Declared:
    # Not loads_itself: a call for each of many experts would show in every small update.
    if "load_state" not in child.__dict__:
        return _Declared(attr)
    beside, slots = child.stored_beside, tuple(child.shard_names)
    tensors = tensor_names(child) if _is_simple(child) else ()
    if slots and not set(slots).isdisjoint(tensors):
        tensors = ()  # which the child refuses when it builds its own table
    return _Declared(attr, slots, tuple(beside.items()) if beside else (), tensors)


def _is_simple(module: Any) -> bool:
    """Tell whether the module above may route names to the tensors of ``module`` by itself."""
    return not (
        module._modules
        or module.weight_aliases
        or module.skipped_weights
        or module.overrides_load_weights
    )


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
    for attr, slots, beside, _ in children:
        claims += (attr, *slots, *(name for _, name in beside))
        _add(routes, f"{attr}.", Child(attr, ""))
        for slot in slots:
            _add(routes, f"{slot}.", Child(attr, f"{slot}."))
        for tensor, name in beside:
            _add(routes, name, Child(attr, tensor))
    for slot in shard_names:
        _add(routes, f"{slot}.", Place("", "", slot))
    for tensor in tensors:
        _add(routes, tensor, Place("", tensor, None))
    for name, reason in skipped:
        _add(routes, name, Skip(reason))
        _add(routes, f"{name}.", Skip(reason))
    targets = [target for _, target in aliases]
    own = _places("", tensors, shard_names)
    claims += _add_aliases(routes, own, aliases)
    _check_claims(kind, (*claims, *targets), claims)
    return routes | _shortcuts(routes, own, children)


def _places(child: str, tensors: Sequence[str], shard_names: Sequence[str]) -> dict[str, Place]:
    """Return the names of ``child``'s tensors and of their slots, relative to it."""
    places = {tensor: Place(child, tensor, None) for tensor in tensors}
    return places | {
        f"{slot}.{tensor}": Place(child, tensor, slot) for slot in shard_names for tensor in tensors
    }


def _shortcuts(
    routes: Routes, own: Mapping[str, Place], children: Sequence[_Declared]
) -> dict[str, Place]:
    """Return whole names that the table leads to a tensor, here or in a child, in several steps."""
    found = {}
    for name, place in own.items():
        route, rest = find(routes, name)
        if isinstance(route, Place) and route._replace(attr=route.attr or rest) == place:
            found[name] = place
    for attr, slots, beside, tensors in children:
        places = _places(attr, tensors, slots)
        names = [f"{attr}.{name}" for name in places] + [*places] + [name for _, name in beside]
        for name in names if tensors else ():
            route, rest = find(routes, name)
            if isinstance(route, Child) and route.attr == attr and route.prefix + rest in places:
                found[name] = places[route.prefix + rest]
    return found


@lru_cache(maxsize=64)
def _of_tensors(tensors: tuple[str, ...]) -> Routes:
    """Return the table of a module that has no more than its own tensors."""
    return {**_places("", tensors, ())}


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
    routes: Routes, own: Mapping[str, Place], aliases: Sequence[tuple[str, str]]
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
            elif route is not None and not rest:  # an own tensor or slot, or a rule
                found[alias + dot] = route
        if alias in found or f"{alias}." in found:
            known.append(alias)
    for name, each in found.items():
        _add(routes, name, each)
    return known


def _check_mappings(module: Any) -> None:
    declared = module.skipped_weights, module.weight_aliases
    if not all(isinstance(each, Mapping) for each in declared):
        raise TypeError(
            f"{type(module).__name__}: skipped_weights and weight_aliases map names, to reasons "
            "and to other names: expected two dicts"
        )


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


def _check_claims(kind: str, declared: Sequence[str], claims: Sequence[str]) -> None:
    """Raise ``ValueError`` if a name is claimed twice, or a declared one has an empty component."""
    for name in declared:
        if not all(name.split(".")):
            raise ValueError(
                f"{kind} declares {name!r}, which is no name: expected components with one dot "
                "between two of them"
            )
    if len(set(claims)) < len(claims):
        twice = sorted({name for name in claims if claims.count(name) > 1})
        raise ValueError(
            f"{kind}: two children, slots, tensors or rules claim the checkpoint name "
            f"{', '.join(twice)}"
        )


def tensor_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the module's own tensors that a checkpoint can store."""
    if not module._buffers:
        return tuple(module._parameters)
    computed = module._non_persistent_buffers_set
    return (*module._parameters, *(name for name in module._buffers if name not in computed))


def no_place(location: Location, slot: str | None) -> str:
    """Say why no tensor is at ``location``, and what the module has instead."""
    node, attr = location.node, location.attr
    module = type(node.module).__name__
    if location.is_made:
        return f"{location.path} is made of full-precision weights while they are loaded"
    declared = attr in node.module._parameters or attr in node.module._buffers
    if slot and node.module._parameters.get(attr) is not None and not is_typed(location.tensor):
        return (
            f"{location.path} is a plain Parameter, which has no slots such as {slot!r}: create it "
            "as a typed one, such as ModelWeightParameter(Dim((Slot(...), ...)), ...)"
        )
    if declared or slot is not None:
        with_slot = f" with a slot {slot!r}" if slot else ""
        return f"{module} was built without {attr!r}{with_slot}"
    for alias, target in getattr(node.module, "weight_aliases", {}).items():
        if f"{attr}.".startswith(f"{alias}."):
            return f"weight_aliases of {module} lead to {target!r}, which is not there"
    component = attr.partition(".")[0]
    for name, child in node.module._modules.items():
        if child is None or loads_itself(child):
            continue
        if component in getattr(child, "shard_names", ()):
            return (
                f"{module}.{name} declares shard_names, which has no effect, because "
                f"{type(child).__name__} is no vLLMModule: make it one"
            )
    known = dict.fromkeys(name.partition(".")[0] for name in routes_of(node))
    # The lines of several numbers can fold, because they say the same.
    number = component.isdecimal()
    if component in known:
        below = routes_of(node).get(f"{component}.")
        if number and isinstance(below, dict):
            names = tuple(dict.fromkeys(each.partition(".")[0] for each in below))
            return f"{module} has below each number {_listed(names)}"
        return f"{module}.{component} is known, but not with a name like this"
    what = "such number" if number else shorten(component)
    return f"{module} has no {what}; it has {_listed(tuple(known))}"


@lru_cache(maxsize=16)  # the same for all experts that a checkpoint has too many
def _listed(known: tuple[str, ...]) -> str:
    names = fold(known)
    return (
        ", ".join(names) if len(names) <= 16 else f"{len(names)} other components"
    ) or "no weights"
