"""Rotation in place, of queries and keys in one launch, against float64."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels.attention import rotary_embedding as kernel
from vllm_module.kernels.attention.rotary_embedding import rotary_embedding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
styles = pytest.mark.parametrize("neox", [True, False], ids=["neox", "gpt-j"])
OPERATOR = torch.ops.vllm_module.rotary_embedding.default


def angles(tokens: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.randn(tokens, pairs) * 10
    return turned.cos(), turned.sin()


def exact(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """Multiply each pair, as a complex number, by that of its angle, in float64."""
    pairs = cos.shape[1]
    wide = x.double()
    turning, rest = wide[..., : 2 * pairs], wide[..., 2 * pairs :]
    shape = (2, pairs) if neox else (pairs, 2)
    together = turning.unflatten(-1, shape)
    together = together.transpose(-1, -2) if neox else together
    turned = torch.view_as_complex(together.contiguous()) * torch.complex(
        cos.double(), sin.double()
    ).unsqueeze(1)
    parts = torch.view_as_real(turned)
    parts = (parts.transpose(-1, -2) if neox else parts).flatten(-2)
    return torch.cat((parts, rest), -1)


def low(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """Rotate in plain torch: in float32 with one rounding."""
    x = x.clone()
    kernel.rotary_embedding_reference(x, x[:, :0], cos, sin, neox)
    return x


def fused(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype):
    """Return a projection's output, with NaN for values, and its query and key."""
    qkv = torch.full((tokens, (heads + 2 * kv_heads) * size), torch.nan, dtype=dtype)
    query, key = (
        part.unflatten(-1, (-1, size))
        for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], -1)[:2]
    )
    for part in (query, key):
        part.copy_(torch.randn(part.shape))
    return qkv, query, key


@given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 5),
    head_size=st.sampled_from([2, 8, 64, 72, 80, 96, 128, 256]),
    share=st.sampled_from([1.0, 0.5, 0.25]),
    neox=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=20)
def test_parts_of_a_projection_are_rotated_where_they_are(
    as_accurate, tokens, heads, kv_heads, head_size, share, neox, dtype, seed
) -> None:
    """Queries and keys that are views of one buffer are rotated, and the rest of it stays."""
    torch.manual_seed(seed)
    qkv, query, key = fused(tokens, heads, kv_heads, head_size, dtype)
    pairs = max(1, int(head_size * share) // 2)
    cos, sin = angles(tokens, pairs)
    kept = query.clone(), key.clone()
    kernel.rotary_embedding_triton(query, key, cos, sin, neox)
    for got, x in zip((query, key), kept, strict=True):
        as_accurate(got.contiguous(), exact(x, cos, sin, neox), low(x, cos, sin, neox))
        assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])
    assert qkv[:, (heads + kv_heads) * head_size :].isnan().all()


@styles
@dtypes
def test_strides_of_every_dimension(neox: bool, dtype: torch.dtype, as_accurate) -> None:
    """Strides may be in any order, and angles may be columns of a wider table."""
    whole = torch.full((4, 21, 2 * 48), torch.nan).to(dtype)
    query = whole.transpose(0, 1)[:, :3, ::2]
    query.copy_(torch.randn(21, 3, 48))
    key = torch.randn(48, 21, 2).to(dtype).permute(1, 2, 0)
    table = torch.randn(40, 21).t()
    cos, sin = table[:, :20], table[:, 20:]
    kept = query.clone(), key.clone()
    kernel.rotary_embedding_triton(query, key, cos, sin, neox)
    for got, x in zip((query, key), kept, strict=True):
        as_accurate(got.contiguous(), exact(x, cos, sin, neox), low(x, cos, sin, neox))
    assert whole[3].isnan().all()
    assert whole[..., 1::2].isnan().all()


@styles
def test_the_reference_is_exact_in_float32(neox: bool, as_accurate) -> None:
    """On the CPU, the public function rotates like complex numbers in plain torch."""
    _, query, key = fused(7, 5, 2, 24, torch.float32)
    cos, sin = angles(7, 8)
    kept = query.clone(), key.clone()
    rotary_embedding(query, key, cos.unsqueeze(1), sin.unsqueeze(1), neox)
    for got, x in zip((query, key), kept, strict=True):
        torch.testing.assert_close(got.double(), exact(x, cos, sin, neox), rtol=0, atol=1e-6)


@styles
def test_what_is_not_finite_stays_in_its_pair(neox: bool) -> None:
    """NaN in a feature or an angle stays in its pair."""
    query, key = torch.randn(5, 2, 16), torch.randn(5, 1, 16)
    cos, sin = angles(5, 8)
    query[1, 1, 3] = torch.nan
    cos[3, 2] = torch.nan
    other = query.clone(), key.clone()
    kernel.rotary_embedding_triton(query, key, cos, sin, neox)
    kernel.rotary_embedding_reference(*other, cos, sin, neox)
    assert query.isnan().sum() == 2 + 2 * 2
    assert key.isnan().sum() == 2
    for got, expected in zip((query, key), other, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_offsets_beyond_32_bits() -> None:
    """Tokens are found if their index times the stride exceeds 32 bits."""
    stride = 1 << 30
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (3 * stride + 128)), dtype=torch.bfloat16)
    query = memory.as_strided((4, 1, 64), (stride, 64, 1))
    key = memory.as_strided((4, 1, 64), (stride, 64, 1), 64)
    query.copy_(torch.randn(4, 1, 64))
    key.copy_(torch.randn(4, 1, 64))
    near, cos_sin = (query.clone(), key.clone()), angles(4, 32)
    kernel.rotary_embedding_triton(query, key, *cos_sin, True)
    kernel.rotary_embedding_triton(*near, *cos_sin, True)
    assert torch.equal(query, near[0])
    assert torch.equal(key, near[1])


@styles
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "pairs"),
    [(0, 2, 1, 4), (3, 2, 1, 0), (3, 0, 2, 4), (3, 2, 0, 4)],
)
def test_empty(neox: bool, tokens: int, heads: int, kv_heads: int, pairs: int) -> None:
    """Without tokens, heads or pairs nothing is rotated; a tensor with heads still is."""
    query, key = torch.randn(tokens, heads, 8), torch.randn(tokens, kv_heads, 8)
    cos, sin = angles(tokens, pairs)
    expected = low(query, cos, sin, neox), low(key, cos, sin, neox)
    kernel.rotary_embedding_triton(query, key, cos, sin, neox)
    torch.testing.assert_close(query, expected[0])
    torch.testing.assert_close(key, expected[1])
    rotary_embedding(query, key, cos, sin, neox)


Q, K, C = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 8)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((Q[0], K, C, C), r"query must have the shape \[any, any, any\], got \[4, 16\]"),
        ((Q, K[:2], C, C), r"key must have the shape \[3, any, 16\], got \[2, 2, 16\]"),
        ((Q, K[..., :8], C, C), r"key must have the shape \[3, any, 16\], got \[3, 2, 8\]"),
        ((Q, K.half(), C, C), r"key must be torch\.float32, got torch\.float16"),
        ((Q.int(), K.int(), C, C), r"query must be .*got torch\.int32"),
        ((Q, K.to("meta"), C, C), "key is on meta, and must be on cpu"),
        ((Q, K, C[:2], C), r"cos must have the shape \[3, any\], got \[2, 8\]"),
        ((Q, K, C.half(), C), r"cos must be torch\.float32, got torch\.float16"),
        ((Q, K, C, C[:, :4]), r"sin must have the shape \[3, 8\], got \[3, 4\]"),
        ((Q, K, C.repeat(1, 2), C.repeat(1, 2)), "rotates 32 features, and heads have 16"),
    ],
)
def test_bad_input(args: tuple[torch.Tensor, ...], message: str) -> None:
    """Arguments that do not fit are refused before anything is written."""
    kept = Q.clone()
    with pytest.raises(ValueError, match=message):
        rotary_embedding(*args)
    assert torch.equal(Q, kept)


def test_meta_tensors() -> None:
    """The call works on the meta device."""
    query, key, cos = (x.to("meta") for x in (Q, K, C))
    assert rotary_embedding(query, key, cos, cos) is None


@styles
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(neox: bool, backend: str) -> None:
    """torch.compile traces views and rotation without a graph break, with the same bits."""

    def step(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv = x * 2
        query, key, value = (
            part.unflatten(-1, (-1, 16)) for part in qkv.split([64, 32, 32], dim=-1)
        )
        rotary_embedding(query, key, cos, sin, neox)
        return torch.cat((query, key, value), 1)

    x, (cos, sin) = torch.randn(3, 128), angles(3, 8)
    compiled: Callable[..., torch.Tensor] = torch.compile(step, fullgraph=True, backend=backend)
    assert torch.equal(compiled(x, cos, sin), step(x, cos, sin))
    assert not torch.equal(step(x, cos, sin), (x * 2).view(3, 8, 16))


def test_the_operator_is_what_it_says() -> None:
    """The operator's schema and fake pass PyTorch's own check."""
    torch.library.opcheck(OPERATOR, (Q.clone(), K.clone(), C, C.clone(), True))
