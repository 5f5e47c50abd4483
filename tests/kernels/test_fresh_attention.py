"""Attention of whole prompts without pages: by torch, as a candidate."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_module.kernels.attention import fresh_attention as module
from vllm_module.kernels.attention.fresh_attention import (
    KERNEL,
    fresh_attention,
    fresh_attention_flash,
    fresh_attention_reference,
)
from vllm_module.kernels.attention.fresh_attention import (
    way_of_fresh_prompts as chosen,
)
from vllm_module.kernels.choices import trying

TORCH = {KERNEL: "torch"}


def step(
    lengths: list[int], heads: int = 4, kv_heads: int = 2, size: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return query, key and value as parts of one tensor, and where sequences begin."""
    qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, size)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return *qkv.split([heads, kv_heads, kv_heads], 1), starts, max(lengths)


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend by one softmax over all tokens, of which a row sees its sequence's last ones."""
    tokens, heads, _ = query.shape
    index = torch.arange(tokens)
    sequence = torch.bucketize(index, starts[1:], right=True)
    distance = index[:, None] - index
    seen = (sequence[:, None] == sequence) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    key, value = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
windows = st.sampled_from([None, 1, 3, 9, 100])


@given(lengths, windows, st.sampled_from([(4, 4), (4, 2), (5, 1)]))
def test_prompts_attend_as_densely(lengths: list[int], window: int | None, heads: Any) -> None:
    """Each token sees its own sequence's tokens before it, or the last ones of them."""
    query, key, value, starts, most = step(lengths, *heads)
    output = fresh_attention(query, key, value, starts, most, 0.3, window)
    expected = dense(query, key, value, starts, 0.3, window)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-6)


@given(lengths, windows)
def test_a_gpu_gets_one_call_for_all_sequences(lengths: list[int], window: int | None) -> None:
    """Torch's operator gets the arguments of causal attention with a window, and takes them."""
    calls = []

    def attend(*args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        """Attend as the operator's documentation says: ``left`` tokens back, ``right`` ahead."""
        query, key, value, starts, theirs, longest, _, dropout, causal, _ = args
        calls.append((args, kwargs))
        left, right = kwargs["window_size_left"], kwargs["window_size_right"]
        assert (dropout, right) == (0.0, 0)
        assert starts is theirs
        assert longest == max(b - a for a, b in pairwise(starts.tolist()))
        assert causal == (left < 0)
        seen = None if left < 0 else left + 1
        return (dense(query, key, value, starts, kwargs["scale"], seen),)

    query, key, value, starts, most = step(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten, "_flash_attention_forward", attend)
        output = fresh_attention_flash(query, key, value, starts, most, 0.3, window, False)
    expected = dense(query, key, value, starts, 0.3, window)
    torch.testing.assert_close(output, expected)
    ((args, kwargs),) = calls
    meta = [x.to("meta", torch.bfloat16) for x in args[:3]]
    shaped = torch.ops.aten._flash_attention_forward(*meta, starts.to("meta"), *args[4:], **kwargs)
    assert shaped[0].shape == query.shape


@given(lengths)
def test_cudnn_gets_one_call_for_all_sequences(lengths: list[int]) -> None:
    """Its operator gets causal attention without a window, by names and places that it has."""
    calls = []

    def attend(*args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        query, key, value, bias, starts, theirs, longest, most, sums, dropout, causal = args
        calls.append((args, kwargs))
        assert (bias, sums, dropout, causal) == (None, False, 0.0, True)
        assert starts is theirs
        assert longest == most == max(b - a for a, b in pairwise(starts.tolist()))
        return (dense(query, key, value, starts, kwargs["scale"], None),)

    query, key, value, starts, most = step(lengths)
    names = [
        each.name for each in torch.ops.aten._cudnn_attention_forward.default._schema.arguments
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten, "_cudnn_attention_forward", attend)
        output = fresh_attention_flash(query, key, value, starts, most, 0.3, None, True)
    torch.testing.assert_close(output, dense(query, key, value, starts, 0.3, None))
    ((args, kwargs),) = calls
    assert names[: len(args)] == [
        "query", "key", "value", "attn_bias", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "compute_log_sumexp", "dropout_p", "is_causal",
    ]  # fmt: skip
    assert set(kwargs) <= set(names)


@given(lengths, st.data())
def test_a_token_does_not_depend_on_its_batch(lengths: list[int], data: st.DataObject) -> None:
    """A sequence alone gives the bits that it gives in a batch."""
    query, key, value, starts, most = step(lengths)
    whole = fresh_attention(query, key, value, starts, most, 0.3)
    begin, end = data.draw(st.sampled_from(list(pairwise(starts.tolist()))))
    one = (x[begin:end] for x in (query, key, value))
    alone = fresh_attention(*one, torch.tensor([0, end - begin]).int(), end - begin, 0.3)
    assert torch.equal(alone, whole[begin:end])


def test_a_derivative_is_that_of_dense_attention() -> None:
    """Where gradients are needed, the reference runs."""
    query, key, value, starts, most = step([3, 1, 4])
    inputs = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    grads = [
        torch.autograd.grad(output.double().square().sum(), inputs)
        for output in (
            fresh_attention(*inputs, starts, most, 0.3),
            dense(*inputs, starts, 0.3, None),
        )
    ]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    "changed",
    [
        {"softcap": 30.0},
        {"alibi_slopes": torch.ones(4)},
        {"sinks": torch.ones(4)},
        {"cache": FP8},
        {"cache": torch.float32},
        {"value": torch.float32},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_pages_are_read_where_torch_would_give_something_else(changed: dict[str, Any]) -> None:
    """Scores of another kind, and caches that round, are no cases of torch's attention."""
    dtypes = {name: changed.pop(name, BF16) for name in ("cache", "value")}
    query, key, value = torch.ones(3, 1, 4, 8, dtype=BF16)
    cache = torch.ones(2, 16, 4, 8).to(dtypes["cache"])
    with trying(TORCH):
        assert chosen(query, key, value.to(dtypes["value"]), cache, **changed) == "pages"
        assert chosen(query, key, value, torch.ones(2, 16, 4, 8, dtype=BF16)) == "flash"
    assert chosen(query, key, value, torch.ones(2, 16, 4, 8, dtype=BF16)) == "pages"


@pytest.mark.parametrize(
    ("size", "dtype", "capability", "taken"),
    [
        (128, BF16, (9, 0), True),
        (80, torch.float16, (8, 0), True),
        (100, BF16, (9, 0), False),
        (128, torch.float32, (9, 0), False),
        (128, torch.float16, (7, 5), False),
    ],
)
def test_a_gpu_needs_what_torchs_kernels_take(
    monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype, capability: Any, taken: bool
) -> None:
    """Numbers of 16 bits, heads of a multiple of 8, and compute capability 8.0."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(module, "capability", lambda tensor: capability)
    query = torch.ones(1, 4, size, dtype=dtype).as_subclass(OnGpu)
    cache = torch.ones(2, 16, 4, size, dtype=dtype)
    with trying(TORCH):
        assert (chosen(query, query, query, cache) == "flash") == taken


def test_the_reference_has_no_rows_for_no_tokens() -> None:
    """A batch of empty sequences is an empty result."""
    nothing = torch.empty(0, 4, 8)
    starts = torch.zeros(3, dtype=torch.int32)
    assert fresh_attention_reference(
        nothing, nothing, nothing, starts, 1, 1.0, None, False
    ).shape == (
        0,
        4,
        8,
    )
