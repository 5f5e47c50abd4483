"""The module tree as a load sees it: where each module and tensor is, and who loads it.

Modules are plain ``nn.Module`` objects here. One that has a ``load_state`` loads itself; the
tensors of any other module are loaded by the nearest module above that has one, its owner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vllm_module.core.conversions import Conversion
from vllm_module.core.report import LoadReport
from vllm_module.core.tensors import expected_shape, is_typed, slots_of

if TYPE_CHECKING:
    from vllm_module.weights.digests import Digests

_NO_CONVERSIONS: dict[str, Conversion] = {}
_NOTHING_BESIDE: dict[str, str] = {}


def _device_to_load_on() -> torch.device:
    device = torch.get_default_device()
    return device if device.type != "meta" else torch.device("cpu")


@dataclass
class LoadState:
    """State of one module that lasts between loads.

    Attributes:
        device: its tensors are materialized here; the default device when it was built.
        loaded: by the local name of a tensor, its slots that hold values.
        tied: local names of tensors that another module is known to hold too.
        refusal: why the module must not run, after a load that broke.
        in_progress: whether it is being loaded.
        guard: the hook that checks before a forward pass; ``None`` once the module is ready.
        report: of the last load called on it.
        sources: with ``keep_digests``, the digests of what tensors were converted or cast from.
        source_slots: for each of these, paths of the tensors, and slots, that it was read into.

    """

    device: torch.device = field(default_factory=_device_to_load_on)
    loaded: dict[str, set[str]] = field(default_factory=dict)
    tied: set[str] = field(default_factory=set)
    refusal: str | None = None
    in_progress: bool = False
    guard: RemovableHandle | None = None
    report: LoadReport | None = None
    sources: Digests = field(default_factory=dict)
    source_slots: dict[str, set[tuple[str, str]]] = field(default_factory=dict)


class Node:
    """One module and its place in the tree.

    Args:
        module: the module itself.
        parent: the node above; ``None`` for the root.
        name: the module's attribute name in its parent.

    Attributes:
        path: from the root to the module; empty, or ends with a dot.
        conversions: those that the module declares.
        stored_beside: tensors that a checkpoint stores beside the module, not below it, each with
            the name that they have there.
        overrides: whether the module has a ``load_weights`` of its own.
        routes: where the components of names lead from here, once a plan has asked.

    """

    __slots__ = (
        "_alone", "_children", "_locations", "_owner", "conversions", "module", "overrides",
        "parent", "path", "routes", "stored_beside",
    )  # fmt: skip

    conversions: Mapping[str, Conversion]
    stored_beside: Mapping[str, str]

    def __init__(self, module: nn.Module, parent: Node | None = None, name: str = "") -> None:
        self.module, self.parent = module, parent
        self.path: str = "" if parent is None else f"{parent.path}{name}."
        self.routes: dict[str, Any] | None = None
        self._children: dict[str, Node] | None = None  # most nodes have none
        self._locations: dict[str, Location] | None = None
        self._alone: bool | None = None
        self.conversions, self.stored_beside = _NO_CONVERSIONS, _NOTHING_BESIDE
        self.overrides = False
        self._owner: Node | None = None  # not self: a cycle would keep a deleted model alive
        if "load_state" in module.__dict__:  # not loads_itself: there is a node for each expert
            declared: Any = module
            self.conversions = declared.conversions
            self.stored_beside = declared.stored_beside
            self.overrides = declared.overrides_load_weights
        elif parent is not None:
            self._owner = parent.owner

    @property
    def owner(self) -> Node:
        """The node whose module loads this module's tensors: this one or the nearest above."""
        return self._owner or self

    @property
    def state(self) -> LoadState:
        """The load state of the owner."""
        return state_of(self.owner.module)

    @property
    def processes_alone(self) -> bool:
        """True if the module has weights to process and no ``vLLMModule`` is below it.

        It processes them once its tensors are filled. The others wait for the end of the load.
        """
        if self._alone is None:
            module: Any = self.module
            below = (each for each in module.modules() if each is not module)
            processes = loads_itself(module) and bool(module.processing())
            self._alone = processes and not any(map(loads_itself, below))
        return self._alone

    def child(self, name: str) -> Node:
        """Return the node of the child ``name``."""
        if self._children is None:
            self._children = {}
        node = self._children.get(name)
        if node is None:
            module: Any = self.module._modules[name]
            node = self._children[name] = Node(module, self, name)
        return node

    def location(self, attr: str) -> Location:
        """Return the location of the module's tensor ``attr``, which need not be there."""
        if self._locations is None:
            self._locations = {}
        location = self._locations.get(attr)
        if location is None:
            location = self._locations[attr] = Location(self, attr)
        return location

    def forget_below(self) -> None:
        """Drop nodes, locations and routes: a cycle of them would keep a deleted model alive."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            waiting += (node._children or {}).values()
            node.routes = node._children = node._locations = None


class Location:
    """Where a tensor is: the attribute ``attr`` of the module at ``node``.

    The tensor itself is looked up each time, because materializing replaces it.

    Attributes:
        path: the full name of the tensor in the tree.
        claims: while a plan is made, the names for each slot, of all places of the tensor, with the
            paths that they lead to; ``None`` until a name leads here.

    """

    __slots__ = ("attr", "claims", "node", "path")

    def __init__(self, node: Node, attr: str) -> None:
        self.node, self.attr = node, attr
        self.path: str = node.path + attr
        self.claims: dict[str, list[tuple[str, str]]] | None = None

    @property
    def local(self) -> str:
        """The name of the tensor relative to its owner."""
        node = self.node
        owner = node.owner
        return self.attr if owner is node else node.path[len(owner.path) :] + self.attr

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter or buffer, which is there."""
        tensor = self.find()
        assert tensor is not None, self.path
        return tensor

    def find(self) -> torch.Tensor | None:
        """Return the parameter or buffer, if there is one and a checkpoint stores it."""
        node, attr = self.node, self.attr
        if node.conversions and self.is_made:
            return None
        module = node.module
        parameter = module._parameters.get(attr)
        if parameter is not None or attr in module._non_persistent_buffers_set:
            return parameter
        return module._buffers.get(attr)

    @property
    def slots(self) -> Collection[str]:
        """The names of the tensor's slots."""
        return slots_of(self.tensor)

    @property
    def is_made(self) -> bool:
        """Whether a conversion computes this tensor from another one."""
        return self.attr in made_by(self.node.conversions)

    @property
    def conversion(self) -> Conversion | None:
        """The conversion of the checkpoint's tensor; ``None`` where it is kept as it is stored."""
        return self.node.conversions.get(self.attr)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that a checkpoint has the tensor in."""
        conversion, tensor = self.conversion, self.tensor
        if conversion is not None:
            return conversion.dtype
        stored = tensor.stored_dtypes if is_typed(tensor) else ()
        return stored[0] if stored and tensor.dtype not in stored else tensor.dtype

    def stored_name(self, slot: str) -> str:
        """Return the name that a checkpoint has for ``slot`` of this tensor."""
        parent, attr = self.node.parent, self._stored_attr
        if slot:
            return f"{parent.path if parent else ''}{slot}.{attr}"
        beside = self.node.stored_beside.get(self.attr)
        return self.node.path + attr if beside is None or parent is None else parent.path + beside

    @property
    def _stored_attr(self) -> str:
        """The name relative to the module: an alias below another tensor, ``"weight.absmax"``.

        A module has no such attribute, so only a checkpoint that another library wrote has it.
        """
        module: Any = self.node.module
        for alias, target in getattr(module, "weight_aliases", {}).items():
            above, dot, _ = alias.partition(".")
            if dot and target == self.attr and above in module._parameters:
                return str(alias)
        return self.attr


def loads_itself(module: nn.Module) -> bool:
    """Tell whether ``module`` is a ``vLLMModule``: one that remembers its loads."""
    return "load_state" in module.__dict__


def state_of(module: nn.Module) -> LoadState:
    """Return what a module that loads itself remembers."""
    state: LoadState = module.__dict__["load_state"]
    return state


def made_by(conversions: Mapping[str, Conversion]) -> set[str]:
    """Return the names of the tensors that conversions of one module compute from others."""
    return {name for each in conversions.values() for name in each.makes}


def stored_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the module's own tensors that a checkpoint stores, each with its name."""
    tensors: Any = module._parameters.items()
    named = [each for each in tensors if each[1] is not None]
    declared: Any = module
    if module._buffers:
        computed = module._non_persistent_buffers_set
        for attr, buffer in module._buffers.items():
            if buffer is not None and attr not in computed:
                named.append((attr, buffer))
    if "load_state" in module.__dict__ and declared.conversions:
        made = made_by(declared.conversions)
        named = [each for each in named if each[0] not in made]
    return named


def modules_below(root: nn.Module) -> list[nn.Module]:
    """Return ``root`` and every module below; one that two paths lead to is there twice."""
    modules, seen, twice = [root], set[nn.Module](), set[nn.Module]()
    for module in modules:  # which grows
        if module not in twice and module._modules:
            modules += [child for child in module._modules.values() if child is not None]
        (twice if module in seen else seen).add(module)
    return modules


def walk(root: Node) -> Iterator[Node]:
    """Yield ``root`` and a node for every module below, parents first, in order of declaration."""
    seen = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        held = node.owner.module, node.module  # a plain module may be held by several owners
        if held in seen:
            continue
        seen.add(held)
        yield node
        if children := node.module._modules:
            names = [name for name, child in children.items() if child is not None]
            waiting += [node.child(name) for name in reversed(names)]


class Tree:
    """A root and all below it during one plan and its run; each list is made once.

    Attributes:
        top: the root's node.

    """

    def __init__(self, root: nn.Module) -> None:
        self.top = Node(root)
        self._modules: list[nn.Module] | None = None
        self._nodes: list[Node] | None = None

    @property
    def modules(self) -> list[nn.Module]:
        """All modules, as :func:`modules_below` lists them."""
        if self._modules is None:
            self._modules = modules_below(self.top.module)
        return self._modules

    @property
    def nodes(self) -> list[Node]:
        """The node of each module, parents first."""
        if self._nodes is None:
            self._nodes = list(walk(self.top))
        return self._nodes

    def list_again(self) -> None:
        """Make both lists anew when they are asked for: modules may have been added."""
        self._modules = self._nodes = None


def locations(root: nn.Module) -> Iterator[Location]:
    """Yield the location of every tensor of the tree that a checkpoint stores."""
    top = Node(root)
    try:
        for node in walk(top):
            yield from (node.location(attr) for attr, _ in stored_tensors(node.module))
    finally:
        top.forget_below()


def held_locations(top: Node) -> Iterator[Location]:
    """Yield where each parameter and persistent buffer below is: a tied tensor once.

    What a conversion makes is among them. The nodes forget their conversions, because nothing is
    converted where all of it is loaded as it is held.
    """
    seen: set[torch.Tensor] = set()
    for node in walk(top):
        node.conversions = _NO_CONVERSIONS
        module = node.module
        computed = module._non_persistent_buffers_set
        named: list[tuple[str, Any]] = [*module._parameters.items()]
        named += [each for each in module._buffers.items() if each[0] not in computed]
        for attr, tensor in named:
            if tensor is not None and tensor not in seen:
                seen.add(tensor)
                yield node.location(attr)


def own_slots(root: nn.Module) -> dict[str, set[str]]:
    """Return, by the local name of a tensor, every slot that ``root`` itself loads."""
    own = (each for each in locations(root) if each.node.owner.module is root)
    return {each.local: set(slots_of(each.tensor)) for each in own}


def expected_weights(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return a meta tensor for each name that a checkpoint of ``root`` holds."""
    expected: dict[str, torch.Tensor] = {}
    seen: set[torch.Tensor] = set()
    for location in locations(root):
        tensor, dtype = location.tensor, location.stored_dtype
        for slot in slots_of(tensor) if tensor not in seen else ():
            shape = expected_shape(tensor, slot)
            expected[location.stored_name(slot)] = torch.empty(shape, dtype=dtype, device="meta")
        seen.add(tensor)
    return expected
