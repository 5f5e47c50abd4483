"""What a quantized weight looks like: its dtype, and how far a scale reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vllm_module.kernels.dtypes import greatest
from vllm_module.parameters import ModelWeightParameter

Strategy = Literal["tensor", "channel", "block"]
Activations = Literal["none", "dynamic", "static"]


@dataclass(frozen=True)
class Scheme:
    """One way to hold a weight in eight bits; names are compressed-tensors' where it has any.

    Attributes:
        strategy: what shares a scale: the tensor that a checkpoint stores (one slot of a fused
            layer), an output channel, or a block.
        dtype: of the weight: float8_e4m3fn or int8.
        activations: whether the input is quantized, by scales of its own or by a stored one.
        block: rows and columns of a block.
        online: the checkpoint holds full precision, which is quantized as it arrives.
        scale_name: what the weight's scale is called, beside the weight.

    """

    strategy: Strategy
    dtype: torch.dtype = torch.float8_e4m3fn
    activations: Activations = "dynamic"
    block: tuple[int, int] = (128, 128)
    online: bool = False
    scale_name: str = "weight_scale"

    def __str__(self) -> str:
        strategy: str = self.strategy
        if strategy == "block":
            strategy = f"{self.block[0]}x{self.block[1]} block"
        how = "quantized while loading" if self.online else f"{self.activations} activations"
        return f"{str(self.dtype).removeprefix('torch.')} per {strategy}, {how}"

    def for_matmul(
        self, weight: ModelWeightParameter, scale: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return a layer's scales as a matmul takes them, and the rows and columns that share one.

        Each slot keeps the scale that its own numbers need, whatever its neighbours'; a matmul
        takes one a row.
        """
        if self.strategy == "block":
            return scale, self.block
        if self.strategy == "tensor":
            rooms = [shard.room for shard in weight.shards[0]]
            if len(rooms) == 1:
                return scale.view(1, 1), (weight.shape[0], weight.shape[1])
            rows = [scale[slot : slot + 1].expand(room) for slot, room in enumerate(rooms)]
            scale = torch.cat(rows).unsqueeze(1)
        return scale, (1, weight.shape[1])

    def error_bound(self, wide: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Return how far each number may be from what it was before it was quantized.

        For FP8, half a unit in the last of its three places, 2^-4 of the number, and below the
        normal numbers 2^-10 of the scale; for INT8, half the scale; and rounding in float32, in
        which all of it is computed.

        Args:
            wide: numbers of any shape.
            largest: absolute value in a number's block, or more; of a shape that broadcasts to it.

        """
        scale = (largest / greatest(self.dtype)).clamp(min=torch.finfo(torch.float32).tiny)
        last = 2.0**-22 * wide.abs()
        if self.dtype.is_floating_point:
            return torch.maximum(wide.abs() * 2.0**-4, scale * 2.0**-10) + last
        return scale / 2 + last * greatest(self.dtype)


_INT8 = torch.int8

# What a full-precision checkpoint can be turned into, by vLLM's names.
ONLINE: dict[str, Scheme] = {
    "fp8_per_tensor": Scheme("tensor", online=True),
    "fp8_per_channel": Scheme("channel", online=True),
    "fp8_per_block": Scheme("block", online=True),
    "int8_per_channel_weight_only": Scheme("channel", _INT8, "none", online=True),
}
