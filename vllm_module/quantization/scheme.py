"""The format of a quantized weight: its dtype, and which numbers share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vllm_module.kernels.dtypes import greatest
from vllm_module.kernels.rows.quantize import dequantize
from vllm_module.parameters import ModelWeightParameter

Strategy = Literal["tensor", "channel", "block"]
Activations = Literal["none", "dynamic", "static"]
EVERY_LAYER = "Linear"  # the target of rules; compressed-tensors names it after PyTorch's class


@dataclass(frozen=True)
class Scheme:
    """One format of a weight in eight bits; the names follow compressed-tensors.

    Attributes:
        strategy: which numbers share a scale: a checkpoint tensor (one slot of a fused layer), an
            output channel, or a block.
        dtype: of the weight: float8_e4m3fn or int8.
        activations: whether the input is quantized: not at all, by a scale computed from it
            (dynamic), or by a stored scale (static). Inputs of INT8 weights are never quantized.
        block: rows and columns of a block.
        online: the checkpoint is in full precision and is quantized while it is loaded.
        scale_name: name of the parameter with the weight's scales.
        or_tensor: a checkpoint may store one scale for all channels of a tensor.
        scale_dtypes: those that a checkpoint may have for scales of blocks, if not only floating
            point of 16 bits and more: uint8 and float8_e8m0fnu are exponents of two.
        modelopt_shapes: the shapes of scales are NVIDIA ModelOpt's: ``[output]`` for channels, and
            ``[output / block[0], 1, input / block[1], 1]`` for blocks.

    """

    strategy: Strategy
    dtype: torch.dtype = torch.float8_e4m3fn
    activations: Activations = "dynamic"
    block: tuple[int, int] = (128, 128)
    online: bool = False
    scale_name: str = "weight_scale"
    or_tensor: bool = False
    scale_dtypes: tuple[torch.dtype, ...] = ()
    modelopt_shapes: bool = False

    def __str__(self) -> str:
        strategy: str = self.strategy
        if strategy == "block":
            strategy = f"{self.block[0]}x{self.block[1]} block"
        if self.or_tensor:
            strategy += " or tensor"
        if torch.uint8 in self.scale_dtypes:
            strategy += " with powers of two as scales"
        how = "quantized while loading" if self.online else f"{self.activations} activations"
        return f"{str(self.dtype).removeprefix('torch.')} per {strategy}, {how}"

    def for_matmul(
        self, weight: ModelWeightParameter, scale: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return a layer's scales as a matmul takes them, and the rows and columns that share one.

        Per tensor, each slot has a scale of its own; a matmul takes one for each row. If the input
        has one scale too, and there is one slot, a matmul takes both as they are.
        """
        if self.strategy == "tensor":
            shards = weight.shards[-2]
            scale = scale.unsqueeze(-1)
            if len(shards) > 1 or self.activations != "static":
                # Not torch.cat: on the meta device it imports torch's compiler.
                rows = scale.new_empty((*scale.shape[:-2], weight.shape[-2], 1))
                for i, shard in enumerate(shards):
                    rows.narrow(-2, shard.offset, shard.padded).copy_(scale[..., i : i + 1, :])
                scale = rows
        elif self.modelopt_shapes:
            scale = scale.unsqueeze(-1) if self.strategy == "channel" else scale[..., 0, :, 0]
        return scale, self.block_of(weight, scale)

    def block_of(self, weight: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
        """Return the rows and columns of ``weight`` that share one of the matmul's scales."""
        if self.strategy == "block":
            return self.block
        rows, columns = weight.shape[-2:]
        return rows if scale.shape[-2] == 1 else 1, columns

    def dequantized(
        self, weight: ModelWeightParameter, scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a layer's weight times its scales."""
        scale, block = self.for_matmul(weight, scale)
        if weight.dim() == 2:
            return dequantize(weight, scale, block, dtype)
        result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        for expert, quantized, scales in zip(result, weight, scale, strict=True):
            expert.copy_(dequantize(quantized, scales, block, dtype))
        return result

    def error_bound(self, values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Return the largest possible error of each number after quantizing and dequantizing it.

        For FP8 (e4m3) it is half a unit in the last of three mantissa bits: 2^-4 of the number, or
        2^-10 of the scale for subnormal numbers. For INT8 it is half the scale. Both include the
        rounding of the float32 arithmetic.

        Args:
            values: full-precision numbers of any shape.
            largest: largest absolute value in the block of each number, or an upper bound of it;
                broadcasts to the shape of ``values``.

        """
        scale = (largest / greatest(self.dtype)).clamp(min=torch.finfo(torch.float32).tiny)
        rounding = 2.0**-22 * values.abs()
        if self.dtype.is_floating_point:
            return torch.maximum(values.abs() * 2.0**-4, scale * 2.0**-10) + rounding
        return scale / 2 + rounding * greatest(self.dtype)


_INT8 = torch.int8
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
FLOATS_OR_E8M0 = (torch.float32, torch.bfloat16, torch.float16, torch.float64, EXPONENTS[1])
MXFP8 = Scheme("block", activations="none", block=(1, 32), scale_dtypes=EXPONENTS)

# The schemes for quantizing while loading, by vLLM's names.
ONLINE: dict[str, Scheme] = {
    "fp8_per_tensor": Scheme("tensor", online=True),
    "fp8_per_channel": Scheme("channel", online=True),
    "fp8_per_block": Scheme("block", online=True),
    "int8_per_channel_weight_only": Scheme("channel", _INT8, "none", online=True),
}
