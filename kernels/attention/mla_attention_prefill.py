"""Latent attention of sequences with several new tokens, in Triton.

Row ``r`` of a tile is token ``r // TILE_HEADS`` and head ``r % TILE_HEADS`` of the tile's heads, so
a row of the cache is loaded once for all of them.
"""

from __future__ import annotations

from typing import Any

from vllm_module.kernels.attention.mla_attention_tile import attend_latent, load_query
from vllm_module.kernels.attention.paged_attention_tile import Arguments, Tiles, normalize
from vllm_module.kernels.operators import tl, triton
from vllm_module.kernels.rows.packed_sequences import sequence_of


def launch_prefill(arguments: Arguments, constants: dict[str, Any], tiles: Tiles) -> None:
    """Write the outputs of sequences with more than one new token."""
    heads = constants["HEADS"]
    head_blocks = -(-heads // tiles.block_m)
    tile_heads = -(-heads // head_blocks)
    block_q = tiles.block_m // tile_heads
    _prefill_latent[arguments.tokens // block_q + arguments.sequences, head_blocks](
        *arguments.flat(),
        **constants,
        TILE_HEADS=tile_heads,
        BLOCK_Q=block_q,
        **tiles.launch(),
    )


@triton.jit(do_not_specialize=["tokens", "sequences", "capacity", "table_row"])
def _prefill_latent(
    tensors,
    tokens,
    sequences,
    capacity,
    factor,
    query_strides,
    cache_strides,
    table_row,
    table_entry,
    output_strides,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute attention of BLOCK_Q new tokens of one sequence and TILE_HEADS of its heads.

    Programs with the longest contexts start first.
    """
    starts_ptr = tensors.query_start_loc
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = sequence_of(program, starts_ptr, sequences, BLOCK_Q)
    first = tl.load(starts_ptr + sequence)
    new = tl.load(starts_ptr + sequence + 1) - first
    begin_q = (program - first // BLOCK_Q - sequence) * BLOCK_Q
    if begin_q >= new or new == 1:
        return
    context = tl.minimum(tl.load(tensors.context_lens + sequence), capacity)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_L).to(tl.int64)
    row = begin_q + m // TILE_HEADS
    head = tl.program_id(1).to(tl.int64) * TILE_HEADS + m % TILE_HEADS
    real = (m < BLOCK_Q * TILE_HEADS) & (head < HEADS) & (row < new)
    real = real & (first + row >= 0) & (first + row < tokens)
    token = (first + row).to(tl.int64)
    rows = tensors.query + token * query_strides[0] + head * query_strides[1]
    q, q_rope, divisor = load_query(
        rows, real, query_strides[2], tensors.cache, LATENT, ROPE, BLOCK_L, BLOCK_R
    )
    scale = 1.0
    if tensors.v_scale is not None:
        scale = tl.load(tensors.v_scale)
    earliest = context - new + begin_q  # position of the first row
    maxima, sums, outputs = attend_latent(
        q, q_rope, context - new + row, tensors.cache,
        tensors.block_tables + table_row.to(tl.int64) * sequence,
        0, tl.minimum(earliest + BLOCK_Q, context), divisor * (factor * scale),
        cache_strides, table_entry,
        LATENT, ROPE, BLOCK_L, BLOCK_R, BLOCK_N, PAGE_SIZE, PRECISION, False,
    )  # fmt: skip
    no_sinks = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    y = normalize(maxima, sums, outputs, no_sinks, scale).to(tensors.output.dtype.element_ty)
    if context == 0:
        y = tl.zeros((BLOCK_M, BLOCK_L), tensors.output.dtype.element_ty)  # zeros for padding
    output_at = token[:, None] * output_strides[0] + head[:, None] * output_strides[1]
    mask = real[:, None] & (d < LATENT)[None, :]
    tl.store(tensors.output + output_at + d[None, :] * output_strides[2], y, mask=mask)
