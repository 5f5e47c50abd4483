"""Writing into the paged cache: the operation's laws, then the kernel against its reference."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels import dtypes
from vllm_module.kernels.attention import reshape_and_cache as module
from vllm_module.kernels.attention.reshape_and_cache import (
    reshape_and_cache,
    reshape_and_cache_reference,
    reshape_and_cache_triton,
)

PAGES, HEADS, HEAD_SIZE = 4, 2, 6
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("page", [1, 3, 5, 16])
def test_every_token_is_in_its_slot_and_nothing_else_is_written(page: int) -> None:
    """Cache slot b * page_size + p is offset p of page b, and other cache slots stay."""
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
    """Padding, mapped to cache slot -1, is not written, not even to the last cache slot."""
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
    for store in (reshape_and_cache, reshape_and_cache_triton):
        caches = torch.full((2, PAGES, 3, HEADS, HEAD_SIZE), torch.nan)
        nothing = torch.empty(0, HEADS, HEAD_SIZE)
        store(nothing, nothing, *caches, torch.empty(0, dtype=torch.int64))
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
@pytest.mark.parametrize("scales", [([0.5], [3.0]), ([0.5, 7.0], [3.0, 0.25])])
def test_an_fp8_cache_holds_what_is_divided_by_its_scale(dtype: torch.dtype, scales) -> None:
    """Keys and values have their own scales, one or one for each head; numbers saturate."""
    caches = torch.zeros(2, PAGES, 3, HEADS, HEAD_SIZE).to(dtype)
    key, value = torch.randn(2, 2, HEADS, HEAD_SIZE)
    key[0, 0, 0] = 1e9
    k_scale, v_scale = map(torch.tensor, scales)
    reshape_and_cache(key, value, *caches, torch.tensor([4, 0]), k_scale, v_scale)
    most = torch.finfo(dtype).max
    for cache, new, scale in ((caches[0], key, k_scale), (caches[1], value, v_scale)):
        expected = (new / scale.expand(HEADS)[:, None]).clamp(-most, most).to(dtype)
        assert torch.equal(cache[1, 1].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(cache[0, 0].view(torch.uint8), expected[1].view(torch.uint8))


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 9),
    heads=st.integers(1, 5),
    head_size=st.sampled_from([1, 6, 64, 80, 96, 112, 128, 320, 512]),
    pages=st.integers(1, 4),
    page=st.integers(1, 7),
    new=st.sampled_from(FLOATS),
    held=st.sampled_from([*FLOATS, *EIGHT_BITS]),
    scales=st.sampled_from(["none", "one", "heads"]),
    layout=st.sampled_from(["apart", "together", "heads first"]),
    slots=st.sampled_from([torch.int64, torch.int32]),
    seed=st.integers(0, 2**16),
)
def test_the_kernel_gives_the_bits_of_the_reference(
    tokens, heads, head_size, pages, page, new, held, scales, layout, slots, seed
) -> None:
    """Any sizes, dtypes, scales and strides; cache slots that are negative or out of range."""
    torch.manual_seed(seed)
    fused = torch.randn(tokens, (heads + 2) * 2, head_size) * 100
    fused[torch.rand_like(fused) < 0.02] = torch.inf
    fused = fused.to(new)
    key, value = fused[:, 2 : 2 + heads], fused[:, -heads:]
    shapes = {
        "apart": (2, pages, page, heads, head_size),
        "together": (pages, 2, page, heads, head_size),
        "heads first": (2, heads, pages, page, head_size),
    }
    cache = torch.randint(0, 100, shapes[layout]).to(held)
    mapping = torch.randperm(pages * page + 4)[:tokens] - 2
    mapping = torch.cat([mapping, torch.full((tokens - len(mapping),), -1)]).to(slots)
    given_scales = [None, None]
    if scales != "none":
        given_scales = list(torch.rand(2, 1 if scales == "one" else heads) * 3 + 0.01)
    results = []
    for store in (reshape_and_cache_triton, reshape_and_cache_reference):
        written = cache.clone()
        k_cache, v_cache = written.unbind(1 if layout == "together" else 0)
        if layout == "heads first":
            k_cache, v_cache = (part.movedim(0, 2) for part in (k_cache, v_cache))
        store(key, value, k_cache, v_cache, mapping, *given_scales)
        results.append(written)
    assert torch.equal(*map(bits, results))
    if ((mapping < 0) | (mapping >= pages * page)).all():
        assert torch.equal(*map(bits, (results[0], cache)))


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_stays_nan(held: torch.dtype) -> None:
    """NaN is stored as NaN, and does not saturate."""
    key = torch.randn(2, HEADS, HEAD_SIZE)
    key[1, 0, 3] = torch.nan
    caches = torch.zeros(2, PAGES, 3, HEADS, HEAD_SIZE).to(held)
    reshape_and_cache_triton(key, key, *caches, torch.tensor([7, 2]))
    assert torch.equal(caches[:, 0, 2].isnan(), key[1].isnan().expand(2, HEADS, HEAD_SIZE))
    assert not caches[:, 2, 1].isnan().any()


def test_a_cache_of_its_tokens_type_holds_their_bits() -> None:
    """Without a change of dtype nothing is converted, and NaN keeps its payload."""
    key = torch.randint(-(2**15), 2**15, (64, HEADS, HEAD_SIZE), dtype=torch.int16)
    caches = torch.zeros(2, 1, 64, HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    new = key.view(torch.bfloat16)
    assert new.isnan().any()
    reshape_and_cache_triton(new, new, *caches, torch.arange(64))
    assert torch.equal(caches.view(torch.int16), key.expand(2, 1, *key.shape))


def test_offsets_beyond_int32() -> None:
    """Tokens, heads, pages and offsets are found if their products with strides exceed 32 bits."""
    gigabyte, step = 2**30, 2**20
    far = torch.frombuffer(mmap.mmap(-1, 2**34), dtype=torch.int8)
    strides = (gigabyte + step, gigabyte + 4 * step, gigabyte + 16 * step, 1)
    cache = far.as_strided((4, 4, 4, 16), strides)
    new = torch.frombuffer(mmap.mmap(-1, 2**34), dtype=torch.float16)
    key = new.as_strided((4, 4, 16), (gigabyte + step, gigabyte + 4 * step, 1))
    key.copy_(torch.randint(-99, 99, key.shape))
    slots = torch.tensor([13, 3, 12, 15])
    reshape_and_cache_triton(key, key, cache, cache, slots)
    assert torch.equal(cache[slots // 4, slots % 4], key.to(torch.int8))


def test_a_gpu_without_fp8_stores_what_torch_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    """If kernels cannot convert to FP8, none does, and the host does not wait for the slots."""
    key, slots = torch.randn(3, HEADS, HEAD_SIZE), torch.tensor([4, -1, 0])
    scales = torch.rand(2, HEADS) + 0.1
    written = []
    for capability in ((8, 9), (8, 6)):
        monkeypatch.setattr(dtypes, "capability", lambda tensor, of=capability: of)
        if capability < (8, 9):
            monkeypatch.setattr(module, "scaled_to", None)
            monkeypatch.setattr(module, "holds_slots", None)
        caches = torch.zeros(PAGES, 2, 3, HEADS, HEAD_SIZE).to(torch.float8_e5m2).unbind(1)
        reshape_and_cache_triton(key, -key, *caches, slots, *scales)
        written.append(torch.stack([bits(cache) for cache in caches]))
    assert written[0].any()
    assert torch.equal(*written)


def arguments(tokens: int = 3, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict:
    caches = torch.zeros(2, PAGES, 3, HEADS, HEAD_SIZE, dtype=dtype, device=device)
    return {
        "key": torch.randn(tokens, HEADS, HEAD_SIZE, device=device),
        "value": torch.randn(tokens, HEADS, HEAD_SIZE, device=device),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slot_mapping": torch.arange(tokens, device=device),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(3, HEADS)}, r"key .*\[any, any, any\], got \[3, 2\]"),
        ({"key": torch.zeros(3, HEADS, HEAD_SIZE, dtype=torch.int32)}, r"key .*int32"),
        ({"value": torch.zeros(3, HEADS, 5)}, r"value .*\[3, 2, 6\], got \[3, 2, 5\]"),
        ({"k_cache": torch.zeros(4, 3, 1, 6)}, r"k_cache .*\[any, any, 2, 6\], got \[4, 3, 1, 6\]"),
        ({"v_cache": torch.zeros(4, 2, 2, 6)}, r"v_cache .*\[4, 3, 2, 6\], got \[4, 2, 2, 6\]"),
        ({"v_cache": torch.zeros(4, 3, 2, 6).bfloat16()}, r"v_cache .*float32, got .*bfloat16"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, r"slot_mapping .*\[3\], got \[2\]"),
        ({"slot_mapping": torch.zeros(3)}, r"slot_mapping .*int64.*got torch.float32"),
        ({"slot_mapping": torch.tensor([0, 12, -1])}, r"slot 12, and the cache has 12: 4 pages"),
        ({"k_scale": torch.ones(3)}, r"k_scale .*\[2\], got \[3\]"),
        ({"v_scale": torch.ones(1).double()}, r"v_scale .*float32, got torch.float64"),
        ({"value": torch.zeros(3, HEADS, HEAD_SIZE, device="meta")}, "value is on meta"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    """A wrong shape, dtype, device or cache slot raises ValueError before any write."""
    given_arguments = {**arguments(), **change}
    with pytest.raises(ValueError, match=message):
        reshape_and_cache(**given_arguments)
    assert not given_arguments["k_cache"].any()


def test_the_operator() -> None:
    """It is registered with its mutations and a fake, and compiles within a graph."""
    operator = torch.ops.vllm_module.reshape_and_cache.default
    caches = [torch.zeros(PAGES, 3, HEADS, HEAD_SIZE) for _ in range(2)]
    example = {**arguments(), "k_cache": caches[0], "v_cache": caches[1]}
    torch.library.opcheck(operator, tuple(example.values()))
    assert reshape_and_cache(**arguments(device="meta")) is None


def test_it_compiles_with_caches_of_one_tensor() -> None:
    """Compiled, a layer whose caches are views of one tensor writes the same as eager."""

    def layer(qkv: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        key, value = qkv[:, HEADS:].chunk(2, 1)
        reshape_and_cache(key * 2, value, kv_cache[0], kv_cache[1], slots)
        return kv_cache[1].sum()

    qkv, slots = torch.randn(4, 3 * HEADS, HEAD_SIZE), torch.tensor([3, -1, 11, 6])
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        kv_cache = torch.zeros(2, PAGES, 3, HEADS, HEAD_SIZE)
        results.append((call(qkv, kv_cache, slots), kv_cache))
    assert results[0][1].any()
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
