"""The layers together: Gemma 2 has an offset norm, soft caps, windows by layer, a scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from vllm_module import vLLMModule
from vllm_module.layers import (
    Attention,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_act_and_mul,
    layer_sliding_window,
)


class SelfAttention(vLLMModule):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer: int) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, 16
        self.qkv_proj = QKVParallelLinear(config.hidden_size, size, heads, kv_heads, bias=False)
        self.rotary_emb = rotary_emb
        self.attn = Attention(
            self.qkv_proj.num_heads,
            size,
            scale=config.query_pre_attn_scalar**-0.5,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            sliding_window=layer_sliding_window(config, layer),
            softcap=config.attn_logit_softcapping,
        )
        self.o_proj = RowParallelLinear(heads * size, config.hidden_size, bias=False)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(x).split(self.qkv_proj.output_sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.attn.head_size)) for part in qkv)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))


class GatedMLP(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [wide] * 2, bias=False, shard_names=["gate_proj", "up_proj"]
        )
        self.act_fn = get_act_and_mul(config.hidden_activation)
        self.down_proj = RowParallelLinear(wide, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class DecoderLayer(vLLMModule):
    def __init__(self, config: Any, rotary_emb: RotaryEmbedding, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, rotary_emb, layer)
        self.mlp = GatedMLP(config)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            norm = RMSNorm(config.hidden_size, config.rms_norm_eps, weight_offset=1.0)
            setattr(self, f"{name}_layernorm", norm)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(positions, x))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma2Model(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding.from_config(config)
        self.layers = nn.ModuleList(
            DecoderLayer(config, self.rotary_emb, layer)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, weight_offset=1.0)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        x = x * x.shape[-1] ** 0.5
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return self.norm(x, residual)[0]


class Gemma2(vLLMModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.softcap = config.final_logit_softcapping
        self.model = Gemma2Model(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.lm_head.tie_weights(self.model.embed_tokens)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lm_head(hidden) / self.softcap) * self.softcap


@pytest.mark.parametrize("changed", [None, "query_pre_attn_scalar", "attn_logit_softcapping"])
@torch.no_grad()
def test_gemma_2_is_wiring_only(changed: str | None) -> None:
    """Wired from the layers, Gemma 2 computes transformers' logits, and each setting counts."""
    config = Gemma2Config(
        vocab_size=96,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=4,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    reference = Gemma2ForCausalLM(config).eval()
    for parameter in reference.parameters():
        parameter.normal_(0, 0.3)
    tokens = torch.randint(96, (12,))
    expected = reference(tokens[None]).logits[0]
    if changed:
        setattr(config, changed, type(getattr(config, changed))(1))
    model = Gemma2(config)
    model.load_weights(reference.state_dict().items())
    logits = model.compute_logits(model.model(tokens, torch.arange(12)))
    assert torch.allclose(logits, expected, rtol=0, atol=1e-5) is (changed is None)
    assert logits.abs().max() > 2.5  # the last cap counts too
