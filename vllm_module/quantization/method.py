"""The interface of a quantization method, and the layers that use one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from vllm_module.core.conversions import Conversion
from vllm_module.core.module import vLLMModule
from vllm_module.core.tree import locations, slots_of
from vllm_module.distributed import TensorParallelGroup
from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.experts.grouped_matmul import grouped_matmul
from vllm_module.kernels.matmul.linear import linear
from vllm_module.parameters import (
    BasevLLMParameter,
    Common,
    Dim,
    Experts,
    ModelWeightParameter,
)
from vllm_module.quantization.rows import ExpertRows, QuantizedRows, RowScheme


class QuantizeMethod(ABC):
    """How layers store their weight ``[output, input]`` and multiply by it.

    A method has no state of a layer, so many layers can share one.

    Attributes:
        parameter_names: names of the parameters that ``create_weights`` returns.
        buffer_names: names of the layer's buffers that ``compute_buffers`` may return.
        processes: whether ``process_weights_after_loading`` does anything.
        weight_aliases: other names of the parameters in checkpoints, each with the parameter's.
        zero_weights: what checkpoints may have although the layer has no such tensor, from its name
            to the reason. It is skipped if it is a vector of zeros, and refused otherwise.
        absent_names: parameters that checkpoints may lack, because they may have one value only:
            that of ``valid_weight``. A whole load fills them with it.
        replaceable: whether a layer that has this method may be given another. False for a method
            of a model's own: the other one would store and multiply the weight differently.

    """

    parameter_names: tuple[str, ...]
    buffer_names: tuple[str, ...] = ()
    processes = False
    replaceable = False
    weight_aliases: Mapping[str, str] = MappingProxyType({})
    zero_weights: Mapping[str, str] = MappingProxyType({})
    absent_names: tuple[str, ...] = ()

    @abstractmethod
    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return new parameters for the layer, on meta, by name; ``weight`` is among them."""

    def joined(self, slots: Mapping[str, QuantizeMethod | None]) -> QuantizeMethod | None:
        """Return the method of a fused layer whose slots have different methods, this among them.

        ``slots`` has the method of each, ``None`` if it is not quantized. By default the result is
        ``None``: there is no such method.
        """
        return None

    def conversions(self, layer: QuantizableLayer) -> Mapping[str, Conversion]:
        """Return the conversions of checkpoint tensors, by the name of the parameter they fill."""
        return {}

    def valid_weight(self, layer: QuantizableLayer, name: str, slot: str) -> torch.Tensor | None:
        """Return a tensor that a checkpoint may have for ``slot`` of the parameter ``name``.

        ``None``, unless the numbers have to fit each other or the layer, so that a load would
        refuse most of them. Dummy weights have this tensor then; the layer may be on meta.
        """
        return None

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Check the layer's weights, or compute others from them, once all of them are loaded.

        The layer's own ``process_weights_after_loading`` is called after it.
        """
        raise NotImplementedError

    def compute_buffers(self, layer: QuantizableLayer) -> Mapping[str, torch.Tensor]:
        """Return what every product needs of the parameters, by the name of a buffer.

        Called after each load, and after a state dict. The layer copies it into the buffers, whose
        memory stays: ``apply`` computes nothing from scales, and a CUDA graph sees an update. A
        scale that is written in another way is not seen, unless it requires a gradient. When
        the layer is quantized, parameters are on meta, and this gives the shapes of the buffers.
        """
        return {}

    def full_precision(
        self, layer: QuantizableLayer, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the weight that the layer multiplies by, in ``dtype`` or its ``params_dtype``."""
        raise NotImplementedError(f"{type(self).__name__} cannot restore a weight")

    @abstractmethod
    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Map ``x [..., input]`` to ``[..., output]``."""

    def row_scheme(self, layer: QuantizableLayer) -> RowScheme | None:
        """Return how :meth:`apply` quantizes rows on a device that multiplies FP8, if it does.

        Rows that something else quantized so may then be given to :meth:`apply_rows`. By default
        the result is ``None``: only tensors may be given.
        """
        return None

    def apply_rows(
        self, layer: QuantizableLayer, rows: QuantizedRows, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what :meth:`apply` would of the rows before they were quantized."""
        raise NotImplementedError(f"{type(self).__name__} has no product for quantized rows")

    def apply_experts(self, layer: QuantizableLayer, rows: ExpertRows) -> torch.Tensor:
        """Multiply rows, sorted by expert, by the weights ``[experts, output, input]``.

        By default they are dequantized, all of the layer.
        """
        return rows.product(grouped_matmul, self.full_precision(layer, rows.x.dtype))


class UnquantizedMethod(QuantizeMethod):
    """A weight in the layer's own dtype."""

    parameter_names = ("weight",)

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        return {"weight": layer.new_weight(layer.params_dtype)}

    def full_precision(
        self, layer: QuantizableLayer, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return layer.weight if dtype is None else layer.weight.to(dtype)

    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return linear(x, layer.weight, bias)

    def apply_experts(self, layer: QuantizableLayer, rows: ExpertRows) -> torch.Tensor:
        return rows.product(grouped_matmul, layer.weight)


class QuantizableLayer(vLLMModule):
    """A layer whose weight ``[output, input]`` is created and applied by a quantization method.

    Attributes:
        output, input: the weight's dimensions, described for all ranks.
        experts: for each of which the layer has such a weight, in one parameter; if it has any.
        transposed: a checkpoint stores the weight as ``[input, output]``.
        params_dtype: of the weight before it is quantized.
        quant_method: creates, processes and applies the weight.

    """

    weight: ModelWeightParameter
    tp_group: TensorParallelGroup
    output: Dim
    input: Dim
    experts: Experts | None = None
    transposed: bool = False
    params_dtype: torch.dtype
    quant_method: QuantizeMethod = UnquantizedMethod()

    def create_weight(self, output: Dim, input: Dim, params_dtype: torch.dtype) -> None:
        """Create the weight, unquantized and on meta."""
        self.output, self.input, self.params_dtype = output, input, params_dtype
        self._parameters |= self.quant_method.create_weights(self)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight has another method than :class:`UnquantizedMethod`."""
        return not isinstance(self.quant_method, UnquantizedMethod)

    def absent_weight(self, name: str, slot: str) -> torch.Tensor | None:
        method = self.quant_method
        return method.valid_weight(self, name, slot) if name in method.absent_names else None

    def quantize(self, method: QuantizeMethod) -> None:
        """Replace the weight, which is still on meta, by the parameters of ``method``.

        Raises ``ShardingError`` if a block of the method would belong to two ranks or slots,
        ``UnsupportedModelError`` if the layer has a method or a class of weight of its own, and
        ``RuntimeError`` if the layer is loaded.
        """
        own = self.quant_method
        plain = type(own) is UnquantizedMethod and type(self.weight) is ModelWeightParameter
        if not (plain or own.replaceable):
            raise UnsupportedModelError(
                f"{type(self).__name__} holds its weight in its own way ({type(own).__name__}, "
                f"{type(self.weight).__name__}), which {type(method).__name__} does not know"
            )
        names = own.parameter_names
        if not all(self.get_parameter(name).is_meta for name in names):
            raise RuntimeError(f"{type(self).__name__} is loaded: quantize it before it is")
        kept = {name: p for name, p in self._parameters.items() if name not in names}
        self._parameters = {**method.create_weights(self), **kept}
        for name in own.buffer_names:
            self._buffers.pop(name, None)
        device = self.load_state.device
        with torch.inference_mode(False):  # so that every load may write to them
            for name, value in method.compute_buffers(self).items():
                # NaN until a load computes it, so that no product has numbers that nothing wrote.
                nothing = torch.nan if value.is_floating_point() else torch.iinfo(value.dtype).max
                unknown = torch.full(value.shape, nothing, dtype=value.dtype, device=device)
                self.register_buffer(name, unknown, persistent=False)
        self.quant_method = method
        # What the layer itself declares stays.
        replaced = own.conversions(self).keys()
        conversions = {k: v for k, v in self.conversions.items() if k not in replaced}
        self.conversions = {**conversions, **method.conversions(self)}
        aliases = {k: v for k, v in self.weight_aliases.items() if k not in own.weight_aliases}
        self.weight_aliases = {**aliases, **method.weight_aliases}
        zeros = {k: v for k, v in self.zero_weights.items() if k not in own.zero_weights}
        self.zero_weights = {**zeros, **method.zero_weights}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move quantized parameters, but never cast them: ``model.half()`` casts the others."""
        method = self.quant_method
        names = method.parameter_names if self.is_quantized else ()
        quantized: set[torch.Tensor | None] = {self._parameters[name] for name in names}
        quantized |= {self._buffers.get(name) for name in method.buffer_names}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            new = fn(tensor)
            cast = tensor in quantized and new.dtype != tensor.dtype
            return tensor.to(new.device) if cast else new

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse full precision for quantized numbers: PyTorch would cast it without a scale."""
        errors: list[str] = args[-1]
        if self.quant_method.buffer_names and args[0].get("assign_to_params_buffers"):
            errors.append(
                f"{prefix}weight is quantized, and assign=True would replace parameters that know "
                "their shard, which its scales are computed from: leave it out"
            )
            return
        for name in self.quant_method.parameter_names:
            given, dtype = state_dict.get(prefix + name), self.get_parameter(name).dtype
            numbers = dtype.itemsize == 1 or not dtype.is_floating_point
            if given is not None and numbers and given.dtype != dtype:
                errors.append(
                    f"{prefix}{name} is held in {dtype}, and {given.dtype} was given: "
                    "load_weights and update_weights quantize"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if not any(parameter.is_meta for parameter in self.parameters(recurse=False)):
            self._compute_buffers()

    def new_weight(self, dtype: torch.dtype) -> ModelWeightParameter:
        """Return a weight of ``dtype``, on meta, for a method to create."""
        return ModelWeightParameter(
            self.output, self.input, transposed=self.transposed, **self.common(dtype)
        )

    def common(self, dtype: torch.dtype) -> Common:
        """Return the arguments that all parameters of the layer are built with."""
        group = self.tp_group
        return {
            "tp_rank": group.rank, "tp_size": group.size, "dtype": dtype, "experts": self.experts
        }  # fmt: skip

    def processing(self) -> Sequence[Callable[[], None]]:
        own = (self._process_quantized,) if self.quant_method.processes else ()
        return (*own, *super().processing())

    def _process_quantized(self) -> None:
        self.quant_method.process_weights_after_loading(self)
        self._compute_buffers()

    def computed_buffers(self) -> Mapping[str, torch.Tensor | None]:
        """Return the buffers that follow from the parameters, ``None`` for one that is not used.

        A plan of another rank takes them from that rank's parameters, which are on meta.
        """
        method = self.quant_method
        return {**dict.fromkeys(method.buffer_names), **method.compute_buffers(self)}

    def _compute_buffers(self) -> None:
        for name, value in self.quant_method.compute_buffers(self).items():
            buffer = self._buffers[name]
            assert buffer is not None, name
            buffer.copy_(value.detach())


def valid_weights(model: vLLMModule) -> dict[str, torch.Tensor]:
    """Return what methods give as :meth:`QuantizeMethod.valid_weight`, by the name in a checkpoint.

    The names are some of :meth:`~vllm_module.core.module.vLLMModule.expected_weights`.
    """
    found: dict[str, torch.Tensor] = {}
    for location in locations(model):
        layer = location.node.module
        if not isinstance(layer, QuantizableLayer):
            continue
        for slot in slots_of(location.tensor):
            valid = layer.quant_method.valid_weight(layer, location.attr, slot)
            if valid is not None:
                found[location.stored_name(slot)] = valid
    return found
