"""Routing: choosing each token's experts and their weights."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.kernels.dtypes import FLOATS
from vllm_module.kernels.experts.few_tokens import choose_few, takes_few_tokens
from vllm_module.kernels.operators import expect, next_power_of_2, operator, tl, triton

_LEAST = -(2**63)  # sort key of an expert that cannot be chosen


def topk_routing(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring_func: str = "softmax",
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose ``top_k`` experts for each token.

    A token's experts are those of the largest logits, or with ``correction_bias`` (DeepSeek-V3,
    arXiv:2412.19437) of the largest sums of score and bias. The weights are the scores, without the
    bias. With groups, only experts of the ``topk_group`` best groups are chosen. A group is rated
    by its best expert (DeepSeek-V2, arXiv:2405.04434), or with a bias by the sum of its best two.

    Experts of a token are in descending order; among equal ones, the lower number comes first. NaN
    counts as the largest number, so that it shows in the weights.

    Args:
        logits: ``[tokens, experts]``, bfloat16, float16 or float32.
        top_k: number of experts of a token.
        scoring_func: ``"softmax"`` over all experts or ``"sigmoid"``, in float32.
        renormalize: True to divide a token's weights by their sum plus 1e-20.
        correction_bias: float32 ``[experts]``.
        num_expert_group: number of equal groups of consecutive experts; by default no groups.
        topk_group: number of groups that a token's experts are chosen from.
        routed_scaling_factor: factor of the weights, applied after renormalizing.

    Returns:
        The weights, float32 ``[tokens, top_k]``, and the numbers of the experts, int32 of the same
        shape.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other; ``top_k`` is more than the
            experts in the chosen groups; groups do not divide the experts.

    """
    expect("logits", logits, (None, None), FLOATS)
    experts = logits.shape[1]
    if scoring_func not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func must be 'softmax' or 'sigmoid', got {scoring_func!r}")
    if correction_bias is not None:
        expect("correction_bias", correction_bias, (experts,), (torch.float32,), logits)
    if (num_expert_group is None) != (topk_group is None):
        raise ValueError(
            "num_expert_group and topk_group belong together, got "
            f"num_expert_group={num_expert_group} and topk_group={topk_group}"
        )
    groups, kept = num_expert_group or 1, topk_group or 1
    if groups < 1 or experts % groups:
        raise ValueError(f"{experts} experts do not divide into num_expert_group={groups} groups")
    if not 1 <= kept <= groups:
        raise ValueError(f"topk_group must be from 1 to {groups} (num_expert_group), got {kept}")
    available = experts // groups * kept
    if not 1 <= top_k <= available:
        of = f"in {kept} of {groups} groups of {experts} experts" if groups > 1 else "experts"
        raise ValueError(f"top_k must be from 1 to {available} ({of}), got {top_k}")
    return _topk_routing(
        logits,
        top_k,
        scoring_func,
        renormalize,
        correction_bias,
        groups,
        kept,
        routed_scaling_factor,
    )


def topk_routing_reference(
    logits: torch.Tensor,
    top_k: int,
    scoring_func: str,
    renormalize: bool,
    correction_bias: torch.Tensor | None,
    groups: int,
    topk_group: int,
    routed_scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts in plain torch, or a few tokens' in loops; see :func:`topk_routing`."""
    if takes_few_tokens(logits):
        return choose_few(
            logits,
            top_k,
            scoring_func,
            renormalize,
            correction_bias,
            groups,
            topk_group,
            routed_scaling_factor,
        )
    logits = logits.float()
    scores = logits.softmax(-1) if scoring_func == "softmax" else logits.sigmoid()
    # Scores are monotonic in their logits, and fewer logits are equal.
    choice = logits if correction_bias is None else scores + correction_bias
    keys = _keys(choice)
    if topk_group < groups:
        grouped = choice.unflatten(-1, (groups, -1))
        if correction_bias is None or grouped.shape[-1] == 1:
            best = grouped.amax(-1)
        else:
            best = grouped.topk(2, -1).values.sum(-1)
        chosen = _keys(best).topk(topk_group, -1).indices
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, chosen, False)
        keys = keys.unflatten(-1, (groups, -1)).masked_fill_(closed[..., None], _LEAST).flatten(-2)
    experts = keys.topk(top_k, -1).indices
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, experts.int()


def _keys(x: torch.Tensor) -> torch.Tensor:
    """Return integer keys in the order of ``x [rows, columns]``; of equals, the first is larger.

    Because all keys differ, their largest ones are the same on every device.
    """
    bits = (x + 0.0).contiguous().view(torch.int32)  # adding 0 turns -0 to 0
    bits = torch.where(x.isnan(), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    columns = x.shape[-1]
    return (bits.long() << 32) | torch.arange(columns - 1, -1, -1, device=x.device)


def topk_routing_triton(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts in a Triton kernel, a program for each token; see :func:`topk_routing`."""
    logits, top_k, scoring_func, renormalize, correction_bias, *kept, factor = arguments
    groups, topk_group = kept
    weights, experts = topk_routing_fake(logits, top_k)
    tokens, count = logits.shape
    if topk_group == groups:
        groups = topk_group = 1
    rows, columns = next_power_of_2(groups), next_power_of_2(count // groups)
    if tokens:
        _route[(tokens,)](
            logits,
            correction_bias,
            weights,
            experts,
            *logits.stride(),
            1 if correction_bias is None else correction_bias.stride(0),
            factor,
            SIGMOID=scoring_func == "sigmoid",
            RENORMALIZE=renormalize,
            EXPERTS=count,
            TOP_K=top_k,
            GROUPS=groups,
            TOPK_GROUP=topk_group,
            ROWS=rows,
            COLUMNS=columns,
            PLACES=next_power_of_2(top_k),
            num_warps=min(4, max(1, rows * columns // 256)),
        )
    return weights, experts


@triton.jit
def _key(x, index):
    """Return integer keys in the order of ``x``, NaN last; of equals, the first is the largest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # adding 0 turns -0 to 0
    bits = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    logits_row,
    logits_column,
    bias_stride,
    factor,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Route a token; its experts are a tile ``[ROWS, COLUMNS]`` with a group in each row."""
    LEAST: tl.constexpr = -(2**63)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    expert = group[:, None] * SIZE + place[None, :]
    ptrs = logits_ptr + token * logits_row + expert.to(tl.int64) * logits_column
    logits = tl.load(ptrs, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
    choice = logits
    if bias_ptr is not None:
        choice = scores + tl.load(bias_ptr + expert * bias_stride, mask=inside, other=0.0)
    keys = tl.where(inside, _key(choice, expert), LEAST)
    if TOPK_GROUP < GROUPS:
        first = tl.max(keys, axis=1)
        best = tl.sum(tl.where(keys == first[:, None], choice, 0.0), axis=1)
        if bias_ptr is not None and SIZE > 1:
            rest = tl.where(keys == first[:, None], LEAST, keys)
            second = tl.max(rest, axis=1)
            best += tl.sum(tl.where(rest == second[:, None], choice, 0.0), axis=1)
        group_keys = tl.where(group < GROUPS, _key(best, group), LEAST)
        closed = group_keys
        for _ in tl.static_range(TOPK_GROUP):
            closed = tl.where(closed == tl.max(closed, axis=0), LEAST, closed)
        keys = tl.where((closed == LEAST)[:, None], keys, LEAST)

    keys = tl.reshape(keys, [ROWS * COLUMNS])
    scores = tl.reshape(scores, [ROWS * COLUMNS])
    k = tl.arange(0, PLACES)
    weights = tl.zeros([PLACES], tl.float32)
    experts = tl.zeros([PLACES], tl.int32)
    for i in range(TOP_K):
        largest = tl.max(keys, axis=0)
        score = tl.sum(tl.where(keys == largest, scores, 0.0), axis=0)
        weights = tl.where(k == i, score, weights)
        experts = tl.where(k == i, 0x7FFFFFFF - (largest & 0xFFFFFFFF).to(tl.int32), experts)
        keys = tl.where(keys == largest, LEAST, keys)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    ptrs = token * TOP_K + k
    tl.store(weights_ptr + ptrs, weights * factor, mask=k < TOP_K)
    tl.store(experts_ptr + ptrs, experts, mask=k < TOP_K)


def topk_routing_fake(
    logits: torch.Tensor, top_k: int, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty weights and experts."""
    shape = (logits.shape[0], top_k)
    return (
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
    )


_topk_routing = operator(topk_routing_reference, topk_routing_triton, topk_routing_fake)
