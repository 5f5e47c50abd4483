"""Our kernel computes norms of transformers' models where they are root mean square norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from vllm_module import ModelConfig, get_model
from vllm_module.layers import RMSNorm
from vllm_module.wrapped.norms import WrappedNorm, norm_of


class Norm(nn.Module):
    """A root mean square norm with one thing changed."""

    def __init__(self, size: int = 32, offset: float = 0.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() * torch.rsqrt(self.mean(x.float()) + self.eps)
        return (y * (self.weight.float() + self.offset)).to(x.dtype)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean(-1, keepdim=True)


class Centered(Norm):
    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return x.var(-1, keepdim=True, unbiased=False)


class ByTheSum(Norm):
    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).sum(-1, keepdim=True)


class WithoutEps(Norm):
    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return (x.pow(2).mean(-1, keepdim=True) - self.eps).clamp(min=1e-30)


class Biased(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(32))


class ReturnsFloats(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float()


class Fails(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("of the model's own")


@pytest.mark.parametrize(
    ("module", "offset"),
    [
        (LlamaRMSNorm(64, eps=1e-5), None),
        (Gemma3RMSNorm(64, eps=1e-6), 1.0),
        (Olmo2RMSNorm(64, eps=1e-3), 0.0),
        (Norm(7), 0.0),
        (Norm(2048, 1.0), 1.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_computed_by_our_kernel(
    module: Any, offset: float | None, dtype: torch.dtype
) -> None:
    """With its offset and eps, also where the mean square is near eps."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        nn.init.normal_(module.to(dtype).weight)
        x = (torch.randn(3, 5, len(module.weight)) * torch.logspace(-4, 2, 5)[:, None]).to(dtype)
    torch.set_default_dtype(dtype)  # as while a model of this dtype is built
    try:
        ours = norm_of(module)
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(ours, RMSNorm)
    assert ours.weight_offset == offset
    ours.load_weights({"weight": module.weight.detach()})
    within = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0}
    torch.testing.assert_close(ours(x), module(x), **within)


@pytest.mark.parametrize(
    "module",
    [
        Norm(offset=2.0), Norm(offset=0.99), Centered(), ByTheSum(), WithoutEps(), Biased(),
        ReturnsFloats(), Fails(), Llama4TextL2Norm(), Gemma3nRMSNorm(32, with_scale=False),
        nn.LayerNorm(32), nn.RMSNorm(32), nn.Linear(32, 32),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_any_other_module_stays(module: nn.Module) -> None:
    """Whatever differs in a term, holds more, or fails."""
    assert norm_of(module) is None


def test_a_norm_with_a_hook_stays() -> None:
    """Its hook would not be called."""
    module = Norm()
    assert norm_of(module) is not None
    module.register_forward_hook(lambda *_: None)
    assert norm_of(module) is None


def test_a_norm_of_another_dtype_than_the_model_stays() -> None:
    """Some classes return the dtype of the input then, and others that of the weight."""
    assert norm_of(Norm().bfloat16()) is None


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "olmo2"])
def test_all_norms_of_a_model_are_replaced(kind: str, tmp_path: Path) -> None:
    """Logits in bfloat16 are as far from those in float32 as transformers' own."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    config = AutoConfig.for_model(kind, **sizes, **heads, pad_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
    theirs.save_pretrained(tmp_path)
    ids, norms = torch.arange(12), 0
    settings = {"model": str(tmp_path), "model_impl": "transformers"}
    ours = get_model(model_config=ModelConfig(**settings, dtype="float32"))
    for module in ours.modules():
        assert "RMSNorm" not in type(module).__name__
        norms += isinstance(module, WrappedNorm)
    assert norms == sum("RMSNorm" in type(module).__name__ for module in theirs.modules())
    with torch.no_grad():
        exact = theirs(input_ids=ids[None]).logits[0]
        torch.testing.assert_close(ours.compute_logits(ours(ids, ids)), exact, rtol=1e-4, atol=1e-5)
        rounded = get_model(model_config=ModelConfig(**settings, dtype="bfloat16"))
        error = (rounded.compute_logits(rounded(ids, ids)).float() - exact).norm()
        their_error = (theirs.bfloat16()(input_ids=ids[None]).logits[0].float() - exact).norm()
    assert error < 1.5 * their_error
