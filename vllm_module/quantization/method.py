"""What a method of quantization is, and the layers that take one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from vllm_module.conversions import Conversion
from vllm_module.distributed import TensorParallelGroup
from vllm_module.kernels.linear import linear
from vllm_module.module import vLLMModule
from vllm_module.parameters import BasevLLMParameter, Dim, ModelWeightParameter


class QuantizeMethod(ABC):
    """How layers hold their weight ``[output, input]`` and multiply by it; one serves many.

    Attributes:
        processes: whether ``process_weights_after_loading`` does anything.
        weight_aliases: other names that checkpoints have for the parameters.

    """

    processes = False
    weight_aliases: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return the layer's parameters, on meta, by name; ``weight`` is among them."""

    def conversions(self, layer: QuantizableLayer) -> Mapping[str, Conversion]:
        """Return what converts checkpoint tensors as they arrive, for parameters that need it."""
        return {}

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Check, or work out, what the layer runs with once its weights are complete."""
        raise NotImplementedError

    @abstractmethod
    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Map ``x [..., input]`` to ``[..., output]``."""


class UnquantizedMethod(QuantizeMethod):
    """A weight in the layer's own dtype."""

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        return {"weight": layer.new_weight(layer.params_dtype)}

    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return linear(x, layer.weight, bias)


class QuantizableLayer(vLLMModule):
    """A layer with a weight ``[output, input]`` that a method of quantization holds and applies.

    Attributes:
        output, input: the weight's features, the same description on every rank.
        params_dtype: of the weight before it is quantized.
        quant_method: creates, processes and applies the weight.

    """

    weight: ModelWeightParameter
    tp_group: TensorParallelGroup
    output: Dim
    input: Dim
    params_dtype: torch.dtype
    quant_method: QuantizeMethod = UnquantizedMethod()

    def create_weight(self, output: Dim, input: Dim, params_dtype: torch.dtype) -> None:
        """Describe the weight and create it, unquantized, on meta."""
        self.output, self.input, self.params_dtype = output, input, params_dtype
        self._parameters |= self.quant_method.create_weights(self)

    def quantize(self, method: QuantizeMethod) -> None:
        """Have ``method`` create the weight, in place of the one that is there on meta.

        Raises ``ShardingError`` where this rank's shard and the method's blocks do not fit, and
        ``RuntimeError`` once the layer was loaded.
        """
        names = self.quant_method.create_weights(self).keys()
        if not all(self.get_parameter(name).is_meta for name in names):
            raise RuntimeError(f"{type(self).__name__} is loaded: quantize it before it is")
        created = method.create_weights(self)
        others = {name: p for name, p in self._parameters.items() if name not in names}
        self._parameters = {**created, **others}
        self.quant_method = method
        self.conversions = method.conversions(self)
        self.weight_aliases = dict(method.weight_aliases)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move what the method created, but never cast it: ``model.half()`` means other tensors."""
        names = self.quant_method.create_weights(self) if self.quant_method.processes else ()
        created = {id(self._parameters[name]) for name in names}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            new = fn(tensor)
            cast = id(tensor) in created and new.dtype != tensor.dtype
            return tensor.to(new.device) if cast else new

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse tensors of another dtype, which PyTorch would cast without their scales."""
        errors: list[str] = args[-1]
        for name in self.quant_method.create_weights(self):
            given, own = state_dict.get(prefix + name), self.get_parameter(name)
            if given is not None and own.dtype.itemsize == 1 and given.dtype != own.dtype:
                errors.append(
                    f"{prefix}{name} is held in {own.dtype}, and {given.dtype} was given: "
                    "load_weights and update_weights quantize"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def new_weight(self, dtype: torch.dtype) -> ModelWeightParameter:
        """Return a weight of ``dtype``, on meta."""
        rank, size = self.tp_group.rank, self.tp_group.size
        return ModelWeightParameter(
            self.output, self.input, tp_rank=rank, tp_size=size, dtype=dtype
        )

    @property
    def processes(self) -> bool:
        return self.quant_method.processes

    def process_weights_after_loading(self) -> None:
        self.quant_method.process_weights_after_loading(self)
