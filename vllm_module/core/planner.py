"""From names to a plan: which checkpoint tensor fills which slot, and what is wrong with the rest.

The outermost call of ``load_weights`` opens a planner, and every call below it adds to it what
``vLLMModule._route`` says of its names. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, Union

import torch
from torch import nn

from vllm_module.base.messages import printable_name, shorten
from vllm_module.core import fit
from vllm_module.core.fill import Fill
from vllm_module.core.plan import LoadPlan, in_reading_order
from vllm_module.core.report import LoadReport, Problem
from vllm_module.core.routes import Child, find, routes_of
from vllm_module.core.state import in_progress
from vllm_module.core.tree import Location, Node, modules_below, slots_of, stored_tensors, walk
from vllm_module.errors import WeightLoadError
from vllm_module.weights import Weight

# What a user gives, or what a module hands to a module below it.
Weights: TypeAlias = Union[Mapping[str, Weight], Iterable[tuple[str, Weight]], "Group"]
# Takes what a stream has brought, before the next is asked for, and what still waits to be read.
Arrived: TypeAlias = Callable[[Sequence[Fill], Sequence[Fill]], None]

_NO_PAIRS = (str, bytes, PathLike, torch.Tensor, nn.Module)

# The plan that this thread is making. A context variable, because an overridden load_weights may
# pass a plain generator to super(): nothing that travels with the weights would survive that.
_current: ContextVar[Planner | None] = ContextVar("planner", default=None)


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


class Planner:
    """Collects what each name of a checkpoint fills, and the problems, for one plan.

    Args:
        root: the module that is loaded, updated or planned.
        partial: whether the weights may be a part of a checkpoint.
        arrived: takes each tensor of a stream at once, because it holds memory. Without it, the
            plan is all that is wanted: tensors need no data, and nothing is read.

    Attributes:
        reads: whether the plan is run afterwards.
        top: the root's node.
        report: the report, which gets every name.
        fills: the fills that are not read yet, in the order of names.
        folder: the folder of the first handle that has a file.

    """

    def __init__(
        self, root: nn.Module, *, partial: bool = False, arrived: Arrived | None = None
    ) -> None:
        self.root, self.partial, self._arrived = root, partial, arrived
        self.reads = arrived is not None
        self.top = Node(root)
        self.report = LoadReport()
        self.fills: list[Fill] = []
        self.folder: Path | None = None
        self._nodes = {root: self.top}  # of modules that may be called with weights
        self._paths: list[str] = []  # of tensors to fill, in the order of names
        # By tensor, the first name for each slot and its path; places of a tied tensor share them.
        self._claims: dict[torch.Tensor, dict[str, tuple[str, str]]] = {}
        self._tied: dict[tuple[str, str], str] = {}  # (another path, slot) -> name
        self._misfits: set[str] = set()
        # By module that overrides load_weights, full names by the names it was given.
        self._given: dict[nn.Module, dict[str, str]] = {}
        self._passed_on: dict[nn.Module, list[str]] = {}  # by such a module, full names
        self._renamed: dict[str, list[Renamed]] = {}  # by full name, what overrides made of it
        self._naming: dict[nn.Module, Callable[[str], str | None]] = {}
        self._zeros: list[tuple[str, Weight]] = []

    @staticmethod
    def current() -> Planner:
        """Return the plan that this thread is making."""
        planner = _current.get()
        assert planner is not None
        return planner

    @staticmethod
    def joined(module: nn.Module, weights: Weights) -> Planner | None:
        """Return the plan that this thread is making if ``module`` belongs to it."""
        planner = _current.get()
        if planner is None:
            return None
        if isinstance(weights, Group):
            planner._nodes[module] = weights.node
        elif module not in planner._nodes:  # an override calls its children, or one that it added
            for node in walk(planner.top):
                planner._nodes.setdefault(node.module, node)
        return planner if module in planner._nodes else None

    # What a call is given

    def pairs_of(self, group: Group) -> list[tuple[str, Weight]]:
        """Return pairs of name and tensor for an override; reports keep the full names."""
        given = self._given.setdefault(group.node.module, {})
        given.update((name, full_name) for name, _, full_name in group)
        return [(name, weight) for name, weight, _ in group]

    def full_name(self, module: nn.Module, name: str) -> str:
        """Return the checkpoint's full name of what ``module`` is given as ``name``."""
        return self._given.get(module, {}).get(name) or self._nodes[module].path + name

    def groups(self, module: nn.Module, weights: Weights) -> Iterator[Group]:
        """Yield ``weights`` as groups for ``module``: a collection whole, a stream pair by pair.

        A pair of a stream is in a group for the module below that its name leads to, so that no
        group is made for each module on the way.
        """
        node = self._nodes[module]
        assert not isinstance(weights, Group)
        pairs: Iterable[tuple[str, Weight]]
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        if isinstance(pairs, Collection):
            named = (pair for pair in pairs if self._is_named(node, pair))
            yield Group(node, [(n, weight, self._full_name(node, n)) for n, weight in named])
            return
        reached = {"": node}
        for pair in pairs:
            if not self._is_named(node, pair):
                continue
            name, weight = pair
            del pair  # or its tensor would be in memory while the source makes the next
            waiting = len(self.fills)
            holder, rest = _follow(reached, name)
            group = Group(holder, ((rest, weight, self._full_name(node, name)),))
            yield group
            # A handle can wait until everything is checked; a tensor holds memory.
            if self._arrived is not None and isinstance(weight, torch.Tensor):
                self._take(waiting, self._arrived)
            group.clear()
            del weight

    def _take(self, waiting: int, arrived: Arrived) -> None:
        """Have the fills after the first ``waiting`` read."""
        fills = self.fills[waiting:]
        del self.fills[waiting:]
        try:
            arrived(fills, self.fills)
        finally:  # an override may go on after an error
            for fill in fills:
                tensor, claims = fill.location.find(), fill.location.claims
                if tensor is not None and claims is not None:  # another one if it was materialized
                    self._claims[tensor] = claims

    def _is_named(self, node: Node, pair: Any) -> bool:
        """Tell whether ``pair`` has a name; report it if its name is no string.

        Raises ``WeightLoadError`` if it is no pair.
        """
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise WeightLoadError(
                f"{type(node.module).__name__} expected pairs of name and tensor, got "
                f"{_described(pair)}"
            )
        name, weight = pair
        if isinstance(name, str):
            if self.folder is None and not isinstance(weight, torch.Tensor):
                file = getattr(weight, "file", None)
                self.folder = file.parent if isinstance(file, Path) else None
            return True
        detail = f"a name is a string, and this is of type {type(name).__name__}"
        self.report.unexpected.append(Problem(node.path + shorten(name), detail))
        return False

    def _full_name(self, node: Node, name: str) -> str:
        if type(name) is Renamed:
            full_name = name.stored
            self._renamed.setdefault(full_name, []).append(name)
        elif node.overrides:
            full_name = self.full_name(node.module, name)
        else:
            return node.path + name
        self._passed_on.setdefault(node.module, []).append(full_name)
        return full_name

    @contextmanager
    def names_of(self, module: nn.Module) -> Iterator[set[str]]:
        """Yield a set that gets the names below ``module`` that the block fills."""
        first, names = len(self._paths), set[str]()
        yield names
        above = len(self._nodes[module].path)
        paths = self._paths[first:]
        names.update([path[above:] for path in paths] if above else paths)

    # What a name does

    def skip(self, name: str, reason: str) -> None:
        """Record that the checkpoint's tensor ``name`` is not loaded, and by which rule."""
        self.report.skipped[name] = reason

    def fill(self, name: str, weight: Weight, location: Location, slot: str | None = None) -> None:
        """Record that ``weight`` fills ``slot`` of the tensor at ``location``, or why it cannot.

        Without a ``slot`` it fills the whole tensor. ``name`` is the checkpoint's full name.
        """
        tensor = location.find()
        slots = () if tensor is None else slots_of(tensor)
        if tensor is None or (slot is not None and slot not in slots):
            self._refuse(name, weight, location, slot, tensor)
            return
        report, path, claims = self.report, location.path, location.claims
        if claims is None:
            claims = location.claims = self._claims.setdefault(tensor, {})
        tied_to = None
        claim = (name, path)
        for each in slots if slot is None else (slot,):
            earlier = claims.setdefault(each, claim)
            if earlier is claim:
                continue
            first, by = earlier
            # A tied tensor may be stored under each of its paths. A converted one cannot be
            # compared, so it may be stored once.
            twice = first if by == path else self._tied.get((path, each))
            if twice is not None or location.conversion is not None:
                other = twice or first
                by = "another tensor of this name" if other == name else shorten(other)
                detail = f"{path} is already filled by {by}"
                report.duplicated.append(Problem(name, detail))
                return
            self._tied[path, each] = name
            tied_to = first if first not in self._misfits else None
        if problem := fit.misfit(location, tensor, slot, weight, needs_data=self.reads):
            report.misshapen.append(self._problem(name, problem))
            self._misfits.add(name)
            return
        names = report.loaded.get(path)
        if names is None:
            report.loaded[path] = [name]
        else:
            names.append(name)
        self._paths.append(path)
        self.fills.append(Fill(name, slot, weight, location, tied_to))

    def _refuse(
        self,
        name: str,
        weight: Weight,
        location: Location,
        slot: str | None,
        tensor: torch.Tensor | None,
    ) -> None:
        """Report a name without a tensor or slot; skip it where zeros may be stored for it."""
        rule = fit.zero_rule(location) if tensor is None else None
        if rule is None:
            problem: str | None = fit.no_place(location, slot)
        elif self.reads:
            problem = fit.not_zeros(weight)
        else:
            problem = None
            self._zeros.append((name, weight))
        if problem is None:
            assert rule is not None
            self.skip(name, rule)
        else:
            self.report.unexpected.append(self._problem(name, problem))

    def _problem(self, name: str, detail: str) -> Problem:
        """Name what was renamed by both names."""
        renamed = ", ".join(map(printable_name, self._renamed.get(name, ())))
        return Problem(name, f"{detail} (renamed: {renamed})" if renamed else detail)

    # What is left

    def plan(self) -> LoadPlan:
        """Return the plan: what is missing is in its report, what fills the slots in its fills."""
        if not self.partial:
            self._add_missing()
        fills = in_reading_order(self.fills)
        return LoadPlan(self.root, self.report, fills, self.folder, self._zeros)

    def _add_missing(self) -> None:
        lacking = (t for module in modules_below(self.root) for _, t in stored_tensors(module))
        if not any(map(self._lacks, lacking)):
            return
        reported = set()
        for node in walk(self.top):
            for attr, tensor in node.tensors():
                if tensor in reported or not self._lacks(tensor):
                    continue
                reported.add(tensor)
                claims = self._claims.get(tensor, {})
                for slot in slots_of(tensor):
                    if slot not in claims:
                        self._fill_absent(node.location(attr), slot)

    def _fill_absent(self, location: Location, slot: str) -> None:
        """Fill a slot that the checkpoint lacks with the layer's own values, or report it."""
        weight = fit.absent_weight(location, slot)
        if weight is None:
            name, detail = fit.missing(location, slot)
            node: Node | None = location.node
            while node is not None:
                if node.overrides and name.startswith(node.path):
                    other = self._names_of(node)(name[len(node.path) :])
                    detail += f" (or {node.path}{other})" if other else ""
                node = node.parent
            self.report.missing.append(Problem(name, detail))
            return
        self.report.loaded.setdefault(location.path, [])
        self.fills.append(Fill(location.stored_name(slot), slot, weight, location))

    def _names_of(self, node: Node) -> Callable[[str], str | None]:
        """Return the :meth:`stored_names` function of the module at ``node``."""
        found = self._naming.get(node.module)
        if found is None:
            module: Any = node.module
            given, above = self._passed_on.get(module, ()), len(node.path)
            found = module.stored_names([name[above:] for name in given])
            self._naming[module] = found
        return found

    def _lacks(self, tensor: torch.Tensor) -> bool:
        """Tell whether no name fills some slot of ``tensor``."""
        claims = self._claims.get(tensor)
        return claims is None or len(claims) < len(slots_of(tensor))


@contextmanager
def planning(
    module: Any, weights: Weights, *, partial: bool = False, arrived: Arrived | None = None
) -> Iterator[Planner]:
    """Yield a planner that every ``load_weights`` below ``module`` adds to while the block runs."""
    if isinstance(weights, _NO_PAIRS) or not isinstance(weights, Iterable):
        raise TypeError(
            f"expected pairs of name and tensor, got {_described(weights)}: open a checkpoint "
            "with vllm_module.weights.open_checkpoint, let get_model do all of it, or pass a "
            "module's state_dict()"
        )
    with in_progress(module):
        planner = Planner(module, partial=partial, arrived=arrived)
        token = _current.set(planner)
        try:
            yield planner
        finally:
            _current.reset(token)
            planner.top.forget_below()


def _follow(reached: dict[str, Node], name: str) -> tuple[Node, str]:
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
        # Where a longer name is declared, what follows decides, too.
        by_child = by_child and not route.prefix and routes.get(rest[: -len(below)]) is route
        rest = route.prefix + below
        if node.overrides:
            break
        if by_child:
            reached[name[: -len(below)]] = node
    return node, rest


def _described(value: object) -> str:
    if isinstance(value, str | bytes | PathLike):
        return shorten(value)
    kind = type(value).__name__
    if not isinstance(value, tuple | list):
        return f"an object of type {kind}"
    return f"a {kind} of {len(value)} ({', '.join(type(each).__name__ for each in value[:4])})"
