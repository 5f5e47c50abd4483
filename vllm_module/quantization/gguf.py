"""Weights in the blocks of GGUF files, dequantized by the product."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.experts.grouped_matmul import by_expert, expect_groups
from vllm_module.kernels.matmul.code_rows import block_rows, float_rows
from vllm_module.kernels.matmul.gguf_blocks import block_scales, blocks_matmul, dequantize_blocks
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES
from vllm_module.kernels.matmul.linear import linear
from vllm_module.parameters import BasevLLMParameter, Dim, ModelWeightParameter
from vllm_module.quantization.demand import demand
from vllm_module.quantization.method import QuantizableLayer, QuantizeMethod
from vllm_module.quantization.rows import ExpertRows, rows_at


class _Part(NamedTuple):
    """Some rows of a layer's weight, of one type; ``None`` is the layer's own dtype."""

    weight: torch.Tensor
    kind: str | None

    @property
    def rows(self) -> int:
        return self.weight.shape[-2 if self.kind is None else -3]

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values, of all experts if there are any."""
        weight = self.weight
        return weight if self.kind is None else dequantize_blocks(weight, self.kind, dtype)


@dataclass(frozen=True)
class GGUFMethod(QuantizeMethod):
    """Weights that stay in blocks, as a GGUF file stores them.

    There is a parameter for each type, ``weight_q4_k``, with the slots that are of this type, and
    ``weight`` with those that are not in blocks. So a fused layer keeps the bytes of each slot.

    Attributes:
        types: pairs of a slot of the output and its type, ``None`` if it is not in blocks; of one
            pair whose slot is ``None``, the type of all.

    """

    types: tuple[tuple[str | None, str | None], ...]

    def __post_init__(self) -> None:
        for _, kind in self.types:
            if kind is not None and kind not in BLOCK_TYPES:
                raise UnsupportedModelError(
                    f"weights of type {kind} are not supported: expected one of "
                    f"{', '.join(BLOCK_TYPES)}"
                )

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(kind or "full precision" for _, kind in self.types))

    @staticmethod
    def of_slots(slots: Mapping[str, object]) -> GGUFMethod | None:
        """Return the method of a layer each of whose slots has a method of one type, or ``None``.

        The slots of experts, ``3.up_proj``, must have one type for all experts, else the result is
        ``None``.
        """
        types: dict[str | None, str | None] = {}
        for slot, method in slots.items():
            kind = method.types[0][1] if isinstance(method, GGUFMethod) else None
            if types.setdefault(slot.rpartition(".")[2], kind) != kind:
                return None
        return GGUFMethod(tuple(types.items()))

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return uint8 ``[output, input / values, bytes]`` for each type.

        Raises ``ShardingError`` where a shard of the input ends inside a block.
        """
        created: dict[str, BasevLLMParameter] = {}
        for kind in dict.fromkeys(kind for _, kind in self.types):
            of_kind = {slot for slot, each in self.types if each == kind}
            slots = [each for each in layer.output.slots if {each.name, None} & of_kind]
            output = Dim(tuple(slots), layer.output.groups)
            if kind is None:
                created["weight"] = ModelWeightParameter(
                    output, layer.input, **layer.common(layer.params_dtype)
                )
                continue
            block = BLOCK_TYPES[kind]
            created[_parameter_name(kind)] = BasevLLMParameter(
                output,
                layer.input.in_units(block.values, f"{kind} block"),
                Dim.whole(block.nbytes),
                **layer.common(torch.uint8),
            )
        return created

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Raise ``WeightReadError`` for a block whose scale or offset is not finite."""
        for kind in dict.fromkeys(kind for _, kind in self.types if kind is not None):
            name = _parameter_name(kind)
            rule = "all scales of blocks must be finite: quantize or download the model again"
            scales = partial(block_scales, kind=kind)
            demand(layer.get_parameter(name), torch.isfinite, name, rule, scales)

    def full_precision(
        self, layer: QuantizableLayer, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        dtype = dtype or layer.params_dtype
        return torch.cat([part.values(dtype) for part in self._parts(layer)], -2)

    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return _product(self._parts(layer), x, bias)

    def embed(self, layer: QuantizableLayer, ids: torch.Tensor, count: int) -> torch.Tensor:
        ((_, kind),) = self.types  # an embedding has no slots
        assert kind is not None
        blocks = rows_at(layer.get_parameter(_parameter_name(kind)), ids, count)
        return dequantize_blocks(blocks, kind, layer.params_dtype)

    def apply_experts(self, layer: QuantizableLayer, rows: ExpertRows) -> torch.Tensor:
        x = rows.x
        if x.is_cuda:
            # A loop over experts would wait for their numbers of rows, which no CUDA graph can.
            return super().apply_experts(layer, rows)
        parts = list(self._parts(layer))
        outputs = sum(part.rows for part in parts)
        shape = len(parts[0].weight), outputs
        expect_groups(x, rows.offsets, rows.bias, rows.order, rows.top_k, shape, x.dtype)

        def product(expert: int, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return _product((_Part(weight[expert], kind) for weight, kind in parts), x, bias)

        described: tuple[Any, ...] = ()
        if len(parts) == 1:
            (weight, kind), *_ = parts
            described = (float_rows, weight) if kind is None else (block_rows, weight, kind)
        return rows.product(by_expert, product, outputs, described=described)

    def _parts(self, layer: QuantizableLayer) -> Iterator[_Part]:
        """Yield the rows of the weight, in the order of the output."""
        types = dict(self.types)
        if len(kinds := set(types.values())) == 1:
            kind = kinds.pop()
            yield _Part(layer.get_parameter(_parameter_name(kind)), kind)
            return
        for slot in layer.output.slots:
            kind = types[slot.name]
            parameter = layer.typed_parameter(_parameter_name(kind), BasevLLMParameter)
            dim = 0 if layer.experts is None else 1
            shard = next(each for each in parameter.shards[dim] if each.name == slot.name)
            yield _Part(parameter.data.narrow(dim, shard.offset, shard.padded), kind)


def _product(parts: Iterable[_Part], x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by rows of a weight, one part after the other."""
    products, first = [], 0
    for part in parts:
        own = None if bias is None else bias.narrow(0, first, part.rows)
        if part.kind is None:
            products.append(linear(x, part.weight, own))
        else:
            products.append(blocks_matmul(x, part.weight, part.kind, own))
        first += part.rows
    return products[0] if len(products) == 1 else torch.cat(products, -1)


def _parameter_name(kind: str | None) -> str:
    return "weight" if kind is None else f"weight_{kind.lower()}"
