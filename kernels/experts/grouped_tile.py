"""A program's expert and rows in a grouped matmul, found on the device.

This is no operation by itself: the grouped matmuls share it.
"""

from __future__ import annotations

from vllm_module.kernels.matmul.product_tile import tile_of
from vllm_module.kernels.operators import tl, triton


def tiles_of(length: int, count: int, rows: int) -> int:
    """Return how many tiles cover ``length`` rows of ``count`` experts in any distribution.

    Each expert with rows, and the rows beyond the last expert, may end with an incomplete tile.
    """
    return length // rows + min(length, count + 1)


@triton.jit
def grouped_tile(
    offsets_ptr,
    rows_ptr,
    length,
    count,
    top_k,
    N,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr = 1,
):
    """Return a program's expert, first feature, rows of the result, their mask, and rows of x.

    Rows beyond the last expert's have the expert ``count``. A program without rows has a larger
    one. The offsets are read ``COUNT`` at a time: more do not fit into registers.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile, n = tile_of(tl.program_id(0), tl.num_programs(0) // tiles_n, tiles_n)
    n = n * BLOCK_N

    expert, row, end, behind = 0, 0, 0, 0
    for start in range(0, COUNT * CHUNKS, COUNT):
        e = start + tl.arange(0, COUNT)
        first = tl.load(offsets_ptr + e, mask=e <= count, other=2147483647)
        last = tl.load(offsets_ptr + e + 1, mask=e < count, other=2147483647)
        first = tl.minimum(tl.maximum(first, 0), length)
        last = tl.minimum(tl.maximum(last, 0), length)
        tiles = tl.where(last > first, (last - first + BLOCK_M - 1) // BLOCK_M, 0)
        ends = behind + tl.cumsum(tiles, axis=0)
        own = (ends - tiles <= tile) & (tile < ends)
        expert += tl.sum((ends <= tile).to(tl.int32), axis=0)
        row += tl.sum(tl.where(own, first + (tile - ends + tiles) * BLOCK_M, 0), axis=0)
        end += tl.sum(tl.where(own, last, 0), axis=0)
        behind += tl.sum(tiles, axis=0)
    row += tl.arange(0, BLOCK_M)
    exist = row < end
    source = row
    if rows_ptr is not None:
        source = tl.load(rows_ptr + row, mask=exist, other=0) // top_k
    source = tl.where(exist, source, 0).to(tl.int64)
    return expert, n, row.to(tl.int64), exist, source
