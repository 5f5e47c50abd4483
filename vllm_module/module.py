"""The module tree loads itself.

``load_weights`` groups checkpoint names by their first component and hands each group to the
child, slot or tensor that the component names; children do the same with what is left. The table
of a module's components is built by scanning its children, so a fused layer that declares
``shard_names`` is found under each of them, and no model has a mapping table of its own.

Routing works on names alone and finishes, with every refusal in one report, before a byte is
read. Only tensors that arrive one by one from an iterator are copied as they come.
"""

from __future__ import annotations

import gc
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from os import PathLike
from types import GeneratorType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vllm_module.errors import ModelNotReadyError
from vllm_module.ledger import Filling, Ledger, Mode
from vllm_module.location import Conversion, Location, expected_weights, materialized, slots_of
from vllm_module.report import LoadReport, Problem, fold
from vllm_module.routes import Declaring, Route, no_route, routes_of
from vllm_module.weights import Weight

Weights = Mapping[str, Weight] | Iterable[tuple[str, Weight]]


class PlannedRead(NamedTuple):
    """One part of a checkpoint tensor that this rank would read, and the slot it is for."""

    name: str
    parameter: str
    slot: str | None
    source: Weight


class LoadPlan(NamedTuple):
    """What :meth:`vLLMModule.load_weights` would do with some weights."""

    report: LoadReport
    fillings: list[Filling]

    def reads(self) -> Iterator[PlannedRead]:
        """Yield every part this rank would read, its handle narrowed to what is kept."""
        for filling in self.fillings:
            for source, _ in filling.cut():
                yield PlannedRead(filling.name, filling.location.path, filling.slot, source)


class Place(NamedTuple):
    """Where a call is at work; each prefix is empty or ends with a dot."""

    path: str  # of the module in the tree
    prefix: str  # of the names it is given, in the checkpoint
    above: str  # of those that keep their slot: a fused layer's parts are its siblings there


class _Loading:
    """The outermost call under way: its books, and where in the tree it is."""

    def __init__(self, root: vLLMModule, mode: Mode) -> None:
        self.root = root
        self.ledger = Ledger(mode, root._locations)
        self.at = Place("", "", "")
        self.routes: dict[int, dict[str, Route]] = {}
        self.places: dict[int, Place] = {id(root): self.at}  # of children that were called
        self.scanned = False
        self.was_ready = False
        self.failure: BaseException | None = None

    def place_of(self, module: nn.Module) -> Place | None:
        """Return where ``module`` is in this tree, ``None`` if it belongs to another."""
        place = self.places.get(id(module))
        if place is None and not self.scanned:
            self.scanned = True  # an override calls children by hand
            for path, other in self.root.named_modules():
                above = path.rpartition(".")[0]
                path, above = (f"{p}." if p else "" for p in (path, above))
                self.places.setdefault(id(other), Place(path, path, above))
            place = self.places.get(id(module))
        return place


# The loading of this thread. A context, because an overridden load_weights may hand a plain
# generator to super(): nothing that travels with the weights would survive that.
_loading: ContextVar[_Loading | None] = ContextVar("loading", default=None)


Load = Callable[["vLLMModule", "Weights"], set[str]]


def _accounted(load: Load) -> Load:
    """Wrap a ``load_weights``, ours or an override, so that it always works on open books."""

    @wraps(load)
    def load_weights(self: vLLMModule, weights: Weights) -> set[str]:
        loading = _loading.get()
        if loading is None or (place := loading.place_of(self)) is None:
            return self._account(weights, "load")[0]
        paths, first = loading.ledger.paths, len(loading.ledger.paths)
        before, loading.at = loading.at, place
        try:
            if isinstance(load(self, weights), GeneratorType):
                raise TypeError(f"{type(self).__name__}.load_weights must not be a generator")
        finally:
            loading.at = before
        return {path[len(place.path) :] for path in paths[first:]}

    return load_weights


class vLLMModule(Declaring):
    """Base of every layer and model: it loads the weights below it, by name.

    Subclasses declare, where it applies:

    Attributes:
        shard_names: the checkpoint components that this layer fuses into its own parameters.
        stored_beside: tensors of this layer that a checkpoint stores beside it, not below it.
        weight_aliases: other checkpoint components under which a child, slot or tensor is known.
        skipped_weights: checkpoint components that are not loaded, each with the rule as its
            reason.
        conversions: for tensors that are kept otherwise than a checkpoint stores them, what
            converts them as they arrive.
        load_report: what the last successful load through this module did.

    A subclass may override ``load_weights`` to rename or transform pairs on their way to
    ``super()``, or to call children by hand. It is given pairs of name and tensor or handle (see
    ``Handle.read``), all of its own at once from a collection and some of them, several times, from
    a stream. When an inner call returns, its names are routed and their bytes may be unread: what
    is to be made of them belongs into ``process_weights_after_loading``.

    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "load_weights" in vars(cls):
            cls.load_weights = _accounted(cls.load_weights)  # type: ignore[method-assign]

    conversions: Mapping[str, Conversion] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self.load_report: LoadReport | None = None
        device = torch.get_default_device()
        self._device = device if device.type != "meta" else torch.device("cpu")
        self._filled: set[tuple[str, str]] = set()  # (local name, slot)
        self._tied: set[str] = set()  # local names of tensors that are held elsewhere too
        self._refusal: str | None = None
        self._busy = False
        # A hook, so that a ready module pays nothing: the check takes itself away.
        self._guard: RemovableHandle | None = self.register_forward_pre_hook(_require_ready)

    @property
    def processes(self) -> bool:
        """Whether ``process_weights_after_loading`` does anything."""
        own = type(self).process_weights_after_loading
        return own is not vLLMModule.process_weights_after_loading

    def process_weights_after_loading(self) -> None:
        """Make of the weights, which are all there, what the module runs with.

        Called once by each load and update, of this module or one above, that filled some of them:
        as soon as it has filled all of them, or else at its end; at the end also where there are
        modules of ours below, after theirs. It works out everything anew, in place, so that a
        captured CUDA graph sees it. A ``WeightLoadError`` refuses the checkpoint; its message
        begins with the name of the tensor.
        """

    # Loading

    @_accounted
    def load_weights(self, weights: Weights) -> set[str]:
        """Load a whole checkpoint and return the names of the parameters and buffers filled.

        Args:
            weights: pairs of name and tensor or handle: a mapping, a collection of pairs, or an
                iterator, which is streamed. Names are relative to this module.

        Every slot of every parameter must be filled exactly once and every tensor must find its
        place. Collections are checked whole before anything is written.

        Raises:
            WeightLoadError: (or its subclass by kind) one report of all that is missing,
                unexpected, duplicated or misshapen.

        """
        self._receive(weights)
        return set()  # the names are _accounted for, whatever an override returns

    def update_weights(self, weights: Weights) -> set[str]:
        """Load part of a checkpoint into the memory the parameters already have.

        Like :meth:`load_weights`, except that nothing has to be complete. If the stream breaks,
        the model refuses to run until a :meth:`load_weights` succeeds.
        """
        return self._account(weights, "update")[0]

    def plan_weights(self, weights: Weights) -> LoadPlan:
        """Return what :meth:`load_weights` would do, by the same recursion, reading nothing."""
        _, ledger = self._account(weights, "plan")
        return LoadPlan(ledger.report, ledger.pending)

    def expected_weights(self) -> dict[str, torch.Tensor]:
        """Return what a whole checkpoint holds for this module: a meta tensor for each name.

        Slots of fused parameters stand under their own names, tied tensors under the first. It is
        the same on every rank. What an overridden ``load_weights`` renames is not seen.
        """
        return expected_weights(self._locations())

    def sleep(self) -> None:
        """Release the memory of all weights: back to meta, until :meth:`load_weights` fills them.

        Tied tensors stay tied, as far as both ends are below. Memory that others hold on to, such
        as a captured CUDA graph, is not released.
        """
        if self._busy:
            raise RuntimeError(f"this {type(self).__name__} is being loaded")
        meta, on_cuda = torch.device("meta"), False
        asleep: dict[int, tuple[torch.Tensor, Any]] = {}
        for module in self.modules():
            kept = module._non_persistent_buffers_set
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and name not in kept:
                        on_cuda |= tensor.is_cuda
                        pair = asleep.setdefault(id(tensor), (tensor, materialized(tensor, meta)))
                        tensors[name] = pair[1]
        for each in self._modules_that_load():
            each._filled.clear()
            each._refusal = None  # of a mixture that is gone
            each._arm()
        asleep.clear()
        if on_cuda:
            torch.cuda.empty_cache()

    def check_ready(self) -> None:
        """Raise ``ModelNotReadyError``, naming every tensor below that was never filled."""
        cannot = f"{type(self).__name__} cannot run: "
        for module in self._modules_that_load():
            if module._busy:
                raise ModelNotReadyError(f"{cannot}its weights are being loaded")
            if module._refusal is not None:
                raise ModelNotReadyError(cannot + module._refusal)
        unfilled = [
            f"{location.path}{f' (slot {slot!r})' if slot else ''}"
            for location in self._locations()
            if (tensor := location.tensor) is not None
            for slot in slots_of(tensor)
            if tensor.is_meta or (location.local, slot) not in location.owner._filled
        ]
        if unfilled:
            lines = "\n".join(f"  {line}" for line in fold(unfilled))
            raise ModelNotReadyError(
                f"{cannot}not loaded, or put to sleep (call load_weights):\n{lines}"
            )
        tensors = (*self.named_parameters(), *self.named_buffers())
        if computed := [name for name, tensor in tensors if tensor.is_meta]:
            raise ModelNotReadyError(
                f"{cannot}tensors that no checkpoint stores are on the meta device, outside of "
                f"which the model has to be built: {', '.join(fold(computed))}"
            )

    # The recursion

    def _receive(self, weights: Weights) -> None:
        """Route ``weights``, whose names are relative to this module."""
        loading = _loading.get()
        assert loading is not None
        pairs: Iterable[tuple[str, Weight]]
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        if isinstance(pairs, Collection):
            self._distribute(self, "", pairs, loading)
            return
        pending = loading.ledger.pending
        for pair in pairs:
            waiting = len(pending)
            self._distribute(self, "", (pair,), loading)
            # A handle can wait until everything is checked; a tensor holds memory.
            if isinstance(pair[1], torch.Tensor) and loading.ledger.mode != "plan":
                self._fill(loading, waiting)
            del pair  # or it would be in memory while the source makes the next

    def _distribute(
        self,
        module: nn.Module,
        inside: str,
        weights: Collection[tuple[str, Weight]],
        loading: _Loading,
    ) -> None:
        """Hand each name to the child, slot or tensor of ``module`` that its component names.

        ``module`` is this module or, on its behalf, a plain one below it at path ``inside``.
        """
        ledger, at = loading.ledger, loading.at
        routes = loading.routes.get(id(module))
        if routes is None:
            routes = loading.routes[id(module)] = routes_of(module)
        prefix = at.prefix + inside
        groups: dict[str, tuple[Route, list[tuple[str, Weight]]]] = {}
        for name, weight in weights:
            component, dot, rest = name.partition(".")
            route = routes.get(component)
            attr, child, slot, skip, beside = route or (component, None, None, None, False)
            if route is not None and child is not None and (bool(rest) != beside):
                if slot is not None:  # a fused child takes all of its slots in one call
                    component, rest = attr, f"{slot}.{rest}"
                elif beside:
                    component, rest = attr, component
                if component not in groups:
                    groups[component] = (route, [])
                groups[component][1].append((rest, weight))
            elif slot is not None and child is None and rest:
                attr = routes[rest].attr if rest in routes else rest  # an alias
                location = self._location(module, inside, attr, at.path)
                ledger.enter(at.above + name, location, slot, weight)
            elif skip is not None:
                ledger.report.skipped[prefix + name] = skip
            elif not dot and (attr in module._parameters or attr in module._buffers):
                location = self._location(module, inside, attr, at.path)
                stored = at.above if attr in self.stored_beside else prefix
                ledger.enter(stored + name, location, None, weight)
            else:
                detail = no_route(module, component, routes)
                ledger.report.unexpected.append(Problem(prefix + name, detail))
        for component, ((attr, child, *_), group) in groups.items():
            if isinstance(child, vLLMModule):
                place = Place(f"{at.path}{inside}{attr}.", f"{prefix}{component}.", prefix)
                load = child.load_weights
                if getattr(load, "__func__", None) is vLLMModule.load_weights:
                    # The same, without what only an override could ask for.
                    loading.at = place
                    child._distribute(child, "", group, loading)
                    loading.at = at
                else:
                    loading.places[id(child)] = place
                    load(group)
            elif child is not None:
                self._distribute(child, f"{inside}{attr}.", group, loading)

    def _fill(self, loading: _Loading, waiting: int = 0) -> None:
        """Read what was entered since ``waiting`` entries were pending."""
        ledger = loading.ledger
        fillings = ledger.pending[waiting:]
        del ledger.pending[waiting:]
        if not fillings:
            return
        if not ledger.touched:
            loading.was_ready = loading.root._guard is None
            loading.root._arm()  # whoever runs the model meanwhile is refused
        try:
            ledger.fill(fillings)
        except BaseException as error:
            loading.failure = error  # an override that catches it does not make the load whole
            raise

    # The account of an outermost call

    def _account(self, weights: Weights, mode: Mode) -> tuple[set[str], Ledger]:
        """Open the books, load through whatever ``load_weights`` this class has, and settle."""
        if isinstance(weights, str | bytes | PathLike):
            raise TypeError(
                f"expected pairs of name and tensor, got {weights!r}: open a checkpoint with "
                "vllm_module.weights.open_checkpoint, or let get_model do all of it"
            )
        if self._busy:
            raise RuntimeError(f"this {type(self).__name__} is already being loaded")
        loading = _Loading(self, mode)
        token = _loading.set(loading)
        self._busy = True
        try:
            pairs = weights.items() if isinstance(weights, Mapping) else weights
            with _paused_gc() if isinstance(pairs, Collection) else nullcontext():
                filled = self.load_weights(pairs)
            self._settle(loading)
        except BaseException as error:
            if loading.ledger.touched:
                cause = str(error).partition("\n")[0]
                for module in self._modules_that_load():
                    module._refusal = (
                        "a load broke midway and left a mixture; call load_weights with a whole "
                        f"checkpoint. It broke on {type(error).__name__}: {cause}"
                    )
                    module._arm()
            raise
        finally:
            self._busy = False
            _loading.reset(token)
        return filled, loading.ledger

    def _settle(self, loading: _Loading) -> None:
        ledger = loading.ledger
        if ledger.mode != "update":
            ledger.demand_completeness()
        if ledger.mode == "plan":
            return
        ledger.report.raise_if_refused(type(self).__name__, touched=ledger.touched)
        if loading.failure is not None:
            raise loading.failure
        self._fill(loading)
        self.load_report = ledger.report
        processing = ledger.processing
        if ledger.mode == "update":
            processing.process_rest(self._on_the_way_to(processing.prefixes))
            if loading.was_ready:
                self._disarm()  # it is ready still
            return
        modules = {f"{path}." if path else "": each for path, each in self.named_modules()}
        ours = {at: each for at, each in modules.items() if isinstance(each, vLLMModule)}
        processing.process_rest({at: each for at, each in ours.items() if each.processes})
        whole = not any(tensor.is_meta for each in modules.values() for tensor in _tensors(each))
        for module in ours.values():
            module._refusal = None
            if whole:  # so that torch.compile sees no hook at the first forward
                module._disarm()

    # Readiness

    @property
    def _processes_early(self) -> bool:
        """Whether to process as soon as its own weights are there: it has none below."""
        if not self.processes:
            return False
        return not any(module is not self for module in self._modules_that_load())

    def _on_the_way_to(self, prefixes: Iterable[str]) -> dict[str, vLLMModule]:
        """Return the modules that process, by prefix, on the way to those at ``prefixes``."""
        found: dict[str, nn.Module] = {"": self}
        for prefix in prefixes:
            module, at = found[""], ""
            for component in prefix.split(".")[:-1]:
                at = f"{at}{component}."
                module = found[at] = module._modules[component]  # type: ignore[assignment]
        ours = {at: each for at, each in found.items() if isinstance(each, vLLMModule)}
        return {at: each for at, each in ours.items() if each.processes}

    def _is_filled(self) -> bool:
        """Whether every slot below was filled, and all that is made of them is there."""
        there = not any(tensor.is_meta for each in self.modules() for tensor in _tensors(each))
        return there and all(
            (location.local, slot) in location.owner._filled
            for location in self._locations()
            if (tensor := location.tensor) is not None
            for slot in slots_of(tensor)
        )

    def _modules_that_load(self) -> Iterator[vLLMModule]:
        return (module for module in self.modules() if isinstance(module, vLLMModule))

    def _location(self, holder: nn.Module, inside: str, attr: str, path: str) -> Location:
        local = inside + attr
        return Location(path + local, holder, attr, self, local)

    def _locations(self) -> Iterator[Location]:
        """Yield where every tensor below is that a checkpoint stores, in tree order.

        A plain module's tensors belong to the ``vLLMModule`` above it, which answers for them.
        """
        seen = set()
        stack: list[tuple[nn.Module, vLLMModule, str, str]] = [(self, self, "", "")]
        while stack:
            module, owner, path, inside = stack.pop()
            if (id(owner), id(module)) in seen:
                continue
            seen.add((id(owner), id(module)))
            for attr in (*module._parameters, *module._buffers):
                location = owner._location(module, inside, attr, path)
                if location.tensor is not None:
                    yield location
            for attr, child in reversed(module._modules.items()):
                if isinstance(child, vLLMModule):
                    stack.append((child, child, f"{path}{inside}{attr}.", ""))
                elif child is not None:
                    stack.append((child, owner, path, f"{inside}{attr}."))

    def _arm(self) -> None:
        """Check readiness before the next forward."""
        if self._guard is None:
            self._guard = self.register_forward_pre_hook(_require_ready)

    def _disarm(self) -> None:
        if self._guard is not None:
            self._guard.remove()
            self._guard = None


def _require_ready(module: nn.Module, args: object) -> None:
    assert isinstance(module, vLLMModule)
    module.check_ready()
    module._disarm()


@contextmanager
def _paused_gc() -> Iterator[None]:
    """Route without garbage collections: each walks the whole model, for entries that all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() == 0:
                gc.freeze()  # makes the entries old without a walk, which enabling would begin with
                gc.unfreeze()
            gc.enable()


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None:
                yield tensor
