"""The module tree loads itself.

``load_weights`` groups pairs of name and tensor by the first component of the name and hands each
group to the child that the component names; the children do the same with the rest of the name. A
fused layer declares ``shard_names``, and the module above finds it under each of them, so no model
needs a mapping table.

All names are routed, and all that is wrong is refused in one report, before a byte is read
(``load.py``). Only tensors that a stream yields one by one are copied as they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from types import GeneratorType, MappingProxyType
from typing import Any

import torch
from torch import nn

from vllm_module import readiness, tree
from vllm_module.conversions import Conversion
from vllm_module.load import Group, Load, Weights
from vllm_module.plan import LoadPlan
from vllm_module.report import LoadReport
from vllm_module.routes import Child, Skip, Slot, routes_of, tensor_at
from vllm_module.tree import LoadState, Location, Node


class vLLMModule(nn.Module):
    """Base of every layer and model: it loads the weights below it, by name.

    A subclass declares what a checkpoint calls its weights, where that is not the attribute's name:

    Attributes:
        shard_names: components of checkpoint names that this layer fuses into its own parameters.
            Each names a slot of them.
        stored_beside: this layer's own tensors that a checkpoint stores beside it, not below it.
        weight_aliases: other components under which a checkpoint has a child, slot or tensor.
        skipped_weights: components that are not loaded, each with the rule as its reason.
        conversions: by parameter, what converts a checkpoint's tensor that is kept in another form.

    """

    shard_names: Sequence[str] = ()
    stored_beside: Sequence[str] = ()
    weight_aliases: Mapping[str, str] = MappingProxyType({})
    skipped_weights: Mapping[str, str] = MappingProxyType({})
    conversions: Mapping[str, Conversion] = MappingProxyType({})

    def load_weights(self, weights: Weights) -> set[str]:
        """Load a whole checkpoint and return the names of the parameters and buffers filled.

        ``weights`` are pairs of name and tensor or handle: a mapping, a collection of pairs, or an
        iterator, which is streamed. Names are relative to this module. Every slot of every
        parameter must be filled exactly once, and every tensor must find its place. A collection
        is checked whole before anything is written.

        A subclass may override this method, to rename or change pairs on their way to ``super()``
        or to call its children itself. Bytes may be unread when an inner call returns: work on
        loaded values belongs into :meth:`process_weights_after_loading`. An override that passes
        on a generator makes a stream of a collection, and a stream is read while it is checked.

        Raises ``WeightLoadError`` (or its subclass by kind): one report of everything that is
        missing, unexpected, duplicated or misshapen.
        """
        if isinstance(weights, Group):  # from the module above
            self._route(weights, weights.node, Load.current())
            return set()
        with Load.of(self, weights) as load, load.names_of(self) as names:
            for group in load.groups(self, weights):
                self._route(group, group.node, load)
        return names

    def _route(self, weights: Group, here: Node, load: Load) -> None:
        """Hand each name to the child, slot, tensor or rule that its first component names."""
        routes = routes_of(here)
        groups: dict[Node, Group] = {}
        for name, weight in weights:
            component, dot, rest = name.partition(".")
            match routes.get(component + dot):
                case None:  # a tensor of this module, or a name that is refused
                    load.assign(name, weight, Location(here, name), None)
                case Child() as child:  # found under its shard_names and aliases too
                    group = groups.get(child.node)
                    if group is None:
                        group = groups[child.node] = Group(child.node)
                    group.append((child.keeps + rest, weight))
                case Slot() as slot:  # of a parameter of this fused layer
                    load.assign(name, weight, tensor_at(here, rest), slot.name)
                case Skip(reason):
                    load.skip(here, name, reason)
                case Location() as tensor:  # under an alias
                    load.assign(name, weight, tensor, None)
        for node, group in groups.items():
            if isinstance(node.module, vLLMModule):
                node.module.load_weights(group)
            else:  # a plain module, such as nn.ModuleList: this one routes for it
                self._route(group, node, load)

    def process_weights_after_loading(self) -> None:
        """Compute from the loaded weights what the module runs with.

        Called once by each load and update that filled a tensor of this module or of one below,
        when all of them are filled, and after the modules below. It computes everything anew, in
        place, so that a captured CUDA graph sees it. To refuse the checkpoint, raise a
        ``WeightLoadError`` whose message begins with the name of the tensor.
        """

    @property
    def processes(self) -> bool:
        """Whether ``process_weights_after_loading`` does anything."""
        own = type(self).process_weights_after_loading
        return own is not vLLMModule.process_weights_after_loading

    def update_weights(self, weights: Weights) -> set[str]:
        """Load part of a checkpoint into the memory that the parameters already have.

        Like :meth:`load_weights`, except that nothing has to be complete. If the stream breaks,
        the model refuses to run until a :meth:`load_weights` succeeds.
        """
        with Load.of(self, weights, "update") as load, load.names_of(self) as names:
            self.load_weights(weights)
        return names

    def plan_weights(self, weights: Weights) -> LoadPlan:
        """Return what :meth:`load_weights` would do, by the same recursion, reading nothing."""
        with Load.of(self, weights, "plan") as load:
            self.load_weights(weights)
        return LoadPlan(self, load.report, load.assigned)

    def expected_weights(self) -> dict[str, torch.Tensor]:
        """Return what a whole checkpoint holds for this module: a meta tensor for each name.

        Slots of fused parameters stand under their own names, tied tensors under the first. It is
        the same on every rank. What an overridden ``load_weights`` renames is not seen.
        """
        return tree.expected_weights(self)

    def check_ready(self) -> None:
        """Raise ``ModelNotReadyError``, naming every tensor below that holds no values."""
        readiness.check_ready(self)

    def sleep(self) -> None:
        """Release the memory of all weights: back to meta, until :meth:`load_weights` fills them.

        Tied tensors stay tied, as far as both ends are below. Memory that something else refers
        to, such as a captured CUDA graph, is not released.
        """
        readiness.sleep(self)

    @property
    def load_report(self) -> LoadReport | None:
        """What the last successful load through this module did with every name."""
        return self.load_state.report

    def __init__(self) -> None:
        super().__init__()
        self.load_state = LoadState()
        readiness.guard(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "load_weights" in vars(cls):
            cls.load_weights = _within_load(cls.load_weights)  # type: ignore[method-assign]


def _within_load(override: Any) -> Any:
    """Wrap an overridden ``load_weights``, so that what it loads is accounted for."""

    @wraps(override)
    def load_weights(self: vLLMModule, weights: Weights) -> set[str]:
        with Load.of(self, weights) as load, load.names_of(self) as names:
            pairs = weights.items() if isinstance(weights, Mapping) else weights
            pairs = list(pairs) if isinstance(weights, Group) else pairs
            if isinstance(override(self, pairs), GeneratorType):
                raise TypeError(f"{type(self).__name__}.load_weights must not be a generator")
        return names

    return load_weights
