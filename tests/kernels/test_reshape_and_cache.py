from __future__ import annotations

import pytest
import torch

from vllm_module.kernels.reshape_and_cache import reshape_and_cache

PAGES, HEADS, HEAD_SIZE = 4, 2, 6


@pytest.mark.parametrize("page", [1, 3, 5, 16])
def test_every_token_is_in_its_slot_and_nothing_else_is_written(page: int) -> None:
    """Slot p of page b holds the token mapped to b * page_size + p, and other slots stay."""
    k_cache, v_cache = (torch.full((PAGES, page, HEADS, HEAD_SIZE), torch.nan) for _ in range(2))
    slots = torch.randperm(PAGES * page)[: PAGES * page // 2 + 1]
    key, value = torch.randn(2, len(slots), HEADS, HEAD_SIZE)
    reshape_and_cache(key, value, k_cache, v_cache, slots)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(k_cache[slot // page, slot % page], key[token])
        assert torch.equal(v_cache[slot // page, slot % page], value[token])
    for cache in (k_cache, v_cache):
        assert (~cache.isnan()).sum() == len(slots) * HEADS * HEAD_SIZE


@pytest.mark.parametrize("slots", [[-1, 5, -1, 0], [-1, -1, -1, -1], [3, -1, 2, 1]])
def test_slot_minus_one_stores_nothing(slots: list[int]) -> None:
    """Padding, mapped to slot -1, is written nowhere, not even to the last slot."""
    caches = torch.full((2, PAGES, 3, HEADS, HEAD_SIZE), torch.nan)
    key, value = torch.randn(2, 4, HEADS, HEAD_SIZE)
    reshape_and_cache(key, value, *caches, torch.tensor(slots))
    expected = torch.full_like(caches, torch.nan)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0, slot // 3, slot % 3] = key[token]
            expected[1, slot // 3, slot % 3] = value[token]
    assert torch.equal(caches.nan_to_num(7), expected.nan_to_num(7))


def test_no_tokens() -> None:
    """A step without tokens writes nothing."""
    caches = torch.full((2, PAGES, 3, HEADS, HEAD_SIZE), torch.nan)
    nothing = torch.empty(0, HEADS, HEAD_SIZE)
    reshape_and_cache(nothing, nothing, *caches, torch.empty(0, dtype=torch.int64))
    assert caches.isnan().all()


def test_views_and_dtypes() -> None:
    """Tokens cut from a fused projection are stored in caches that are views, in their dtype."""
    fused = torch.randn(5, 3 * HEADS * HEAD_SIZE)
    key, value = (
        part.unflatten(-1, (HEADS, HEAD_SIZE))
        for part in fused.split(HEADS * HEAD_SIZE, dim=-1)[1:]
    )
    together = torch.zeros(PAGES, 2, 3, HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    k_cache, v_cache = together.unbind(1)
    slots = torch.tensor([11, 0, 4, 7, 3])
    reshape_and_cache(key, value, k_cache, v_cache, slots)
    assert torch.equal(k_cache[slots // 3, slots % 3], key.bfloat16())
    assert torch.equal(v_cache[slots // 3, slots % 3], value.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_fp8_cache_holds_what_is_divided_by_its_scale(dtype: torch.dtype) -> None:
    """Keys and values have scales of their own, and what is beyond the range saturates."""
    caches = torch.zeros(2, PAGES, 3, HEADS, HEAD_SIZE).to(dtype)
    key, value = torch.randn(2, 2, HEADS, HEAD_SIZE)
    key[0, 0, 0] = 1e9
    k_scale, v_scale = torch.tensor([0.5]), torch.tensor([3.0])
    reshape_and_cache(key, value, *caches, torch.tensor([4, 0]), k_scale, v_scale)
    most = torch.finfo(dtype).max
    for cache, new, scale in ((caches[0], key, k_scale), (caches[1], value, v_scale)):
        expected = (new / scale).clamp(-most, most).to(dtype)
        assert torch.equal(cache[1, 1].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(cache[0, 0].view(torch.uint8), expected[1].view(torch.uint8))
