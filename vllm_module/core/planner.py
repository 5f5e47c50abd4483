"""From names to a plan: which checkpoint tensor fills which slot, and what is wrong with the rest.

The outermost call of ``load_weights`` opens a planner, and every call below it adds to it what
``vLLMModule._route`` says of its names. Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from vllm_module.base.messages import shorten
from vllm_module.core import fit
from vllm_module.core.fill import Fill
from vllm_module.core.given import GivenNames, Group, Weights, described, follow, refuse_no_pairs
from vllm_module.core.plan import LoadPlan, in_reading_order
from vllm_module.core.report import LoadReport, Problem
from vllm_module.core.state import in_progress
from vllm_module.core.tensors import slots_of
from vllm_module.core.tree import Location, Node, Tree, stored_tensors
from vllm_module.errors import WeightLoadError
from vllm_module.weights import Weight
from vllm_module.weights.changes import Changes

# Takes what a stream has brought, before the next is asked for, and what still waits to be read.
Arrived: TypeAlias = Callable[[Sequence[Fill], Sequence[Fill]], None]

# The plan that this thread is making. A context variable, because an overridden load_weights may
# pass a plain generator to super(): nothing that travels with the weights would survive that.
_current: ContextVar[Planner | None] = ContextVar("planner", default=None)


class Planner:
    """Collects what each name of a checkpoint fills, and the problems, for one plan.

    Args:
        tree: the module that is loaded, updated or planned, and all below it.
        arrived: takes each tensor of a stream at once, because it holds memory. Without it, the
            plan is all that is wanted: tensors need no data, and nothing is read.

    Attributes:
        tree: the same.
        report: the report, which gets every name.
        fills: the fills that are not read yet, in the order of names.
        names: the names that overrides are given and pass on.
        folder: the folder of the first handle that has a file.

    """

    def __init__(self, tree: Tree, arrived: Arrived | None = None) -> None:
        self.tree = tree
        self.report = LoadReport()
        self.fills: list[Fill] = []
        self.names = GivenNames()
        self.folder: Path | None = None
        self._arrived = arrived
        self._nodes = {tree.top.module: tree.top}  # of modules that may be called with weights
        self._paths: list[str] = []  # of tensors to fill, in the order of names
        # By tensor and slot, the names that fill it, each with the path that it leads to. A tied
        # tensor has several: the first is read, and the others are compared with it.
        self._claims: dict[torch.Tensor, dict[str, list[tuple[str, str]]]] = {}
        self._partial_tensors: set[torch.Tensor] = set()  # of which some elements are sent
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
            planner.tree.list_again()
            for node in planner.tree.nodes:
                planner._nodes.setdefault(node.module, node)
        return planner if module in planner._nodes else None

    # What a call is given

    def groups(self, module: nn.Module, weights: Weights) -> Iterator[Group]:
        """Yield ``weights`` as groups for ``module``: a collection whole, a stream pair by pair.

        A pair of a stream is in a group for the module below that its name leads to, so that no
        group is made for each module on the way.
        """
        node = self._nodes[module]
        assert not isinstance(weights, Group)
        pairs: Iterable[tuple[str, Weight]]
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        full_name = self.names.passed_on
        if isinstance(pairs, Collection):
            named = (pair for pair in pairs if self._is_named(node, pair))
            yield Group(node, [(n, weight, full_name(node, n)) for n, weight in named])
            return
        reached = {"": node}
        for pair in pairs:
            if not self._is_named(node, pair):
                continue
            name, weight = pair
            del pair  # or its tensor would be in memory while the source makes the next
            waiting = len(self.fills)
            holder, rest = follow(reached, name)
            group = Group(holder, ((rest, weight, full_name(node, name)),))
            yield group
            # A handle can wait until everything is checked; a tensor holds memory.
            if self._arrived is not None and isinstance(weight, torch.Tensor):
                self._take(waiting, self._arrived)
            group.clear()
            del weight

    def _is_named(self, node: Node, pair: Any) -> bool:
        """Tell whether ``pair`` has a name; report it if its name is no string.

        Raises ``WeightLoadError`` if it is no pair.
        """
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise WeightLoadError(
                f"{type(node.module).__name__} expected pairs of name and tensor, got "
                f"{described(pair)}"
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

    def full_name(self, module: nn.Module, name: str) -> str:
        """Return the checkpoint's full name of what ``module`` is given as ``name``."""
        return self.names.full_name(self._nodes[module], name)

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
        report, tensor = self.report, location.find()
        slots = () if tensor is None else slots_of(tensor)
        if tensor is None or (slot is not None and slot not in slots):
            self._refuse(name, weight, location, slot, tensor)
            return
        path, claims, tied_to = location.path, location.claims, None
        if claims is None:
            claims = location.claims = self._claims.setdefault(tensor, {})
        for each in slots if slot is None else (slot,):
            claimed = claims.get(each)
            if claimed is None:
                claims[each] = [(name, path)]
                continue
            first, _ = claimed[0]
            by_path = [other for other, led_to in claimed if led_to == path]
            # A tied tensor may be stored under each of its paths. Some elements cannot be compared.
            if by_path or isinstance(weight, Changes) or tensor in self._partial_tensors:
                other = by_path[0] if by_path else first
                by = "another tensor of this name" if other == name else shorten(other)
                problem = Problem(name, f"{path} is already filled by {by}")
                report.duplicated.append(problem)
                return
            claimed.append((name, path))
            misshapen = any(problem.name == first for problem in report.misshapen)
            tied_to = None if misshapen else first
        reads = self._arrived is not None
        if detail := fit.misfit(location, tensor, slot, weight, needs_data=reads):
            report.misshapen.append(self.names.problem(name, detail))
            return
        names = report.loaded.get(path)
        if names is None:
            report.loaded[path] = [name]
        else:
            names.append(name)
        if isinstance(weight, Changes):
            self._partial_tensors.add(tensor)
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
        detail = None
        if rule is None:
            detail = fit.no_place(location, slot)
        elif self._arrived is not None:
            detail = fit.not_zeros(weight)
        else:
            self._zeros.append((name, weight))
        if detail is not None:
            self.report.unexpected.append(self.names.problem(name, detail))
        elif rule is not None:
            self.skip(name, rule)

    # What is left

    def plan(self, *, partial: bool = False) -> LoadPlan:
        """Return the plan of what was added.

        Its report names what is missing, unless the weights may be a ``partial`` checkpoint.
        """
        self.tree.list_again()  # an override may have added modules
        if not partial:
            self._add_missing()
        fills = in_reading_order(self.fills)
        return LoadPlan(self.tree.top.module, self.report, fills, self.folder, self._zeros)

    def _add_missing(self) -> None:
        """Fill what no name fills with the layers' own values, or report it."""
        modules = self.tree.modules
        if not any(self._lacks(each) for module in modules for _, each in stored_tensors(module)):
            return
        reported = set()
        for node in self.tree.nodes:
            for attr, tensor in stored_tensors(node.module):
                if tensor in reported or not self._lacks(tensor):
                    continue
                reported.add(tensor)
                claims, location = self._claims.get(tensor, {}), node.location(attr)
                for slot in slots_of(tensor):
                    if slot in claims:
                        continue
                    weight = fit.absent_weight(location, slot)
                    if weight is None:
                        missing = self.names.missing(node, *fit.missing(location, slot))
                        self.report.missing.append(missing)
                        continue
                    self.report.loaded.setdefault(location.path, [])
                    self.fills.append(Fill(location.stored_name(slot), slot, weight, location))

    def _lacks(self, tensor: torch.Tensor) -> bool:
        """Tell whether no name fills some slot of ``tensor``."""
        claims = self._claims.get(tensor)
        return claims is None or len(claims) < len(slots_of(tensor))


@contextmanager
def planning(
    tree: Tree,
    weights: Weights,
    arrived: Arrived | None = None,
    planner: Planner | None = None,
) -> Iterator[Planner]:
    """Yield a planner that every ``load_weights`` of ``tree`` adds to while the block runs."""
    refuse_no_pairs(weights)
    with in_progress(tree.top.module):
        planner = planner or Planner(tree, arrived)
        token = _current.set(planner)
        try:
            yield planner
        finally:
            _current.reset(token)
            tree.top.forget_below()
