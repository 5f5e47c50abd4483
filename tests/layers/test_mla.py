"""Latent attention and the up-projection that it absorbs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_module.distributed import run_ranks
from vllm_module.errors import ShardingError, UnsupportedModelError
from vllm_module.layers import AttentionMetadata, MLAAttention, MLAUpProjection
from vllm_module.quantization import ONLINE, EightBitMethod

TOKENS, PAGE = 11, 4
HEADS, LATENT, NOPE, ROPE, V = 4, 24, 6, 8, 5


def unabsorbed(q_nope, q_pe, kv_c, k_pe, weight: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute keys and values of every head, and attend causally, in float64."""
    q = torch.cat((q_nope, q_pe), -1).double()
    kv_c, k_pe, weight = kv_c.double(), k_pe.double(), weight.double()
    keys, values = (kv_c @ weight.T).unflatten(-1, (-1, NOPE + V)).split([NOPE, V], -1)
    keys = torch.cat((keys, k_pe.unsqueeze(1).expand(-1, keys.shape[1], -1)), -1)
    scores = torch.einsum("thd,shd->hts", q, keys) * scale
    scores.masked_fill_(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values).flatten(1)


def loaded(weight: torch.Tensor) -> MLAUpProjection:
    layer = MLAUpProjection(LATENT, HEADS, NOPE, V)
    layer.load_weights({"weight": weight})
    return layer


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(HEADS * (NOPE + V), LATENT)


@pytest.fixture
def tokens() -> tuple[torch.Tensor, ...]:
    """Queries, latents and rotary keys, which are views of projections."""
    queries = torch.randn(TOKENS, HEADS, NOPE + ROPE).split([NOPE, ROPE], -1)
    return *queries, *torch.randn(TOKENS, LATENT + ROPE).split([LATENT, ROPE], -1)


def metadata_of(begin: int, end: int, pages: list[int]) -> AttentionMetadata:
    slots = [pages[p // PAGE] * PAGE + p % PAGE for p in range(begin, end)]
    return AttentionMetadata(
        slot_mapping=torch.tensor(slots),
        block_tables=torch.tensor([pages], dtype=torch.int32),
        context_lens=torch.tensor([end], dtype=torch.int32),
        query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
        max_query_len=end - begin,
    )


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("chunks", [[11], [1] * 11, [4, 1, 6]])
def test_absorbed_is_what_keys_and_values_of_all_heads_give(
    weight, tokens, chunks: list[int], scale: float | None
) -> None:
    """Without a cache, and in any chunks with one, the output is that of plain attention."""
    up = loaded(weight)
    layer = MLAAttention(HEADS, LATENT, NOPE, ROPE, scale)
    expected = unabsorbed(*tokens, weight, scale or (NOPE + ROPE) ** -0.5)
    whole = layer(*tokens, up.w_uk, up.w_uv)
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=2e-5)
    layer.kv_cache = torch.full((1, 5, PAGE, 1, LATENT + ROPE), torch.nan)
    begin, outputs = 0, []
    for count in chunks:
        part = [x[begin : begin + count] for x in tokens]
        metadata = metadata_of(begin, begin + count, [3, 0, 2])
        outputs.append(layer(*part, up.w_uk, up.w_uv, metadata))
        begin += count
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=0, atol=2e-5)


def test_an_fp8_cache_is_scaled_in_and_out(weight, tokens) -> None:
    """With an FP8 cache, latents and rotary keys are rounded to FP8 with ``k_scale``."""
    up, layer = loaded(weight), MLAAttention(HEADS, LATENT, NOPE, ROPE)
    layer.create_kv_scales()
    layer.update_weights({"k_scale": torch.tensor(0.03), "v_scale": torch.tensor(0.2)})
    rounded = [(x / 0.03).to(torch.float8_e4m3fn).float() * 0.03 for x in tokens[2:]]
    expected = layer(*tokens[:2], *rounded, up.w_uk, up.w_uv)
    layer.kv_cache = torch.zeros(1, 5, PAGE, 1, LATENT + ROPE).to(torch.float8_e4m3fn)
    got = layer(*tokens, up.w_uk, up.w_uv, metadata_of(0, TOKENS, [3, 0, 2]))
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    assert not torch.allclose(got, layer(*tokens, up.w_uk, up.w_uv), atol=1e-3)


def test_metadata_needs_a_cache(weight, tokens) -> None:
    """Attention with metadata and without a cache raises an error."""
    up, layer = loaded(weight), MLAAttention(HEADS, LATENT, NOPE, ROPE)
    with pytest.raises(RuntimeError, match="needs a kv_cache"):
        layer(*tokens, up.w_uk, up.w_uv, metadata_of(0, TOKENS, [3, 0, 2]))


def parts_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``w_uk`` and ``w_uv`` of a weight should be."""
    heads = weight.view(-1, NOPE + V, LATENT)
    return heads[:, :NOPE], heads[:, NOPE:].transpose(1, 2)


def test_both_parts_are_computed_again_in_place(weight) -> None:
    """A load, a reload and an update compute both from the weight, in the same memory."""
    layer = MLAUpProjection(LATENT, HEADS, NOPE, V)
    assert list(layer.expected_weights()) == ["weight"]
    memory = layer.w_uk.data_ptr(), layer.w_uv.data_ptr()
    for call in (layer.load_weights, layer.load_weights, layer.update_weights):
        weight = weight + 1
        call({"weight": weight})
        for computed, expected in zip((layer.w_uk, layer.w_uv), parts_of(weight), strict=True):
            assert torch.equal(computed, expected)
    assert memory == (layer.w_uk.data_ptr(), layer.w_uv.data_ptr())
    layer.sleep()  # which releases the memory
    layer.load_weights({"weight": weight - 3})
    assert torch.equal(layer.w_uv, parts_of(weight - 3)[1])


@pytest.mark.parametrize("name", ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "stored"])
def test_both_parts_are_those_of_an_fp8_weight(weight, name: str) -> None:
    """Quantized while it is loaded, or stored in FP8 blocks, the weight is dequantized for them."""
    layer = MLAUpProjection(LATENT, HEADS, NOPE, V)
    scheme = ONLINE["fp8_per_block"] if name == "stored" else ONLINE[name]
    if scheme.strategy == "block":
        scheme = replace(scheme, block=(4, 16))  # blocks end inside of heads
    layer.quantize(EightBitMethod(replace(scheme, online=name != "stored")))
    checkpoint = {"weight": weight}
    if name == "stored":
        scale = torch.rand(11, 2) + 0.5
        checkpoint = {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": scale}
        wide = scale.repeat_interleave(4, 0).repeat_interleave(16, 1)[:, :LATENT]
        weight = checkpoint["weight"].float() * wide
    for call in (layer.load_weights, layer.update_weights):
        call(checkpoint)
        for computed, expected in zip((layer.w_uk, layer.w_uv), parts_of(weight), strict=True):
            bound = 0 if name == "stored" else 2**-4 * weight.abs().max().item()
            torch.testing.assert_close(computed, expected, rtol=0, atol=bound)
        layer.w_uk.zero_()


def test_the_weight_gets_its_gradient(weight, tokens) -> None:
    """Where the weight needs a gradient, it is that of the attention written out."""
    layer, plain = loaded(weight), weight.clone().requires_grad_()
    assert layer.absorbed()[0] is layer.w_uk
    layer.weight.requires_grad_()
    attention = MLAAttention(HEADS, LATENT, NOPE, ROPE)
    attention(*tokens, *layer.absorbed()).sum().backward()
    unabsorbed(*tokens, plain, attention.scale).sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.grad, rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantized", [False, True])
def test_both_parts_are_those_of_a_state_dict(weight, quantized: bool) -> None:
    """A state dict has the weight alone, from which both parts are computed."""
    layers = []
    for number in range(2):
        layer = MLAUpProjection(LATENT, HEADS, NOPE, V)
        if quantized:
            layer.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
        layer.load_weights({"weight": weight + number})
        layers.append(layer)
    layers[0].load_state_dict(layers[1].state_dict())
    for got, expected in zip(layers[0].absorbed(), layers[1].absorbed(), strict=True):
        assert torch.equal(got, expected)


def test_a_trained_weight_is_absorbed_without_autograd(weight) -> None:
    """What an optimizer wrote to the weight counts while no gradients are recorded too."""
    layer = loaded(weight)
    layer.weight.requires_grad_()
    with torch.no_grad():
        layer.weight += 1
        for got, expected in zip(layer.absorbed(), parts_of(weight + 1), strict=True):
            assert torch.equal(got, expected)


def test_parts_that_no_memory_can_hold_are_refused() -> None:
    """The message has the sizes and the entries of the configuration that they come from."""
    with pytest.raises(UnsupportedModelError, match=r"w_uk of 4 heads, 1048576 by .*kv_lora_rank"):
        MLAUpProjection(2**30, HEADS, 2**20, V)


def test_each_rank_has_its_own_heads(weight) -> None:
    """Ranks cut the weight by heads; heads that cannot be divided evenly are refused."""
    uk, uv = parts_of(weight)
    ranks = run_ranks(2, lambda rank: loaded(weight))
    assert torch.equal(torch.cat([layer.w_uk for layer in ranks]), uk)
    assert torch.equal(torch.cat([layer.w_uv for layer in ranks]), uv)
    with pytest.raises(ShardingError, match="4 attention heads cannot be shared evenly by 3"):
        run_ranks(3, lambda rank: MLAUpProjection(LATENT, HEADS, 6, 6))
