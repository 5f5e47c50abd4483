"""From a plan to bytes: allocate, read, mark what is filled, process, and undo what broke.

Nothing here routes names. A reader gets the pieces of a plan in their order, one group of modules
after the other, each piece with what it is read into: another reader may fetch them from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from itertools import chain, groupby
from types import GeneratorType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from vllm_module.base.garbage import paused_gc
from vllm_module.base.messages import printable, printable_name
from vllm_module.core import changes
from vllm_module.core.allocation import Allocation
from vllm_module.core.fill import Fill, Slots, refuse_elements, refuse_nan, refuse_nan_read
from vllm_module.core.fit import misfit, not_zeros
from vllm_module.core.given import Group, Weights
from vllm_module.core.plan import LoadPlan
from vllm_module.core.planner import Planner, planning
from vllm_module.core.report import Problem, fold, outcome
from vllm_module.core.state import (
    allow_to_run,
    guard,
    in_progress,
    is_complete,
    refuse_to_run,
    unguard,
)
from vllm_module.core.tree import LoadState, Location, Node, Tree, own_slots, state_of
from vllm_module.errors import WeightLoadError, WeightReadError
from vllm_module.weights import Destination, Handle, Readers, TensorHandle, read_into
from vllm_module.weights.changes import Changes

_MOST_NAMED = 8  # tensors that the message of an error says were overwritten, numbers folded


class Reader(Protocol):
    """Fills destinations with what handles stand for."""

    def read(self, jobs: Iterable[tuple[Handle, Destination]]) -> None:
        """Fill each destination as ``read_into(handle, destination)`` does; return when all are.

        ``jobs`` is a generator that allocates each destination when it is asked for it, and copies
        tensors in memory on the way.
        """

    def stages(self, weight: torch.Tensor, destination: Destination) -> bool:
        """Tell whether a tensor in memory is to be among the jobs, as a ``TensorHandle``."""


OpenReader: TypeAlias = Callable[[LoadPlan], AbstractContextManager[Reader]]


class _Target(NamedTuple):
    """A tensor that a run fills.

    Attributes:
        held: whether it had memory when the run began.
        loaded: the slots that hold values, as each module that holds the tensor remembers them.
        alone: of these modules those that process their weights as soon as they have them, each
            with the tensor's name there.

    """

    held: bool
    loaded: list[set[str]]
    alone: list[tuple[Node, str]]


class Run:
    """The reading of one plan: the work of a load or update on the modules below ``root``.

    Args:
        root: the module that is loaded or updated.
        partial: whether the run may fill some slots and leave others, in memory that stays.

    Attributes:
        tree: the root and all below it.
        written: whether anything was written to the model.
        overwritten: what had memory before.
        failure: what broke it.

    """

    def __init__(self, root: nn.Module, *, partial: bool = False) -> None:
        self.root, self.partial = root, partial
        self.tree = Tree(root)
        self.written = False
        self.overwritten: dict[Location, None] = {}
        self.failure: BaseException | None = None
        self._refuses_nan = not getattr(root, "allow_nan", False)
        self._sources: dict[str, Any] = {}  # digests
        self._written: Slots = {}
        self._filled_by: dict[str, Slots] = {}  # by the name of a digest
        self._jobs_of: Callable[[Fill], Any] = Fill.jobs
        if getattr(root, "keep_digests", False):
            from vllm_module.core.digests import digested  # needs kernels, which a load does not

            self._jobs_of = digested(self._sources, self._filled_by)
        self._reader: Reader | None = None
        self._opened = ExitStack()  # the reader, until the run ends
        self._allocation = Allocation(self.tree, partial=partial)
        self._targets: dict[Location, _Target] = {}
        self._filled: dict[Node, None] = {}  # owners of tensors that this run fills
        self._unfilled: dict[nn.Module, dict[str, set[str]]] = {}  # of owners that wait to process
        self._processed: set[nn.Module] = set()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)
        self.failure = None  # its frames have this run, and the cycle would keep the model alive

    def execute(self, plan: LoadPlan, open_reader: OpenReader | None = None) -> None:
        """Refuse the plan, or read what it fills and process what was not processed on the way."""
        name = type(self.root).__name__
        plan.report.raise_if_refused(name, touched=self.written, folder=plan.folder)
        if self.failure is not None:
            raise self.failure
        if open_reader is not None:
            self._reader = self._opened.enter_context(open_reader(plan))
        self.fill(plan.fills)
        self._process_rest()
        state, kept = state_of(self.root), self._jobs_of is not Fill.jobs
        state.report = plan.report
        if kept:
            self._keep_digests(state)
        else:
            state.sources, state.source_slots = {}, {}
        if not self.partial:
            allow_to_run(self.tree.modules)

    def fill(self, fills: Sequence[Fill], waiting: Sequence[Fill] = ()) -> None:
        """Read ``fills``, which are in reading order, while others are still ``waiting``."""
        try:
            fills = _compared(fills, waiting)
            if self._refuses_nan:
                refuse_nan(fills, stored=self.partial)
            if fills and not self.written:
                guard(self.root)  # no forward pass meanwhile
                self.written = True
            for _, group in groupby(fills, _together) if len(fills) > 1 else ((None, fills),):
                together = [*group]
                jobs = self._jobs(together)
                for first in jobs:  # tensors in memory are copied on the way to it
                    self._opened_reader().read(chain((first,), jobs))
                self._process_filled(together)
        except BaseException as error:
            self.failure = error  # an override that catches it does not make the load whole
            self._reader = None  # which reads no more
            raise

    def _keep_digests(self, state: LoadState) -> None:
        """Keep the digests of earlier runs, but those of slots that this one has written."""
        tensors = (*self.root.named_parameters(), *self.root.named_buffers())
        paths = {id(tensor): path for path, tensor in tensors}  # of a tied one, the first

        def slots_in(slots: Slots) -> set[tuple[str, str]]:
            return {(paths[id(each.tensor)], slot) for each, of in slots.items() for slot in of}

        written, before = slots_in(self._written), state.source_slots.items()
        state.source_slots = {name: of for name, of in before if written.isdisjoint(of)}
        held = {name: each for name, each in state.sources.items() if name in state.source_slots}
        state.sources = held | self._sources
        state.source_slots |= {name: slots_in(of) for name, of in self._filled_by.items()}

    def undo(self) -> None:
        """Put what was allocated back on the meta device."""
        self._allocation.undo()

    # Bytes

    def _opened_reader(self) -> Reader:
        if self._reader is None:
            self._reader = self._opened.enter_context(Readers(state_of(self.root).device))
        return self._reader

    def _jobs(self, fills: Sequence[Fill]) -> Iterator[tuple[Handle, Destination]]:
        """Allocate what is filled; copy tensors in memory, and yield the jobs of a reader."""
        reader = self._opened_reader()
        for fill in fills:
            location = fill.location
            target = self._targets.get(location)
            if target is None:
                target = self._targets[location] = self._target(location)
            if fill.tied_to is not None:
                continue
            if target.held:
                self.overwritten[location] = None
            self._written.setdefault(location, set()).update(fill.slots)
            if isinstance(fill.weight, Changes):
                changes.write(location.tensor, fill.slot, fill.weight)
                continue
            for weight, destination in self._jobs_of(fill):
                if not isinstance(weight, torch.Tensor):
                    yield weight, destination
                elif reader.stages(weight, destination):
                    yield TensorHandle(fill.name, weight), destination
                else:
                    try:
                        read_into(weight, destination)
                    except WeightReadError as error:  # for handles, the reader adds the name
                        raise WeightReadError(f"{fill.name}: {error}") from None

    def _target(self, location: Location) -> _Target:
        """Allocate the tensor at ``location`` if it is on meta, and find all who hold it."""
        held = self._allocation.materialize(location)
        state, local, holders = location.node.state, location.local, [location]
        # An update comes in many parts, and must not look for ties in the whole tree each time.
        loaded = state.loaded.get(local, set())
        if not self.partial or local in state.tied or not loaded.issuperset(location.slots):
            holders = self._allocation.holders_of(location)
        target = _Target(held, [], [])
        for holder in holders:
            owner, local = holder.node.owner, holder.local
            state = state_of(owner.module)
            if len(holders) > 1:
                state.tied.add(local)
            target.loaded.append(state.loaded.setdefault(local, set()))
            self._filled[owner] = None
            if owner.processes_alone:
                target.alone.append((owner, local))
        return target

    # Processing

    def _process_filled(self, fills: Sequence[Fill]) -> None:
        """Note that slots hold values, and process the modules that now have all of theirs."""
        complete: dict[nn.Module, Node] = {}
        for fill in fills:
            target, slots = self._targets[fill.location], fill.slots
            for loaded in target.loaded:
                loaded.update(slots)
            for owner, local in target.alone:
                unfilled = self._unfilled.get(owner.module)
                if unfilled is None:
                    unfilled = self._unfilled[owner.module] = own_slots(owner.module)
                if local in unfilled:
                    unfilled[local].difference_update(slots)
                if not any(unfilled.values()):
                    del self._unfilled[owner.module]
                    complete[owner.module] = owner
        for module, node in complete.items():
            if is_complete(module):
                self._process(node)
        # After processing, whose refusals say more of the scales of quantized weights.
        if self._refuses_nan:
            refuse_nan_read(fills)

    def _process_rest(self) -> None:
        """Process, inner modules first, what this run has changed and not processed yet."""
        nodes: Iterable[Node] = ()
        if self.partial:
            nodes = self._above_filled()
        elif any(map(_processes, self.tree.modules)):
            nodes = self.tree.nodes
        waiting = [
            node for node in nodes if _processes(node.module) and node.module not in self._processed
        ]
        for node in sorted(waiting, key=lambda node: -node.path.count(".")):
            if is_complete(node.module):  # else it waits for the load that brings the rest
                self._process(node)

    def _above_filled(self) -> Iterable[Node]:
        """Return the modules of the tensors that were read, and those above them."""
        nodes: dict[nn.Module, Node] = {}
        for filled in self._filled:
            node: Node | None = filled
            while node is not None:
                nodes[node.module] = node
                node = node.parent
        return nodes.values()

    def _process(self, node: Node) -> None:
        module: Any = node.module
        self._processed.add(module)
        try:
            for step in module.processing():
                step()
        except WeightLoadError as error:
            error.args = (f"{node.path}{error}",)
            raise


@contextmanager
def loading(
    module: Any,
    weights: Weights,
    *,
    partial: bool = False,
    open_reader: OpenReader | None = None,
) -> Iterator[Planner]:
    """Yield the planner that ``load_weights`` of ``module`` and below adds to, then run its plan.

    That is the planner of the load in progress, if ``module`` belongs to it: the outermost call
    runs the plan. Tensors of a stream are read as they arrive.

    Raises ``WeightLoadError`` with everything that is missing, unexpected, duplicated or misshapen,
    and what reading or processing raises. If anything was written by then, the model refuses to
    run.
    """
    planner = None if partial else Planner.joined(module, weights)
    if planner is not None:
        yield planner
        return
    run = Run(module, partial=partial)
    with planning(run.tree, weights, run.fill) as planner, _undone_if_broken(run, planner):
        with paused_gc(isinstance(weights, Collection)):
            yield planner
        plan = planner.plan(partial=partial)
        if not partial:
            refuse_elements(plan.fills)
        run.execute(plan, open_reader)


def within_load(override: Any) -> Any:
    """Wrap an overridden ``load_weights``: it adds to a plan, and returns the names it filled."""

    @wraps(override)
    def load_weights(module: Any, weights: Weights) -> set[str]:
        with loading(module, weights) as planner, planner.names_of(module) as names:
            # Overrides get plain pairs: only the base class may see a Group.
            pairs = planner.names.give(weights) if isinstance(weights, Group) else weights
            pairs = pairs.items() if isinstance(pairs, Mapping) else pairs
            if isinstance(override(module, pairs), GeneratorType):
                raise TypeError(f"{type(module).__name__}.load_weights must not be a generator")
        return names

    return load_weights


def execute(plan: LoadPlan, open_reader: OpenReader | None = None) -> None:
    """Do what ``plan`` says: refuse it, or read its fills into the module that it is for.

    Raises as :func:`loading` does.
    """
    run = Run(plan.module)
    _check_values(plan)
    try:
        with in_progress(plan.module), _undone_if_broken(run, plan):
            run.execute(plan, open_reader)
    finally:
        run.tree.top.forget_below()


def _check_values(plan: LoadPlan) -> None:
    """Report what a plan does not look at: tensors without data, and zeros that are none."""
    report = plan.report
    for name, slot, weight, location, _, held in plan.fills:
        if isinstance(weight, torch.Tensor) and not held:
            problem = misfit(location, location.tensor, slot, weight, needs_data=True)
            report.misshapen += [Problem(name, problem)] if problem else []
    for name, weight in plan.zeros:
        problem = not_zeros(weight)
        report.unexpected += [Problem(name, problem)] if problem else []


@contextmanager
def _undone_if_broken(run: Run, made: Planner | LoadPlan) -> Iterator[None]:
    """Undo what the block has done if it raises, and let no half-written model run."""
    was_ready = state_of(run.root).guard is None
    try:
        with run, torch.no_grad():  # the run's reader releases its memory before the tensors' is
            yield
        if run.partial and was_ready:
            unguard(run.root)
    except BaseException as error:
        run.undo()
        overwritten = fold(location.path for location in run.overwritten)
        named = ", ".join(map(printable_name, overwritten[:_MOST_NAMED]))
        if len(overwritten) > _MOST_NAMED:
            named += f" and {len(overwritten) - _MOST_NAMED} more"
        if isinstance(error, WeightLoadError):
            error.args = (_with_outcome(error, run, made, named),)
        if run.written:
            refuse_to_run(run.root, error, named)
        raise


def _with_outcome(error: WeightLoadError, run: Run, made: Planner | LoadPlan, named: str) -> str:
    """Return the error's message, and after it what was written to the model."""
    lines = [str(error)]
    if made.folder is not None and str(made.folder) not in lines[0]:
        lines.append(f"The checkpoint is in {printable(made.folder)}.")
    if named:
        lines.append(f"Overwritten before, at least in part: {named}.")
    elif run.written:
        lines.append(
            "Nothing that the model held before was overwritten; it refuses to run until a "
            "load succeeds."
        )
        return "\n".join(lines)
    if error.report is None:  # else the message ends with it
        lines.append(outcome(touched=run.written))
    return "\n".join(lines)


def _compared(fills: Sequence[Fill], waiting: Sequence[Fill]) -> Sequence[Fill]:
    """Compare tied tensors that have two names, and return what is to be read of ``fills``.

    A handle that waits will be read for the tensor that is tied to it.
    """
    tied = [fill for fill in fills if fill.tied_to is not None]
    if not tied:
        return fills
    for fill in tied:
        fill.check_tied((*waiting, *fills))
    names = {fill.name for fill in waiting}
    return [fill for fill in fills if fill.tied_to not in names]


def _together(fill: Fill) -> nn.Module | None:
    """Return the module that processes what ``fill`` fills as soon as it has all of its weights."""
    owner = fill.location.node.owner
    return owner.module if owner.processes_alone else None


def _processes(module: Any) -> bool:
    return "load_state" in module.__dict__ and bool(module.processing())
