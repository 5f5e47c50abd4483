"""Faults that loaders have had or could have, each a change of one line of the running code.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A change of the function ``where``, and a law and a subject that show it."""

    name: str
    where: str  # module:qualified name, below vllm_module
    right: str  # stands in the function exactly once
    wrong: str
    law: str  # less "assert_"
    subject: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the running function the faulty code while the block runs."""
        function = _function(self.where)
        before = function.__code__
        function.__code__ = self._faulty(function)
        try:
            yield
        finally:
            function.__code__ = before

    def _faulty(self, function: FunctionType) -> CodeType:
        lines, first = inspect.getsourcelines(function)
        segment = "".join(lines)
        assert segment.count(self.right) == 1, f"{self.where} has no such line: {self.right}"
        module = inspect.getmodule(function)
        source = inspect.getsource(module).splitlines(keepends=True)
        changed = segment.replace(self.right, self.wrong)
        source[first - 1 : first - 1 + len(lines)] = [changed]
        code = compile("".join(source), module.__file__, "exec", flags=_flags(function))
        (found,) = [
            each
            for each in _nested(code)
            if each.co_name == function.__code__.co_name
            and each.co_firstlineno == function.__code__.co_firstlineno
        ]
        return found


def _function(where: str) -> Any:
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(f"vllm_module.{module}")
    for attribute in path.split("."):
        found = inspect.getattr_static(found, attribute)
    found = found.fget if isinstance(found, property) else found
    return inspect.unwrap(found)


def _flags(function: FunctionType) -> int:
    import __future__

    return function.__code__.co_flags & __future__.annotations.compiler_flag


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


_DISTRIBUTE = "module:vLLMModule._distribute"
_CUT = "parameters:BasevLLMParameter.cut"
_SHARDS = "parameters:Dim.shards"
_ROW = "layers.linear:RowParallelLinear.forward"
_EMBED = "layers.embedding:VocabParallelEmbedding.forward"

FAULTS = (
    # Where a shard begins and ends
    Fault("the rank is always 0", _SHARDS,
          "tp_rank * slot.parts // tp_size", "0 * slot.parts // tp_size",
          "sharding_equivalent", "column"),
    Fault("ranks are counted from the end", _SHARDS,
          "tp_rank * slot.parts // tp_size", "(tp_size - 1 - tp_rank) * slot.parts // tp_size",
          "sharding_equivalent", "column"),
    Fault("replicas by modulo instead of division", _SHARDS,
          "tp_rank * slot.parts // tp_size", "tp_rank % slot.parts",
          "sharding_equivalent", "attention"),
    Fault("a shard begins one too late", _SHARDS,
          "min(part * room, slot.size)", "min(part * room + (part > 0), slot.size)",
          "sharding_equivalent", "column"),
    Fault("a shard is one too short", _SHARDS,
          "min(room, slot.size - start)", "max(1, min(room, slot.size - start) - 1)",
          "sharding_equivalent", "column"),
    Fault("a shard reaches into the next one's padding", _SHARDS,
          "min(room, slot.size - start)", "room",
          "sharding_equivalent", "embedding"),
    Fault("a slot lies over the one before", _SHARDS,
          "offset += room", "offset += room - 1",
          "sharding_equivalent", "merged"),
    Fault("padding is not zeroed", "parameters:BasevLLMParameter.materialize_on",
          ".zero_()", "",
          "sharding_equivalent", "embedding"),
    Fault("padding is zeroed one too far", "parameters:BasevLLMParameter.materialize_on",
          "data.narrow(dim, shard.offset + shard.length, padding)",
          "data.narrow(dim, shard.offset + shard.length, padding - 1)",
          "sharding_equivalent", "embedding"),
    Fault("units are rounded down", "parameters:Dim.in_units",
          "-(-slot.size // unit), -(-slot.padded // unit)",
          "slot.size // unit, slot.padded // unit",
          "sharding_equivalent", "BlockQuantScaleParameter"),
    Fault("every slot's scale goes to the first", "parameters:PerTensorScaleParameter.cut",
          "self.data[index]", "self.data[0]",
          "sharding_equivalent", "PerTensorScaleParameter"),
    Fault("every size but 1 is refused", "parameters:Slot.__post_init__",
          "if self.padded % self.parts:", "if self.parts > 1:",
          "sharding_equivalent", "column"),
    # What is cut from a fused tensor
    Fault("the fused tensor is cut by rank and not by slot", _CUT,
          "begin + start, length)", "(begin + start if slot is not None else self.tp_rank * length), length)",
          "routed_exactly", "merged"),
    Fault("every slot of a fused tensor is its first", _CUT,
          "first += declared.size", "first += 0",
          "routed_exactly", "merged"),
    Fault("slots lie in the opposite order", _CUT,
          "target.narrow(dim, offset, length)",
          "target.narrow(dim, room[dim] - offset - length, length)",
          "sharding_equivalent", "merged"),
    Fault("a fused tensor fills nothing", _CUT,
          "if slot is None or slot == declared.name", "if slot == declared.name",
          "routed_exactly", "merged"),
    Fault("slots are declared in another order than they lie", "layers.linear:fused",
          "Dim(tuple(slots))", "Dim(tuple(slots)[::-1])",
          "routed_exactly", "attention"),
    # What the layers compute
    Fault("every rank adds the bias", _ROW,
          "if group.rank == 0 and not", "if not",
          "sharding_equivalent", "row"),
    Fault("no rank adds the bias", _ROW,
          "if group.rank == 0 and not", "if group.rank == group.size - 2 and not",
          "sharding_equivalent", "row"),
    Fault("partial sums are not reduced", _ROW,
          "group.all_reduce(y) if self.reduce_results and group.size > 1 else y", "y",
          "sharding_equivalent", "row"),
    Fault("a rank takes its neighbour's input", _ROW,
          "[group.rank]", "[group.rank - 1]",
          "sharding_equivalent", "row"),
    Fault("fused outputs are gathered as one", "layers.linear:ColumnParallelLinear.forward",
          "torch.split(y, [shard.room for shard in self.weight.shards[0]], dim=-1)", "[y]",
          "sharding_equivalent", "merged"),
    Fault("a rank answers for one token too many", _EMBED,
          "local >= shard.length", "local > shard.length",
          "sharding_equivalent", "embedding"),
    Fault("tokens of other ranks are not masked", _EMBED,
          "rows.masked_fill(elsewhere.unsqueeze(-1), 0)", "rows",
          "sharding_equivalent", "embedding"),
    Fault("logits of padding stay", "layers.embedding:ParallelLMHead.forward",
          "[..., : self.num_embeddings]", "",
          "sharding_equivalent", "vocabulary"),
    Fault("the tied head is dropped", "layers.embedding:ParallelLMHead.tie_weights",
          "self.weight = embedding.weight", "pass",
          "accounting_exact", "LlamaForCausalLM"),
    Fault("the last rank is left out of a sum", "distributed.groups:SimulatedGroup.all_reduce",
          "for other in others:", "for other in others[:-1]:",
          "sharding_equivalent", "row"),
    Fault("outputs are joined in another order", "distributed.groups:_Meeting.exchange",
          "for rank in range(self.size)]", "for rank in reversed(range(self.size))]",
          "sharding_equivalent", "column"),
    # Where a name leads
    Fault("a component is matched by substring", _DISTRIBUTE,
          "routes.get(component)",
          "next((route for known, route in routes.items() if known in component), None)",
          "routed_exactly", "mlp"),
    Fault("a component is matched by its beginning", _DISTRIBUTE,
          "routes.get(component)",
          "next((route for known, route in routes.items() if component.startswith(known)), None)",
          "routed_exactly", "attention"),
    Fault("unknown names are passed over", _DISTRIBUTE,
          "ledger.report.unexpected.append(Problem(prefix + name, detail))", "pass",
          "accounting_exact", "mlp"),
    Fault("names of a slot a layer lacks are passed over", "ledger:Ledger.enter",
          "report.unexpected.append(Problem(name, detail))", "pass",
          "routed_exactly", "mlp"),
    Fault("a fused layer's names are not its slots'", "routes:routes_of",
          "claims += [(slot, Route(attr, child, slot)) for slot in child.shard_names]",
          "claims += [(s, Route(attr, child, child.shard_names[0])) for s in child.shard_names]",
          "accounting_exact", "mlp"),
    Fault("two slots of a fused layer are exchanged", "routes:routes_of",
          "claims += [(slot, Route(attr, child, slot)) for slot in child.shard_names]",
          "claims += [(s, Route(attr, child, t)) for s, t in zip(child.shard_names, child.shard_names[::-1])]",
          "sharding_equivalent", "mlp"),
    Fault("a component may have one letter more", _DISTRIBUTE,
          "routes.get(component)", "routes.get(component, routes.get(component[:-1]))",
          "routed_exactly", "named"),
    Fault("aliases lead nowhere", "routes:routes_of",
          "claims += [(alias, known[name]) for alias, name in aliases if name in known]", "pass",
          "order_independent", "named"),
    # What is accepted
    Fault("a slot may be filled twice", "ledger:Ledger.enter",
          "if earlier is not None:", "if False:",
          "accounting_exact", "mlp"),
    Fault("completeness is not asked for", "module:vLLMModule._settle",
          'if ledger.mode != "update":', "if False:",
          "accounting_exact", "mlp"),
    Fault("tensors are counted and not their slots", "ledger:Ledger.demand_completeness",
          "(key, slot) not in self._filled and", "key not in {k for k, _ in self._filled} and",
          "accounting_exact", "mlp"),
    Fault("buffers are skipped", "ledger:Location.tensor",
          "return holder._buffers.get(attr)", "return None",
          "sharding_equivalent", "plain"),
    Fault("any shape is accepted", "ledger:_misfit",
          "fits = tensor.accepts(slot, torch.Size(weight.shape))", "fits = True",
          "accounting_exact", "mlp"),
    Fault("a shape of as many elements is accepted", "parameters:BasevLLMParameter.accepts",
          "shape == self.checkpoint_shape(slot)",
          "shape.numel() == torch.Size(self.checkpoint_shape(slot)).numel()",
          "accounting_exact", "mlp"),
    Fault("any dtype is accepted", "ledger:_misfit",
          "if weight.dtype != dtype and not", "if False and not",
          "accounting_exact", "mlp"),
    Fault("floats of another precision are refused", "ledger:_is_wide",
          "dtype.itemsize > 1", "dtype.itemsize > 8",
          "order_independent", "column"),
    Fault("integers are taken for floats", "ledger:_is_wide",
          "dtype.is_floating_point and dtype.itemsize > 1", "True",
          "accounting_exact", "column"),
    Fault("eight bits are taken for sixteen", "ledger:_is_wide",
          "dtype.itemsize > 1", "dtype.itemsize > 0",
          "accounting_exact", "column"),
    Fault("a name may end with a dot", _DISTRIBUTE,
          "elif not dot and (", "elif not rest and (",
          "routed_exactly", "column"),
    Fault("a load that broke before it wrote stops the module", "module:vLLMModule._account",
          "if loading.ledger.touched:", "if True:",
          "reload_in_place", "column"),
    Fault("a tensor without data is accepted", "ledger:_misfit",
          "weight.is_meta and mode", "False and mode",
          "accounting_exact", "column"),
    Fault("tied tensors are compared by their first byte", "ledger:_check_tied",
          "torch.equal(_bits(copy), _bits(held))", "torch.equal(_bits(copy)[:1], _bits(held)[:1])",
          "accounting_exact", "vocabulary"),
    Fault("tied tensors are not compared", "ledger:Ledger.fill",
          "if filling.tied_to is not None:", "if False:",
          "accounting_exact", "vocabulary"),
    Fault("a refused collection was half read", "module:vLLMModule._receive",
          "if isinstance(pairs, Collection):", "if False:",
          "accounting_exact", "mlp"),
    # What is left behind
    Fault("a parameter is tagged while it is read", "ledger:Ledger._jobs",
          "self._materialize(filling.location)",
          "self._materialize(filling.location); filling.location.tensor.is_loaded = True",
          "pure", "norm"),
    Fault("a checkpoint's tensor is tagged", "ledger:Ledger.enter",
          "self.paths.append(path)", "self.paths.append(path); weight.is_loaded = True",
          "pure", "norm"),
    Fault("a parameter loses its type when it becomes real", "ledger:materialized",
          "return tensor.materialize_on(device)",
          "return nn.Parameter(tensor.materialize_on(device).data, False)",
          "pure", "column"),
    Fault("routes are kept in a global", _DISTRIBUTE,
          "routes = loading.routes[id(module)] = routes_of(module)",
          'routes = globals().setdefault("_CACHE", {}).setdefault(id(module), routes_of(module))',
          "pure", "mlp"),
    Fault("garbage collection stays off", "module:_paused_gc",
          "if was_enabled:", "if False:",
          "pure", "norm"),
    Fault("requires_grad is gained", "ledger:materialized",
          "requires_grad=tensor.requires_grad", "requires_grad=True",
          "pure", "named"),
    Fault("a parameter becomes real in another precision", "ledger:materialized",
          "tensor.stride(), dtype=tensor.dtype", "tensor.stride(), dtype=torch.float32",
          "pure", "plain"),
    # What several calls and files leave out
    Fault("an update forgets what earlier ones filled", "ledger:Ledger._mark_filled",
          "place.owner._filled.update(filled)",
          "place.owner._filled.clear(); place.owner._filled.update(filled)",
          "order_independent", "column"),
    Fault("the first file of an index is taken for all", "weights.checkpoint:open_checkpoint",
          "Checkpoint(tuple(files))", "Checkpoint(tuple(files[:1]))",
          "order_independent", "mlp"),
    # When a module is ready, and where its memory is
    Fault("a parameter with some slots filled counts as ready", "module:vLLMModule.check_ready",
          "if tensor.is_meta or (location.local, slot) not in location.owner._filled",
          "if tensor.is_meta",
          "meta_first", "mlp"),
    Fault("a parameter is born with memory", "parameters:BasevLLMParameter.__new__",
          'device="meta"', 'device="cpu"',
          "meta_first", "column"),
    Fault("a plan of a stream is carried out", "module:vLLMModule._receive",
          ' and loading.ledger.mode != "plan"', "",
          "meta_first", "column"),
    Fault("a module runs while it is loaded", "module:vLLMModule.check_ready",
          "if module._busy:", "if False:",
          "reload_in_place", "column"),
    Fault("a module is loaded twice at a time", "module:vLLMModule._account",
          "if self._busy:", "if False:",
          "reload_in_place", "column"),
    Fault("a load that broke marks the root alone", "module:vLLMModule._account",
          "for module in self._modules_that_load():", "for module in [self]:",
          "reload_in_place", "mlp"),
    Fault("a reload takes new memory", "ledger:Ledger._materialize",
          "if not tensor.is_meta:", "if False:",
          "reload_in_place", "column"),
    Fault("a load that broke goes on serving", "module:vLLMModule._account",
          "if loading.ledger.touched:", "if False:",
          "reload_in_place", "column"),
    Fault("an update makes a mixture whole", "module:vLLMModule._settle",
          'if ledger.mode == "update":', "if False:",
          "reload_in_place", "column"),
    # What is made of weights as they arrive
    Fault("a weight's scales go to another slot", "parameters:BasevLLMParameter.region",
          "of_dim[self.slots.index(slot)] if", "of_dim[0] if",
          "sharding_equivalent", "quantized while loading"),
    Fault("a fused tensor is quantized as its first slot", "quantization.online:QuantizeOnline.jobs",
          "first += declared.size", "first += 0",
          "routed_exactly", "quantized while loading"),
    Fault("the largest number is looked for above zero", "kernels.quantize:_amax",
          "torch.maximum(most, -least)", "most",
          "sharding_equivalent", "quantized while loading"),
    Fault("numbers are cut instead of rounded", "kernels.quantize:quantize_reference",
          "values.round_()", "values.trunc_()",
          "sharding_equivalent", "quantized while loading"),
    Fault("scales are demanded of a full-precision checkpoint", "ledger:Location.tensor",
          "self._conversions and self.is_made", "False",
          "order_independent", "quantized while loading"),
    Fault("a scale stays on meta", "ledger:Ledger._materialize",
          "location.holder._parameters[made] = materialized(there, device)", "pass",
          "meta_first", "quantized while loading"),
    Fault("a module is processed by the name that it was given", "ledger:Ledger._mark_filled",
          "for place in places:", "for place in places[:1]:",
          "order_independent", "derived"),
    Fault("what is above is not processed again", "module:vLLMModule._settle",
          "self._on_the_way_to(processing.prefixes)", "{}",
          "reload_in_place", "derived"),
    # What a load costs
    Fault("streamed tensors are kept", "ledger:Ledger.enter",
          "self.paths.append(path)", "self.paths.append(path); self._replaced[-len(self.paths)] = (0, weight)",
          "memory_bounded", "mlp"),
    Fault("a parameter is made twice", "ledger:materialized",
          "return tensor.materialize_on(device)",
          "return (tensor.materialize_on(device), tensor.materialize_on(device))[0]",
          "memory_bounded", "mlp"),
    Fault("tensors are read whole and cut afterwards", "ledger:Filling.cut",
          "tensor.cut(self.weight, self.slot)",
          "tensor.cut(self.weight if isinstance(self.weight, torch.Tensor) else self.weight.read(), self.slot)",
          "reads_what_it_keeps", "column"),
    Fault("streamed handles are read as they come", "module:vLLMModule._receive",
          "isinstance(pair[1], torch.Tensor) and", "True and",
          "reads_what_it_keeps", "mlp"),
    Fault("bytes are read twice", "ledger:Ledger._jobs",
          "yield from filling.jobs()", "yield from (*filling.cut(), *filling.cut())",
          "reads_what_it_keeps", "column"),
    Fault("an update walks the whole tree", "ledger:Ledger._mark_filled",
          'self.mode == "load"', "True",
          "cost_linear", "mlp"),
    Fault("every name looks at all before it", "ledger:Ledger.enter",
          "self.paths.append(path)", "self.paths.append(path); sum(1 for _ in self.paths)",
          "cost_linear", "mlp"),
)  # fmt: skip
