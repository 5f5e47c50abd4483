"""Weights in eight bits, stored so or quantized while they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from vllm_module.conversions import Conversion
from vllm_module.errors import WeightReadError
from vllm_module.kernels.scaled_matmul import scaled_matmul
from vllm_module.parameters import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    PerTensorScaleParameter,
)
from vllm_module.quantization.method import QuantizableLayer, QuantizeMethod
from vllm_module.quantization.online import QuantizeOnline
from vllm_module.quantization.scheme import Scheme

_CHUNK = 1 << 22  # numbers that are looked at at a time


class EightBitMethod(QuantizeMethod):
    """A weight in eight bits with scales, stored so or quantized while it is loaded."""

    processes = True

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        if scheme.online:
            return
        # Either of them is what the weight is multiplied by, whatever "inv" says.
        (other,) = {"weight_scale", "weight_scale_inv"} - {scheme.scale_name}
        self.weight_aliases = {other: scheme.scale_name}
        if scheme.activations == "static":
            self.weight_aliases["activation_scale"] = "input_scale"

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return ``weight``, its scale (float32) and, where stored, ``input_scale``."""
        scheme, output = self.scheme, layer.output
        rank, size, wide = layer.tp_group.rank, layer.tp_group.size, torch.float32
        scale: BasevLLMParameter
        if scheme.strategy == "tensor":
            scale = PerTensorScaleParameter(output, tp_rank=rank, tp_size=size, dtype=wide)
        elif scheme.strategy == "channel":
            scale = ChannelQuantScaleParameter(output, tp_rank=rank, tp_size=size, dtype=wide)
        else:
            scale = BlockQuantScaleParameter(
                output, layer.input, block=scheme.block, tp_rank=rank, tp_size=size, dtype=wide
            )
        created: dict[str, BasevLLMParameter]
        created = {"weight": layer.new_weight(scheme.dtype), scheme.scale_name: scale}
        if scheme.activations == "static":
            created["input_scale"] = PerTensorScaleParameter(
                output, tp_rank=rank, tp_size=size, dtype=wide
            )
        return created

    def conversions(self, layer: QuantizableLayer) -> Mapping[str, Conversion]:
        if not self.scheme.online:
            return {}
        return {"weight": QuantizeOnline(self.scheme, layer.params_dtype)}

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Refuse scales and weights that are no numbers to compute with."""
        scale = getattr(layer, self.scheme.scale_name)
        if self.scheme.online:  # a number that is not finite makes its scale so
            what = "must be finite to be quantized: train or convert it anew"
            _demand(scale, torch.isfinite, "weight", what)
            return
        again = "quantize the checkpoint anew"
        what = f"must be finite and not negative: {again}"
        _demand(scale, lambda x: x.isfinite() & (x >= 0), self.scheme.scale_name, what)
        if self.scheme.activations == "static":
            what = f"must be finite and positive: calibrate it and {again}"
            static = layer.get_parameter("input_scale")
            _demand(static, lambda x: x.isfinite() & (x > 0), "input_scale", what)
        if self.scheme.dtype == torch.float8_e4m3fn:
            # NaN has every bit but the sign; there is no infinity.
            what = f"must be finite: {again}"
            _demand(layer.weight, lambda x: x.view(torch.uint8) & 0x7F != 0x7F, "weight", what)

    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        scheme = self.scheme
        scale, block = scheme.for_matmul(layer.weight, getattr(layer, scheme.scale_name))
        static = None
        if scheme.activations == "static":  # one input for all slots, which the largest one holds
            static = layer.get_parameter("input_scale").max()
        quantized = scheme.activations != "none"
        return scaled_matmul(x, layer.weight, scale, block, bias, static, quantize_input=quantized)


def _demand(
    parameter: nn.Parameter, good: Callable[[torch.Tensor], torch.Tensor], name: str, what: str
) -> None:
    """Refuse a parameter's first slot that is not good all over; ``name`` is what it is called."""
    assert isinstance(parameter, BasevLLMParameter)
    for slot in parameter.slots:
        region = parameter.region(slot)
        rows = max(1, _CHUNK // max(1, region[:1].numel()))  # masks are as large as what they mask
        for part in (region[first : first + rows] for first in range(0, len(region), rows)):
            if not bool((fine := good(part)).all()):
                where = f"{name}{f' (slot {slot!r})' if slot else ''}"
                raise WeightReadError(f"{where} has {part[~fine][0].item():g}, and {what}")
