"""The cache's memory: layers get views of it, and pages are copied and swapped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module import vLLMModule
from vllm_module.layers import Attention, MLAAttention
from vllm_module.runtime.cache.kv_cache import KVCache, attention_layers, page_bytes
from vllm_module.runtime.step_inputs import Moves

CPU = torch.device("cpu")
Pairs = list[tuple[int, int]]
PAGES, HOST_PAGES, PAGE_SIZE = 6, 4, 3


class Mixed(vLLMModule):
    """Three layers with keys and values of two shapes, and two with latents."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Attention(4, 8, num_kv_heads=2)
        self.second = Attention(3, 5)
        self.latent = MLAAttention(4, 5, 3, 2)
        self.third = Attention(2, 8)
        self.other_latent = MLAAttention(1, 4, 9, 3)


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
    """Draw (from, to) pairs of pages, none copied to twice."""
    pair = st.tuples(st.integers(0, sources - 1), st.integers(0, targets - 1))
    return st.lists(pair.filter(lambda p: p[0] != p[1]), unique_by=lambda p: p[1], max_size=4)


@given(
    pairs(PAGES, HOST_PAGES),
    pairs(PAGES, PAGES),
    pairs(HOST_PAGES, PAGES),
    st.sampled_from([torch.float32, torch.float8_e4m3fn]),
)
@settings(max_examples=60)
def test_pages_are_copied_in_order(
    out: Pairs, copied: Pairs, back: Pairs, dtype: torch.dtype
) -> None:
    """In every layer: to the host, then on the device one after another, then from the host."""
    cache, held = filled(Mixed(), dtype, HOST_PAGES)
    every = [(page, page) for page in range(HOST_PAGES)]
    cache.move(Moves(swapped_out=every))  # so that the host's content is known
    expected = [tensor.clone() for tensor in held]
    host = [tensor[:, :HOST_PAGES].clone() for tensor in held]
    for layer, host_layer in zip(expected, host, strict=True):
        for source, target in out:
            host_layer[:, target] = layer[:, source]
        for source, target in copied:
            layer[:, target] = layer[:, source]
        for source, target in back:
            layer[:, target] = host_layer[:, source]
    cache.move(Moves(out, copied, back))
    for tensor, layer in zip(held, expected, strict=True):
        assert torch.equal(bits(tensor), bits(layer))
    cache.move(Moves(swapped_in=every))
    for tensor, host_layer in zip(held, host, strict=True):
        assert torch.equal(bits(tensor[:, :HOST_PAGES]), bits(host_layer))


def test_a_page_can_be_copied_from_and_then_to_in_one_step() -> None:
    """The copies keep their order if one overwrites what an earlier one has read."""
    cache, held = filled(Mixed(), torch.float32, 0)
    before = [tensor.clone() for tensor in held]
    cache.move(Moves(copied=[(0, 1), (2, 0), (0, 3)]))
    for tensor, was in zip(held, before, strict=True):
        for target, source in ((1, 0), (0, 2), (3, 2), (2, 2), (4, 4), (5, 5)):
            assert torch.equal(bits(tensor[:, target]), bits(was[:, source]))


def test_the_default_device_is_not_that_of_the_host() -> None:
    """Memory and lists of the host are there, whatever device a program has set for its own."""
    model = Mixed()
    with torch.device("meta"):
        cache = KVCache(model, PAGES, PAGE_SIZE, CPU, torch.float32, HOST_PAGES)
        held = [layer.kv_cache for layer in attention_layers(model)]
        for tensor in held:
            tensor[:, 1] = 7
        cache.move(Moves([(1, 3)], [(1, 0)], [(3, 2)]))
    for tensor in held:
        assert tensor[:, :4].mean((0, 2, 3, 4)).tolist() == [7, 7, 7, 0]


def test_layers_get_views_of_the_shape_of_their_heads() -> None:
    """Until the cache is closed, each layer has its view, and a second cache is refused."""
    model = Mixed()
    cache = KVCache(model, PAGES, PAGE_SIZE, CPU, torch.float32)
    shapes = [tuple(layer.kv_cache.shape) for layer in attention_layers(model)]
    latent = (1, 6, 3, 1, 7)
    assert shapes == [(2, 6, 3, 2, 8), (2, 6, 3, 3, 5), latent, (2, 6, 3, 2, 8), latent]
    assert not any(layer.kv_cache.any() for layer in attention_layers(model))
    with pytest.raises(RuntimeError, match="have a KV cache already"):
        KVCache(model, 1, PAGE_SIZE, CPU, torch.float32)
    cache.close()
    assert [layer.kv_cache for layer in attention_layers(model)] == [None] * 5
    assert cache.nbytes == 0
    KVCache(model, 1, PAGE_SIZE, CPU, torch.float32).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_page_bytes_are_those_of_the_memory(dtype: torch.dtype) -> None:
    """``page_bytes`` is the cache's memory divided by its pages."""
    model = Mixed()
    cache = KVCache(model, PAGES, PAGE_SIZE, CPU, dtype)
    assert cache.nbytes == PAGES * page_bytes(model, PAGE_SIZE, dtype)
    numbers = 2 * (16 + 15 + 16) + 2 * 7  # of a token
    assert page_bytes(model, PAGE_SIZE, dtype) == 3 * numbers * dtype.itemsize
    assert sum(layer.kv_cache.nbytes for layer in attention_layers(model)) == cache.nbytes
    cache.close()
