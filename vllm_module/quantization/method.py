"""The interface of a quantization method, and the layers that use one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from vllm_module.core.conversions import Conversion
from vllm_module.core.module import vLLMModule
from vllm_module.core.tensors import materialized, slots_of, without_casts
from vllm_module.core.tree import locations
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
from vllm_module.quantization.rows import ExpertRows

_Parameter = TypeVar("_Parameter", bound=BasevLLMParameter)


@dataclass(frozen=True)
class StoredTensor:
    """How checkpoints store one tensor of a layer, where the class of its parameter cannot say it.

    Attributes:
        aliases: other names of the tensor.
        conversion: what computes the parameter, and others, from the checkpoint's tensor.
        valid: returns numbers that a load accepts for a slot, in a shape that broadcasts to the
            slot's. ``None``, unless the numbers have to fit each other or the layer, so that a load
            would refuse most of them. Dummy weights have these numbers then. The layer may be on
            meta.
        optional: a checkpoint may lack the tensor, because no other numbers are valid. A whole load
            fills it with them.
        zeros: why a checkpoint may have such a tensor although the layer has none. It is skipped if
            it is a vector of zeros, and refused otherwise.

    """

    aliases: tuple[str, ...] = ()
    conversion: Conversion | None = None
    valid: Callable[[str], torch.Tensor] | None = None
    optional: bool = False
    zeros: str = ""


class QuantizeMethod(ABC):
    """How layers store their weight ``[output, input]`` and multiply by it.

    A method has no state of a layer, so many layers can share one.
    """

    def __repr__(self) -> str:
        """Name the settings alone, by which ranks compare their methods."""
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"

    @abstractmethod
    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return new parameters for the layer, on meta, by name."""

    def stored(self, layer: QuantizableLayer) -> Mapping[str, StoredTensor]:
        """Return what checkpoints have for tensors beside their names, by the parameter's name.

        A tensor that the layer has no parameter for may be among them.
        """
        return {}

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Check the layer's weights, or compute others from them, once all of them are loaded.

        The layer's own ``process_weights_after_loading`` is called after it.
        """
        return

    def compute_buffers(self, layer: QuantizableLayer) -> Mapping[str, torch.Tensor]:
        """Return what every product needs of the parameters, by the name of a buffer.

        Called after each load, and after a state dict. The layer copies it into the buffers, whose
        memory stays until the layer sleeps: ``apply`` computes nothing from scales, and a CUDA
        graph sees an update. A scale that is written in another way is not seen, unless it requires
        a gradient. When the layer is quantized, parameters are on meta, and this gives the shapes
        of the buffers.
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

    def embed(self, layer: QuantizableLayer, ids: torch.Tensor, count: int) -> torch.Tensor:
        """Return the rows ``ids [...]`` of the weight, ``[..., input]`` in ``params_dtype``.

        Raises ``IndexError`` for an id that is none of the first ``count`` rows. A method that does
        not override this holds no embedding.
        """
        raise NotImplementedError(f"{type(self).__name__} holds no embedding")

    def apply_experts(self, layer: QuantizableLayer, rows: ExpertRows) -> torch.Tensor:
        """Multiply rows, sorted by expert, by the weights ``[experts, output, input]``.

        By default all weights of the layer are dequantized, and then multiplied.
        """
        return rows.product(grouped_matmul, self.full_precision(layer, rows.x.dtype))


class UnquantizedMethod(QuantizeMethod):
    """A weight in the layer's own dtype."""

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

    def embed(self, layer: QuantizableLayer, ids: torch.Tensor, count: int) -> torch.Tensor:
        return F.embedding(ids, layer.weight[:count])

    def apply_experts(self, layer: QuantizableLayer, rows: ExpertRows) -> torch.Tensor:
        return rows.product(grouped_matmul, layer.weight)


class QuantizableLayer(vLLMModule):
    """A layer whose weight ``[output, input]`` is created and applied by a quantization method.

    Attributes:
        output, input: the weight's dimensions, described for all ranks.
        experts: for each of which the layer has such a weight, in one parameter; if it has any.
        transposed: a checkpoint stores the weight as ``[input, output]``.
        params_dtype: of the weight before it is quantized.
        is_embedding: rows of the weight are looked up. Only a rule that names such a layer gives it
            a method.
        quant_method: creates, processes and applies the weight.
        parameter_names, buffer_names: what the method has created and what it computes.
        own_buffer_names: what the layer itself computes from the weight.

    """

    weight: ModelWeightParameter
    tp_group: TensorParallelGroup
    output: Dim
    input: Dim
    experts: Experts | None = None
    transposed: bool = False
    params_dtype: torch.dtype
    is_embedding = False
    quant_method: QuantizeMethod = UnquantizedMethod()
    parameter_names: tuple[str, ...] = ()
    buffer_names: tuple[str, ...] = ()
    own_buffer_names: tuple[str, ...] = ()
    _is_replaced = False  # a call has replaced the layer's own method

    def create_weight(self, output: Dim, input: Dim, params_dtype: torch.dtype) -> None:
        """Create the weight, unquantized and on meta."""
        self.output, self.input, self.params_dtype = output, input, params_dtype
        created = self.quant_method.create_weights(self)
        self._parameters |= created
        self.parameter_names = tuple(created)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight has another method than :class:`UnquantizedMethod`."""
        return not isinstance(self.quant_method, UnquantizedMethod)

    def valid_weights(self, name: str) -> Callable[[str], torch.Tensor] | None:
        """Return what gives a tensor for each slot of the parameter ``name`` that a load accepts.

        ``None`` if it accepts most tensors.
        """
        stored = self.quant_method.stored(self).get(name)
        if stored is None or stored.valid is None:
            return None
        valid, parameter = stored.valid, self.typed_parameter(name, BasevLLMParameter)
        return lambda slot: valid(slot).expand(parameter.checkpoint_shape(slot))

    def absent_weight(self, name: str, slot: str) -> torch.Tensor | None:
        stored = self.quant_method.stored(self).get(name)
        valid = self.valid_weights(name) if stored is not None and stored.optional else None
        return None if valid is None else valid(slot)

    def quantize(self, method: QuantizeMethod) -> None:
        """Replace the weight, which is still on meta, by the parameters of ``method``.

        Raises ``ShardingError`` if a block of the method would belong to two ranks or slots,
        ``UnsupportedModelError`` if the layer has a method or a class of weight of its own, and
        ``RuntimeError`` if the layer is loaded.
        """
        own = self.quant_method
        weight = self._parameters.get("weight")  # another method may have none
        plain = type(own) is UnquantizedMethod and type(weight) is ModelWeightParameter
        if not (plain or self._is_replaced):
            raise UnsupportedModelError(
                f"{type(self).__name__} holds its weight in its own way ({type(own).__name__}, "
                f"{type(weight).__name__}), which {type(method).__name__} does not know"
            )
        names = self.parameter_names
        if not all(self.get_parameter(name).is_meta for name in names):
            raise RuntimeError(f"{type(self).__name__} is loaded: quantize it before it is")
        if self.is_embedding and type(method).embed is QuantizeMethod.embed:
            raise UnsupportedModelError("it looks up rows, and the scheme has products alone")
        created = method.create_weights(self)
        self._hold(method, created, {})
        device = self.load_state.device
        with torch.inference_mode(False):  # so that every load may write to them
            for name, value in method.compute_buffers(self).items():
                # NaN until a load computes it, so that no product has numbers that nothing wrote.
                nothing = torch.nan if value.is_floating_point() else torch.iinfo(value.dtype).max
                unknown = torch.full(value.shape, nothing, dtype=value.dtype, device=device)
                self.register_buffer(name, unknown, persistent=False)
                self.buffer_names += (name,)

    def share_weight(self, other: QuantizableLayer) -> None:
        """Hold the weight of ``other``, which is of the same shape: both have one from now on."""
        buffers = {name: other._buffers[name] for name in other.buffer_names}
        parameters = {name: other.get_parameter(name) for name in other.parameter_names}
        self._hold(other.quant_method, parameters, buffers)

    def _hold(
        self,
        method: QuantizeMethod,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor | None],
    ) -> None:
        """Replace the weight by the tensors of ``method``."""
        before = _Declared.by(self.quant_method, self)
        names = self.parameter_names
        kept = {name: p for name, p in self._parameters.items() if name not in names}
        self._parameters = {**parameters, **kept}
        for name in self.buffer_names:
            self._buffers.pop(name)
            self._non_persistent_buffers_set.discard(name)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)
        self.quant_method, self._is_replaced = method, True
        self.parameter_names, self.buffer_names = tuple(parameters), tuple(buffers)
        # What the layer itself declares stays.
        for attr, new in _Declared.by(method, self)._asdict().items():
            old = getattr(before, attr)
            own_names = {k: v for k, v in getattr(self, attr).items() if k not in old}
            setattr(self, attr, {**own_names, **new})

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move quantized parameters, but never cast them: ``model.half()`` casts the others."""
        names = self.parameter_names if self.is_quantized else ()
        quantized: set[torch.Tensor | None] = {self._parameters[name] for name in names}
        quantized |= {self._buffers.get(name) for name in self.buffer_names}
        # PyTorch gives _apply no types.
        return super()._apply(without_casts(fn, quantized), recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse full precision for quantized numbers: PyTorch would cast it without a scale."""
        errors: list[str] = args[-1]
        if self.buffer_names and args[0].get("assign_to_params_buffers"):
            errors.append(
                f"{prefix}weight is quantized, and assign=True would replace parameters that know "
                "their shard, which its scales are computed from: leave it out"
            )
            return
        for name in self.parameter_names:
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

    def typed_parameter(self, name: str, cls: type[_Parameter]) -> _Parameter:
        """Return the parameter ``name``, which the method has created as a ``cls``."""
        parameter = self.get_parameter(name)
        assert isinstance(parameter, cls), name
        return parameter

    def weight_shapes(self, at: int | None) -> list[list[int]]:
        """Return the shapes that slot ``at`` of the output may have in files beside its tensors.

        They are its own, if it is one slot, and that of all slots as one tensor.
        """
        rows = [] if at is None else [self.output.slots[at].size]
        return [[size, self.input.size] for size in (*rows, self.output.size)]

    def processing(self) -> Sequence[Callable[[], None]]:
        checks = type(self.quant_method).process_weights_after_loading
        has_work = checks is not QuantizeMethod.process_weights_after_loading or self.buffer_names
        own = (self._process_quantized,) if has_work else ()
        return (*own, *super().processing())

    def _process_quantized(self) -> None:
        self.quant_method.process_weights_after_loading(self)
        self._compute_buffers()

    def computed_buffers(self) -> Mapping[str, torch.Tensor | None]:
        """Return the buffers that follow from the parameters, ``None`` for one that is not used.

        A plan of another rank takes them from that rank's parameters, which are on meta.
        """
        computed = self.quant_method.compute_buffers(self)
        return {**dict.fromkeys(self.buffer_names), **computed}

    @property
    def computed_names(self) -> tuple[str, ...]:
        """Names of the buffers that processing computes from the parameters: sleep frees them."""
        return *self.buffer_names, *self.own_buffer_names

    def _compute_buffers(self) -> None:
        for name, value in self.quant_method.compute_buffers(self).items():
            self._set_buffer(name, value)

    def _set_buffer(self, name: str, value: torch.Tensor) -> None:
        buffer = self._buffers[name]
        assert buffer is not None, name
        if buffer.is_meta:  # the layer slept
            buffer = self._buffers[name] = materialized(buffer, value.device)
        buffer.copy_(value.detach())


class _Declared(NamedTuple):
    """What a module declares of the tensors that a method stores."""

    conversions: dict[str, Conversion]
    weight_aliases: dict[str, str]
    zero_weights: dict[str, str]

    @classmethod
    def by(cls, method: QuantizeMethod, layer: QuantizableLayer) -> _Declared:
        stored = method.stored(layer)
        return cls(
            {name: each.conversion for name, each in stored.items() if each.conversion is not None},
            {alias: name for name, each in stored.items() for alias in each.aliases},
            {name: each.zeros for name, each in stored.items() if each.zeros},
        )


def valid_weights(model: vLLMModule) -> dict[str, torch.Tensor]:
    """Return what methods declare as :attr:`StoredTensor.valid`, by the name in a checkpoint.

    The names are some of :meth:`~vllm_module.core.module.vLLMModule.expected_weights`.
    """
    found: dict[str, torch.Tensor] = {}
    for location in locations(model):
        layer = location.node.module
        valid = layer.valid_weights(location.attr) if isinstance(layer, QuantizableLayer) else None
        if valid is not None:
            found |= {location.stored_name(s): valid(s) for s in slots_of(location.tensor)}
    return found
