"""Weights as bitsandbytes stores them: NF4 and FP4 in blocks of a row, and int8 per channel.

Its 4-bit tensors are those of the weight, flat and cut into blocks: two codes a byte, the first one
in the high bits, a scale for each block, and the value of each code. Nested, a scale is a code too:
the quantized scales have blocks, scales and values of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch

from vllm_module.errors import UnsupportedModelError, WeightReadError
from vllm_module.kernels.experts.grouped_matmul import grouped_matmul
from vllm_module.kernels.matmul.scaled_matmul import scaled_matmul
from vllm_module.kernels.rows.quantize_nf4 import NF4
from vllm_module.parameters import (
    BasevLLMParameter,
    ColumnvLLMParameter,
    Dim,
    FlattenedParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
    PerTensorTableParameter,
    Slot,
)
from vllm_module.quantization.codebook import AbsmaxMethod
from vllm_module.quantization.demand import demand, with_slot
from vllm_module.quantization.method import QuantizableLayer, QuantizeMethod, StoredTensor
from vllm_module.quantization.quant_state import LONGEST, NESTED_BLOCKSIZE, QuantState
from vllm_module.quantization.rows import ExpertRows
from vllm_module.weights import read_into

_STATE = "weight.quant_state.bitsandbytes__"
_ADVICE = "quantize the checkpoint again"
_CODES = 16


class BitsAndBytes4BitMethod(AbsmaxMethod):
    """A weight that is stored in NF4 or FP4.

    A checkpoint stores ``[output, input]``, even if it stores another order in full precision.

    Args:
        quant_type: of the codes. Their values are the checkpoint's own; it is only compared.
        nested: whether the scales are quantized too.
        blocksize: inputs in a row that share a scale.

    """

    def __init__(
        self, quant_type: Literal["nf4", "fp4"], *, nested: bool, blocksize: int = 64
    ) -> None:
        super().__init__(blocksize)
        self.quant_type, self.nested = quant_type, nested

    def __str__(self) -> str:
        nested = ", nested" if self.nested else ""
        return f"bitsandbytes {self.quant_type} in blocks of {self.blocksize}{nested}"

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return ``weight``, ``absmax``, and what each slot has: the values, and ``quant_state``.

        Raises ``ShardingError`` where a row or a shard of the input ends inside a block.
        """
        if layer.experts is not None and layer.experts.together:
            raise UnsupportedModelError(
                "experts that are stored as one tensor, which bitsandbytes does not quantize"
            )
        output, blocks = layer.output, layer.input.in_units(self.blocksize, "scale block")
        common, tables = layer.common(torch.uint8), layer.common(torch.float32)
        created: dict[str, BasevLLMParameter] = {
            "weight": FlattenedParameter(
                output, layer.input.in_units(2, "packed element"), column=True, **common
            ),
            "absmax": FlattenedParameter(
                output, blocks, column=False, **(common if self.nested else tables)
            ),
            "quant_map": PerTensorTableParameter(output, length=_CODES, **tables),
            "quant_state": PerTensorTableParameter(output, length=LONGEST, shorter=True, **common),
        }
        if self.nested:
            created["nested_absmax"] = ColumnvLLMParameter(_nested(output, blocks), **tables)
            created["nested_quant_map"] = PerTensorTableParameter(output, length=256, **tables)
        return created

    def stored(self, layer: QuantizableLayer) -> Mapping[str, StoredTensor]:
        """Return names below that of the weight, and a ``quant_state`` of each slot.

        The values of NF4 are valid for codes of either type.
        """
        other = {"nf4": "fp4", "fp4": "nf4"}[self.quant_type]  # is refused for what it says
        states = _STATE + self.quant_type, _STATE + other
        nested = ("nested_absmax", "nested_quant_map") if self.nested else ()
        return {
            **{name: StoredTensor((f"weight.{name}",)) for name in ("absmax", *nested)},
            "quant_map": StoredTensor(
                ("weight.quant_map",), valid=lambda slot: torch.tensor(NF4, dtype=torch.float32)
            ),
            "quant_state": StoredTensor(states, valid=partial(self._valid_state, layer)),
        }

    def _valid_state(self, layer: QuantizableLayer, slot: str) -> torch.Tensor:
        state = QuantState(
            quant_type=self.quant_type,
            blocksize=self.blocksize,
            shape=self._shapes(layer, slot)[0],
            nested_blocksize=NESTED_BLOCKSIZE if self.nested else None,
            nested_dtype="float32" if self.nested else None,
            nested_offset=2.0**-5 if self.nested else None,  # about the mean of other scales
        )
        return state.stored()

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Raise ``WeightReadError`` for tensors that do not belong together or are not finite."""
        states = self._states(layer)
        for slot, state in states.items():
            shapes = self._shapes(layer, slot)
            where = with_slot("weight.quant_state", slot)
            state.check(where, self.quant_type, self.blocksize, shapes, self.nested)
            if self.nested and state.shape != shapes[0]:
                self._check_edges(layer, where)
        rule = f"must be finite: {_ADVICE}"
        scales = ("nested_absmax", "nested_quant_map") if self.nested else ("absmax",)
        for name in ("quant_map", *scales):
            demand(layer.get_parameter(name), torch.isfinite, f"weight.{name}", rule)
        if self.nested:
            self._check_range(layer, states)
        maps = layer.get_parameter("quant_map").data.view(-1, _CODES)
        if bool((maps != maps[:1]).any()):
            raise WeightReadError(
                "weight.quant_map has values that differ between the slots or experts of the "
                f"layer, which are multiplied at once and need the same ones: {_ADVICE}"
            )

    def _shapes(self, layer: QuantizableLayer, slot: str) -> list[list[int]]:
        """Return the shapes a tensor may have had: that of the slot, and of all slots as one."""
        absmax = layer.typed_parameter("absmax", FlattenedParameter)
        return layer.weight_shapes(absmax.slots[slot][-2])

    def _check_edges(self, layer: QuantizableLayer, where: str) -> None:
        """Refuse slots stored as one tensor if a block of nested scales crosses an edge."""
        blocks = layer.input.size // self.blocksize
        for slot in layer.output.slots[:-1]:
            if slot.size * blocks % NESTED_BLOCKSIZE:
                raise WeightReadError(
                    f"{where}: the checkpoint stores the layer as one tensor, and the "
                    f"{slot.size * blocks} scales of {slot.name} end inside a block of "
                    f"{NESTED_BLOCKSIZE}: quantize its parts by themselves"
                )

    def _check_range(self, layer: QuantizableLayer, states: Mapping[str, QuantState]) -> None:
        """Refuse scales that may be beyond float32, though what they are computed from is not."""
        nested = layer.typed_parameter("nested_absmax", ColumnvLLMParameter)
        values = layer.typed_parameter("nested_quant_map", PerTensorTableParameter)
        for slot, state in states.items():
            most = nested.region(slot).abs().amax() * values.tables(slot).abs().amax()
            if not bool((most + abs(state.nested_offset or 0.0)).isfinite()):
                raise WeightReadError(
                    f"{with_slot('weight.absmax', slot)} stands for scales beyond float32, by its "
                    f"nested_absmax, nested_quant_map and nested_offset: {_ADVICE}"
                )

    def compute_buffers(self, layer: QuantizableLayer) -> Mapping[str, torch.Tensor]:
        """Return the values of the codes, float32 ``[16]``, and the scales if they are nested."""
        maps = layer.get_parameter("quant_map").data.view(-1, _CODES)
        codebook = maps[0] if len(maps) else maps.new_zeros(_CODES)  # a rank may have no experts
        if not self.nested:
            return {"codebook": codebook}
        return {"codebook": codebook, "scales": self._unnested(layer)}

    def scales(self, layer: QuantizableLayer) -> torch.Tensor:
        return layer.get_buffer("scales") if self.nested else super().scales(layer)

    def _unnested(self, layer: QuantizableLayer) -> torch.Tensor:
        """Return the scales, float32; those of padding are zero."""
        absmax = layer.typed_parameter("absmax", FlattenedParameter)
        if absmax.is_meta:
            return absmax.new_empty(absmax.shape, dtype=torch.float32)
        nested = layer.typed_parameter("nested_absmax", ColumnvLLMParameter)
        values = layer.typed_parameter("nested_quant_map", PerTensorTableParameter)
        scales = FlattenedParameter(
            *absmax.dims[-2:], column=False, **layer.common(torch.float32)
        ).materialize_on(absmax.device)
        for slot, state in self._states(layer).items():
            held = scales.region(slot)
            if not held.numel():  # this rank has only padding of it
                continue
            # For each scale that of its block, in a checkpoint's order.
            count, blocks = absmax.checkpoint_shape(slot).numel(), nested.region(slot).flatten()
            _fill(scales, slot, blocks.repeat_interleave(NESTED_BLOCKSIZE)[:count])
            held.mul_(values.tables(slot)[0][absmax.region(slot).int()])
            held.add_(state.nested_offset or 0.0)
        scales.zero_padding()
        return scales.data

    def _states(self, layer: QuantizableLayer) -> dict[str, QuantState]:
        """Return what the checkpoint says of each slot that this rank holds."""
        table = layer.typed_parameter("quant_state", PerTensorTableParameter)
        host = table.materialize_on("cpu")
        host.data.copy_(table.data)
        return {
            slot: QuantState.parse(each[0], with_slot("weight.quant_state", slot))
            for slot in host.slots
            if len(each := host.tables(slot))
        }


def _fill(parameter: BasevLLMParameter, slot: str, weight: torch.Tensor) -> None:
    """Fill a slot with what this rank keeps of ``weight``, which is the checkpoint's."""
    for source, target in parameter.cut(weight, slot):
        read_into(source, target)


class BitsAndBytes8BitMethod(QuantizeMethod):
    """A weight in int8, ``weight * SCB / 127``, where ``SCB`` is the largest of each channel.

    Inputs are not quantized. LLM.int8() does so, but for features with an outlier, whose threshold
    the checkpoint's configuration has; its weights are the same.
    """

    def __str__(self) -> str:
        return "bitsandbytes int8"

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return ``weight``, ``SCB`` (float32) and ``weight_format``, a number for each slot.

        A checkpoint stores ``[output, input]``, even if it stores another order in full precision.
        """
        output, common = layer.output, layer.common
        return {
            "weight": ModelWeightParameter(output, layer.input, **common(torch.int8)),
            "SCB": ColumnvLLMParameter(output, **common(torch.float32)),
            "weight_format": PerTensorScaleParameter(output, **common(torch.uint8)),
        }

    def stored(self, layer: QuantizableLayer) -> Mapping[str, StoredTensor]:
        """Return the only format, and scales that are not negative: 127 is about 0.04."""
        rows = torch.zeros((), dtype=torch.uint8)
        return {
            "SCB": StoredTensor(valid=lambda slot: torch.tensor(0.04, dtype=torch.float32)),
            # Files of its first versions, which have rows, lack it.
            "weight_format": StoredTensor(valid=lambda slot: rows, optional=True),
        }

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Raise ``WeightReadError`` for scales that are not finite, and for another order."""
        rule = f"must be finite and not negative: {_ADVICE}"
        demand(layer.get_parameter("SCB"), lambda x: x.isfinite() & (x >= 0), "SCB", rule)
        rule = f"must be 0, for rows; other orders are for old devices: {_ADVICE}"
        demand(layer.get_parameter("weight_format"), lambda x: x == 0, "weight_format", rule)

    def compute_buffers(self, layer: QuantizableLayer) -> Mapping[str, torch.Tensor]:
        """Return the scale of each channel, float32 ``[output, 1]``."""
        return {"scale_for_matmul": layer.get_parameter("SCB").data.unsqueeze(-1) / 127}

    def full_precision(
        self, layer: QuantizableLayer, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        scale = layer.get_buffer("scale_for_matmul")
        return (layer.weight.float() * scale).to(dtype or layer.params_dtype)

    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        scale, block = layer.get_buffer("scale_for_matmul"), (1, layer.weight.shape[-1])
        return scaled_matmul(x, layer.weight, scale, block, bias, None, quantize_input=False)

    def apply_experts(self, layer: QuantizableLayer, rows: ExpertRows) -> torch.Tensor:
        scale, block = layer.get_buffer("scale_for_matmul"), (1, layer.weight.shape[-1])
        return rows.product(
            grouped_matmul, layer.weight, scale=scale, block=block, quantize_input=False
        )


def _nested(output: Dim, blocks: Dim) -> Dim:
    """Return the scales of the quantized scales: of each slot, or of all that are stored as one."""
    slots = output.slots if output.groups is None else (Slot("", output.size),)
    return Dim(
        tuple(Slot(slot.name, -(-slot.size * blocks.size // NESTED_BLOCKSIZE)) for slot in slots)
    )
