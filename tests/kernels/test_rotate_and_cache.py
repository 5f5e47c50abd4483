"""Norms, rotation and writing the cache in one launch: what the separate operations give."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels import dtypes
from vllm_module.kernels.attention import rotate_and_cache as module
from vllm_module.kernels.attention.paged_layout import PagedLayout
from vllm_module.kernels.attention.reshape_and_cache import (
    reshape_and_cache,
    reshape_and_cache_triton,
)
from vllm_module.kernels.attention.rotary_embedding import (
    rotary_embedding,
    rotary_embedding_reference,
    rotary_embedding_triton,
)
from vllm_module.kernels.attention.rotate_and_cache import (
    rotate_and_cache,
    rotate_and_cache_reference,
    rotate_and_cache_triton,
)
from vllm_module.kernels.rows.rms_norm import rms_norm, rms_norm_reference

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def projected(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype):
    """Return query, key and value that are views of one projection's output."""
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(dtype)
    return qkv.unflatten(-1, (-1, size)).split([heads, kv_heads, kv_heads], -2)


def angles(tokens: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.randn(tokens, pairs) * 10
    return turned.cos(), turned.sin()


def copies(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return copies that are views of one tensor, as the tensors are."""
    return list(torch.cat(tensors, -2).split([x.shape[-2] for x in tensors], -2))


sizes = given(
    tokens=st.integers(1, 12),
    groups=st.sampled_from([1, 4, 5]),
    kv_heads=st.integers(1, 3),
    head_size=st.sampled_from([2, 8, 64, 80, 96, 112, 128, 256, 320, 512]),
    share=st.sampled_from([1.0, 0.75, 0.5, 0.25]),
    neox=st.booleans(),
    page=st.integers(1, 7),
    new=st.sampled_from(FLOATS),
    held=st.sampled_from([None, *FLOATS, *EIGHT_BITS]),
    seed=st.integers(0, 2**16),
)


@settings(max_examples=20)
@sizes
def test_rotation_has_the_bits_of_separate_kernels(
    tokens, groups, kv_heads, head_size, share, neox, page, new, held, seed
) -> None:
    """Without norms, queries and caches are those of two launches, bit for bit.

    Slots may be negative or out of range, and numbers infinite; values that nobody reads stay.
    """
    torch.manual_seed(seed)
    query, key, value = projected(tokens, groups * kv_heads, kv_heads, head_size, new)
    value[torch.rand(value.shape) < 0.02] = torch.inf
    cos, sin = angles(tokens, max(1, int(head_size * share) // 2))
    pages = 3
    mapping = torch.randperm(max(tokens, pages * page + 4))[:tokens] - 2
    cache = torch.randint(0, 100, (pages, 2, page, kv_heads, head_size)).to(held or new)
    scales = torch.rand(2, kv_heads) * 3 + 0.01
    results = []
    for fused in (True, False):
        written, (q, k, v) = cache.clone(), copies(query, key, value)
        stored = *written.unbind(1), mapping, *scales
        if fused:
            rotate_and_cache_triton(q, k, v, cos, sin, *stored, neox, None, None, 0.0, 0.0)
        else:
            rotary_embedding_triton(q, k, cos, sin, neox)
            reshape_and_cache_triton(k, v, *stored)
        assert torch.equal(bits(v), bits(value))
        results.append((bits(q), bits(written)))
    assert all(map(torch.equal, *results))


def composed(
    query: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **how: Any
) -> torch.Tensor:
    """Normalize and rotate in plain torch, in the dtype of ``query``."""
    normed = rms_norm_reference(query, weight, how["eps"], how["offset"])
    rotary_embedding_reference(normed, normed[:, :0], cos, sin, how["neox"])
    return normed


def exactly(
    query: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **how: Any
) -> torch.Tensor:
    """Normalize and rotate in float64."""
    x, pairs = query.double(), cos.shape[1]
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + how["eps"])
    x = x * (weight.double() + (how["offset"] or 0.0))
    one = slice(pairs) if how["neox"] else slice(0, 2 * pairs, 2)
    other = slice(pairs, 2 * pairs) if how["neox"] else slice(1, 2 * pairs, 2)
    cos, sin, y = cos.double().unsqueeze(1), sin.double().unsqueeze(1), x.clone()
    y[..., one] = x[..., one] * cos - x[..., other] * sin
    y[..., other] = x[..., other] * cos + x[..., one] * sin
    return y


@settings(max_examples=20)
@sizes
def test_normalized_heads_are_as_exact_as_separate_operations(
    as_accurate, tokens, groups, kv_heads, head_size, share, neox, page, new, held, seed
) -> None:
    """With norms, queries and keys are as near to float64 as plain torch's.

    They are rounded where separate operations round: in 16 bits almost all numbers are equal. A sum
    of squares in another order changes the others.
    """
    torch.manual_seed(seed)
    heads = groups * kv_heads
    query, key, value = projected(tokens, heads, kv_heads, head_size, new)
    cos, sin = angles(tokens, max(1, int(head_size * share) // 2))
    weights = torch.randn(2, head_size).to(new)
    caches = torch.zeros(2, -(-tokens // page), page, kv_heads, head_size, dtype=new)
    how = {"eps": 1e-3, "offset": None if held is None else 1.0, "neox": neox}
    kept = copies(query, key, value)
    rotate_and_cache_triton(
        query, key, value, cos, sin, *caches, torch.arange(tokens), None, None, neox,
        *weights, how["eps"], how["offset"],
    )  # fmt: skip
    stored = caches.flatten(1, 2)[:, :tokens]
    for got, x, weight in ((query, kept[0], weights[0]), (stored[0], kept[1], weights[1])):
        exact, low = (of(x, weight, cos, sin, **how) for of in (exactly, composed))
        as_accurate(got.contiguous(), exact, low)
        if new != torch.float32:
            assert (got != low).sum() <= 2 + 0.05 * got.numel()
    assert torch.equal(stored[1], kept[2])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_operation_is_the_separate_operations_bit_for_bit(normed: bool, dtype) -> None:
    """On a CPU, in a shared layout or without, in inference mode or not."""
    query, key, value = projected(5, 6, 2, 16, dtype)
    cos, sin = angles(5, 6)
    slots, scales = torch.tensor([4, 0, 2, 8, 7]), torch.tensor([[0.5], [3.0]])
    weights = tuple(torch.randn(2, 16).to(dtype)) if normed else (None, None)
    for held in (dtype, torch.float8_e4m3fn):
        cache = torch.zeros(2, 3, 3, 2, 16).to(held)
        q, k, v = copies(query, key, value)
        if normed:
            q, k = (rms_norm(x, w, 1e-5, 1.0) for x, w in zip((q, k), weights, strict=True))
        rotary_embedding(q, k, cos, sin, False)
        expected = cache.clone()
        reshape_and_cache(k, v, *expected, slots, *scales)
        layout = PagedLayout(*torch.zeros(3, 1, 2, dtype=torch.int32).unbind(), slots)
        for shared, inference in ((None, False), (None, True), (layout, True), (layout, True)):
            written, new = cache.clone(), copies(query, key, value)
            with torch.inference_mode(inference):
                got = rotate_and_cache(
                    *new, cos.unsqueeze(1), sin.unsqueeze(1), *written, slots, *scales,
                    False, *weights, 1e-5, 1.0, layout=shared,
                )  # fmt: skip
            assert torch.equal(bits(got), bits(q))
            assert torch.equal(bits(written), bits(expected))


def test_a_shared_layout_checks_each_kind_of_tensors() -> None:
    """After a call that fits, other shapes, strides and dtypes are checked as without a layout."""
    query, key, value = projected(3, 4, 2, 8, torch.float32)
    cos, sin = angles(3, 4)
    caches, slots = torch.zeros(2, 4, 2, 2, 8), torch.tensor([0, 7, 2])
    lengths, starts = torch.tensor([3], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    layout = PagedLayout(torch.zeros(1, 4, dtype=torch.int32), lengths, starts, slots)
    good = {"key": key, "cos": cos, "k_cache": caches[0], "v_cache": caches[1], "k_weight": None}
    smaller = {"k_cache": caches[0, :3], "v_cache": caches[1, :3]}
    wrong: list[tuple[dict[str, Any], str]] = [
        (smaller, "slot_mapping has cache slot 7, and the cache has 6"),
        ({"key": key[:, :1].expand(-1, 2, -1)}, "key is written"),
        ({"cos": cos.double()}, "cos must be torch.float32"),
        ({"k_weight": torch.ones(8)}, "a weight is missing"),
    ]
    with torch.inference_mode():
        for changes, expected in ({}, ""), *wrong, ({}, ""), *wrong:
            given = good | changes
            call = partial(
                rotate_and_cache, query, given["key"], value, given["cos"], sin, given["k_cache"],
                given["v_cache"], slots, k_weight=given["k_weight"], layout=layout,
            )  # fmt: skip
            if not expected:
                call()
                continue
            with pytest.raises(ValueError, match=expected):
                call()


@pytest.mark.parametrize("normed", [True, False])
def test_padding_and_nan_stay_where_they_are(normed: bool) -> None:
    """A token of slot -1 is not stored, NaN stays in its head, and margins are not written."""
    whole = torch.full((9, 7, 3 + 4 + 1, 8), torch.nan)
    query, key, value = whole[2:7, 3, :3], whole[2:7, 3, 3:5], whole[2:7, 3, 5:7]
    for part in (query, key, value):
        part.copy_(torch.randn(part.shape))
    query[1, 2, 5] = key[0, 1, 3] = value[3, 0, 0] = torch.nan
    cache = torch.full((2, 4, 3, 2, 8), torch.nan)
    slots = torch.tensor([4, -1, 6, 0, -1])
    weights = torch.ones(2, 8) if normed else (None, None)
    rotate_and_cache_triton(
        query, key, value, *angles(5, 4), *cache[:, 1:3], slots, None, None, True,
        *weights, 1e-6, 0.0,
    )  # fmt: skip
    assert query.isnan().sum() == (8 if normed else 2)
    assert query[1, 2].isnan().any()
    k_cache, v_cache = cache.flatten(1, 2)
    written = torch.tensor([3 + 4, 3 + 0])  # slot 6 is beyond the two pages
    for held, nans in ((k_cache, 8 if normed else 2), (v_cache, 1)):
        assert held[written].isnan().sum() == nans
        rest = torch.ones(12, dtype=torch.bool)
        rest[written] = False
        assert held[rest].isnan().all()
    assert whole[:2].isnan().all()
    assert whole[7:].isnan().all()
    assert whole[2:7, 3, 7].isnan().all()
    assert whole[2:7, 4:].isnan().all()


def test_no_tokens() -> None:
    """A step without tokens writes nothing."""
    caches = torch.full((2, 4, 3, 2, 8), torch.nan)
    slots = torch.empty(0, dtype=torch.int64)
    for rotate in (rotate_and_cache, rotate_and_cache_triton, rotate_and_cache_reference):
        given = *projected(0, 4, 2, 8, torch.float32), *angles(0, 4), *caches, slots
        rotate(*given, None, None, True, None, None, 1e-6, 0.0)
    assert caches.isnan().all()


def test_offsets_beyond_int32() -> None:
    """Tokens, heads, pages and offsets are found if their products with strides exceed 32 bits."""
    gigabyte, step = 2**30, 2**20
    far = torch.frombuffer(mmap.mmap(-1, 2**34), dtype=torch.int8)
    strides = (gigabyte + step, gigabyte + 4 * step, gigabyte + 16 * step, 1)
    cache = far.as_strided((4, 4, 4, 16), strides)
    far = torch.frombuffer(mmap.mmap(-1, 2**34), dtype=torch.float16)
    query = far.as_strided((4, 4, 16), (gigabyte + step, gigabyte + 4 * step, 1))
    query.copy_(torch.randint(-99, 99, query.shape))
    key, half_turn, slots = query.clone(), -torch.ones(4, 8), torch.tensor([13, 3, 12, 15])
    for k, v in ((query, -key), (-key, query)):  # each is far in its turn, and so is the cache
        given = k.clone(), k, v, half_turn, torch.zeros(4, 8), cache, cache, slots, None, None
        rotate_and_cache_triton(*given, True, None, None, 0.0, 0.0)
        assert torch.equal(cache[slots // 4, slots % 4], v.to(torch.int8))
    rotate_and_cache_triton(query, key, -key, *given[3:], True, None, None, 0.0, 0.0)
    assert torch.equal(query, -key)


def test_a_gpu_without_fp8_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """If kernels cannot convert to FP8, plain torch computes, and the host does not wait for it."""
    query, key, value = projected(2, 4, 2, 8, torch.float32)
    cos, sin = angles(2, 4)
    written = []
    for capability in ((8, 9), (8, 6)):
        monkeypatch.setattr(dtypes, "capability", lambda tensor, of=capability: of)
        if capability < (8, 9):
            monkeypatch.setattr(module, "_rotate_and_store", None)
            monkeypatch.setattr(f"{reshape_and_cache.__module__}.holds_slots", None)
        caches, new = torch.zeros(2, 4, 3, 2, 8).to(torch.float8_e5m2), copies(query, key, value)
        slots = torch.tensor([4, 0])
        rotate_and_cache_triton(
            *new, cos, sin, *caches, slots, None, None, True, None, None, 0.0, 0.0
        )
        written.append(bits(caches))
        torch.testing.assert_close(new[0], composed_rotation(query, cos, sin))
    assert written[0].any()
    assert torch.equal(*written)


def composed_rotation(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotated = query.clone()
    rotary_embedding_reference(rotated, rotated[:, :0], cos, sin, True)
    return rotated


def example() -> dict[str, Any]:
    query, key, value = projected(3, 4, 2, 8, torch.float32)
    cos, sin = angles(3, 4)
    k_cache, v_cache = torch.zeros(2, 4, 3, 2, 8)
    return {
        "query": query, "key": key, "value": value, "cos": cos, "sin": sin,
        "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": torch.tensor([4, 0, 2]),
        "k_scale": None, "v_scale": None, "is_neox_style": True,
        "q_weight": torch.ones(8), "k_weight": torch.ones(8), "eps": 1e-6, "weight_offset": None,
    }  # fmt: skip


# fmt: off
REFUSED: list[tuple[dict[str, Callable[[torch.Tensor], Any]], str]] = [
    ({"query": lambda x: x[0]}, r"query must have the shape \[any, any, any\]"),
    ({"query": lambda x: x[:, :1].expand(3, 4, 8)}, "query is written, and elements"),
    ({"key": lambda x: x[:2]}, r"key must have the shape \[3, any, 8\], got \[2, 2, 8\]"),
    ({"key": lambda x: x.half()}, "key must be torch.float32"),
    ({"value": lambda x: x.half()}, "value must be torch.float32"),
    ({"value": lambda x: x[:, :1]}, r"value must have the shape \[3, 2, 8\]"),
    ({"cos": lambda x: x.half()}, "cos must be torch.float32"),
    ({"cos": lambda _: torch.ones(3, 5), "sin": lambda _: torch.ones(3, 5)}, "10 features"),
    ({"sin": lambda x: x[:, :2]}, r"sin must have the shape \[3, 4\]"),
    ({"q_weight": lambda _: None}, "a weight is missing"),
    ({"k_weight": lambda x: x[:4]}, r"k_weight must have the shape \[8\]"),
    ({"q_weight": lambda x: x.half()}, "q_weight must be torch.float32"),
    ({"k_cache": lambda x: x[..., :4]}, r"k_cache must have the shape \[any, any, 2, 8\]"),
    ({"v_cache": lambda x: x.half()}, "v_cache must be torch.float32"),
    ({"v_cache": lambda x: x[:1].expand_as(x)}, "v_cache is written, and elements"),
    ({"slot_mapping": lambda x: x.float()}, "slot_mapping must be torch.int64 or torch.int32"),
    ({"slot_mapping": lambda x: x + 8}, "cache slot 12, and the cache has 12: 4 pages of 3"),
    ({"v_scale": lambda _: torch.ones(3)}, r"v_scale must have the shape \[2\], got \[3\]"),
]
# fmt: on


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_does_not_fit_is_refused(change, message: str) -> None:
    """The message names the argument, what it must be, and what it is."""
    arguments = example()
    rotate_and_cache(**arguments)
    arguments |= {name: of(arguments[name]) for name, of in change.items()}
    with pytest.raises(ValueError, match=message):
        rotate_and_cache(**arguments)


def test_the_operator_says_what_it_writes() -> None:
    """Schema, fake and registration agree with what runs."""
    operator = torch.ops.vllm_module.rotate_and_cache.default
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(operator, tuple(example().values()), test_utils=checks)
