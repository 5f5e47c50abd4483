"""Combining the outputs of a token's experts: their weighted sum."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.experts.few_tokens import combine_few, takes_few_tokens
from vllm_module.kernels.operators import expect, next_power_of_2, operator, tl, triton

_TILE = 1024  # features of a program


def combine_experts(
    y: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return, for each token, the sum of its experts' rows times their weights, in float32.

    Rows from ``offsets[-1]`` on, of other ranks' experts, are not read. They contribute nothing,
    even if they hold NaN.

    Args:
        y: ``[tokens * top_k, features]``, bfloat16, float16 or float32, sorted by expert.
        order, offsets: results of
            :func:`~vllm_module.kernels.experts.sort_by_expert.sort_by_expert`.
        weights: float32 ``[tokens, top_k]``.

    Returns:
        ``[tokens, features]``, of the dtype of ``y``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    """
    expect("weights", weights, (None, None), (torch.float32,), y)
    expect("y", y, (weights.numel(), None), FLOATS)
    expect("order", order, (weights.numel(),), (torch.int32,), y)
    expect("offsets", offsets, (None,), (torch.int32,), y)
    if not len(offsets):
        raise ValueError("offsets must have one element more than there are experts, got 0")
    return _combine_experts(y, order, offsets, weights)


def combine_experts_reference(
    y: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Combine in plain torch, or few rows in a loop; see :func:`combine_experts`."""
    if takes_few_tokens(y):
        return combine_few(y, order, offsets, weights)
    tokens, top_k = weights.shape
    place = torch.empty(len(order), dtype=torch.int64, device=y.device)
    place[order.long()] = torch.arange(len(order), device=y.device)
    rows = y.index_select(0, place).float()
    missing = (place >= offsets[-1]).view(tokens, top_k)
    weights = weights.masked_fill(missing, 0)
    rows = rows.view(tokens, top_k, y.shape[1]).masked_fill(missing[..., None], 0)
    return torch.bmm(weights.unsqueeze(1), rows).squeeze(1).to(y.dtype)


def combine_experts_triton(
    y: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Combine in Triton kernels; see :func:`combine_experts`."""
    out = _empty(y, order, offsets, weights)
    (tokens, features), top_k = out.shape, weights.shape[1]
    if not y.numel():
        return out.zero_()
    places = torch.empty(len(order), dtype=torch.int32, device=y.device)
    _find[(-(-len(order) // _TILE),)](order, offsets, places, len(order), len(offsets), TILE=_TILE)
    tile = min(_TILE, next_power_of_2(features))
    _combine[(tokens, -(-features // tile))](
        y,
        places,
        weights,
        out,
        features,
        *y.stride(),
        *weights.stride(),
        TOP_K=top_k,
        TILE=tile,
        num_warps=max(1, tile // 256),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _find(order_ptr, offsets_ptr, places_ptr, rows, offsets, TILE: tl.constexpr):
    """Write the place of each token's row in the order; -1 after the last expert's rows."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(order_ptr + place, mask=place < rows, other=-1)
    last = tl.load(offsets_ptr + offsets - 1)
    tl.store(places_ptr + row, tl.where(place < last, place, -1), mask=(row >= 0) & (row < rows))


@triton.jit
def _combine(
    y_ptr,
    places_ptr,
    weights_ptr,
    out_ptr,
    features,
    y_row,
    y_column,
    weights_row,
    weights_column,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write some features of a token."""
    token = tl.program_id(0).to(tl.int64)
    feature = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = feature < features
    sums = tl.zeros([TILE], tl.float32)
    for k in range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights_ptr + token * weights_row + k * weights_column)
        ptrs = y_ptr + place * y_row + feature * y_column
        row = tl.load(ptrs, mask=inside & (place >= 0), other=0.0).to(tl.float32)
        sums += tl.where(place >= 0, weight * row, 0.0)
    tl.store(out_ptr + token * features + feature, sums.to(out_ptr.dtype.element_ty), mask=inside)


def _empty(y: torch.Tensor, *others: Any) -> torch.Tensor:
    """Return an empty sum."""
    *_, weights = others
    return y.new_empty(weights.shape[0], y.shape[1])


_combine_experts = operator(combine_experts_reference, combine_experts_triton, _empty)
