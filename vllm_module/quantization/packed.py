"""Weights of two, three, four or eight bits that stay packed: GPTQ, AWQ and compressed-tensors.

An element is ``(code - zero) * scale``; a scale and a zero are shared by a group of inputs. The
formats differ in names, in which dimension shares a word, and in which of two dimensions is first:
GPTQ's ``qweight [input words, output]`` is compressed-tensors' ``weight_packed [output, input
words]``, transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch.nn import functional as F

from vllm_module.errors import WeightReadError
from vllm_module.kernels.experts.grouped_matmul_packed import (
    dequantize_experts,
    grouped_matmul_packed,
)
from vllm_module.kernels.matmul.packed_matmul import packed_matmul
from vllm_module.kernels.matmul.packed_words import Packing, dequantize_packed, pack, unpack
from vllm_module.parameters import (
    BasevLLMParameter,
    Dim,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
    PerSlotVectorParameter,
)
from vllm_module.quantization.demand import demand, with_slot
from vllm_module.quantization.method import QuantizableLayer, QuantizeMethod, StoredTensor
from vllm_module.quantization.rows import ExpertRows

_ADVICE = "quantize the checkpoint again"
_ZERO_BIAS = "AutoGPTQ stores zeros for a layer without a bias"


class PackedFormat(NamedTuple):
    """What a format calls a layer's tensors, and how it stores them.

    Attributes:
        name: of the format, for messages.
        words, scales, zeros, group_of: names of the tensors.
        shape: name of the tensor with the weight's shape; empty if there is none.
        transposed: whether they are stored as ``[input, output]``.
        along, order: how weights share words (:class:`Packing`). Zeros share them along the output.
        stores_all: whether zeros are stored for symmetric weights too, groups of inputs that are in
            order, and, by old versions of AutoGPTQ, a bias of zeros for layers without one.
        minus_one: whether a stored zero is the zero minus one: ``"each"`` by itself, where one less
            than 0 is the largest code; or ``"word"``, where one was taken from all zeros of a word
            at once, so that a zero of 0 borrows from the next one.

    """

    name: str
    words: str
    scales: str
    zeros: str
    group_of: str
    shape: str = ""
    transposed: bool = False
    along: int = 1
    order: tuple[int, ...] | None = None
    stores_all: bool = False
    minus_one: Literal["", "each", "word"] = ""


_GPTQ_NAMES = "qweight", "scales", "qzeros", "g_idx"
GPTQ_V2 = PackedFormat("GPTQ v2", *_GPTQ_NAMES, transposed=True, stores_all=True)
GPTQ = GPTQ_V2._replace(name="GPTQ", minus_one="each")
GPTQ_OF_WORDS = GPTQ._replace(minus_one="word")
AWQ = PackedFormat(
    "AWQ", *_GPTQ_NAMES, transposed=True, along=0, order=(0, 4, 1, 5, 2, 6, 3, 7)
)  # fmt: skip
COMPRESSED_TENSORS = PackedFormat(
    "pack-quantized",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
)


@dataclass(frozen=True)
class PackedMethod(QuantizeMethod):
    """A weight of a few bits with scales, and zeros, for groups of inputs; it stays packed.

    A checkpoint stores it in the format's order of dimensions, even if it stores full precision in
    another one (``transposed``).

    Attributes:
        format: names and packing.
        bits: of a code: 2, 3, 4 or 8.
        group_size: inputs that share a scale; ``None`` for all.
        symmetric: whether every zero is half of the range.
        act_order: whether the inputs of a group are anywhere, as the tensor ``group_of`` says. Each
            rank then holds the scales and zeros of all groups.

    """

    format: PackedFormat
    bits: int
    group_size: int | None
    symmetric: bool = True
    act_order: bool = False

    def __str__(self) -> str:
        group = "all inputs" if self.group_size is None else f"{self.group_size} inputs"
        kind = "symmetric" if self.symmetric else "with zeros"
        order = ", in activation order" if self.act_order else ""
        return f"{self.format.name}, {self.bits} bits, {kind}, a scale for {group}{order}"

    @property
    def packing(self) -> Packing:
        """How codes share words."""
        return Packing(self.bits, self.format.along, self.format.order)

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return words, scales (float32) and what else the format stores of the layer.

        Raises ``ShardingError`` where the edge of a slot or shard falls inside a word or group.
        """
        names, output = self.format, layer.output
        integers, floats = layer.common(torch.int32), layer.common(torch.float32)
        # Values and words of a run that ends where a word does.
        factor, elements = (32, 3) if self.bits == 3 else (32 // self.bits, 1)
        inputs, size = self._grouped(layer.input)
        possible: dict[str, BasevLLMParameter] = {
            names.words: PackedvLLMParameter(
                output,
                layer.input,
                packed_dim=names.along,
                packed_factor=factor,
                packed_elements=elements,
                transposed=names.transposed,
                **integers,
            ),
            names.scales: GroupQuantScaleParameter(
                output, inputs, group_size=size, transposed=names.transposed, **floats
            ),
        }
        if self._has_zeros:
            possible[names.zeros] = PackedvLLMParameter(
                output,
                inputs.in_units(size, "scale group", partial=True),
                packed_dim=0,
                packed_factor=factor,
                packed_elements=elements,
                transposed=names.transposed,
                **integers,
            )
        if self._has_order:
            # All groups are counted, so each rank has those of all inputs where they are anywhere.
            held = Dim.whole(layer.input.size) if self.act_order else layer.input
            possible[names.group_of] = PerSlotVectorParameter(output, held, **integers)
        if names.shape:
            possible[names.shape] = PerSlotVectorParameter(
                output, Dim.whole(2), **layer.common(torch.int64)
            )
        return possible

    @property
    def _has_zeros(self) -> bool:
        return self.format.stores_all or not self.symmetric

    @property
    def _has_order(self) -> bool:
        return self.format.stores_all or self.act_order

    def _grouped(self, input: Dim) -> tuple[Dim, int]:
        """Return the inputs that have scales of their own, and how many of them share one."""
        if self.group_size is None or self.group_size >= input.size:  # each rank has the scale
            return Dim.whole(1), 1
        return (Dim.whole(input.size) if self.act_order else input), self.group_size

    def stored(self, layer: QuantizableLayer) -> Mapping[str, StoredTensor]:
        """Return valid groups, shapes and zeros, and the zeros for a layer without a bias."""
        names, stored = self.format, dict[str, StoredTensor]()
        if self._has_order:
            # AutoRound and others leave out the groups of inputs that are in order.
            optional = not self.act_order
            stored[names.group_of] = StoredTensor(
                valid=partial(self._groups_in_order, layer), optional=optional
            )
        if names.shape:
            stored[names.shape] = StoredTensor(valid=partial(self._shape_of, layer))
        if self.symmetric and self._has_zeros:
            stored[names.zeros] = StoredTensor(valid=partial(self._zeros_in_the_middle, layer))
        if names.stores_all:
            stored["bias"] = StoredTensor(zeros=_ZERO_BIAS)
        return stored

    def _groups_in_order(self, layer: QuantizableLayer, slot: str) -> torch.Tensor:
        inputs = layer.input.size
        return torch.arange(inputs, dtype=torch.int32) // self._size_of_group(inputs)

    def _shape_of(self, layer: QuantizableLayer, slot: str) -> torch.Tensor:
        shapes = layer.typed_parameter(self.format.shape, PerSlotVectorParameter)
        return torch.tensor(layer.weight_shapes(shapes.slots[slot][-1])[0])

    def _zeros_in_the_middle(self, layer: QuantizableLayer, slot: str) -> torch.Tensor:
        names, zeros = self.format, layer.typed_parameter(self.format.zeros, PackedvLLMParameter)
        middle = (1 << (self.bits - 1)) - bool(names.minus_one)
        codes = torch.full((32, 1), middle, dtype=torch.uint8)
        words = pack(codes, Packing(self.bits, 0, names.order))
        held = zeros.checkpoint_shape(slot)[-1 if names.transposed else -2]
        words = words.repeat(-(-held // len(words)), 1)[:held]
        return words.T if names.transposed else words

    # What was loaded

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Raise ``WeightReadError`` for tensors that contradict each other or the configuration."""
        names = self.format
        # AutoRound's symmetric scales may be negative.
        demand(layer.get_parameter(names.scales), torch.isfinite, names.scales, _must("be finite"))
        if names.shape:
            self._check_shape(layer)
        if self.symmetric and self._has_zeros:
            self._check_zeros(layer)
        if self._has_order:
            self._check_groups(layer)

    def _check_shape(self, layer: QuantizableLayer) -> None:
        shapes = layer.typed_parameter(self.format.shape, PerSlotVectorParameter)
        for slot, index in shapes.slots.items():
            possible = layer.weight_shapes(index[-1])
            for each in shapes.region(slot).view(-1, 2).tolist():
                if each not in possible:
                    raise WeightReadError(
                        f"{with_slot(self.format.shape, slot)} has {each}, and must have "
                        f"{possible[0]}, the shape of the weight: {_ADVICE}"
                    )

    def _check_zeros(self, layer: QuantizableLayer) -> None:
        zeros = layer.typed_parameter(self.format.zeros, BasevLLMParameter)
        middle = 1 << (self.bits - 1)
        if bool((self._zeros(zeros) == middle).all()):
            return
        for slot in zeros.slots:  # padding has none
            wrong = self._zeros(zeros.region(slot))
            if not bool((mask := wrong == middle).all()):
                raise WeightReadError(
                    f"{with_slot(self.format.zeros, slot)} stands for a zero of "
                    f"{wrong[~mask][0].item()}, and must stand for {middle} where "
                    "quantization_config says sym: set it to false, or quantize the checkpoint "
                    "again"
                )

    def _check_groups(self, layer: QuantizableLayer) -> None:
        name, inputs = self.format.group_of, layer.input.size
        group_of = layer.typed_parameter(name, PerSlotVectorParameter)
        size = self._size_of_group(inputs)
        groups = -(-inputs // size)
        rule = _must(f"be a group, from 0 to {groups - 1}")
        demand(group_of, lambda x: (x >= 0) & (x < groups), name, rule)
        rows = group_of.vectors()
        for first, slot in pairwise(layer.output.names):
            at = layer.output.names.index(slot)
            if bool((apart := (rows[..., at, :] != rows[..., at - 1, :]).any(-1)).any()):
                # One product multiplies all slots by the same inputs.
                raise WeightReadError(
                    f"{with_slot(name, _of_expert(layer, slot, apart))} is another one than that "
                    f"of slot {first!r}, and must be the same: fused layers have the same inputs. "
                    f"{_ADVICE.capitalize()}, these layers at once"
                )
        if self.act_order:
            self._count_groups(layer, rows[..., 0, :], size)
            return
        for shard in group_of.shards[-1]:
            there = torch.arange(shard.start, shard.start + shard.length, device=group_of.device)
            expected = there // size
            held = group_of.data.narrow(-1, shard.offset, shard.length)
            if bool((wrong := (held != expected).any(-1)).any()):
                raise WeightReadError(
                    f"{with_slot(name, _of_expert(layer, shard.name, wrong))} has groups in "
                    "another order than that of the inputs, where quantization_config has no "
                    f"desc_act: set it to true, or {_ADVICE}"
                )

    def _count_groups(self, layer: QuantizableLayer, group_of: torch.Tensor, size: int) -> None:
        """Raise unless each group has ``size`` inputs, and the last one those that are left."""
        inputs = group_of.shape[-1]
        groups = group_of.long().view(-1, inputs)
        count = -(-inputs // size)
        counts = groups.new_zeros(len(groups), count)
        counts.scatter_add_(1, groups, torch.ones_like(groups))
        expected = groups.new_full((count,), size)
        expected[-1] = inputs - size * (count - 1)
        if bool((wrong := counts != expected).any()):
            row, group = wrong.nonzero()[0].tolist()
            slot = _of_expert(layer, "", wrong.any(-1))
            raise WeightReadError(
                f"{with_slot(self.format.group_of, slot)} has {int(counts[row, group])} inputs in "
                f"group {group}, and must have {int(expected[group])}: {_ADVICE}"
            )

    def compute_buffers(self, layer: QuantizableLayer) -> Mapping[str, torch.Tensor]:
        """Return the zeros, if they are not all alike: uint8 ``[output, groups]``."""
        if self.symmetric:
            return {}
        return {"zeros_for_matmul": self._zeros(layer.get_parameter(self.format.zeros))}

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        """Return the zeros ``[..., output, groups]`` that ``words`` stand for.

        Of version 1 a zero is ``(stored + 1) & (2^bits - 1)``, as AutoGPTQ's own layer reads it
        (qlinear_cuda.py). GPTQModel writes that version by ``qzeros -= 0x11111111`` for four bits,
        and the like for two and eight (convert_gptq_v2_to_v1_format_module), and reads it by the
        sum. Both are the same unless a zero is 0. Of three bits GPTQModel 7 subtracts from each
        zero too.
        """
        *experts, rows, groups = words.shape
        if experts or words.is_meta:
            zeros = words.new_empty(*experts, rows * 32 // self.bits, groups, dtype=torch.uint8)
            if words.is_meta:  # each layer is built on meta, where torch's operations are slow
                return zeros
            # One after the other: their words are many times as large unpacked.
            for expert, own in zip(zeros, words, strict=True):
                expert.copy_(self._zeros(own))
            return zeros
        last, minus_one = (1 << self.bits) - 1, self.format.minus_one
        flat = words.detach()
        by_word = minus_one == "word" and self.bits != 3
        if by_word:
            flat = flat + 0xFFFFFFFF // last
        zeros = unpack(flat, Packing(self.bits, 0, self.format.order))
        if minus_one and not by_word:
            zeros = (zeros + 1) & last
        return zeros

    # Products

    def full_precision(
        self, layer: QuantizableLayer, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        words, scales, size, zeros, group_of = self._operands(layer)
        dequantize = dequantize_packed if layer.experts is None else dequantize_experts
        dtype = dtype or layer.params_dtype
        return dequantize(words, scales, self.packing, size, dtype, zeros, group_of)

    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        words, scales, size, zeros, group_of = self._operands(layer)
        return packed_matmul(
            x, words, scales, self.packing, size, zeros=zeros, group_of=group_of, bias=bias
        )

    def apply_experts(self, layer: QuantizableLayer, rows: ExpertRows) -> torch.Tensor:
        words, scales, size, zeros, group_of = self._operands(layer)
        packed = words, scales, self.packing, size
        return rows.product(grouped_matmul_packed, *packed, zeros=zeros, group_of=group_of)

    def _size_of_group(self, inputs: int) -> int:
        """Return how many of ``inputs`` share a scale; a larger number would fit no integer."""
        return inputs if self.group_size is None else min(self.group_size, inputs)

    def groups_of_inputs(self, layer: QuantizableLayer) -> torch.Tensor | None:
        """Return the group of each input of this rank, if they are not in order."""
        if not self.act_order:
            return None
        group_of = layer.typed_parameter(self.format.group_of, PerSlotVectorParameter)
        (shard,) = layer.input.shards(group_of.tp_rank, group_of.tp_size)
        # They are alike for all slots. Padding multiplies zeros, so any group will do.
        own = group_of.vectors()[..., 0, :].narrow(-1, shard.start, shard.length)
        return own if shard.padded == shard.length else F.pad(own, (0, shard.padded - shard.length))

    def _operands(
        self, layer: QuantizableLayer
    ) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None, torch.Tensor | None]:
        """Return words, scales, the size of a group, zeros and groups, as products take them."""
        parameters, names = layer._parameters, self.format
        words, scales = parameters[names.words], parameters[names.scales]
        assert words is not None
        assert scales is not None
        zeros, group_of = layer._buffers.get("zeros_for_matmul"), self.groups_of_inputs(layer)
        size = self._size_of_group(self.packing.codes(words.shape[-2:], 32)[1])
        return words, scales, size, zeros, group_of


def _of_expert(layer: QuantizableLayer, slot: str, wrong: torch.Tensor) -> str:
    """Return the name of ``slot`` of the first expert that is ``wrong``, if the layer has any."""
    if layer.experts is None:
        return slot
    return f"{layer.experts.kept[int(wrong.nonzero()[0])]}.{slot}".rstrip(".")


def _must(rule: str) -> str:
    return f"must {rule}: {_ADVICE}"
