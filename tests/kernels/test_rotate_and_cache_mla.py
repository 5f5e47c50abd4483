"""Norm of latents, rotation and writing the cache of latents in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_module.kernels import dtypes
from vllm_module.kernels.attention import rotate_and_cache_mla as module
from vllm_module.kernels.attention.concat_and_cache_mla import concat_and_cache_mla
from vllm_module.kernels.attention.rotary_embedding import rotary_embedding
from vllm_module.kernels.attention.rotate_and_cache_mla import (
    rotate_and_cache_mla,
    rotate_and_cache_mla_reference,
    rotate_and_cache_mla_triton,
)
from vllm_module.kernels.rows.rms_norm import rms_norm

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def example(
    tokens: int = 3,
    heads: int = 2,
    latent: int = 6,
    rope: int = 8,
    pairs: int = 4,
    page: int = 3,
    dtype: torch.dtype = torch.float32,
    held: torch.dtype | None = None,
    neox: bool = False,
) -> dict[str, Any]:
    """Return arguments that are views of projections' outputs and of a buffer for queries."""
    query = torch.randn(tokens, heads, 5 + rope).to(dtype)[..., 5:]
    parts = torch.randn(tokens, latent + rope).to(dtype).split([latent, rope], -1)
    turned = torch.randn(tokens, pairs) * 10
    cache = torch.randint(0, 100, (3, page, latent + rope)).to(held or dtype)
    slots = torch.randperm(max(tokens, 3 * page))[:tokens]
    return {
        "query": query, "latent": parts[0], "rope_key": parts[1],
        "cos": turned.cos(), "sin": turned.sin(),
        "rotated": torch.full((tokens, heads, latent + rope), torch.nan, dtype=dtype)[..., latent:],
        "cache": cache, "slot_mapping": slots, "scale": torch.rand(1) + 0.1,
        "weight": torch.randn(latent).to(dtype), "eps": 1e-3, "weight_offset": None,
        "is_neox_style": neox,
    }  # fmt: skip


def separately(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated queries and the cache, by three operations in plain torch."""
    one = {name: x.clone() if torch.is_tensor(x) else x for name, x in arguments.items()}
    query, key = one["query"], one["rope_key"].unsqueeze(1)
    rotary_embedding(query, key, one["cos"], one["sin"], one["is_neox_style"])
    latent = rms_norm(one["latent"], one["weight"], one["eps"], one["weight_offset"])
    stored = one["cache"], one["slot_mapping"], one["scale"]
    concat_and_cache_mla(latent, key.squeeze(1), *stored)
    return query, one["cache"]


@settings(max_examples=15)
@given(
    tokens=st.integers(1, 8),
    heads=st.sampled_from([1, 5, 16]),
    latent=st.sampled_from([1, 24, 100, 512]),
    rope=st.sampled_from([8, 24, 64]),
    share=st.sampled_from([1.0, 0.75, 0.5, 0.25]),
    page=st.integers(1, 5),
    dtype=st.sampled_from(FLOATS),
    neox=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_kernel_gives_what_separate_operations_give(
    tokens, heads, latent, rope, share, page, dtype, neox, seed
) -> None:
    """Rotated queries and keys agree to the last bit but one, and so do normalized latents.

    Slots may be negative or out of range; what is not stored stays.
    """
    torch.manual_seed(seed)
    pairs = int(rope * share) // 2
    arguments = example(tokens, heads, latent, rope, pairs, page, dtype, None, neox)
    arguments["slot_mapping"] = torch.randperm(max(tokens, 3 * page + 4))[:tokens] - 2
    kept = arguments["slot_mapping"].clamp(-1, 3 * page)
    expected = separately(arguments | {"slot_mapping": kept.where(kept < 3 * page, -1)})
    rotate_and_cache_mla_triton(*arguments.values())
    for got, wanted in zip((arguments["rotated"], arguments["cache"]), expected, strict=True):
        near = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, wanted, rtol=near, atol=near)
    assert arguments["rotated"]._base[..., :latent].isnan().all()


@pytest.mark.parametrize("held", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_an_fp8_cache_holds_what_is_divided_by_its_scale(held: torch.dtype) -> None:
    """Rows are divided by the scale and rounded once more, as separate operations do."""
    arguments = example(7, dtype=torch.float16, held=held, page=5)
    _, expected = separately(arguments)
    rotate_and_cache_mla_triton(*arguments.values())
    torch.testing.assert_close(arguments["cache"].float(), expected.float(), rtol=0.3, atol=0.01)
    same = bits(arguments["cache"]) == bits(expected)
    assert same.float().mean() > 0.98  # a number on the edge of two may become either


def test_padding_and_nan_stay_where_they_are() -> None:
    """A token of slot -1 is not stored, and NaN stays in its row."""
    arguments = example(4)
    arguments["cache"].fill_(torch.nan)
    arguments["slot_mapping"] = torch.tensor([2, -1, 9, 4])
    arguments["latent"][0, 1] = arguments["rope_key"][3, 2] = torch.nan
    rotate_and_cache_mla_triton(*arguments.values())
    rows = arguments["cache"].flatten(0, 1)
    assert rows[2, :6].isnan().all()
    assert not rows[2, 6:].isnan().any()
    assert not rows[4, :6].isnan().any()
    assert rows[4, 6:].isnan().sum() == 2
    assert rows[[0, 1, 3, 5, 6, 7, 8]].isnan().all()
    assert not arguments["rotated"].isnan().any()


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_operation_is_the_separate_operations_bit_for_bit(dtype, inference: bool) -> None:
    """On a CPU, in inference mode or not."""
    for held in (dtype, torch.float8_e4m3fn):
        arguments = example(5, dtype=dtype, held=held)
        expected = separately(arguments)
        arguments |= {name: arguments[name].unsqueeze(1) for name in ("cos", "sin")}
        with torch.inference_mode(inference):
            rotate_and_cache_mla(**arguments)
        got = arguments["rotated"], arguments["cache"]
        assert all(torch.equal(*map(bits, pair)) for pair in zip(got, expected, strict=True))


def test_no_tokens() -> None:
    """A step without tokens writes nothing."""
    for rotate in (
        rotate_and_cache_mla, rotate_and_cache_mla_triton, rotate_and_cache_mla_reference,
    ):  # fmt: skip
        arguments = example(0)
        before = arguments["cache"].clone()
        rotate(*arguments.values())
        assert torch.equal(arguments["cache"], before)


def test_a_gpu_without_fp8_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """If kernels cannot convert to FP8, plain torch computes."""
    arguments = example(held=torch.float8_e5m2)
    expected = separately(arguments)
    monkeypatch.setattr(dtypes, "capability", lambda _: (8, 6))
    monkeypatch.setattr(module, "_rotate_and_store_latent", None)
    rotate_and_cache_mla_triton(*arguments.values())
    assert torch.equal(arguments["rotated"], expected[0])
    assert torch.equal(bits(arguments["cache"]), bits(expected[1]))


# fmt: off
REFUSED: list[tuple[dict[str, Callable[[torch.Tensor], Any]], str]] = [
    ({"query": lambda x: x[0]}, r"query must have the shape \[any, any, any\]"),
    ({"latent": lambda x: x[:2]}, r"latent must have the shape \[3, any\], got \[2, 6\]"),
    ({"rope_key": lambda x: x[:, :4]}, r"rope_key must have the shape \[3, 8\]"),
    ({"rotated": lambda x: x[:, :1].expand_as(x)}, "rotated is written, and elements"),
    ({"rotated": lambda x: x.half()}, "rotated must be torch.float32"),
    ({"cos": lambda x: x.half()}, "cos must be torch.float32"),
    ({"cos": lambda _: torch.ones(3, 5), "sin": lambda _: torch.ones(3, 5)}, "10 features"),
    ({"sin": lambda x: x[:, :2]}, r"sin must have the shape \[3, 4\]"),
    ({"cache": lambda x: x[..., :4]}, r"cache must have the shape \[any, any, 14\]"),
    ({"slot_mapping": lambda x: x.float()}, "slot_mapping must be torch.int64 or torch.int32"),
    ({"slot_mapping": lambda x: x + 9}, "the cache has 9: 3 pages of 3"),
    ({"scale": lambda _: torch.ones(3)}, r"scale must have the shape \[1\], got \[3\]"),
    ({"weight": lambda x: x[:4]}, r"weight must have the shape \[6\]"),
]
# fmt: on


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_does_not_fit_is_refused(change, message: str) -> None:
    """The message names the argument, what it must be, and what it is."""
    arguments = example()
    rotate_and_cache_mla(**arguments)
    arguments |= {name: of(arguments[name]) for name, of in change.items()}
    with pytest.raises(ValueError, match=message):
        rotate_and_cache_mla(**arguments)


def test_the_operator_says_what_it_writes() -> None:
    """Schema, fake and registration agree with what runs."""
    operator = torch.ops.vllm_module.rotate_and_cache_mla.default
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(operator, tuple(example().values()), test_utils=checks)
