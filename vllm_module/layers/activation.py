"""Activations, and gated ones that multiply two halves of their input."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from vllm_module.core.module import vLLMModule
from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.rows.act_and_mul import (
    gelu_and_mul,
    gelu_and_mul_quantize,
    silu_and_mul,
    silu_and_mul_quantize,
    swiglu_oai_and_mul,
)
from vllm_module.quantization.rows import QuantizedRows, RowScheme


class SiluAndMul(vLLMModule):
    """SwiGLU's gate (arXiv:2002.05202): ``[..., 2 d]``, gate and up, to ``silu(gate) * up``."""

    output_form: RowScheme | None = None  # as of RMSNorm

    def forward(self, x: torch.Tensor) -> torch.Tensor | QuantizedRows:
        rows = self.output_form
        if rows is None or not rows.quantizes(x):
            return silu_and_mul(x)
        values, scales = silu_and_mul_quantize(x, rows.dtype, rows.group, rows.scale)
        return rows.rows(values, scales, x.dtype)


class GeluAndMul(vLLMModule):
    """GeGLU's gate (arXiv:2002.05202): ``[..., 2 d]``, gate and up, to ``gelu(gate) * up``.

    Args:
        approximate: ``"tanh"`` for the tanh approximation of GELU.

    """

    output_form: RowScheme | None = None  # as of RMSNorm

    def __init__(self, approximate: Literal["none", "tanh"] = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor | QuantizedRows:
        rows = self.output_form
        if rows is None or not rows.quantizes(x):
            return gelu_and_mul(x, self.approximate)
        values, scales = gelu_and_mul_quantize(
            x, self.approximate, rows.dtype, rows.group, rows.scale
        )
        return rows.rows(values, scales, x.dtype)


class SwigluOAIAndMul(vLLMModule):
    """gpt-oss's gate: ``[..., 2 d]``, gate and up, to ``(up + 1) * gate * sigmoid(alpha * gate)``.

    Args:
        alpha: of the sigmoid.
        limit: the largest gate, and the largest absolute value of up; others are clamped.

    """

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return swiglu_oai_and_mul(x, self.alpha, self.limit)


class ReLUSquared(nn.Module):
    """``relu(x) ** 2`` (arXiv:2109.08668), of MLPs without a gate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x).square()


def get_act_and_mul(name: str) -> SiluAndMul | GeluAndMul:
    """Return the gated activation for ``hidden_act`` of a configuration.

    Raises ``UnsupportedModelError`` for an activation that has no gated layer.
    """
    activation = get_act(name)
    if isinstance(activation, ReLUSquared):
        raise UnsupportedModelError(f"hidden_act {name!r} has no layer here for an MLP with a gate")
    if isinstance(activation, nn.SiLU):
        return SiluAndMul()
    return GeluAndMul("tanh" if activation.approximate == "tanh" else "none")


def get_act(name: str) -> nn.SiLU | nn.GELU | ReLUSquared:
    """Return the activation for ``hidden_act`` of a configuration, for an MLP without a gate.

    Raises ``UnsupportedModelError`` for an activation that has no layer.
    """
    if name in ("silu", "swish"):
        return nn.SiLU()
    if name == "gelu":
        return nn.GELU()
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return nn.GELU(approximate="tanh")
    if name == "relu2":
        return ReLUSquared()
    raise UnsupportedModelError(
        f"hidden_act {name!r} has no layer here: expected silu, swish, gelu, "
        "gelu_pytorch_tanh, gelu_new or relu2"
    )
