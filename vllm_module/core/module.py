"""The module tree loads itself.

``load_weights`` groups pairs of name and tensor by the first component of the name and hands each
group to the child that the component names; the children do the same with the rest of the name. A
fused layer declares ``shard_names``, and the module above finds it under each of them: there
``q_proj.weight`` leads to the child ``qkv_proj``, which takes it for slot ``q_proj`` of ``weight``.
So no model needs a mapping table. Where several declared names begin a name, the longest counts.

What each name does is written into a plan (``planner.py``). Of a mapping or collection, all names
and shapes that are wrong, unknown ones among them, are refused in one report before anything is
written; then the plan is run (``run.py``), and each parameter cuts its slot's rows for this rank.
Of an iterator, each tensor is planned and copied before the next is asked for, so the report comes
at the end; what is wrong was not copied, and the model refuses to run. Handles of an iterator are
read after the report.

To fetch from elsewhere, ``run.execute(model.plan_weights(weights), open_reader)``: ``open_reader``
gets the plan and returns a context manager of a ``run.Reader``. Its ``read(jobs)`` is called with
an iterator of handles, in the plan's order and narrowed to what this rank keeps, each with the
destination that it must have filled when ``read`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from vllm_module.base.garbage import paused_gc
from vllm_module.core.conversions import Conversion
from vllm_module.core.given import Group, Weights
from vllm_module.core.plan import LoadPlan
from vllm_module.core.planner import Planner, planning
from vllm_module.core.routes import Child, Skip, find, is_direct, routes_of
from vllm_module.core.run import loading, within_load
from vllm_module.core.state import GuardedModule
from vllm_module.core.tree import Tree, expected_weights

if TYPE_CHECKING:
    from vllm_module.core.digests import ModelDigest
    from vllm_module.layout import Layout


class vLLMModule(GuardedModule):
    """Base of every layer and model: it loads the weights below it, by name.

    A subclass declares what a checkpoint calls its weights, where that is not the attribute's name.
    It sets these attributes on the class, or in ``__init__``. They replace those of its base class.

    Attributes:
        shard_names: names that this layer fuses: ``["q_proj", "k_proj", "v_proj"]``. Each is the
            name of one slot of its parameters, and may be a path: ``"3.up_proj"``. A checkpoint has
            it in place of the layer's own name: ``self_attn.q_proj.weight`` for a slot of
            ``self_attn.qkv_proj.weight``.
        stored_beside: maps a tensor of this module to the name that a checkpoint has for it one
            level up. ``{"weight": "kernel"}`` on ``attn``: the checkpoint has ``self_attn.kernel``
            for ``self_attn.attn.weight``. Of a tensor with slots, it is the name of one checkpoint
            tensor with all of them.
        weight_aliases: other names that a checkpoint may use, each with the child, slot or tensor
            that it means. Either may be a path: ``{"h": "transformer.h"}``. An alias of a module
            stands for all names below it. No alias leads to another one, or to a rule, of the
            same module.
        skipped_weights: names that are not loaded, nor anything below them, each with the reason.
            Each may be a path. Nothing is refused if the checkpoint lacks it.
        zero_weights: names of tensors that checkpoints may have and the model lacks, each with the
            reason. Such a tensor is skipped if it is all zeros, else refused.
        held_elsewhere: for a module without tensors that stands for one of another rank, why names
            below it are not loaded; empty for all others.
        conversions: the conversion of a parameter's checkpoint tensor, by the parameter's name.
        allow_nan: whether weights may be NaN, when this is the module that is loaded or updated.
            By default a NaN is refused by the tensor's name, in a tensor in memory and in one that
            is read onto a GPU.
        keep_digests: whether loads and updates that are called on this module keep the digests of
            what they quantize or cast, as it was read: see :meth:`digest`.

    """

    shard_names: Sequence[str] = ()
    stored_beside: Mapping[str, str] = MappingProxyType({})
    weight_aliases: Mapping[str, str] = MappingProxyType({})
    skipped_weights: Mapping[str, str] = MappingProxyType({})
    zero_weights: Mapping[str, str] = MappingProxyType({})
    held_elsewhere: str = ""
    conversions: Mapping[str, Conversion] = MappingProxyType({})
    allow_nan: bool = False
    keep_digests: bool = False

    def load_weights(self, weights: Weights) -> set[str]:
        """Load a whole checkpoint and return the names of the parameters and buffers it fills.

        ``weights`` are pairs of name and tensor or handle (``weights.Handle``: a tensor that is not
        read yet), as a mapping, a collection or an iterator; names are relative to this module.
        Every slot must be filled exactly once, a tied tensor under one of its names or all. What is
        missing, unexpected, duplicated or misshapen is one ``WeightLoadError`` (or a subclass).
        Gradients are not recorded meanwhile, nor in an iterator that computes tensors.

        An override may rename or change pairs for ``super()``, or call its children itself. If it
        gets an iterator, it must pass ``super()`` a generator, so that tensors are streamed. If it
        gets a collection, it must pass a list, so that all names are checked before anything is
        written. Below the outermost module, an override is called once for each pair of a stream.
        Values may not be there yet when ``super()`` returns: compute with them in
        :meth:`process_weights_after_loading`.
        """
        if isinstance(weights, Group):  # from a module above, which needs no names back
            self._route(weights, Planner.current())
            return set()
        with loading(self, weights) as planner, planner.names_of(self) as names:
            for group in planner.groups(self, weights):
                self._route(group, planner)
        return names

    def _route(self, weights: Group, planner: Planner) -> None:
        """Hand each name to the child, tensor or rule that it leads to."""
        node = weights.node
        if isinstance(node.module, vLLMModule) and node.module is not self:
            node.module.load_weights(weights)
            return
        # A plain module, such as nn.ModuleList, is routed for by the one above it.
        routes = routes_of(node)
        groups: dict[str, Group] = {}  # by child: the slots of a fused layer arrive together
        found: dict[str, Group] = {}  # the same by component, where it alone decides
        for name, weight, full_name in weights:
            component, dot, rest = name.partition(".")
            group = found.get(component + dot)
            if group is not None:
                group.append((rest, weight, full_name))
                continue
            route, rest = find(routes, name)
            if isinstance(route, Child):
                group = groups.get(route.attr)
                if group is None:
                    group = groups[route.attr] = Group(node.child(route.attr))
                if is_direct(routes, component + dot):
                    found[component + dot] = group
                group.append((route.prefix + rest, weight, full_name))
            elif isinstance(route, Skip):
                planner.skip(full_name, route.reason)
            else:  # a tensor, behind its slot if there is one; or unknown: the planner refuses it
                planner.fill(full_name, weight, node.location(route.attr or rest), route.slot)
        for group in groups.values():
            self._route(group, planner)

    def absent_weight(self, name: str, slot: str) -> torch.Tensor | None:
        """Return the values of a slot of tensor ``name`` for a checkpoint that lacks it.

        ``None`` if a whole checkpoint must have it.
        """
        return None

    def process_weights_after_loading(self) -> None:
        """Compute from the loaded weights what the module runs with.

        Called once by each load, and by each update that fills a tensor here or below, children
        first, and only when all tensors here and below hold values; never for modules above the one
        that is loaded. A module with no ``vLLMModule`` below it is called as soon as all of its
        tensors are filled. All others, and those that an update fills in part, are called at the
        end. An override computes everything again, in place, so that a captured CUDA graph sees
        it. It leaves what was loaded as it is: an update may not bring it again. To refuse the
        checkpoint, it raises a ``WeightLoadError`` whose message begins with the name of the
        tensor.
        """

    def processing(self) -> Sequence[Callable[[], None]]:
        """Return the steps that a load calls once all weights here and below are filled.

        A base class of layers puts its own steps first, so that
        :meth:`process_weights_after_loading` stays free for the layers.
        """
        own = type(self).process_weights_after_loading
        if own is vLLMModule.process_weights_after_loading:
            return ()
        return (self.process_weights_after_loading,)

    def stored_names(self, given: Sequence[str]) -> Callable[[str], str | None]:
        """Return a function from a tensor's name to another name that a checkpoint may have for it.

        Reports of missing tensors show both. A class whose :meth:`load_weights` renames overrides
        this; ``given`` are the names that it was called with.
        """
        return lambda name: None

    @property
    def overrides_load_weights(self) -> bool:
        """Whether a ``load_weights`` other than this class's is called for the module."""
        inherits = type(self).load_weights is vLLMModule.load_weights
        return not inherits or "load_weights" in self.__dict__

    def update_weights(self, weights: Weights) -> set[str]:
        """Load part of a checkpoint into the memory that the parameters already have.

        Like :meth:`load_weights`, except that nothing has to be complete. If it fails after it has
        written, the model refuses to run until a :meth:`load_weights` succeeds.
        """
        with loading(self, weights, partial=True) as planner, planner.names_of(self) as names:
            self.load_weights(weights)  # adds to this plan
        return names

    def plan_weights(self, weights: Weights) -> LoadPlan:
        """Return what :meth:`load_weights` would do, by the same recursion, reading nothing.

        What would be refused is in the plan's report, but for what only values show. An iterator is
        used up.
        """
        with (
            planning(Tree(self), weights) as planner,
            paused_gc(isinstance(weights, Collection)),
        ):
            self.load_weights(weights)  # adds to this plan
            return planner.plan()

    def expected_weights(self) -> dict[str, torch.Tensor]:
        """Return what a whole checkpoint holds for this module: a meta tensor for each name.

        Shapes are the checkpoint's, the same on every rank. Each slot has its own name; a tied
        tensor is listed once, by the name that comes first. What an overridden ``load_weights``
        renames is not seen.
        """
        return expected_weights(self)

    def digest(self, layout: Layout | None = None) -> ModelDigest:
        """Return for each tensor of a checkpoint a number that no layout changes.

        It is of what this rank holds; ranks' digests are added. Tensors have the names of
        :meth:`expected_weights`, or with a plan's ``layout`` those of its checkpoint. What was
        quantized or cast then has the digest of what was read, if ``keep_digests`` was set before.
        """
        from vllm_module.core.digests import digest_of  # needs kernels, which a load does not

        return digest_of(self, layout)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "load_weights" in vars(cls):
            # It adds to a plan, and returns the names it filled, whatever it returns.
            cls.load_weights = within_load(cls.load_weights)  # type: ignore[method-assign]
