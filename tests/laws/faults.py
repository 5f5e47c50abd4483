"""Faults that loaders have had or could have, and for each the law that must catch it.

A fault replaces a function or method by a faulty one. The faulty one is given the right one to
call, so it depends on what that does and not on how it is written.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from vllm_module.core import routes
from vllm_module.core.tree import locations
from vllm_module.errors import WeightLoadError
from vllm_module.parameters import Dim
from vllm_module.parameters.division import division_of

HERE = Path(__file__).parent
sharding = SimpleNamespace(**runpy.run_path(str(HERE / "faulty_sharding.py")))
loading = SimpleNamespace(**runpy.run_path(str(HERE / "faulty_loading.py")))
layouts = SimpleNamespace(**runpy.run_path(str(HERE / "faulty_layouts.py")))
stages = SimpleNamespace(**runpy.run_path(str(HERE / "faulty_stages.py")))


class Fault(NamedTuple):
    """A way to make the running code wrong, and a law and a subject that show it."""

    name: str
    law: str  # without "assert_"
    subject: str
    applied: Callable[[], AbstractContextManager[None]]


def caught(error: BaseException) -> bool:
    """Tell whether ``error`` is a law's, a load's or PyTorch's; any other comes of a broken fault.

    Where shapes do not fit, PyTorch raises ``RuntimeError``, and our kernels ``ValueError``.
    """
    if several := getattr(error, "exceptions", ()):  # what a race gives differs from run to run
        return any(map(caught, several))
    kinds = AssertionError | WeightLoadError | RuntimeError
    misfit = isinstance(error, ValueError) and " must have the shape " in str(error)
    return (misfit or isinstance(error, kinds)) and not isinstance(error, RecursionError)


def instead(where: str, faulty: Callable[..., Any]) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which ``where`` is replaced by ``faulty(right, *arguments)``.

    ``where`` is a function, method or property, written ``module:qualified name`` and below
    vllm_module; ``right`` is what it was. A function is replaced in every module that imported it.
    Entering raises ``KeyError`` where ``where`` does not exist. What parameters share is worked out
    again, inside and afterwards.
    """

    @contextmanager
    def applied() -> Iterator[None]:
        module, _, path = where.partition(":")
        *classes, name = path.split(".")
        owner: Any = importlib.import_module(f"vllm_module.{module}")
        for each in classes:
            owner = vars(owner)[each]
        right = vars(owner)[name]
        wrong = _replaced(right, faulty)
        holders = [owner] if inspect.isclass(owner) else _modules_with(name, right)
        for holder in holders:
            setattr(holder, name, wrong)
        division_of.cache_clear()
        try:
            yield
        finally:
            for holder in holders:
                setattr(holder, name, right)
            division_of.cache_clear()

    return applied


def _replaced(right: Any, faulty: Callable[..., Any]) -> Any:
    if isinstance(right, property):
        return property(_replaced(right.fget, faulty))
    if isinstance(right, classmethod | staticmethod):
        return type(right)(_replaced(right.__func__, faulty))

    signature = inspect.signature(right)

    @wraps(right)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()  # so that a faulty function need not repeat them
        return faulty(right, *given.args, **given.kwargs)

    return wrong


def _modules_with(name: str, function: object) -> list[Any]:
    ours = [m for path, m in sys.modules.items() if path.partition(".")[0] == "vllm_module"]
    return [module for module in ours if vars(module).get(name) is function]


@contextmanager
def routes_in_a_global() -> Iterator[None]:
    cache: dict[int, Any] = {}
    routes._CACHE = cache
    keep = loading.first(lambda node: cache.setdefault(id(node.module), node))
    try:
        with instead("core.routes:routes_of", keep)():
            yield
    finally:
        del routes._CACHE


@contextmanager
def gc_left_off() -> Iterator[None]:
    on = instead("core.state:GuardedModule.__init__", loading.first(lambda module: gc.enable()))
    off = instead(EXECUTE, loading.first(lambda *_: gc.disable()))
    try:
        with on(), off():  # each case begins with collection on
            yield
    finally:
        gc.enable()


cooperating = runpy.run_path(str(HERE / "cooperating.py"))["cooperating"]


def together(where: str, faulty: Callable[..., Any]) -> Callable[[], AbstractContextManager[None]]:
    """Do as ``instead`` does, where ranks load together."""

    @contextmanager
    def applied() -> Iterator[None]:
        with cooperating(instead), instead(where, faulty)():
            yield

    return applied


FILL = "core.planner:Planner.fill"
FIND = "core.routes:find"
BOXES = "parameters.boxes:boxes_of"
EXECUTE = "core.run:Run.execute"
GROUPS = "core.planner:Planner.groups"
MATERIALIZED = "core.tensors:materialized"
MATMUL = "quantization.method:UnquantizedMethod.apply"
MISFIT = "core.fit:misfit"
PIECES = "parameters:BasevLLMParameter.pieces"
READ = "core.run:Run.fill"
REFUSE = "core.report:LoadReport.raise_if_refused"
ROUTES = "core.routes:routes_of"
SAME_BITS = "core.fill:same_bits"
SHARDS = "parameters:Dim.shards"

FAULTS = (
    # Where a shard begins and ends
    Fault("the rank is always 0", "sharding_equivalent", "column",
          instead(SHARDS, lambda shards, dim, rank, size: shards(dim, 0, size))),
    Fault("ranks are counted from the end", "sharding_equivalent", "column",
          instead(SHARDS, lambda shards, dim, rank, size: shards(dim, size - 1 - rank, size))),
    Fault("replicas by modulo instead of division", "sharding_equivalent", "attention",
          instead(SHARDS, sharding.by_modulo)),
    Fault("a shard begins one too late", "sharding_equivalent", "column",
          instead(SHARDS, sharding.each_shard(sharding.one_too_late))),
    Fault("a shard is one too short", "sharding_equivalent", "column",
          instead(SHARDS, sharding.each_shard(lambda shard, _: {"length": max(0, shard.length - 1)}))),
    Fault("a shard reaches into the next one's padding", "sharding_equivalent", "embedding",
          instead(SHARDS, sharding.each_shard(lambda shard, _: {"length": shard.padded}))),
    Fault("a slot lies over the one before", "sharding_equivalent", "merged",
          instead(SHARDS, sharding.overlapping)),
    Fault("padding is not zeroed", "sharding_equivalent", "embedding",
          instead("parameters:BasevLLMParameter.materialize_on", sharding.unpadded(last_row_only=False))),
    Fault("the last row of padding is not zeroed", "sharding_equivalent", "embedding",
          instead("parameters:BasevLLMParameter.materialize_on", sharding.unpadded(last_row_only=True))),
    Fault("units are rounded down", "sharding_equivalent", "BlockQuantScaleParameter",
          instead("parameters:Dim.in_units", sharding.rounded_down)),
    Fault("every slot's scale goes to the first", "sharding_equivalent", "PerTensorScaleParameter",
          instead("parameters:PerTensorScaleParameter.pieces", sharding.to_the_first)),
    Fault("every size but 1 is refused", "sharding_equivalent", "column",
          instead("parameters:Slot.__post_init__", sharding.never_cut)),
    # What is cut from a fused tensor
    Fault("the fused tensor is cut by rank and not by slot", "routed_exactly", "merged",
          instead(PIECES, sharding.of_fused(sharding.by_rank))),
    Fault("every slot of a fused tensor is its first", "routed_exactly", "merged",
          instead(PIECES, sharding.of_fused(sharding.first_slot_for_each))),
    Fault("slots lie in the opposite order", "sharding_equivalent", "merged",
          instead(SHARDS, sharding.opposite)),
    Fault("a fused tensor fills nothing", "routed_exactly", "merged",
          instead(PIECES, sharding.of_fused(lambda pieces, parameter, weight: ()))),
    Fault("slots are declared in another order than they lie", "sharding_equivalent", "attention",
          instead("layers.linear:fused", lambda fused, *a: Dim(fused(*a).slots[::-1]))),
    # Experts, and what is stored in another order
    Fault("an expert lies one place too far", "sharding_equivalent", "experts",
          instead("parameters:Experts.shards", sharding.one_place_too_far)),
    Fault("what is left of an uneven number of experts is lost", "sharding_equivalent", "experts",
          instead("parameters:Experts.kept", sharding.without_the_rest)),
    Fault("the last rank takes what is left of an uneven number of experts", "sharding_equivalent", "experts",
          instead("parameters:Experts.kept", sharding.with_all_the_rest)),
    Fault("a rank keeps the experts of the order before they were placed", "sharding_equivalent", "experts",
          instead("parameters:Experts.shards", lambda shards, experts: shards(replace(experts, placement=None)))),
    Fault("tokens go to where experts were before", "sharding_equivalent", "experts",
          instead("layers.placed_experts:_table", sharding.as_before)),
    Fault("every place of an expert computes all of its tokens", "sharding_equivalent", "experts",
          instead("layers.placed_experts:_table", sharding.all_turns)),
    Fault("one place of an expert computes no token", "sharding_equivalent", "experts",
          instead("layers.placed_experts:_table", sharding.too_many_turns)),
    Fault("packed gate and up are exchanged", "routed_exactly", "experts",
          instead("parameters:Dim.stored_start", sharding.of_the_other_slot)),
    Fault("packed experts are cut by rank and not by slot", "routed_exactly", "experts",
          instead(PIECES, sharding.of_fused(sharding.packed_by_rank))),
    Fault("a square that is stored transposed is taken as it is", "sharding_equivalent", "layouts",
          instead(PIECES, sharding.squares_as_stored)),
    Fault("slots that alternate are cut as if one followed the other", "sharding_equivalent", "layouts",
          instead("parameters:Dim.alternates", lambda alternates, dim: False)),
    Fault("pairs are not put in order", "sharding_equivalent", "layouts",
          instead("parameters:StoredOrder.restore", lambda restore, order, stored:
                  restore(order._replace(pairs=None), stored))),
    Fault("all slots of a group are as wide as its first", "sharding_equivalent", "layouts",
          instead("parameters:StoredOrder.restore", sharding.of_equal_shares)),
    Fault("a rank forgets the bias that experts are chosen by", "sharding_equivalent", "experts",
          instead("layers.fused_moe:FusedMoE.forward", sharding.uncorrected)),
    Fault("an expert is quantized with the scale of another", "sharding_equivalent", "quantized experts",
          instead("parameters:BasevLLMParameter.region", sharding.of_next_expert)),
    # Packed weights
    Fault("a word or group of two ranks is cut", "sharding_equivalent", "packed",
          instead("parameters:Dim.in_units", sharding.cut_anywhere)),
    Fault("a slot has the scales of another", "sharding_equivalent", "packed",
          instead(PIECES, sharding.scales_of_next_slot)),
    Fault("the order of inputs is ignored", "sharding_equivalent", "packed",
          instead("quantization.packed:PackedMethod.groups_of_inputs", sharding.groups_in_order)),
    Fault("a slot has the absmax of another", "sharding_equivalent", "packed by bitsandbytes",
          instead("parameters:FlattenedParameter.pieces", sharding.absmax_of_next_slot)),
    Fault("a rank counts blocks of nested scales from its own first", "sharding_equivalent", "packed by bitsandbytes",
          instead("parameters:BasevLLMParameter.cut", sharding.counted_from_its_own_first)),
    Fault("a packed code is one too high", "sharding_equivalent", "packed while loading",
          instead("quantization.packed_online:PackOnline.quantize", sharding.one_code_higher)),
    Fault("the padding of slots is not zeroed", "order_independent", "ColumnvLLMParameter",
          instead("core.allocation:Allocation._new", sharding.unpadded_if_partial)),
    # What the layers compute
    Fault("every rank adds the bias", "sharding_equivalent", "row",
          instead(MATMUL, lambda apply, method, layer, x, bias: apply(method, layer, x, layer.bias))),
    Fault("no rank adds the bias", "sharding_equivalent", "row",
          instead(MATMUL, lambda apply, method, layer, x, bias:
                  apply(method, layer, x, bias if layer.tp_group.size == 1 else None))),
    Fault("partial sums are not reduced", "sharding_equivalent", "row",
          instead("layers.linear:RowParallelLinear.__init__", sharding.unreduced)),
    Fault("a rank takes its neighbour's input", "sharding_equivalent", "row",
          instead("layers.linear:RowParallelLinear.forward", sharding.of_neighbour)),
    Fault("fused outputs are gathered as one", "sharding_equivalent", "merged",
          instead("layers.linear:ColumnParallelLinear.forward", sharding.projected_and_gathered)),
    Fault("a rank answers for one token too many", "sharding_equivalent", "embedding",
          instead("layers.embedding:VocabParallelEmbedding.forward", sharding.looked_up(beyond=1, masked=True))),
    Fault("tokens of other ranks are not masked", "sharding_equivalent", "embedding",
          instead("layers.embedding:VocabParallelEmbedding.forward", sharding.looked_up(beyond=0, masked=False))),
    Fault("logits of padding stay", "sharding_equivalent", "vocabulary",
          instead("layers.embedding:ParallelLMHead.forward", sharding.projected_and_gathered)),
    Fault("the tied head is dropped", "accounting_exact", "LlamaForCausalLM",
          instead("layers.embedding:ParallelLMHead.tie_weights", lambda tie, head, embedding: None)),
    Fault("the last rank is left out of a sum", "sharding_equivalent", "row",
          instead("distributed.groups:SimulatedGroup.all_reduce", sharding.without_last_rank)),
    Fault("outputs are joined in another order", "sharding_equivalent", "column",
          instead("distributed.groups:SimulatedGroup.all_gather", sharding.joined_backwards)),
    # Layers with recurrent state
    Fault("the channels of a convolution are cut by rank and not by slot", "sharding_equivalent", "mamba2",
          instead("layers.recurrent:CausalConv1d.__init__", sharding.convolved_by_rank)),
    Fault("a rank normalizes its part of a group alone", "sharding_equivalent", "mamba2",
          instead("layers.gated_norm:GroupedGatedRMSNorm.forward", sharding.normalized_alone)),
    Fault("ranks of all groups add up their sums of squares", "sharding_equivalent", "mamba2",
          instead("layers.gated_norm:GroupedGatedRMSNorm._over_ranks", sharding.added_over_groups)),
    Fault("every head has the decay of the rank's first", "sharding_equivalent", "gated delta net",
          instead("layers.recurrent:DecayingLayer.decay", sharding.decays_of_first_heads)),
    Fault("every rank reads the first key heads' groups", "sharding_equivalent", "gated delta net",
          instead("parameters:Dim.groups_of", sharding.of_the_first_groups)),
    Fault("key heads' groups are taken for slots", "sharding_equivalent", "gated delta net",
          instead("parameters:Dim.alternates", lambda right, dim: False)),
    Fault("decays are computed once", "reload_in_place", "gated delta net",
          instead("layers.recurrent:DecayingLayer.process_weights_after_loading", sharding.decays_of_first_load)),
    # What ranks that load together pass to each other
    Fault("a buffer is reused before every rank has taken its batch", "sharding_equivalent", "row",
          together("distributed.shared_ring:SharedRing.start", sharding.never_waiting)),
    Fault("a batch is taken before every rank has read its part", "sharding_equivalent", "row",
          together("distributed.shared_ring:SharedRing._is_filled", sharding.own_part_alone)),
    Fault("parts of two ranks are exchanged", "sharding_equivalent", "row",
          together("cooperative.reader:SharedReader.read_part", sharding.of_another_part)),
    Fault("rows that two ranks want are laid out one too far", "sharding_equivalent", "row",
          together("cooperative.batches:_split", sharding.one_row_too_far)),
    # Where a name leads
    Fault("a component is matched by substring", "routed_exactly", "mlp",
          instead(ROUTES, loading.matched(lambda known, component: known in component))),
    Fault("a component is matched by its beginning", "routed_exactly", "attention",
          instead(ROUTES, loading.matched(lambda known, component: component.startswith(known)))),
    Fault("unknown names are passed over", "accounting_exact", "mlp",
          instead(FILL, loading.filled_if(lambda location, slot: slot is not None or location.find() is not None))),
    Fault("names of a slot a layer lacks are passed over", "routed_exactly", "mlp",
          instead(FILL, loading.filled_if(lambda location, slot: "." not in location.attr or location.find() is not None))),
    Fault("a fused layer's names are not its slots'", "accounting_exact", "mlp",
          instead(FILL, loading.to_slots(lambda names: names[:1] * len(names)))),
    Fault("two slots of a fused layer are exchanged", "sharding_equivalent", "mlp",
          instead(FILL, loading.to_slots(lambda names: names[::-1]))),
    Fault("a component may have one letter more", "routed_exactly", "named",
          instead(ROUTES, loading.matched(lambda known, component: known == component[:-1]))),
    Fault("aliases lead nowhere", "order_independent", "named",
          instead(ROUTES, loading.without_aliases)),
    Fault("an alias that is a path is matched by its first component", "routed_exactly", "renamed",
          instead(FIND, loading.by_first_component)),
    Fault("the shortest path that is declared counts", "order_independent", "renamed",
          instead(FIND, loading.shortest)),
    Fault("a rule for a path skips what begins like it", "routed_exactly", "renamed",
          instead(FIND, loading.skipping_siblings)),
    Fault("experts that a rank does not keep are passed over", "accounting_exact", "experts",
          instead(FILL, loading.filled_if(loading.is_kept))),
    Fault("experts that a rank does not keep may be missing", "accounting_exact", "experts",
          instead(REFUSE, loading.without_missing_experts)),
    Fault("an expert too many is passed over", "routed_exactly", "experts",
          instead(FILL, loading.filled_if(lambda location, slot:
                  not location.attr.partition(".")[0].isdecimal()))),
    Fault("slots of one name stored in two layers are one in the checkpoint", "sharding_equivalent", "layouts",
          instead("core.tree:Location.stored_name", loading.above_its_layer)),
    # What is accepted
    Fault("a slot may be filled twice", "accounting_exact", "mlp",
          instead(FILL, loading.filled_twice)),
    Fault("completeness is not asked for", "accounting_exact", "mlp",
          instead(REFUSE, loading.without_missing)),
    Fault("tensors are counted and not their slots", "accounting_exact", "mlp",
          instead(REFUSE, loading.without_missing_slots)),
    Fault("buffers are skipped", "sharding_equivalent", "plain",
          instead("core.tree:Location.find", loading.parameter_only)),
    Fault("any shape is accepted", "accounting_exact", "mlp",
          instead(MISFIT, loading.despite("expected shape"))),
    Fault("a shape of as many elements is accepted", "accounting_exact", "mlp",
          instead("parameters:BasevLLMParameter.accepts", lambda accepts, parameter, slot, shape:
                  shape.numel() == torch.Size(parameter.checkpoint_shape(slot)).numel())),
    Fault("any dtype is accepted", "accounting_exact", "mlp",
          instead(MISFIT, loading.despite("expected dtype"))),
    Fault("floats of another precision are refused", "order_independent", "column",
          instead(MISFIT, loading.only_its_dtype)),
    Fault("integers are taken for floats", "accounting_exact", "mlp",
          instead(MISFIT, loading.despite("expected dtype torch.float", "got torch.int"))),
    Fault("eight bits are taken for sixteen", "accounting_exact", "mlp",
          instead(MISFIT, loading.despite("expected dtype", "got torch.float8"))),
    Fault("a name may end with a dot", "routed_exactly", "column",
          instead("core.tree:Node.location", lambda location, node, attr: location(node, attr.rstrip(".")))),
    Fault("a load that broke before it wrote stops the module", "reload_in_place", "column",
          instead("core.run:Run.__init__", loading.written_from_the_start)),
    Fault("a tensor without data is accepted", "accounting_exact", "column",
          instead(MISFIT, lambda misfit, *args, needs_data: misfit(*args, needs_data=False))),
    Fault("tied tensors are compared by their first byte", "accounting_exact", "vocabulary",
          instead(SAME_BITS, loading.tied_if(lambda *values: loading.same_bits(*values, first=1)))),
    Fault("tied tensors are not compared", "accounting_exact", "vocabulary",
          instead("core.fill:Fill.check_tied", lambda check_tied, fill, unread: None)),
    Fault("tied tensors are compared after the first write", "accounting_exact", "vocabulary",
          instead(READ, loading.written_before_compared)),
    Fault("tied tensors are compared by their first row", "accounting_exact", "vocabulary",
          instead(SAME_BITS, loading.tied_if(lambda one, other: torch.equal(one[:1], other[:1])))),
    Fault("a tensor tied to a misshapen one is compared and not loaded", "accounting_exact", "named",
          instead(FILL, loading.tied_to_misfits)),
    Fault("a refused collection was half read", "accounting_exact", "mlp",
          instead(GROUPS, loading.streamed)),
    # What is left behind
    Fault("a parameter is tagged while it is read", "pure", "norm",
          instead("core.fill:Fill.jobs", loading.first(lambda fill: loading.tag(fill.location.tensor)))),
    Fault("a checkpoint's tensor is tagged", "pure", "norm",
          instead(FILL, loading.first(lambda planner, name, weight, *_: loading.tag(weight)))),
    Fault("a parameter loses its type when it becomes real", "pure", "column",
          instead(MATERIALIZED, loading.untyped)),
    Fault("routes are kept in a global", "pure", "mlp", routes_in_a_global),
    Fault("garbage collection stays off", "pure", "norm", gc_left_off),
    Fault("requires_grad is gained", "pure", "named",
          instead(MATERIALIZED, loading.requiring_grad)),
    Fault("a parameter becomes real in another precision", "pure", "plain",
          instead(MATERIALIZED, loading.in_float32)),
    # What several calls and files leave out
    Fault("an update forgets what earlier ones filled", "order_independent", "attention",
          instead(READ, loading.first(loading.forgetting))),
    Fault("the first file of an index is taken for all", "order_independent", "mlp",
          instead("weights.checkpoint:Checkpoint.__init__", lambda init, checkpoint, files, *of:
                  init(checkpoint, files[:1], *of))),
    Fault("a range of a file is off by one", "order_independent", "column",
          instead("weights.handle:FileHandle.narrow", loading.one_further)),
    # When a module is ready, and where its memory is
    Fault("a parameter with some slots filled counts as ready", "meta_first", "mlp",
          instead("core.state:check_ready", loading.first(loading.some_are_all))),
    Fault("a parameter is born with memory", "meta_first", "column",
          instead("parameters:BasevLLMParameter.__new__", lambda new, *args, **kwargs:
                  new(*args, **kwargs).materialize_on("cpu"))),
    Fault("a plan of a stream is carried out", "meta_first", "column",
          instead(GROUPS, loading.read_as_it_comes(planning=True))),
    Fault("a module runs while it is loaded", "reload_in_place", "column",
          instead("core.state:check_ready", loading.while_it_is_loaded)),
    Fault("a module is loaded twice at a time", "reload_in_place", "column",
          instead("core.state:in_progress", loading.first(loading.twice_at_a_time))),
    Fault("a load that broke marks the root alone", "reload_in_place", "mlp",
          instead("core.run:loading", loading.root_alone)),
    Fault("a reload takes new memory", "reload_in_place", "column",
          instead(EXECUTE, loading.in_new_memory)),
    Fault("a load that broke goes on serving", "reload_in_place", "column",
          instead(READ, loading.unwritten)),
    Fault("an update makes a mixture whole", "reload_in_place", "column",
          instead(EXECUTE, loading.whole_after_update)),
    # What pipeline stages hold, and pass on
    Fault("two stages hold a layer", "staged", "a tied model in depth",
          instead("distributed.groups:PipelineStage.layers", stages.one_layer_more)),
    Fault("no stage holds a layer", "staged", "a hybrid with experts in depth",
          instead("distributed.groups:PipelineStage.layers", stages.one_layer_less)),
    Fault("a tied weight is at one end alone", "staged", "a tied model in depth",
          instead("build.stages:_parameters", lambda parameters, modules: set())),
    Fault("an update leaves the last stage its tied weight", "staged", "a tied model in depth",
          instead("core.module:vLLMModule.update_weights", stages.but_the_tied)),
    Fault("a stage that is loaded ignores updates", "staged", "a tied model in depth",
          instead("core.module:vLLMModule.update_weights", stages.once_loaded)),
    Fault("a rule of stages covers a layer that is here", "accounting_exact", "a stage of a tied model",
          instead("core.routes:_declared", stages.held_elsewhere)),
    Fault("a stage is named that lacks the name", "staged", "a tied model in depth",
          instead("layers.stages:OtherStage.__init__", lambda init, module, rank, size:
                  init(module, min(rank + 1, size - 1), size))),
    Fault("a stage reads what others hold", "staged", "a tied model in depth",
          instead("core.plan:LoadPlan.reads", stages.with_tensors_of_others)),
    Fault("a stage begins without the residual", "staged", "a tied model in depth",
          instead("models.decoder:DecoderModel.forward", stages.without_residual)),
    Fault("ranks of each stage are counted from 0", "staged", "a hybrid with experts in depth",
          instead("layout.stages:_later", lambda later, shapes, first: later(shapes, 0))),
    # Where a layout says that boxes lie
    Fault("a box lies one value too far", "laid_out", "column",
          instead(BOXES, layouts.each_box(layouts.held(offset=lambda held: held.offset + 1)))),
    Fault("a box lies one row too far in padding", "laid_out", "embedding",
          instead(BOXES, layouts.each_box(layouts.held(offset=lambda held: held.offset + held.strides[0])))),
    Fault("a box is one row before the one that is held", "laid_out", "column",
          instead(BOXES, layouts.each_box(layouts.one_row_later))),
    Fault("a box lacks its last row", "laid_out", "row",
          instead(BOXES, layouts.each_box(layouts.one_row_less))),
    Fault("a box is transposed", "laid_out", "replicated",
          instead(BOXES, layouts.each_box(layouts.held(strides=lambda held: held.strides[::-1])))),
    Fault("a layout has a box twice", "laid_out", "merged", instead(BOXES, layouts.twice)),
    Fault("a layout lacks the last box", "laid_out", "merged", instead(BOXES, layouts.last_missing)),
    Fault("a rank's boxes are the next rank's", "laid_out", "attention",
          instead("core.layout_of:_Layouts._classes", layouts.of_next_rank)),
    Fault("experts lie over each other", "laid_out", "experts",
          instead(BOXES, layouts.each_box(layouts.held(step=lambda held: held.step // 2)))),
    Fault("experts that follow each other lie side by side, whatever their places", "laid_out", "experts",
          instead("core.layout_of:_consecutive", lambda consecutive, numbers:
                  [range(numbers[0], numbers[0] + len(numbers))] if numbers else [])),
    Fault("experts have one value between them", "laid_out", "experts",
          instead(BOXES, layouts.each_box(layouts.held(step=lambda held: held.step + bool(held.step))))),
    Fault("a layout takes no notice of the stored order", "laid_out", "layouts",
          instead("parameters.boxes:_of_piece", layouts.without_order)),
    Fault("packed values count as elements", "laid_out", "packed while loading",
          instead(BOXES, layouts.each_box(layouts.held(packed=lambda held: 1)))),
    Fault("what is quantized is digested as the first rows", "laid_out", "quantized while loading",
          instead("core.digests:_viewed", lambda viewed, values, start, view, shape:
                  viewed(values, (0,) * len(start), view, shape))),
    # How boxes get from one layout to another
    Fault("a box goes to the next rank", "transfers", "row",
          instead("layout.transfer:_Making._send", lambda send, making, piece, box, target, first, end:
                  send(making, piece, box, max(0, target - 1), first, end))),
    Fault("a box is sent without its last row", "transfers", "column",
          instead("layout.transfer:meeting", layouts.met_short)),
    Fault("the last piece of a box is not sent", "transfers", "row",
          instead("layout.transfer:_Making.add", lambda add, making, pieces, receivers:
                  add(making, pieces[:-1] if len(pieces) > 1 else pieces, receivers))),
    Fault("a box is sent twice", "transfers", "replicated",
          instead("layout.transfer:_Making.add", lambda add, making, pieces, receivers:
                  (add(making, pieces, receivers), add(making, pieces[-1:], receivers)))),
    Fault("only the first rank of a host gets what all of its ranks keep", "transfers", "replicated",
          instead("layout.transfer:_Making.route", lambda route, making:
                  replace(route(making), relayed=()))),
    Fault("a rank sends what another one has", "transfers", "merged",
          instead("layout.transfer:_Making._send", layouts.sent_by_next)),
    Fault("a part of a box is not gathered", "transfers", "column",
          instead("layout.transfer:_Making.route", lambda route, making:
                  replace(made := route(making), gathered=made.gathered[1:]))),
    Fault("an expert's neighbour is sent", "transfers", "experts",
          instead("layout.transfer:_Making._send", lambda send, making, piece, box, target, first, end:
                  send(making, piece, box, target, first, max(first + 1, end - 1)))),
    Fault("what is left of a row before a range is not cut out", "transfers", "layouts",
          instead("layout.views:_ranges", layouts.whole_rows)),
    Fault("a part is written at the start of its box", "transfers", "column",
          instead("layout.views:within", lambda within, *arguments:
                  replace(within(*arguments), offset=0))),
    # What is made of weights as they arrive
    Fault("a weight's scales go to another slot", "sharding_equivalent", "quantized while loading",
          instead("parameters:BasevLLMParameter.region", lambda region, parameter, slot:
                  region(parameter, next(iter(parameter.slots))))),
    Fault("a fused tensor is quantized as its first slot", "routed_exactly", "quantized while loading",
          instead("quantization.online:QuantizeOnline.jobs", sharding.quantized_first_slot)),
    Fault("the largest number is looked for above zero", "sharding_equivalent", "quantized while loading",
          instead("kernels.rows.quantize:quantize", loading.above_zero)),
    Fault("numbers are cut instead of rounded", "sharding_equivalent", "quantized while loading",
          instead("kernels.rows.quantize:quantize", loading.truncated)),
    Fault("two codes of a byte are swapped", "sharding_equivalent", "quantized to NF4 while loading",
          instead("kernels.rows.quantize_nf4:quantize_nf4", loading.codes_swapped)),
    Fault("a code's scale is that of another row", "sharding_equivalent", "quantized to NF4 while loading",
          instead("kernels.rows.quantize_nf4:quantize_nf4", loading.scales_of_another_row)),
    Fault("scales are demanded of a full-precision checkpoint", "order_independent", "quantized while loading",
          instead("core.tree:made_by", lambda made_by, conversions: set())),
    Fault("a scale is left on meta", "meta_first", "quantized while loading",
          instead(EXECUTE, loading.scales_left_on_meta)),
    Fault("a module is processed by the name that it was given", "order_independent", "derived",
          instead(READ, loading.by_the_given_name)),
    Fault("what is above is not processed again", "reload_in_place", "derived",
          instead("core.run:Run._above_filled", lambda above_filled, run: [*run._filled])),
    # What a load costs
    Fault("streamed tensors are kept", "memory_bounded", "mlp",
          instead(FILL, loading.first(loading.kept))),
    Fault("a parameter is made twice", "memory_bounded", "mlp",
          instead(MATERIALIZED, lambda materialized, *args: (materialized(*args), materialized(*args))[0])),
    Fault("tensors are read whole and cut afterwards", "reads_what_it_keeps", "column",
          instead("core.fill:Fill.pieces", loading.read_whole)),
    Fault("a rank reads experts that it does not keep", "reads_what_it_keeps", "experts",
          instead("core.fill:Fill.jobs", loading.dropped_too)),
    Fault("streamed handles are read as they come", "reads_what_it_keeps", "mlp",
          instead(GROUPS, loading.read_as_it_comes(planning=False))),
    Fault("bytes are read twice", "reads_what_it_keeps", "column",
          instead("core.fill:Fill.jobs", lambda jobs, each: (*jobs(each), *jobs(each)))),
    Fault("an update walks the whole tree", "cost_linear", "mlp",
          instead(READ, loading.first(lambda run, *_: list(locations(run.root))))),
    Fault("every name looks at all before it", "cost_linear", "mlp",
          instead(FILL, loading.first(lambda planner, *_: sum(1 for _ in planner.report.loaded)))),
)  # fmt: skip
