"""Attention layers in steps of whole prompts, where torch may attend without pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_module.kernels.attention.fresh_attention import KERNEL
from vllm_module.kernels.choices import trying
from vllm_module.layers import Attention, AttentionMetadata, RMSNorm, RotaryEmbedding, fuse
from vllm_module.layers import attention as module

LENGTHS, PAGE, SIZE = [5, 1, 6], 4, 8
TOKENS = sum(LENGTHS)
PAGES = [[3, 0], [5, 6], [1, 4]]


def metadata(fresh: bool) -> AttentionMetadata:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    slots = [
        pages[position // PAGE] * PAGE + position % PAGE
        for pages, length in zip(PAGES, LENGTHS, strict=True)
        for position in range(length)
    ]
    return AttentionMetadata(
        torch.tensor(slots),
        torch.tensor(PAGES, dtype=torch.int32),
        torch.tensor(LENGTHS, dtype=torch.int32),
        starts,
        max(LENGTHS),
        fresh=fresh,
    ).laid_out()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note which of the two attends."""
    calls: list[str] = []

    def noted(name: str) -> Any:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    for name in ("paged_attention", "fresh_attention"):
        monkeypatch.setattr(module, name, noted(name))
    return calls


def norm() -> RMSNorm:
    made = RMSNorm(SIZE, 1e-6, torch.float32)
    made.load_weights({"weight": torch.randn(SIZE)})
    return made


class Rotating(torch.nn.Module):
    sole_readers = {"q_norm": "rotary_emb", "k_norm": "rotary_emb", "rotary_emb": "attn"}

    def __init__(self, attn: Attention) -> None:
        super().__init__()
        self.attn, self.rotary_emb = attn, RotaryEmbedding(SIZE, 64)
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, q: Any, k: Any, v: Any, metadata: AttentionMetadata) -> torch.Tensor:
        q, k = self.rotary_emb(torch.arange(TOKENS), self.q_norm(q), self.k_norm(k))
        return self.attn(q, k, v, metadata)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_torch_gives_what_the_pages_give(
    called: list[str], inference: bool, rotated: bool, window: int | None
) -> None:
    """The output is the same up to rounding, and the cache holds the same bits."""
    layer = Attention(4, SIZE, num_kv_heads=2, sliding_window=window)
    given = torch.randn(TOKENS, 8, SIZE)
    module = fuse(Rotating(layer)) if rotated else layer
    results, caches = [], []
    for choice, fresh in (("pages", True), ("torch", False), ("torch", True)):
        layer.kv_cache = torch.full((2, 7, PAGE, 2, SIZE), torch.nan)
        q, k, v = given.clone().split([4, 2, 2], 1)
        with torch.inference_mode(inference), torch.no_grad(), trying({KERNEL: choice}):
            results.append(module(q, k, v, metadata(fresh)))
        caches.append(layer.kv_cache)
    assert called == ["paged_attention", "paged_attention", "fresh_attention"]
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=2e-6)
    for cache in caches[1:]:
        assert torch.equal(cache.view(torch.int32), caches[0].view(torch.int32))


@pytest.mark.parametrize("entry", ["softcap", "alibi_slopes", "sinks", "cache"])
def test_what_torch_has_not_is_read_from_pages(called: list[str], entry: str) -> None:
    """Soft caps, slopes, sinks and caches of eight bits: a choice of torch does not matter."""
    options: Any = {"softcap": 20.0, "alibi_slopes": [0.1, 0.2, 0.3, 0.4]}
    layer = Attention(4, SIZE, num_kv_heads=2, **{k: v for k, v in options.items() if k == entry})
    dtype = torch.float8_e4m3fn if entry == "cache" else torch.float32
    layer.kv_cache = torch.zeros(2, 7, PAGE, 2, SIZE).to(dtype)
    q, k, v = torch.randn(TOKENS, 8, SIZE).split([4, 2, 2], 1)
    sinks = torch.randn(4) if entry == "sinks" else None
    expected = layer(q, k, v, metadata(False), sinks)
    with trying({KERNEL: "torch"}):
        assert torch.equal(layer(q, k, v, metadata(True), sinks), expected)
    assert called == ["paged_attention"] * 2
