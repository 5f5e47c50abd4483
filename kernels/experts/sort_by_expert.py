"""Sorting tokens by expert, so that each expert multiplies consecutive rows."""

from __future__ import annotations

import torch

from vllm_module.kernels.experts.few_tokens import sort_few, takes_few_tokens
from vllm_module.kernels.operators import expect, operator, tl, triton

_TILE = 2048  # rows that a program reads in one step


def sort_by_expert(
    experts: torch.Tensor, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of ``experts`` in the order of their experts, and each expert's first row.

    The rows of an expert keep their order. Rows of other experts, and padding of -1, come last.
    Shapes do not depend on values, and the host does not wait for the device, so a CUDA graph can
    replay it.

    Args:
        experts: int32 ``[tokens, top_k]``; its row ``r`` is ``experts[r // top_k, r % top_k]``.
        first, count: first number of this rank's experts, and how many they are.

    Returns:
        The order, int32 ``[tokens * top_k]``, and offsets, int32 ``[count + 1]``. The rows of
        expert ``first + e`` are ``order[offsets[e]:offsets[e + 1]]``; those of others start at
        ``offsets[count]``.

    Raises:
        ValueError: the shape or dtype is another, or the count is negative.

    """
    expect("experts", experts, (None, None), (torch.int32,))
    if count < 0 or first < 0:
        raise ValueError(f"first and count must not be negative, got {first} and {count}")
    return _sort_by_expert(experts, first, count)


def sort_by_expert_reference(
    experts: torch.Tensor, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort in plain torch, or a few rows in a loop; see :func:`sort_by_expert`."""
    if takes_few_tokens(experts):
        return sort_few(experts, first, count)
    local = experts.reshape(-1) - first
    local = torch.where((local >= 0) & (local < count), local, count)
    ascending, order = local.sort(stable=True)
    numbers = torch.arange(count + 1, dtype=ascending.dtype, device=experts.device)
    return order.int(), torch.searchsorted(ascending, numbers, out_int32=True)


def sort_by_expert_triton(
    experts: torch.Tensor, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort in a Triton kernel, a program for each expert; see :func:`sort_by_expert`."""
    order, offsets = sort_by_expert_fake(experts, first, count)
    rows = experts.contiguous()
    _sort[(count + 1,)](rows, order, offsets, rows.numel(), first, TILE=_TILE, num_warps=4)
    return order, offsets


@triton.jit(do_not_specialize=["rows", "first"])
def _sort(experts_ptr, order_ptr, offsets_ptr, rows, first, TILE: tl.constexpr):
    """Write one expert's rows; the last program writes those of all other experts."""
    own, count = tl.program_id(0), tl.num_programs(0) - 1
    lower = 0
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        local = tl.load(experts_ptr + row, mask=row < rows, other=-1) - first
        lower += tl.sum(((local >= 0) & (local < own)).to(tl.int32), axis=0)
    tl.store(offsets_ptr + own, lower)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        local = tl.load(experts_ptr + row, mask=row < rows, other=-1) - first
        local = tl.where((local >= 0) & (local < count), local, count)
        ours = ((local == own) & (row < rows)).to(tl.int32)
        place = lower + tl.cumsum(ours, axis=0) - 1
        tl.store(order_ptr + place, row, mask=ours != 0)
        lower += tl.sum(ours, axis=0)


def sort_by_expert_fake(
    experts: torch.Tensor, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an empty order and offsets."""
    return (
        torch.empty(experts.shape.numel(), dtype=torch.int32, device=experts.device),
        torch.empty(count + 1, dtype=torch.int32, device=experts.device),
    )


_sort_by_expert = operator(sort_by_expert_reference, sort_by_expert_triton, sort_by_expert_fake)
