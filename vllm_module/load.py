"""One load, from names to bytes to processing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, Union

import torch
from torch import nn

from vllm_module.allocation import Allocation
from vllm_module.assignment import (
    Assignment,
    Fills,
    HeldAssignment,
    Target,
    absent_weight,
    in_reading_order,
    misfit,
    missing,
    not_zeros,
    refuse_nan,
    refuse_nan_read,
    zero_rule,
)
from vllm_module.errors import WeightLoadError, WeightReadError
from vllm_module.garbage import paused_gc
from vllm_module.messages import printable, printable_name, shorten
from vllm_module.readiness import allow_to_run, guard, is_complete, refuse_to_run, unguard
from vllm_module.report import LoadReport, Problem, fold, outcome
from vllm_module.routes import no_place
from vllm_module.tree import (
    Location,
    Node,
    held_locations,
    loads_itself,
    modules_below,
    own_slots,
    slots_of,
    state_of,
    stored_tensors,
    walk,
)
from vllm_module.weights import Destination, Readers, TensorHandle, Weight, read_into

# What a user gives, or what a module hands to a module below it.
Weights: TypeAlias = Union[Mapping[str, Weight], Iterable[tuple[str, Weight]], "Group"]
Mode = Literal["load", "update", "plan"]

_NO_PAIRS = (str, bytes, PathLike, torch.Tensor, nn.Module)
_MOST_NAMED = 8  # tensors that the message of an error says were overwritten, numbers folded

# The load that this thread is doing. A context variable, because an overridden load_weights may
# pass a plain generator to super(): nothing that travels with the weights would survive that.
_current: ContextVar[Load | None] = ContextVar("load", default=None)


class Group(list[tuple[str, Weight, str]]):
    """Weights that the module above hands to the module at ``node``.

    Each has its name relative to the module, the tensor or handle, and the checkpoint's full name.
    """

    __slots__ = ("node",)

    def __init__(self, node: Node, weights: Iterable[tuple[str, Weight, str]] = ()) -> None:
        if weights:
            self.extend(weights)
        self.node = node


class Load:
    """What the outermost call opens, and every call below it adds to.

    First names: :meth:`assign` records which checkpoint tensor fills which slot, or why it cannot.
    Then bytes: :meth:`read` materializes parameters and fills them. Then processing, module by
    module. Tensors from a stream are read as they arrive; handles and collections are read once
    all names are checked.

    Attributes:
        mode: ``"load"`` takes a whole checkpoint, ``"update"`` a part; ``"plan"`` reads nothing.
        report: what happened to every name.
        assigned: what is routed and not read yet.
        written: whether anything was written to the model.

    """

    def __init__(self, root: nn.Module, mode: Mode) -> None:
        self.root, self.mode = root, mode
        self.report = LoadReport()
        self.assigned: list[Assignment] = []
        self.written = False
        self._top = Node(root)
        self._nodes = {root: self._top}  # of modules that were called with weights
        # By module that overrides load_weights, full names by the names it was given.
        self._given: dict[nn.Module, dict[str, str]] = {}
        self._other_names: dict[str, Callable[[str], str | None]] = {}  # by paths, with a dot
        self._renamed: dict[nn.Module, dict[str, str]] = {}  # by the names that it passes on
        self._tree: list[Node] | None = None  # of every module, once it was walked
        self._below: list[nn.Module] | None = None  # the root and every module below
        self._paths: list[str] = []  # of tensors, in the order in which names were assigned
        # By tensor, as it was when the load began, the first name for each slot and its path.
        self._claims: dict[torch.Tensor, dict[str, tuple[str, str]]] = {}
        self._tied_claims: dict[tuple[str, str], str] = {}  # (another path, slot) -> name
        self._misfits: set[str] = set()
        self._allocation = Allocation(partial=mode == "update")
        self._folder: Path | None = None  # of the first handle that says
        self._opened = ExitStack()  # the readers, until the load ends
        self._readers: Readers | None = None
        self._overwritten: list[Location] = []  # what had memory when the load began
        self._failure: BaseException | None = None
        self._filled: dict[Node, None] = {}  # owners of tensors that were read
        self._unfilled: dict[nn.Module, dict[str, set[str]]] = {}  # of owners that wait to process
        self._processed: set[nn.Module] = set()

    # Opening and joining

    @classmethod
    @contextmanager
    def of(cls, module: Any, weights: Weights, mode: Mode = "load") -> Iterator[Load]:
        """Yield the load in progress if ``module`` belongs to it; else open one and finish it.

        Raises as :meth:`finish` does. If anything was written by then, the model refuses to run.
        """
        load = _current.get()
        if mode == "load" and load is not None and load._takes_part(module, weights):
            yield load
            return
        name, state = type(module).__name__, state_of(module)
        if isinstance(weights, _NO_PAIRS) or not isinstance(weights, Iterable):
            raise TypeError(
                f"expected pairs of name and tensor, got {_described(weights)}: open a checkpoint "
                "with vllm_module.weights.open_checkpoint, let get_model do all of it, or pass a "
                "module's state_dict()"
            )
        if state.in_progress:
            raise RuntimeError(f"this {name} is already being loaded")
        load = cls(module, mode)
        was_ready = state.guard is None
        token = _current.set(load)
        state.in_progress = True
        try:
            with load._opened:  # whose memory is released before the load's is
                with paused_gc() if isinstance(weights, Collection) else nullcontext():
                    yield load
                load.finish()
            if mode == "update" and was_ready:
                unguard(module)
        except BaseException as error:
            load._allocation.undo()
            if isinstance(error, WeightLoadError) and mode != "plan":
                error.args = (load._with_outcome(error),)
            if load.written:
                refuse_to_run(module, error, load._overwritten_names())
            raise
        finally:
            state.in_progress = False
            _current.reset(token)
            load._top.forget_below()

    @staticmethod
    def current() -> Load:
        """Return the load that this thread is doing."""
        load = _current.get()
        assert load is not None
        return load

    def _takes_part(self, module: nn.Module, weights: Weights) -> bool:
        if isinstance(weights, Group):
            self._nodes[module] = weights.node
        elif module not in self._nodes:  # an override calls its children, or one that it has added
            self._tree = self._below = None
            for node in self._walk():
                self._nodes.setdefault(node.module, node)
        return module in self._nodes

    def pairs_of(self, group: Group) -> list[tuple[str, Weight]]:
        """Return pairs of name and tensor for an override; reports keep the full names."""
        given = self._given.setdefault(group.node.module, {})
        given.update((name, full_name) for name, _, full_name in group)
        return [(name, weight) for name, weight, _ in group]

    def full_name(self, module: nn.Module, name: str) -> str:
        """Return the checkpoint's full name of what an override of ``module`` was given."""
        return self._given.get(module, {}).get(name) or self._nodes[module].path + name

    def renamed_by(self, module: nn.Module) -> dict[str, str]:
        """Return full names by those that an override of ``module`` passes on.

        An override that renames adds to them, so that reports have the names of the checkpoint.
        """
        return self._renamed.setdefault(module, {})

    def report_missing_as(self, module: nn.Module, other_name: Callable[[str], str | None]) -> None:
        """Name what is missing below ``module`` as ``other_name`` does, too, for reports.

        It gets a name relative to the module, and returns another one of a checkpoint, if any.
        """
        self._other_names[self._nodes[module].path] = other_name

    def groups(self, module: nn.Module, weights: Weights) -> Iterator[Group]:
        """Yield ``weights`` as groups for ``module``: a collection whole, a stream pair by pair."""
        node = self._nodes[module]
        given = self._renamed.get(module, self._given.get(module, {}))
        assert not isinstance(weights, Group)
        pairs: Iterable[tuple[str, Weight]]
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        if isinstance(pairs, Collection):
            named = (pair for pair in pairs if self._is_named(node, pair))
            if not (node.path or given):
                yield Group(node, [(name, weight, name) for name, weight in named])
                return
            yield Group(node, [(n, w, given.get(n) or node.path + n) for n, w in named])
            return
        for pair in pairs:
            if not self._is_named(node, pair):
                continue
            waiting = len(self.assigned)
            name, weight = pair
            group = Group(node, ((name, weight, given.get(name) or node.path + name),))
            del pair  # or its tensor would be in memory while the source makes the next
            yield group
            # A handle can wait until everything is checked; a tensor holds memory.
            if isinstance(weight, torch.Tensor) and self.mode != "plan":
                self.read(waiting)
            group.clear()
            del weight

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
            if self._folder is None and not isinstance(weight, torch.Tensor):
                file = getattr(weight, "file", None)
                self._folder = file.parent if isinstance(file, Path) else None
            return True
        detail = f"a name is a string, and this is of type {type(name).__name__}"
        self.report.unexpected.append(Problem(node.path + shorten(name), detail))
        return False

    @contextmanager
    def names_of(self, module: nn.Module) -> Iterator[set[str]]:
        """Yield a set that gets the names below ``module`` that the block fills."""
        first, names = len(self._paths), set[str]()
        yield names
        above = len(self._nodes[module].path)
        paths = self._paths[first:]
        names.update([path[above:] for path in paths] if above else paths)

    # Names

    def target(self, location: Location) -> Target:
        """Look up what all names of the tensor at ``location`` share, until it is materialized."""
        tensor = location.find()
        if tensor is None:
            return Target(location, None, location.path, (), {})
        claims = self._claims.setdefault(self._allocation.original(tensor), {})
        return Target(location, tensor, location.path, slots_of(tensor), claims)

    def assign(self, name: str, weight: Weight, target: Target, slot: str | None = None) -> None:
        """Record that ``weight`` fills ``slot`` of ``target``, or why it cannot.

        Without a ``slot`` it fills the whole tensor. ``name`` is the checkpoint's full name.
        """
        report, location, tensor = self.report, target.location, target.tensor
        if tensor is None and (rule := zero_rule(location)) is not None:
            problem = None if self.mode == "plan" else not_zeros(weight)
            if problem is None:
                self.skip(name, rule)
            else:
                report.unexpected.append(Problem(name, problem))
            return
        if tensor is None or (slot is not None and slot not in target.slots):
            report.unexpected.append(Problem(name, no_place(location, slot)))
            return
        path, claims = target.path, target.claims
        tied_to = None
        claim = (name, path)
        for each in target.slots if slot is None else (slot,):
            earlier = claims.setdefault(each, claim)
            if earlier is claim:
                continue
            first, by = earlier
            # A tied tensor may be stored under each of its paths. A converted one cannot be
            # compared, so it may be stored once.
            twice = first if by == path else self._tied_claims.get((path, each))
            if twice is not None or location.conversion is not None:
                other = twice or first
                by = "another tensor of this name" if other == name else shorten(other)
                detail = f"{path} is already filled by {by}"
                report.duplicated.append(Problem(name, detail))
                return
            self._tied_claims[path, each] = name
            tied_to = first if first not in self._misfits else None
        planning = self.mode == "plan"
        if problem := misfit(location, tensor, slot, weight, needs_data=not planning):
            report.misshapen.append(Problem(name, problem))
            self._misfits.add(name)
            return
        report.loaded.setdefault(path, []).append(name)
        self._paths.append(path)
        self.assigned.append(Assignment(name, slot, weight, location, tied_to))

    def assign_held(self, held: Mapping[str, Weight]) -> None:
        """Record that each tensor fills a parameter as this rank holds it: whole, by its path.

        What a conversion makes is filled too. ``held`` has a tied tensor under its first path.
        """
        left = dict(held)
        for location in held_locations(self._top):
            target = self.target(location)
            path, slots = target.path, target.slots
            target.claims.update(dict.fromkeys(slots, (path, path)))
            weight = left.pop(path, None)
            if weight is None:
                detail = f"expected shape {list(location.tensor.shape)}, as this rank holds it"
                self.report.missing.append(Problem(path, detail))
                continue
            assigned = HeldAssignment(path, None, weight, location, None)
            if problem := assigned.misfit():
                self.report.misshapen.append(Problem(path, problem))
                continue
            self.report.loaded[path] = [path]
            self._paths.append(path)
            self.assigned.append(assigned)
        detail = f"{type(self.root).__name__} has no parameter or buffer of this path"
        self.report.unexpected += [Problem(name, detail) for name in left]

    def skip(self, name: str, reason: str) -> None:
        """Record that the checkpoint's tensor ``name`` is not loaded, and by which rule."""
        self.report.skipped[name] = reason

    def _report_missing(self) -> None:
        self._tree = self._below = None  # an override may have added modules
        tensors = (each for module in self._modules() for each in stored_tensors(module))
        if not any(self._lacks(tensor) for _, tensor in tensors):
            return
        reported = set()
        for node in self._walk():
            for attr, tensor in node.tensors():
                original = self._allocation.original(tensor)
                if self._lacks(tensor) and original not in reported:
                    reported.add(original)
                    claims, location = self._claims.get(original, {}), Location(node, attr)
                    for slot in slots_of(tensor):
                        if slot not in claims:
                            self._fill_absent(location, slot)

    def _fill_absent(self, location: Location, slot: str) -> None:
        """Assign what the layer has for a slot that a checkpoint may lack, or report it."""
        weight = absent_weight(location, slot)
        if weight is None:
            name, detail = missing(location, slot)
            for beginning, other_name in self._other_names.items():
                other = name.startswith(beginning) and other_name(name[len(beginning) :])
                detail += f" (or {beginning}{other})" if other else ""
            self.report.missing.append(Problem(name, detail))
            return
        self.report.loaded.setdefault(location.path, [])
        name = location.stored_name(slot)
        self.assigned.append(Assignment(name, slot, weight, location, None))

    def _lacks(self, tensor: torch.Tensor) -> bool:
        """Tell whether no name was assigned to some slot of ``tensor``."""
        claims = self._claims.get(self._allocation.original(tensor))
        return claims is None or len(claims) < len(slots_of(tensor))

    def _modules(self) -> list[nn.Module]:
        if self._below is None:
            self._below = modules_below(self.root)
        return self._below

    def _walk(self) -> list[Node]:
        if self._tree is None:
            self._tree = list(walk(self._top))
        return self._tree

    # Bytes

    def read(self, since: int = 0) -> None:
        """Fill the slots that were assigned after the first ``since``, module by module."""
        assigned = self.assigned[since:]
        del self.assigned[since:]
        if not assigned:
            return
        try:
            for each in assigned if self._tied_claims else ():
                if each.tied_to is not None:
                    each.check_tied((*self.assigned, *assigned))
            if self._tied_claims:  # a handle that waits will be read for the tensor tied to it
                waiting = {each.name for each in self.assigned}
                assigned = [each for each in assigned if each.tied_to not in waiting]
            if not getattr(self.root, "allow_nan", False):
                refuse_nan(assigned)
            guard(self.root)  # no forward pass meanwhile
            self.written = True
            readers = self._open_readers()
            with torch.no_grad():
                for module, group in in_reading_order(assigned):
                    self._read_group(group, readers, processes=module is not None)
        except BaseException as error:
            self._failure = error  # an override that catches it does not make the load whole
            raise

    def _open_readers(self) -> Readers:
        """Return the readers of this load, which keep threads and buffers from read to read."""
        if self._readers is None or self._readers.stopped:
            device = state_of(self.root).device
            self._readers = self._opened.enter_context(Readers(device))
        return self._readers

    def _read_group(self, fills: Fills, readers: Readers, *, processes: bool) -> None:
        readers.read(self._jobs(fills, readers))
        marked = (node for fill in fills.items() for node in self._mark_loaded(*fill, processes))
        for node in {node.module: node for node in marked}.values():
            if is_complete(node.module):
                self._process(node)
        # After processing, whose refusals say more of the scales of quantized weights.
        if not getattr(self.root, "allow_nan", False):
            refuse_nan_read(fills)

    def _jobs(self, fills: Fills, readers: Readers) -> Iterator[tuple[Weight, Destination]]:
        for location, assigned in fills.items():
            held = self._allocation.materialize(location, self._modules, self._walk)
            if held and any(each.tied_to is None for each in assigned):
                self._overwritten.append(location)
            for each in assigned:
                if each.tied_to is not None:
                    continue
                for weight, destination in each.jobs():
                    if not isinstance(weight, torch.Tensor):
                        yield weight, destination
                        continue
                    if readers.stages(weight, destination):
                        yield TensorHandle(each.name, weight), destination
                        continue
                    try:
                        read_into(weight, destination)
                    except WeightReadError as error:  # for handles, the reader adds the name
                        raise WeightReadError(f"{each.name}: {error}") from None

    def _mark_loaded(
        self, location: Location, assigned: list[Assignment], processes: bool
    ) -> Iterator[Node]:
        """Note that slots hold values; yield the modules that now have all of theirs.

        ``processes`` tells whether the owner at ``location`` processes as soon as it has them.
        """
        state, local = location.node.state, location.local
        slots = [slot for each in assigned for slot in each.slots]
        holders = [location]
        # An update comes in many parts, and must not look for ties in the whole tree each time.
        if (
            self.mode == "load"
            or local in state.tied
            or not state.loaded.get(local, set()).issuperset(slots)
        ):
            holders = self._allocation.holders_of(location, self._modules, self._walk)
        for holder in holders:
            owner, local = holder.node.owner, holder.local
            state = state_of(owner.module)
            if len(holders) > 1:
                state.tied.add(local)
            loaded = state.loaded.get(local)
            if loaded is None:
                loaded = state.loaded[local] = set()
            loaded.update(slots)
            self._filled[owner] = None
            if processes if holder is location else owner.processes_alone:
                if owner.module not in self._unfilled:
                    self._unfilled[owner.module] = own_slots(owner.module)
                unfilled = self._unfilled[owner.module]
                if local in unfilled:
                    unfilled[local].difference_update(slots)
                if not any(unfilled.values()):
                    del self._unfilled[owner.module]
                    yield owner

    # Processing

    def _process_rest(self) -> None:
        """Process, inner modules first, what this load has changed and not processed yet."""
        nodes: Iterable[Node] = ()
        if self.mode != "load":
            nodes = self._above_filled()
        elif any(loads_itself(each) and each.processes for each in self._modules()):
            nodes = self._walk()
        waiting = [node for node in nodes if node.processes and node.module not in self._processed]
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
            with torch.no_grad():
                module.process_weights()
        except WeightLoadError as error:
            error.args = (f"{node.path}{error}",)
            raise

    # The end

    def finish(self) -> None:
        """Refuse what does not fit together, else read what is left and process.

        Raises ``WeightLoadError`` with everything that is missing, unexpected, duplicated or
        misshapen, and what reading or processing raises.
        """
        if self.mode != "update":
            self._report_missing()
        if self.mode == "plan":
            return
        model = type(self.root).__name__
        self.report.raise_if_refused(model, touched=self.written, folder=self._folder)
        if self._failure is not None:
            raise self._failure
        self.read()
        state_of(self.root).report = self.report
        self._process_rest()
        if self.mode == "load":
            allow_to_run(self._modules())

    def _overwritten_names(self) -> str:
        names = fold(location.path for location in self._overwritten)
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return ", ".join(map(printable_name, names[:_MOST_NAMED])) + more

    def _with_outcome(self, error: WeightLoadError) -> str:
        """Return the error's message, and after it what the load has written to the model."""
        lines = [str(error)]
        if self._folder is not None and str(self._folder) not in lines[0]:
            lines.append(f"The checkpoint is in {printable(self._folder)}.")
        if names := self._overwritten_names():
            lines.append(f"Overwritten before, at least in part: {names}.")
        elif self.written:
            lines.append(
                "Nothing that the model held before was overwritten; it refuses to run until a "
                "load succeeds."
            )
            return "\n".join(lines)
        if error.report is None:  # else the message ends with it
            lines.append(outcome(touched=self.written))
        return "\n".join(lines)


def _described(value: object) -> str:
    if isinstance(value, str | bytes | PathLike):
        return shorten(value)
    kind = type(value).__name__
    if not isinstance(value, tuple | list):
        return f"an object of type {kind}"
    return f"a {kind} of {len(value)} ({', '.join(type(each).__name__ for each in value[:4])})"
