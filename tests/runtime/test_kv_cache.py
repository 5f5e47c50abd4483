"""The cache's memory: layers get it, pages are copied in and out of it, and it is given back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module import vLLMModule
from vllm_module.layers import Attention
from vllm_module.runtime.kv_cache import KVCache, attention_layers, page_bytes

CPU = torch.device("cpu")
Pairs = list[tuple[int, int]]
PAGES, HOST_PAGES, PAGE_SIZE = 6, 4, 3


class Mixed(vLLMModule):
    """Layers of two shapes, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Attention(4, 8, num_kv_heads=2)
        self.second = Attention(3, 5)
        self.third = Attention(2, 8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def filled(model: vLLMModule, dtype: torch.dtype, host_pages: int) -> tuple[KVCache, list]:
    """Return a cache of random bits, and its tensors by layer."""
    cache = KVCache(model, PAGES, PAGE_SIZE, CPU, dtype, host_pages)
    held = [layer.kv_cache for layer in attention_layers(model)]
    for tensor in held:
        bits(tensor).copy_(torch.randint(256, bits(tensor).shape, dtype=torch.uint8))
    return cache, held


def pairs(sources: int, targets: int) -> st.SearchStrategy[Pairs]:
    """Draw pages to copy, none of them replaced twice."""
    pair = st.tuples(st.integers(0, sources - 1), st.integers(0, targets - 1))
    return st.lists(pair.filter(lambda p: p[0] != p[1]), unique_by=lambda p: p[1], max_size=4)


@given(
    pairs(PAGES, HOST_PAGES),
    pairs(PAGES, PAGES),
    pairs(HOST_PAGES, PAGES),
    st.sampled_from([torch.float32, torch.float8_e4m3fn]),
)
@settings(max_examples=60)
def test_pages_move_as_plain_copies_in_order_would_move_them(
    out: Pairs, copied: Pairs, back: Pairs, dtype: torch.dtype
) -> None:
    """In every layer: out to the host, then copies one after the other, then in from the host."""
    cache, held = filled(Mixed(), dtype, HOST_PAGES)
    cache.move([(page, page) for page in range(HOST_PAGES)], [], [])  # known from now on
    expected = [tensor.clone() for tensor in held]
    host = [tensor[:, :HOST_PAGES].clone() for tensor in held]
    for layer, beside in zip(expected, host, strict=True):
        for source, target in out:
            beside[:, target] = layer[:, source]
        for source, target in copied:
            layer[:, target] = layer[:, source]
        for source, target in back:
            layer[:, target] = beside[:, source]
    cache.move(out, copied, back)
    for tensor, layer in zip(held, expected, strict=True):
        assert torch.equal(bits(tensor), bits(layer))
    cache.move([], [], [(page, page) for page in range(HOST_PAGES)])
    for tensor, beside in zip(held, host, strict=True):
        assert torch.equal(bits(tensor[:, :HOST_PAGES]), bits(beside))


def test_a_page_that_is_copied_from_can_be_replaced_in_the_same_step() -> None:
    """Copies are made in their order where one replaces what another has read."""
    cache, held = filled(Mixed(), torch.float32, 0)
    before = [tensor.clone() for tensor in held]
    cache.move([], [(0, 1), (2, 0), (0, 3)], [])
    for tensor, was in zip(held, before, strict=True):
        for target, source in ((1, 0), (0, 2), (3, 2), (2, 2), (4, 4), (5, 5)):
            assert torch.equal(bits(tensor[:, target]), bits(was[:, source]))


def test_layers_get_pages_of_their_own_heads_and_give_them_back() -> None:
    """Until the cache is closed, each layer holds its part, and a second cache is refused."""
    model = Mixed()
    cache = KVCache(model, PAGES, PAGE_SIZE, CPU, torch.float32)
    shapes = [tuple(layer.kv_cache.shape) for layer in attention_layers(model)]
    assert shapes == [(2, 6, 3, 2, 8), (2, 6, 3, 3, 5), (2, 6, 3, 2, 8)]
    assert not any(layer.kv_cache.any() for layer in attention_layers(model))
    with pytest.raises(RuntimeError, match="have a KV cache already"):
        KVCache(model, 1, PAGE_SIZE, CPU, torch.float32)
    cache.close()
    assert [layer.kv_cache for layer in attention_layers(model)] == [None] * 3
    assert cache.nbytes == 0
    KVCache(model, 1, PAGE_SIZE, CPU, torch.float32).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_page_bytes_are_those_of_the_memory(dtype: torch.dtype) -> None:
    """What a page is said to take is what the cache has for each."""
    model = Mixed()
    cache = KVCache(model, PAGES, PAGE_SIZE, CPU, dtype)
    assert cache.nbytes == PAGES * page_bytes(model, PAGE_SIZE, dtype)
    assert page_bytes(model, PAGE_SIZE, dtype) == 2 * 3 * (16 + 15 + 16) * dtype.itemsize
    assert sum(layer.kv_cache.nbytes for layer in attention_layers(model)) == cache.nbytes
    cache.close()
