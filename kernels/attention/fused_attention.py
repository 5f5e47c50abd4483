"""Torch's fused attention, with NaN and infinities as softmax and products give them."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

SCORES_AT_ONCE = 1 << 24  # scores of rows that matrix products compute at once; 64 MiB


def fused_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    *,
    is_causal: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention by torch's fused kernels; tokens that no row attends to may be NaN.

    On the CPU, a row is NaN if one of its scores is NaN. Torch returns zeros for a row whose scores
    are all NaN, may ignore an infinite score, and may add NaN of tokens that a row does not attend
    to. Such rows are computed again, and no other row changes. On other devices rows are not
    checked, because the host would wait: there a token with NaN that some rows attend to may reach
    all rows of its sequence.

    Args:
        query: ``[batch, heads, rows, head_size]``.
        keys, values: ``[batch, heads, tokens, head_size]``.
        seen: True for tokens that a row attends to, bool, broadcast to ``[batch, heads, rows,
            tokens]``; ``None`` for all.
        scale: factor of the scores.
        is_causal: True if ``seen`` is a lower triangle, which torch need not read.
        bias: ``seen`` as 0 and minus infinity in the query's dtype, if that exists already.

    """
    if not query.is_cpu or not query.numel():
        mask = None if is_causal else seen
        if mask is not None:  # NaN times a weight of zero is NaN
            keys, values = _without_unseen(keys, values, mask)
        return F.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=is_causal, scale=scale
        )
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    query, keys, values = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values)
    )
    if seen is None or is_causal:
        bias = None
    elif bias is None or bias.dtype != query.dtype:
        bias = query.new_zeros(()).masked_fill(~seen, -torch.inf)
    output, broken = _fused(query, keys, values, bias, scale, is_causal)
    if broken is not None and seen is not None:
        keys, values = _without_unseen(keys, values, seen)
        output, broken = _fused(query, keys, values, bias, scale, is_causal)
    if broken is not None:
        output = torch.where(broken, _attend(query, keys, values, seen, scale), output)
    return output


def _without_unseen(
    keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values with 0 for tokens that no row attends to."""
    unseen = ~seen.any(-2).unsqueeze(-1)
    return keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)


def _fused(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return torch's result, and a mask of its numbers that may be wrong; ``None`` if none are."""
    # scaled_dot_product_attention calls this function on the CPU, and drops the second result.
    output, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    # The row's logsumexp is not finite, or it is zero because torch took all scores for masked
    # ones. The quotient is NaN in both cases, and 1 in any other.
    quotient = log_sums / log_sums
    if math.isfinite(quotient.sum().item()) and (
        # Values that a row does not attend to may be NaN, and NaN times a weight of zero is NaN.
        (bias is None and not is_causal) or math.isfinite(output.sum(dtype=torch.float32).item())
    ):
        return output, None
    broken = quotient.isnan().unsqueeze(-1) | ~output.isfinite()
    return output, broken if bool(broken.any()) else None


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Compute attention by matrix products, some rows at a time."""
    shape = (*query.shape[:-1], keys.shape[-2])
    if seen is None:
        seen = query.new_ones((), dtype=torch.bool)
    seen = seen.expand(shape)
    step = max(1, SCORES_AT_ONCE * shape[-2] // math.prod(shape))
    keys = keys.float().transpose(-2, -1)
    outputs = []
    for first in range(0, shape[-2], step):
        rows = slice(first, first + step)
        scores = query[..., rows, :].float() @ keys * scale
        weights = scores.masked_fill(~seen[..., rows, :], -torch.inf).softmax(-1)
        outputs.append(weigh(weights, values, seen[..., rows, :]))
    return torch.cat(outputs, dim=-2).to(query.dtype)


def weigh(weights: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return ``weights @ values`` in float32, without values that a row does not attend to.

    Their weight is zero, but zero times NaN is NaN.
    """
    reach = seen.to(torch.float32)
    output = weights @ values.float().nan_to_num(0, 0, 0)
    for sign in (1, -1):  # NaN counts for both signs, and the sum of both is NaN
        unbounded = (values.isnan() | (values == sign * torch.inf)).float()
        output = output + torch.where(reach @ unbounded > 0, sign * torch.inf, 0.0)
    return output
