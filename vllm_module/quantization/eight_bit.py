"""Weights in eight bits: stored quantized, or quantized while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from vllm_module.kernels.dtypes import can_convert
from vllm_module.kernels.experts.grouped_matmul import grouped_matmul
from vllm_module.kernels.matmul.scaled_matmul import scaled_matmul
from vllm_module.kernels.rows.quantize import dequantize
from vllm_module.parameters import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ColumnvLLMParameter,
    PerTensorScaleParameter,
)
from vllm_module.quantization.demand import demand
from vllm_module.quantization.method import QuantizableLayer, QuantizeMethod, StoredTensor
from vllm_module.quantization.online import QuantizeOnline, finish_online
from vllm_module.quantization.rows import ExpertRows, QuantizedRows, RowScheme, rows_at
from vllm_module.quantization.scheme import Scheme

_online = lru_cache(maxsize=64)(QuantizeOnline)  # layers alike share it


class EightBitMethod(QuantizeMethod):
    """A weight in eight bits with scales: stored quantized, or quantized while it is loaded."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def create_weights(self, layer: QuantizableLayer) -> dict[str, BasevLLMParameter]:
        """Return ``weight``, its scale (float32) and, where stored, ``input_scale``."""
        scheme, output = self.scheme, layer.output
        common = layer.common(torch.float32)
        scale: BasevLLMParameter
        if scheme.strategy == "tensor":
            scale = PerTensorScaleParameter(output, **common)
        elif scheme.strategy == "channel" and scheme.modelopt_shapes:
            scale = ColumnvLLMParameter(output, **common)
        elif scheme.strategy == "channel":
            scale = ChannelQuantScaleParameter(output, or_tensor=scheme.or_tensor, **common)
        else:
            scale = BlockQuantScaleParameter(
                output,
                layer.input,
                block=scheme.block,
                apart=scheme.modelopt_shapes,
                stored_dtypes=scheme.scale_dtypes,
                transposed=layer.transposed,
                **common,
            )
        created: dict[str, BasevLLMParameter]
        created = {"weight": layer.new_weight(scheme.dtype), scheme.scale_name: scale}
        if scheme.activations == "static":
            created["input_scale"] = PerTensorScaleParameter(output, **common)
        return created

    def stored(self, layer: QuantizableLayer) -> Mapping[str, StoredTensor]:
        """Return the conversion of a weight, or other names of the scales.

        Where scales are stored as exponents of two and nothing else, few numbers are valid.
        """
        scheme = self.scheme
        if scheme.online:
            convert = _online(scheme, layer.params_dtype, layer.transposed)
            return {"weight": StoredTensor(conversion=convert)}
        # Under both names the weight is multiplied by the scale, whatever "inv" suggests.
        others = tuple({"weight_scale", "weight_scale_inv"} - {scheme.scale_name})
        only_exponents = scheme.scale_dtypes and torch.float32 not in scheme.scale_dtypes
        valid = (lambda slot: torch.tensor(120, dtype=torch.uint8)) if only_exponents else None
        stored = {scheme.scale_name: StoredTensor(others, valid=valid)}
        if scheme.activations == "static":
            stored["input_scale"] = StoredTensor(("activation_scale",))
        return stored

    def process_weights_after_loading(self, layer: QuantizableLayer) -> None:
        """Raise ``WeightReadError`` for scales and weights that nothing can be multiplied by."""
        scale = getattr(layer, self.scheme.scale_name)
        if self.scheme.online:
            finish_online(layer, self.scheme.scale_name)
            return
        advice = "quantize the checkpoint again"
        # INT8 has one more negative number than positive ones: AutoRound turns channels around.
        if self.scheme.dtype == torch.int8:
            demand(scale, torch.isfinite, self.scheme.scale_name, f"must be finite: {advice}")
        else:
            rule = f"must be finite and not negative: {advice}"
            demand(scale, lambda x: x.isfinite() & (x >= 0), self.scheme.scale_name, rule)
        if self.scheme.activations == "static":
            rule = f"must be finite and positive: calibrate it and {advice}"
            input_scale = layer.get_parameter("input_scale")
            demand(input_scale, lambda x: x.isfinite() & (x > 0), "input_scale", rule)
        if self.scheme.dtype == torch.float8_e4m3fn:
            # NaN has every bit set except the sign; e4m3fn has no infinity.
            rule = f"must be finite: {advice}"
            demand(layer.weight, lambda x: x.view(torch.uint8) & 0x7F != 0x7F, "weight", rule)

    def compute_buffers(self, layer: QuantizableLayer) -> Mapping[str, torch.Tensor]:
        """Return the scales as products take them, where the parameters differ from that.

        All slots, and experts, have the same input: the largest of their static scales fits.
        """
        computed = {}
        if self.scheme.strategy == "tensor":
            computed["scale_for_matmul"] = self._own_scale(layer)[0]
        if self.scheme.activations == "static" and len(layer.weight):  # a rank may have no experts
            computed["input_scale_for_matmul"] = layer.get_parameter("input_scale").amax()
        return computed

    def full_precision(
        self, layer: QuantizableLayer, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        scale = getattr(layer, self.scheme.scale_name)
        return self.scheme.dequantized(layer.weight, scale, dtype or layer.params_dtype)

    def apply(
        self, layer: QuantizableLayer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        scale, block, input_scale = self._scales(layer)
        quantize_input = self.scheme.activations != "none"
        return scaled_matmul(
            x, layer.weight, scale, block, bias, input_scale, quantize_input=quantize_input
        )

    def embed(self, layer: QuantizableLayer, ids: torch.Tensor, count: int) -> torch.Tensor:
        scale, (rows, columns), _ = self._scales(layer)
        of_rows = rows_at(scale, ids // rows, len(scale)).flatten(0, -2)
        values = rows_at(layer.weight, ids, count)
        embedded = dequantize(values.flatten(0, -2), of_rows, (1, columns), layer.params_dtype)
        return embedded.view(values.shape)

    def row_scheme(self, layer: QuantizableLayer) -> RowScheme | None:
        """Return how :meth:`apply` quantizes rows on a device that multiplies FP8, if it does.

        Rows that something else quantized so may then be given to :meth:`apply_rows`. If the result
        is ``None``, only tensors may be given.
        """
        scheme, group = self.scheme, None
        own = type(self).apply is not EightBitMethod.apply  # which expects tensors
        if own or scheme.activations == "none" or scheme.dtype != torch.float8_e4m3fn:
            return None
        if not can_convert(scheme.dtype, layer.weight):  # the product dequantizes the weight
            return None
        if scheme.activations == "static":
            return RowScheme(scheme.dtype, scale=self._static_scale(layer))
        if scheme.strategy == "block":
            group = scheme.block[1]
            if group & (group - 1):  # norms and activations find no scales for such groups
                return None
        return RowScheme(scheme.dtype, group)

    def apply_rows(
        self, layer: QuantizableLayer, rows: QuantizedRows, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what :meth:`apply` would of the rows before they were quantized."""
        scale, block, _ = self._scales(layer)
        return scaled_matmul(
            rows.values, layer.weight, scale, block, bias, rows.scales, dtype=rows.dtype
        )

    def apply_experts(self, layer: QuantizableLayer, rows: ExpertRows) -> torch.Tensor:
        scale, block, input_scale = self._scales(layer)
        quantize_input = self.scheme.activations != "none"
        return rows.product(
            grouped_matmul,
            layer.weight,
            scale=scale,
            block=block,
            input_scale=input_scale,
            quantize_input=quantize_input,
        )

    def _scales(
        self, layer: QuantizableLayer
    ) -> tuple[torch.Tensor, tuple[int, int], torch.Tensor | None]:
        """Return scales, the rows and columns that share one, and the input's scale, if static."""
        parameter = layer._parameters[self.scheme.scale_name]
        assert parameter is not None
        static = self._static_scale(layer)
        if self.scheme.strategy != "tensor" or parameter.requires_grad:  # an optimizer may write it
            return *self._own_scale(layer), static
        scale = layer._buffers["scale_for_matmul"]
        assert scale is not None  # the layer is ready
        return scale, self.scheme.block_of(layer.weight, scale), static

    def _static_scale(self, layer: QuantizableLayer) -> torch.Tensor | None:
        static = layer._buffers.get("input_scale_for_matmul")
        given = layer._parameters.get("input_scale")
        if static is not None and given is not None and given.requires_grad:
            return given.amax()
        return static

    def _own_scale(self, layer: QuantizableLayer) -> tuple[torch.Tensor, tuple[int, int]]:
        return self.scheme.for_matmul(layer.weight, getattr(layer, self.scheme.scale_name))
