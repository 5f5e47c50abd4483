"""Gradients of the layers whose forward is a custom operator."""

from __future__ import annotations

import torch

from vllm_module.layers import Attention, GeluAndMul, RMSNorm, RotaryEmbedding, SiluAndMul


def test_gradients_go_through_every_layer_that_has_an_operator() -> None:
    """Gradients of norm, rotary embedding, attention and activation match finite differences."""
    norm, rotary, attention = RMSNorm(8), RotaryEmbedding(8, 32), Attention(2, 8)
    norm.load_weights({"weight": torch.rand(8) + 0.5})
    silu, gelu = SiluAndMul(), GeluAndMul("tanh")
    positions = torch.arange(5)
    residual, mixed = torch.randn(5, 48), torch.randn(5, 48)

    def loss(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)) for part in (x + residual).split(16, dim=-1))
        q, k = norm(q), norm(k, v)[0]
        q, k = rotary(positions, q, k)
        y = attention(q, k, v)
        return (silu(y).sum() + gelu(y * 2).sum()) + (x * mixed).sum()

    x = torch.randn(5, 48, requires_grad=True)
    loss(x).backward()
    direction = torch.randn(5, 48)
    with torch.no_grad():
        step = 1e-2 * direction
        change = (loss(x + step) - loss(x - step)) / 2e-2
    assert x.grad is not None
    torch.testing.assert_close((x.grad * direction).sum(), change, rtol=2e-2, atol=2e-2)
