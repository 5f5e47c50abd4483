"""An adapter as a module tree: the base model's modules and names, with A and B on its layers.

``lora_A`` of ``q_proj`` goes the way of its ``weight``: through the same declarations, to the slot
of the same fused layer, cut by the same dimensions. So the laws of loading hold for adapters, and a
model's file has no line for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import cast

import torch
from torch import nn

from vllm_module.adapters.config import AdapterConfig
from vllm_module.adapters.copies import without_copies
from vllm_module.adapters.files import refuse_infinite, warn_of_left_out, warn_of_unnamed
from vllm_module.adapters.spellings import spellings, without_numbers
from vllm_module.base.messages import printable_name
from vllm_module.core.fill import Fill
from vllm_module.core.module import vLLMModule
from vllm_module.core.plan import LoadPlan
from vllm_module.core.planner import Planner, planning
from vllm_module.core.report import LoadReport, Problem
from vllm_module.core.run import execute, loading
from vllm_module.core.tree import Node, Tree, loads_itself, locations, modules_below
from vllm_module.errors import UnsupportedModelError, WeightLoadError
from vllm_module.layers import ParallelLMHead, VocabParallelEmbedding
from vllm_module.layers.fused_moe import ExpertsLinear, Router
from vllm_module.layers.linear import LinearBase
from vllm_module.layers.low_rank import LowRank, LowRankPart
from vllm_module.parameters import (
    BasevLLMParameter,
    Common,
    Dim,
    Experts,
    RankedColumnParameter,
    Slot,
)
from vllm_module.weights import Weight

_FEW = (1 << 15) - 1  # numbers that torch sums in one thread
Adaptable = LinearBase | ExpertsLinear | Router | VocabParallelEmbedding


class AdapterModule(vLLMModule):
    """The place of a module of the base model: its names, without its tensors."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        if loads_itself(base):
            declared = cast(vLLMModule, base)
            self.shard_names, self.weight_aliases = declared.shard_names, declared.weight_aliases
            self.held_elsewhere = declared.held_elsewhere


class LoRALayer(AdapterModule):
    """A and B of one layer, for this rank.

    Args:
        node: the layer's place in the base model.
        config: the adapter's settings.
        together: the adapter has one A and B for all experts and slots.

    Attributes:
        base: the layer; in a tuple, so that it is no child.
        modules_of: by slot, the name that a checkpoint has for the module.
        spelled: by slot, the names that the settings may have for it: that, and those of aliases.
        is_parameter: these are names of parameters, which have no module of their own.
        is_embedding: the layer is an embedding: A has a column for each token.
        absent: slots that the adapter has neither A nor B for.
        places: where the others are, and where all end, as in :class:`LowRank`.

    """

    places: tuple[tuple[LowRankPart, ...], tuple[int, ...]]

    def __init__(self, node: Node, config: AdapterConfig, *, together: bool) -> None:
        base = cast(Adaptable, node.module)
        super().__init__(base)
        self.base = (base,)
        self.absent: frozenset[str] = frozenset()
        self._config = config
        output, inputs, common = _dimensions(base, together=together)
        if any(slot.pairs for slot in output.slots):  # a format's order, which PEFT's files lack
            output = Dim(tuple(map(_in_order, output.slots)))
            self.shard_names = output.names
        location = node.location("weight")
        names = {
            slot: location.stored_name(slot).removesuffix(".weight")
            for slot in _slots(output, common["experts"])
        }
        self.is_parameter = together
        self.is_embedding = isinstance(base, VocabParallelEmbedding)
        if together and isinstance(base, ExpertsLinear) and node.parent is not None:
            names = {"": f"{node.parent.path}{base.packed}"}
        self.modules_of = names
        self.spelled = {slot: spellings(node, each) for slot, each in names.items()}
        slots = output.names or ("",)  # experts of a layer have the same ranks, or are refused
        ranks = [config.rank(*each) for each in list(self.spelled.values())[: len(slots)]]
        most = max(ranks)
        rank = Dim(
            tuple(Slot(slot, each, 1, most) for slot, each in zip(slots, ranks, strict=True))
        )
        self.lora_A = BasevLLMParameter(rank, inputs, **common)
        self.lora_B = RankedColumnParameter(output, ranks=ranks, **common)
        if together and isinstance(base, ExpertsLinear):
            if not base.transposed and output.size == inputs.size:
                config.refuse_old_experts(*self.spelled[""])
            self.shard_names = ()
            self.stored_beside = {name: f"{base.packed}.{name}" for name in ("lora_A", "lora_B")}
        # On a device, rows are multiplied by copies in slots (layers/lora_slots.py).
        self.load_state.device = torch.device("cpu")

    def absent_weight(self, name: str, slot: str) -> torch.Tensor | None:
        """Return zeros for a slot that the adapter does not adapt."""
        if slot not in self.absent:
            return None
        parameter = cast(BasevLLMParameter, self.get_parameter(name))
        return torch.zeros((), dtype=parameter.dtype).expand(parameter.checkpoint_shape(slot))

    def low_rank(self) -> LowRank:
        """Return what the layer computes with, without the slots that are absent."""
        return LowRank(self.lora_A.data, self.lora_B.data, *self.places)

    def find_places(self) -> None:
        """Find where the slots are that are not absent: once for all adapters that are alike."""
        a, b = self.lora_A, self.lora_B
        experts = a.experts is not None
        ranks, outputs = a.shards[experts], b.shards[experts]
        present = [slot for slot in self.modules_of if slot not in self.absent]
        parts = []
        if len(ranks) == 1:  # one A for all of the layer's output
            size, end = ranks[0].length, outputs[-1].offset + outputs[-1].padded
            parts.append(LowRankPart(slice(0, size), slice(0, end), self._scale(present, size)))
        else:
            for rank, output in zip(ranks, outputs, strict=True):
                # Of experts, the slot of each.
                slots = [each for each in present if f".{each}".endswith(f".{rank.name}")]
                if slots:
                    parts.append(
                        LowRankPart(
                            slice(rank.offset, rank.offset + rank.length),
                            slice(output.offset, output.offset + output.padded),
                            self._scale(slots, rank.length),
                        )
                    )
        ends = [each.offset + each.padded for each in outputs]
        self.places = tuple(parts), tuple(ends if len(ranks) > 1 else ends[-1:])

    def scale(self, slot: str, rank: int) -> float:
        """Return the factor of B @ A of a slot; ``rank`` is that of its A."""
        return self._config.scale(*self.spelled[slot], rank=rank)

    def _scale(self, slots: Sequence[str], rank: int) -> float:
        """Return the factor that these slots share."""
        scales = {self.scale(slot, rank) for slot in slots}
        if len(scales) > 1:
            raise UnsupportedModelError(
                f"alpha_pattern gives {self.modules_of[slots[0]]} another scale than other experts "
                "of its layer, which share one: merge the adapter into its base model with PEFT's "
                "merge_and_unload()"
            )
        return scales.pop()


def _is_of_experts(layer: LoRALayer) -> bool:
    return isinstance(layer.base[0], ExpertsLinear)


def _dimensions(base: Adaptable, *, together: bool) -> tuple[Dim, Dim, Common]:
    """Return a layer's output and input, and the other arguments of its parameters."""
    if isinstance(base, Router):
        of = base.weight
        common = Common(experts=None, tp_rank=of.tp_rank, tp_size=of.tp_size, dtype=of.dtype)
        first, second = of.dims
        return first, second, common
    output, common = base.output, base.common(base.params_dtype)
    if isinstance(base, VocabParallelEmbedding):
        # Features are the output, and A has a column for each token.
        return base.input, output, common
    if together and base.experts is not None:
        common["experts"] = replace(base.experts, together=True)
        output = replace(output, groups=output.groups or 1)
    return output, base.input, common


def _in_order(slot: Slot) -> Slot:
    """Return a slot of a layer's output as transformers stores it, and so PEFT its B."""
    return replace(slot, name=slot.name.removesuffix("_pairs"), pairs=0)


def _slots(output: Dim, experts: Experts | None) -> list[str]:
    """Return the names of the slots of an adapter's parameters."""
    names = list(output.names) or [""]
    if experts is None or experts.together:
        return names
    return [f"{number}.{name}" for number in range(experts.count) for name in names]


class Adapter(AdapterModule):
    """A LoRA adapter of a base model, on this rank.

    Args:
        base: the model, built and on its device; nothing of it is changed or kept but its layers.
        config: the adapter's settings.

    Attributes:
        base: the model; in a tuple, so that it is no child.
        config: the same.
        base_has_changed: set it once the base's weights are others than those that PEFT's copies of
            them were compared with; they are not compared again.

    """

    base_has_changed = False

    def __init__(self, base: vLLMModule, config: AdapterConfig) -> None:
        super().__init__(base)
        self.base = (base,)
        self.config = config
        packed = {each.rpartition(".")[2] for each in config.target_parameters or ()} - {"weight"}
        made: dict[nn.Module, AdapterModule] = {base: self}
        places: list[Node] = []
        for node in Tree(base).nodes:
            module = node.module
            if isinstance(module, Adaptable):
                experts = getattr(module, "experts", None)
                together = experts is not None and (bool(packed) or experts.together)
                made[module] = LoRALayer(node, config, together=together)
                places.append(node)
            elif getattr(module, "held_elsewhere", ""):
                made[module] = AdapterModule(module)
                places.append(node)
        # Of the others, those on the way to a layer: an adapter has no names below norms.
        for node in places:
            above = node.parent
            while above is not None and above.module not in made:
                made[above.module] = AdapterModule(above.module)
                above = above.parent
        for module, own in made.items():
            for name, child in module.named_children():
                if child in made:
                    own.add_module(name, made[child])
        for module, own in made.items():  # no alias leads to a norm
            below = module.named_modules() if own.weight_aliases else ()
            gone = {path for path, each in below if each not in made}
            own.weight_aliases = {a: of for a, of in own.weight_aliases.items() if of not in gone}

    def load(self, weights: Mapping[str, Weight]) -> None:
        """Load a whole adapter, under the base model's names.

        Raises ``WeightLoadError`` for a name without a place, a shape that does not fit, one of A
        and B without the other, a module that the settings name without either, and for NaN and
        infinity, which would reach the rows of others.
        """
        execute(self.plan(without_copies(self.base[0], weights)))
        self.check_finite()

    def check_finite(self) -> None:
        """Raise ``WeightReadError`` for a NaN or an infinity in A and B."""
        # One pass, and padding is zero. Torch starts threads for longer sums, which take a
        # millisecond each where the cores are busy.
        parts = chain.from_iterable(
            each.data.view(-1).chunk(-(-each.numel() // _FEW))
            if each.numel() > _FEW
            else (each.data,)
            for each in self.tensors()
        )
        if all(math.isfinite(part.sum().item()) for part in parts):
            return
        for location in locations(self):
            tensor = cast(BasevLLMParameter, location.tensor)
            for slot in tensor.slots:
                refuse_infinite(location.stored_name(slot), tensor.region(slot))

    def update(self, weights: Mapping[str, Weight]) -> None:
        """Update A and B in place; nothing has changed if the update is refused."""
        with loading(self, found := self._finite(weights), partial=True) as planner:
            self._route_update(planner, found)

    def check_update(self, weights: Mapping[str, Weight]) -> None:
        """Raise what an update would raise before it writes anything.

        A number that the adapter's dtype does not have is refused, too.
        """
        with planning(Tree(self), found := self._finite(weights)) as planner:
            self._route_update(planner, found)
            plan = planner.plan(partial=True)
        self._refuse(plan.report)
        for fill in plan.fills:
            dtype = fill.location.tensor.dtype
            if isinstance(fill.weight, torch.Tensor) and fill.weight.dtype != dtype:
                refuse_infinite(f"{fill.name}, as {dtype},", fill.weight.to(dtype))

    def _route_update(self, planner: Planner, weights: Mapping[str, Weight]) -> None:
        """Plan an update; what is for a slot that the adapter does not adapt has no place."""
        self.load_weights(weights)  # adds to this plan
        planner.report.unexpected += [
            Problem(
                fill.name,
                "the adapter was loaded without A and B of this module, and an update changes "
                "those that it has: load one with them under another name",
            )
            for fill in planner.fills
            if not cast(LoRALayer, fill.location.node.module).absent.isdisjoint(fill.slots)
        ]

    def _finite(self, weights: Mapping[str, Weight]) -> dict[str, Weight]:
        """Return A and B alone; refuse NaN and infinity."""
        is_base = (lambda copy: True) if self.base_has_changed else Fill.is_held
        found = without_copies(self.base[0], weights, is_base)
        for name, weight in found.items():
            if isinstance(weight, torch.Tensor):
                refuse_infinite(name, weight)
        return found

    def plan(self, weights: Mapping[str, Weight]) -> LoadPlan:
        """Return what a load of A and B reads, and keep the layers that it is for.

        These are the ones that ``weights`` have a tensor for, or that the settings name. Raises
        ``WeightLoadError`` for all that names and shapes show.
        """
        with planning(Tree(self), weights) as planner:
            self.load_weights(weights)  # adds to this plan
            self._refuse(planner.report)
            self._place(planner.fills, elsewhere=bool(planner.report.skipped))
            plan = planner.plan()
        self._refuse(plan.report)
        return plan

    def _refuse(self, report: LoadReport) -> None:
        report.unexpected[:] = self._explained(report.unexpected)
        if base := self.config.base_model_name_or_path:
            report.advice = f"The adapter was made for {printable_name(base)}: is this that model?"
        report.raise_if_refused(f"An adapter of {type(self.base[0]).__name__}", touched=False)

    def _place(self, fills: Sequence[Fill], *, elsewhere: bool) -> None:
        """Keep A and B of the layers that something fills, or that the settings name.

        There is one, unless what the adapter has is ``elsewhere``, on other ranks.
        """
        filled: dict[nn.Module, set[str]] = {}
        unnamed: list[str] = []
        left_out: list[str] = []
        for fill in fills:
            filled.setdefault(fill.location.node.module, set()).update(fill.slots)
        has_experts = any(_is_of_experts(cast(LoRALayer, each)) for each in filled)
        has = {
            without_numbers(cast(LoRALayer, layer).modules_of[slot])
            for layer, slots in filled.items()
            for slot in slots
        }
        for layer in self.layers():
            present = filled.get(layer, set())
            needed = {slot for slot, each in layer.spelled.items() if self._targets(layer, each)}
            if missing := needed - present:
                never_made = self._never_made(layer, missing, has, has_experts=has_experts)
                left_out += (layer.modules_of[slot] for slot in never_made)
                needed -= never_made
            layer.absent = frozenset(layer.modules_of) - present - needed
            unnamed += (layer.modules_of[slot] for slot in present - needed)
            if present or needed:
                layer.find_places()
            else:
                layer._parameters.clear()
        if not elsewhere and not any(self.layers()):
            raise WeightLoadError(
                "the adapter has no A and B, and its target_modules are of no layer of "
                f"{type(self.base[0]).__name__}"
            )
        if self.config.target_modules:
            warn_of_unnamed(unnamed)
        warn_of_left_out(left_out)

    def _never_made(
        self, layer: LoRALayer, missing: set[str], has: set[str], *, has_experts: bool
    ) -> set[str]:
        """Return the slots of ``missing`` that PEFT makes no A and B for, though it is told to.

        ``has`` are the modules of any layer, without its number, that the adapter has A and B for.
        """
        # In transformers 5 experts are no modules, and PEFT leaves them out of some adapters.
        if not has_experts and _is_of_experts(layer) and not layer.is_parameter:
            return missing
        # Of a module's names, transformers and so PEFT know only one, and no file says which.
        return {
            slot
            for slot in missing
            if without_numbers(layer.modules_of[slot]) not in has
            and not all(self._targets(layer, [each]) for each in layer.spelled[slot])
        }

    def _explained(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems of names without a place, as those of the base model's modules."""
        nodes = Tree(self.base[0]).nodes if problems else []
        others = {
            f"{node.path}{attr}": type(node.module).__name__
            for node in nodes
            if not isinstance(node.module, Adaptable)
            for attr in ("lora_A", "lora_B")
        }
        return [
            each._replace(
                detail=f"{others[each.name]} is no layer that an adapter can add to: merge the "
                "adapter into its base model with PEFT's merge_and_unload()"
            )
            if each.name in others
            else each
            for each in problems
        ]

    def _targets(self, layer: LoRALayer, names: Sequence[str]) -> bool:
        (base,) = layer.base
        if layer.is_parameter:
            return self.config.targets_parameter(*names)
        if self.config.target_modules == "all-linear":
            return isinstance(base, LinearBase) and not isinstance(base, ParallelLMHead)
        return self.config.targets(*names) or self.config.targets_weight(*names)

    def tensors(self) -> Iterator[nn.Parameter]:
        """Yield A and B of each layer."""
        for layer in self.layers():
            yield layer.lora_A
            yield layer.lora_B

    def layers(self) -> Iterator[LoRALayer]:
        """Yield the layers with A and B."""
        for each in dict.fromkeys(modules_below(self)):  # nn.Module.modules takes longer
            if isinstance(each, LoRALayer) and each._parameters:
                yield each
