"""Cutting a context into splits, assigning splits to programs, and combining their results.

Paged and latent attention share this. A program processes items: an item is a split of one sequence
with one new token. Items lie sequence after sequence, without gaps, so no program is launched for
pages of the block table beyond a context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_module.kernels.attention.paged_attention_tile import Arguments, Tiles, normalize
from vllm_module.kernels.attention.reshape_and_cache import scale_stride
from vllm_module.kernels.operators import next_power_of_2, tl, triton

SEQUENCES = 256  # largest number in one launch: each program adds up the splits of all of them
SCRATCH = 1 << 28  # bytes of the outputs of splits, unless one sequence needs more
_PROGRAMS = 1024  # programs of one launch: two or three for each slot of a Hopper GPU
_MANY = 32  # sequences from which more programs share their splits, which may be few


@dataclass(frozen=True)
class Splits:
    """Size and number of the splits of a context.

    Attributes:
        tokens: largest number of tokens of a split. The splits of a context are as even as tiles
            allow.
        most: largest number of splits of one context; longer contexts have larger splits.

    """

    tokens: int = 512
    most: int = 64

    def count(self, capacity: int) -> int:
        """Return the largest number of splits of a context of at most ``capacity`` tokens."""
        return max(1, min(self.most, -(-capacity // self.tokens)))


@dataclass(frozen=True)
class Decoding:
    """A candidate: how contexts are cut, and how splits are computed and combined.

    Attributes:
        splits, tiles: of a context, and of a split.
        early: whether it is launched early.
        combined: numbers that a program combines at once, and its warps. Most contexts have few
            splits, and there is a program for each sequence and head.
        shares: factor of the programs that share the splits of many sequences.

    """

    splits: Splits
    tiles: Tiles
    early: bool = False
    combined: tuple[int, int] = (1024, 2)
    shares: int = 2


def sequences_of_a_launch(heads: int, size: int, splits: int) -> int:
    """Return how many sequences one launch processes, so that its scratch memory is bounded.

    A sequence's bits do not depend on this.
    """
    if splits == 1:
        return SEQUENCES
    return max(1, min(SEQUENCES, SCRATCH // (4 * heads * size * splits)))


def programs_of(sequences: int, splits: int, columns: int, shares: int = 2) -> int:
    """Return how many programs share a launch's items, for each column of the grid."""
    most = shares * _PROGRAMS if sequences >= _MANY else _PROGRAMS
    return max(1, min(sequences * splits, most // columns))


def launch_splits(
    kernel: Any,
    arguments: Arguments,
    rest: tuple[object, ...],
    chosen: Decoding,
    columns: int,
    constants: dict[str, Any],
) -> None:
    """Write the outputs of sequences with one new token, and zeros for tokens of no sequence.

    Args:
        kernel: computes the splits of items.
        arguments, rest: its first arguments.
        chosen: the candidate.
        columns: size of the grid's second dimension, whose programs share the heads.
        constants: its constants.

    """
    tensors, sequences, splits = arguments.tensors, arguments.sequences, chosen.splits
    count = splits.count(arguments.capacity)
    output = tensors.output
    tokens, heads, size = output.shape
    most = sequences_of_a_launch(heads, size, count)
    partial: tuple[torch.Tensor | None, ...] = None, None, None
    if count > 1:
        shape = min(most, sequences), heads, count
        outputs = torch.empty(*shape, size, dtype=torch.float32, device=output.device)
        partial = outputs, *torch.empty(2, *shape, dtype=torch.float32, device=output.device)
    block_d = max(16, next_power_of_2(size))
    sizes = {"SPLIT": splits.tokens, "MAX_SPLITS": splits.most}
    for begin in range(0, max(1, sequences), most):
        end = min(begin + most, sequences)
        kernel[programs_of(end - begin, count, columns, chosen.shares), columns](
            *arguments.flat(),
            *rest,
            partial,
            begin,
            end,
            count,
            **constants,
            **sizes,
            DIRECT=count == 1,
            SEQUENCES=SEQUENCES,
            SWAP=chosen.tiles.swap,
            **chosen.tiles.launch(),
        )
        if count > 1 and begin < end:
            _combine[end - begin, heads](
                output,
                partial,
                tensors.context_lens,
                tensors.query_start_loc,
                tensors.sinks,
                tensors.v_scale,
                begin,
                tokens,
                count,
                arguments.capacity,
                output.stride(),
                scale_stride(tensors.v_scale),
                GROUP=constants.get("GROUP", heads),
                WINDOW=constants.get("WINDOW", 0),
                HEAD_SIZE=size,
                BLOCK_D=block_d,
                AT_ONCE=min(next_power_of_2(splits.most), max(1, chosen.combined[0] // block_d)),
                BLOCK_N=chosen.tiles.block_n,
                **sizes,
                num_warps=chosen.combined[1],
            )


@triton.jit
def split_size(context, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the tokens of a split, which depend only on the sequence, as do its bits.

    They are whole tiles, and no split but the last has fewer.
    """
    most = SPLIT * tl.maximum(1, tl.cdiv(context, SPLIT * MAX_SPLITS))
    count = tl.maximum(1, tl.cdiv(context, most))
    return tl.maximum(1, tl.cdiv(context, count * BLOCK_N)) * BLOCK_N


@triton.jit
def ends_of_items(
    contexts_ptr,
    starts_ptr,
    begin,
    end,
    tokens,
    capacity,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Return the end of each sequence's items, from ``begin`` on, int32 ``[SEQUENCES]``.

    A sequence without exactly one new token, or beyond the last one, has no items. LEAST is the
    number of items of an empty context.
    """
    sequence = begin + tl.arange(0, SEQUENCES)
    exists = sequence < end
    first = tl.load(starts_ptr + sequence, mask=exists, other=0)
    new = tl.load(starts_ptr + sequence + 1, mask=exists, other=0) - first
    context = tl.minimum(tl.load(contexts_ptr + sequence, mask=exists, other=0), capacity)
    size = split_size(context, SPLIT, MAX_SPLITS, BLOCK_N)
    splits = tl.cdiv(tl.maximum(context, 0), size)
    if WINDOW > 0:
        splits -= tl.maximum(0, context - WINDOW) // size
    decodes = exists & (new == 1) & (first >= 0) & (first < tokens)
    return tl.cumsum(tl.where(decodes, tl.maximum(splits, LEAST), 0), 0)


@triton.jit
def find_item(item, ends):
    """Return an item's sequence, and the item's number in that sequence."""
    before = ends <= item
    return tl.sum(before.to(tl.int32), 0), item - tl.max(tl.where(before, ends, 0), 0)


@triton.jit(do_not_specialize=["begin", "tokens", "splits", "capacity"])
def _combine(
    output_ptr,
    partial,
    contexts_ptr,
    starts_ptr,
    sinks_ptr,
    v_scale_ptr,
    begin,
    tokens,
    splits,
    capacity,
    output_strides,
    v_scale_head,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Combine the splits of one sequence's new token and one query head, in a fixed order."""
    partial_ptr, maxima_ptr, sums_ptr = partial
    head = tl.program_id(1).to(tl.int64)
    index = (tl.program_id(0) * tl.num_programs(1) + head) * splits
    sequence = begin + tl.program_id(0)
    first = tl.load(starts_ptr + sequence).to(tl.int64)
    if (tl.load(starts_ptr + sequence + 1) - first != 1) | (first < 0) | (first >= tokens):
        return
    context = tl.minimum(tl.load(contexts_ptr + sequence), capacity)
    size = split_size(context, SPLIT, MAX_SPLITS, BLOCK_N)
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(0, context - WINDOW) // size
    end_split = tl.cdiv(context, size)
    d = tl.arange(0, BLOCK_D)
    split = tl.arange(0, MAX_SPLITS)
    exists = (split >= first_split) & (split < end_split)
    maxima = tl.load(maxima_ptr + index + split, mask=exists, other=float("-inf"))
    highest = tl.max(maxima, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    sums = tl.load(sums_ptr + index + split, mask=exists, other=0.0)
    total = tl.sum(sums * tl.exp2(maxima - highest), axis=0)
    outputs = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(first_split // AT_ONCE * AT_ONCE, end_split, AT_ONCE, num_stages=3):
        some = start + tl.arange(0, AT_ONCE)
        in_range = (some >= first_split) & (some < end_split)
        maximum = tl.load(maxima_ptr + index + some, mask=in_range, other=float("-inf"))
        partial_at = (index + some)[:, None] * HEAD_SIZE + d[None, :]
        mask = in_range[:, None] & (d < HEAD_SIZE)[None, :]
        output = tl.load(partial_ptr + partial_at, mask=mask, other=0.0)
        outputs += tl.sum(output * tl.exp2(maximum - highest)[:, None], axis=0)
    one = tl.zeros((1,), tl.float32)
    sinks = one + float("-inf")
    if sinks_ptr is not None:
        sinks = one + tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
    v_scale = 1.0
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + head // GROUP * v_scale_head)
    y = normalize(one + highest, one + total, outputs[None, :], sinks, v_scale)
    y = tl.where(context <= 0, 0.0, tl.sum(y, axis=0)).to(output_ptr.dtype.element_ty)
    output_at = first * output_strides[0] + head * output_strides[1] + d * output_strides[2]
    tl.store(output_ptr + output_at, y, mask=d < HEAD_SIZE)
