from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from vllm_module.distributed import run_ranks
from vllm_module.layers import (
    GatedRMSNorm,
    GroupedGatedRMSNorm,
    LayerNorm,
    PerHeadLayerNorm,
    QKVParallelLinear,
    RMSNorm,
    ShardedRMSNorm,
)
from vllm_module.parameters import Slot

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


REFERENCES = {None: LlamaRMSNorm, 0.0: Olmo2RMSNorm, 1.0: Gemma2RMSNorm}  # by their offset


def both(dtype: torch.dtype, eps: float, offset: float | None) -> tuple[RMSNorm, torch.nn.Module]:
    reference = REFERENCES[offset](96, eps).to(dtype)
    torch.nn.init.normal_(reference.weight)
    norm = RMSNorm(96, eps, params_dtype=dtype, weight_offset=offset)
    norm.load_weights({"weight": reference.weight.data})
    return norm, reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])  # 300 squared is beyond float16
@pytest.mark.parametrize("offset", REFERENCES)
@torch.no_grad()
def test_the_bits_of_transformers(
    dtype: torch.dtype, eps: float, scale: float, offset: float | None
) -> None:
    """The norm of any dtype is transformers' bit for bit, rounding in the same places."""
    norm, reference = both(dtype, eps, offset)
    x = (torch.randn(2, 7, 96) * scale).to(dtype)
    y = norm(x)
    assert y.dtype == dtype
    assert torch.equal(y, reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", REFERENCES)
@torch.no_grad()
def test_with_a_residual(dtype: torch.dtype, offset: float | None) -> None:
    """With a residual, the sum is normalized and returned as the new one; arguments stay."""
    norm, reference = both(dtype, 1e-6, offset)
    x, residual = torch.randn(2, 7, 96).to(dtype)
    kept = x.clone(), residual.clone()
    y, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, reference(x + residual))
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_dtype_of_the_weight() -> None:
    """params_dtype, else the default dtype, is that of the weight."""
    assert RMSNorm(4, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert RMSNorm(4).weight.dtype == torch.get_default_dtype()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_layer_norm(dtype: torch.dtype, bias: bool) -> None:
    """Layer normalization has PyTorch's bits, and with a residual returns the sum too."""
    reference = nn.LayerNorm(96, 1e-3, bias=bias, dtype=dtype)
    for parameter in reference.parameters():
        nn.init.normal_(parameter)
    norm = LayerNorm(96, 1e-3, bias, params_dtype=dtype)
    norm.load_weights(reference.state_dict())
    x, residual = torch.randn(2, 7, 96).to(dtype)
    assert torch.equal(norm(x), reference(x))
    y, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, reference(x + residual))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("make", "reference"),
    [
        (lambda: GroupedGatedRMSNorm(96, 1, 1e-5), MambaRMSNormGated(96, 96, 1e-5)),
        (lambda: GroupedGatedRMSNorm(96, 6, 1e-5), MambaRMSNormGated(96, 16, 1e-5)),
        (lambda: GroupedGatedRMSNorm(96, 1, 1e-5, True), Qwen3NextRMSNormGated(96, 1e-5)),
        (lambda: GatedRMSNorm(96, 1e-5), Qwen3NextRMSNormGated(96, 1e-5)),
    ],
    ids=["one group", "six groups", "norm first", "whole"],
)
@torch.no_grad()
def test_the_bits_of_gated_norms(
    dtype: torch.dtype, make: Callable[[], GroupedGatedRMSNorm], reference: nn.Module
) -> None:
    """Norms with a gate round where those of transformers do."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        norm = make()
    finally:
        torch.set_default_dtype(before)
    nn.init.normal_(reference.to(dtype).weight)
    norm.load_weights(reference.state_dict())
    x, gate = torch.randn(2, 7, 96).to(dtype)
    y = norm(x, gate)
    assert y.dtype == dtype
    assert torch.equal(y, reference(x, gate))


# With 2 KV heads, each of 4 ranks shares its head with another one.
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", REFERENCES)
@torch.no_grad()
def test_norms_of_heads_that_are_cut(offset: float | None, dtype: torch.dtype, size: int) -> None:
    """However many ranks share the heads, each computes its part of transformers' norms."""
    all_heads = [REFERENCES[offset](heads * 6, 1e-3).to(dtype) for heads in (4, 2)]
    each_head = [CohereLayerNorm((heads, 6), 1e-3).to(dtype) for heads in (4, 2)]
    for reference in (*all_heads, *each_head):
        nn.init.normal_(reference.weight)
    # Squares of these add up to the same sum in any order.
    x = [torch.randint(-16, 17, (7, heads, 6)).to(dtype) for heads in (4, 2)]

    def compare(rank: int) -> None:
        slots = QKVParallelLinear(5, 6, 4, 2).output.slots
        for slot, whole, of_all, of_each in zip(slots[:2], x, all_heads, each_head, strict=True):
            part = rank * slot.parts // size
            local = whole.chunk(slot.parts, dim=1)[part]
            sharded = ShardedRMSNorm(slot, 1e-3, dtype, offset)
            sharded.load_weights(of_all.state_dict())
            expected = of_all(whole.flatten(1)).chunk(slot.parts, dim=1)[part]
            assert torch.equal(sharded(local.flatten(1)), expected)  # rounded in the same places
            per_head = PerHeadLayerNorm(slot, 6, 1e-3, dtype)
            per_head.load_weights(of_each.state_dict())
            expected = of_each(whole).chunk(slot.parts, dim=1)[part]
            torch.testing.assert_close(per_head(local), expected)

    run_ranks(size, compare)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("offset", REFERENCES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_norms_whose_weight_has_another_dtype(
    dtype: torch.dtype, weight_dtype: torch.dtype, offset: float | None, size: int
) -> None:
    """A result has the dtype to which input and weight promote, cut over ranks or not."""
    weight = torch.randn(24).to(weight_dtype)
    # Squares of these add up to the same sum in any order.
    x = torch.randint(-16, 17, (7, 24)).to(dtype)
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-3)
    if offset is None:
        expected = normed.to(dtype) * weight
    else:
        expected = (normed * (weight.float() + offset)).to((x * weight).dtype)
    whole = RMSNorm(24, 1e-3, weight_dtype, offset)
    whole.load_weights({"weight": weight})

    def compare(rank: int) -> None:
        sharded = ShardedRMSNorm(Slot("", 24, size), 1e-3, weight_dtype, offset)
        sharded.load_weights({"weight": weight})
        found = sharded(x.chunk(size, dim=1)[rank])
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected.chunk(size, dim=1)[rank])

    assert whole(x).dtype == expected.dtype
    assert torch.equal(whole(x), expected)
    run_ranks(size, compare)
