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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vllm_module.errors import ModelNotReadyError
from vllm_module.ledger import Filling, Ledger, Location, Mode, slots_of
from vllm_module.report import LoadReport, Problem, fold
from vllm_module.weights import Weight

Weights = Mapping[str, Weight] | Iterable[tuple[str, Weight]]


class Route(NamedTuple):
    """Where a component leads: to the child or tensor ``attr``, to a slot, or to a skip rule."""

    attr: str = ""
    child: nn.Module | None = None
    slot: str | None = None
    skip: str | None = None


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
        self.entering: tuple[nn.Module, Place] | None = None  # the child about to be called
        self.routes: dict[int, dict[str, Route]] = {}
        self.refusal = root._refusal  # from an earlier load that broke

    def place_of(self, module: nn.Module) -> Place | None:
        """Return where ``module`` is in this tree, ``None`` if it belongs to another."""
        if self.entering is not None and self.entering[0] is module:
            return self.entering[1]
        for path, other in self.root.named_modules(remove_duplicate=False):
            if other is module:
                above = path.rpartition(".")[0]
                path, above = (f"{p}." if p else "" for p in (path, above))
                return Place(path, path, above)
        return None


# The loading of this thread. A context, because an overridden load_weights may hand a plain
# generator to super(): nothing that travels with the weights would survive that.
_loading: ContextVar[_Loading | None] = ContextVar("loading", default=None)


class vLLMModule(nn.Module):
    """Base of every layer and model: it loads the weights below it, by name.

    Subclasses declare, where it applies:

    Attributes:
        shard_names: the checkpoint components that this layer fuses into its own parameters.
        weight_aliases: other checkpoint components under which a child, slot or tensor is known.
        skipped_weights: checkpoint components that are not loaded, each with the rule as its
            reason.
        load_report: what the last successful load through this module did.

    """

    shard_names: Sequence[str] = ()
    weight_aliases: Mapping[str, str] = MappingProxyType({})
    skipped_weights: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self.load_report: LoadReport | None = None
        device = torch.get_default_device()
        self._device = device if device.type != "meta" else torch.device("cpu")
        self._filled: set[tuple[str, str]] = set()  # (local name, slot)
        self._refusal: str | None = None
        self._guard: RemovableHandle | None = None
        self._refuse(None)

    # Loading

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
        return self._load(weights, "load")[0]

    def update_weights(self, weights: Weights) -> set[str]:
        """Load part of a checkpoint into the memory the parameters already have.

        Like :meth:`load_weights`, except that nothing has to be complete. If the stream breaks,
        the model refuses to run until a :meth:`load_weights` succeeds.
        """
        return self._load(weights, "update")[0]

    def plan_weights(self, weights: Weights) -> LoadPlan:
        """Return what :meth:`load_weights` would do, by the same recursion, reading nothing."""
        _, ledger = self._load(weights, "plan")
        return LoadPlan(ledger.report, ledger.pending)

    def check_ready(self) -> None:
        """Raise ``ModelNotReadyError``, naming every tensor below that was never filled."""
        cannot = f"{type(self).__name__} cannot run: "
        for module in self._modules_that_load():
            if module._refusal is not None:
                raise ModelNotReadyError(cannot + module._refusal)
        unfilled = [
            f"{location.path}{f' (slot {slot!r})' if slot else ''}"
            for location in self._locations()
            if (tensor := location.tensor) is not None
            for slot in slots_of(tensor)
            if (location.local, slot) not in location.filled
        ]
        if unfilled:
            lines = "\n".join(f"  {line}" for line in fold(unfilled))
            raise ModelNotReadyError(f"{cannot}never loaded (call load_weights):\n{lines}")
        computed = [name for name, buffer in self.named_buffers() if buffer.is_meta]
        if computed:
            raise ModelNotReadyError(
                f"{cannot}buffers that no checkpoint stores are on the meta device, outside of "
                f"which the model has to be built: {', '.join(fold(computed))}"
            )

    # The recursion

    def _receive(self, weights: Weights, loading: _Loading) -> set[str]:
        """Route ``weights``, named relative to this module; return the names they fill."""
        ledger, path = loading.ledger, loading.at.path
        first = len(ledger.paths)
        pairs: Iterable[tuple[str, Weight]]
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        if isinstance(pairs, Collection):
            self._distribute(self, "", pairs, loading)
        else:
            for pair in pairs:
                waiting = len(ledger.pending)
                self._distribute(self, "", (pair,), loading)
                # A handle can wait until everything is checked; a tensor holds memory.
                if isinstance(pair[1], torch.Tensor) and ledger.mode != "plan":
                    self._fill(loading, waiting)
        return {filled[len(path) :] for filled in ledger.paths[first:]}

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
            routes = loading.routes[id(module)] = _routes(module)
        prefix = at.prefix + inside
        groups: dict[str, tuple[Route, list[tuple[str, Weight]]]] = {}
        for name, weight in weights:
            component, _, rest = name.partition(".")
            route = routes.get(component)
            attr, child, slot, skip = route or (component, None, None, None)
            if route is not None and child is not None and rest:
                if slot is not None:  # a fused child takes all of its slots in one call
                    component, rest = attr, f"{slot}.{rest}"
                if component not in groups:
                    groups[component] = (route, [])
                groups[component][1].append((rest, weight))
            elif slot is not None and child is None and rest:
                location = self._location(module, inside, rest, at.path)
                ledger.enter(at.above + name, location, slot, weight)
            elif skip is not None:
                ledger.report.skipped[prefix + name] = skip
            elif not rest and (attr in module._parameters or attr in module._buffers):
                location = self._location(module, inside, attr, at.path)
                ledger.enter(prefix + name, location, None, weight)
            else:
                detail = _no_route(module, component, routes)
                ledger.report.unexpected.append(Problem(prefix + name, detail))
        for component, ((attr, child, _, _), group) in groups.items():
            if isinstance(child, vLLMModule):
                path = f"{at.path}{inside}{attr}."
                loading.entering = (child, Place(path, f"{prefix}{component}.", prefix))
                child.load_weights(group)
            elif child is not None:
                self._distribute(child, f"{inside}{attr}.", group, loading)

    def _fill(self, loading: _Loading, waiting: int = 0) -> None:
        """Read what was entered since ``waiting`` entries were pending."""
        ledger, root = loading.ledger, loading.root
        if not ledger.touched:
            root._refuse("its weights are being loaded")
        fillings = ledger.pending[waiting:]
        del ledger.pending[waiting:]
        ledger.fill(fillings)

    # The account of an outermost call

    def _load(self, weights: Weights, mode: Mode) -> tuple[set[str], Ledger]:
        """Join the loading that an outer call began; without one, begin it and settle it."""
        loading = _loading.get()
        if loading is not None and (place := loading.place_of(self)) is not None:
            before, loading.at = loading.at, place
            filled = self._receive(weights, loading)
            loading.at = before
            return filled, loading.ledger
        loading = _Loading(self, mode)
        token = _loading.set(loading)
        try:
            with _paused_gc() if isinstance(weights, Collection) else nullcontext():
                filled = self._receive(weights, loading)
            self._settle(loading)
        except BaseException as error:
            if loading.ledger.touched:
                cause = str(error).partition("\n")[0]
                for module in self._modules_that_load():
                    module._refuse(
                        "a load broke midway and left a mixture; call load_weights with a whole "
                        f"checkpoint. It broke on {type(error).__name__}: {cause}"
                    )
            raise
        finally:
            _loading.reset(token)
        return filled, loading.ledger

    def _settle(self, loading: _Loading) -> None:
        ledger = loading.ledger
        if ledger.mode != "update":
            ledger.demand_completeness()
        if ledger.mode == "plan":
            return
        ledger.report.raise_if_refused(type(self).__name__, touched=ledger.touched)
        self._fill(loading)
        self._refusal = loading.refusal
        if ledger.mode == "load":
            for module in self._modules_that_load():
                module._refusal = None
        self.load_report = ledger.report

    # Readiness

    def _modules_that_load(self) -> Iterator[vLLMModule]:
        return (module for module in self.modules() if isinstance(module, vLLMModule))

    def _location(self, holder: nn.Module, inside: str, attr: str, path: str) -> Location:
        local = inside + attr
        return Location(path + local, holder, attr, self._device, self._filled, local)

    def _locations(self) -> Iterator[Location]:
        """Yield where every tensor below is that a checkpoint stores, in tree order.

        A plain module's tensors belong to the ``vLLMModule`` above it, which answers for them.
        """
        seen = set()
        stack: list[tuple[nn.Module, vLLMModule, str, str]] = [(self, self, "", "")]
        while stack:
            module, owner, path, inside = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            for attr in (*module._parameters, *module._buffers):
                location = owner._location(module, inside, attr, path)
                if location.tensor is not None:
                    yield location
            for attr, child in reversed(module._modules.items()):
                if isinstance(child, vLLMModule):
                    stack.append((child, child, f"{path}{inside}{attr}.", ""))
                elif child is not None:
                    stack.append((child, owner, path, f"{inside}{attr}."))

    def _refuse(self, reason: str | None) -> None:
        """Check readiness before the next forward, which fails with ``reason`` if there is one."""
        self._refusal = reason
        if self._guard is None:  # a hook, so that a ready module pays nothing
            self._guard = self.register_forward_pre_hook(_require_ready)


def _require_ready(module: nn.Module, args: object) -> None:
    assert isinstance(module, vLLMModule)
    module.check_ready()
    if module._guard is not None:
        module._guard.remove()
        module._guard = None


@contextmanager
def _paused_gc() -> Iterator[None]:
    """Route without garbage collections: each walks the whole model, for entries that all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _routes(module: nn.Module) -> dict[str, Route]:
    """Build the table from component to route out of what the module's children declare.

    Its own tensors need no entry. Raises ``ValueError`` where two claim one component.
    """
    claims: list[tuple[str, Route]] = []
    for attr, child in module._modules.items():
        if child is not None:
            claims.append((attr, Route(attr, child)))
            if isinstance(child, vLLMModule):
                claims += [(slot, Route(attr, child, slot)) for slot in child.shard_names]
    if isinstance(module, vLLMModule):
        claims += [(slot, Route(slot=slot)) for slot in module.shard_names]
        claims += [(name, Route(skip=rule)) for name, rule in module.skipped_weights.items()]
        if module.weight_aliases:
            known = {attr: Route(attr) for attr in _tensor_names(module)} | dict(claims)
            aliases = module.weight_aliases.items()
            claims += [(alias, known[name]) for alias, name in aliases if name in known]
    routes = dict(claims)
    if len(routes) < len(claims) or not routes.keys().isdisjoint(_tensor_names(module)):
        components = [*(component for component, _ in claims), *_tensor_names(module)]
        twice = sorted({name for name in components if components.count(name) > 1})
        raise ValueError(
            f"{type(module).__name__}: two children, slots, tensors or rules claim the checkpoint "
            f"component {', '.join(twice)}"
        )
    return routes


def _tensor_names(module: nn.Module) -> list[str]:
    """Return the names of the tensors that a checkpoint can store for ``module`` itself."""
    computed = module._non_persistent_buffers_set
    return [*module._parameters, *(name for name in module._buffers if name not in computed)]


def _no_route(module: nn.Module, component: str, routes: Mapping[str, Route]) -> str:
    known = [*routes, *_tensor_names(module)]
    if component in known:
        return f"{type(module).__name__}.{component} is known, but not with a name like this"
    listed = ", ".join(known) if len(known) <= 16 else f"{len(known)} other components"
    return f"{type(module).__name__} has no {component!r}; it has {listed or 'no weights'}"
