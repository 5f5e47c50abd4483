"""Configurations of matmuls with an eight-bit weight, by the bucket of the number of tokens.

This is no operation by itself: it belongs to :mod:`~vllm_module.kernels.matmul.scaled_matmul`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from vllm_module.kernels.choices import choose
from vllm_module.kernels.dtypes import capability
from vllm_module.kernels.operators import next_power_of_2

# Largest number of tokens of each bucket; the last is unbounded.
BUCKETS = (16, 32, 64, 128, 256, 512, 1024)

_FP8 = torch.float8_e4m3fn


class ScaledMatmulConfig(NamedTuple):
    """The tiles of a matmul and the steps of a program.

    Attributes:
        rows: tokens of a tile.
        columns: output features of a tile.
        depth: input features of a step.
        splits: programs that share the input features of a tile.
        two: True if a program computes two neighbouring tiles.
        way: loads by pointers or by tensor descriptors (TMA), or torch's own matmul.
        persistent: True if there are as many programs as multiprocessors, each with several tiles.

    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    splits: int = 1
    two: bool = False
    way: Literal["pointers", "descriptors", "torch"] = "pointers"
    persistent: bool = False


class Configuration(NamedTuple):
    """A configuration for a bucket of tokens.

    Attributes:
        tokens: the bucket's largest number of tokens; for the last bucket, which is unbounded, the
            smallest number that fills whole tiles.
        name: name of the candidate, for :func:`~vllm_module.kernels.choices.trying`.
        case: case of the choice, for ``choices.json``.
        config: tiles and steps.

    """

    tokens: int
    name: str
    case: str
    config: ScaledMatmulConfig


def configurations(
    N: int,
    K: int,
    block: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> list[Configuration]:
    """Return all configurations of matmuls with one weight, for any number of tokens.

    To compile every variant that :func:`~vllm_module.kernels.matmul.scaled_matmul.scaled_matmul`
    may launch for this weight, call it once with each number of ``tokens``.

    Args:
        N, K: number of output and input features.
        block: rows and columns of the weight that share a scale.
        dtype: dtype of the input in the product: float8_e4m3fn, or the input's own if it is not
            quantized.
        device: a GPU; by default one with compute capability 9.0.

    """
    of = capability(torch.empty(0, device=device or torch.device("cpu")))
    return [
        Configuration(tokens, name, case, config)
        for tokens in BUCKETS
        for case, candidates in [_candidates(tokens, N, K, block, dtype, of)]
        for name, config in candidates.items()
    ]


def config_of(
    M: int, N: int, K: int, block: tuple[int, int], x: torch.Tensor
) -> ScaledMatmulConfig:
    """Return the chosen configuration for the bucket of ``M`` rows of ``x``."""
    case, candidates = _candidates(bucket_of(M), N, K, block, x.dtype, capability(x))
    return choose("scaled_matmul", case, candidates, x.device)


def default_of(
    M: int, N: int, K: int, block: tuple[int, int], x: torch.Tensor
) -> ScaledMatmulConfig:
    """Return a configuration for tensors of any strides; it is the first of most buckets."""
    return _tiles(bucket_of(M), N, K, block, x.dtype, capability(x))


def bucket_of(M: int) -> int:
    """Return the bucket of ``M`` tokens."""
    return min(max(BUCKETS[0], next_power_of_2(M)), BUCKETS[-1])


@lru_cache(maxsize=4096)
def _candidates(
    tokens: int,
    N: int,
    K: int,
    block: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> tuple[str, Mapping[str, ScaledMatmulConfig]]:
    """Return a bucket's case and its candidates by name, the default first."""
    first = _tiles(tokens, N, K, block, dtype, capability)
    found = {"tiles": first}
    one_scale = block[0] % 128 == 0 or block[0] >= N or block[1] >= K
    if tokens <= 128:
        if first.splits * 1024 <= K:
            found["more splits"] = first._replace(splits=first.splits * 2)
        # Widened weights leave registers for fewer tokens.
        if tokens <= (64 if dtype == _FP8 else 32) and one_scale and first.depth == 128:
            stages = 5 if dtype == _FP8 else 4
            found["wide tiles"] = first._replace(columns=128, stages=stages)
    if dtype == _FP8 and capability == (9, 0) and K % 16 == 0:
        whole = block[1] >= K or block[1] % 128 == 0
        if tokens > 128 and one_scale and whole:
            small = {"small descriptors": ScaledMatmulConfig(64, 128, 128, 4, 3, way="descriptors")}
            large = ScaledMatmulConfig(128, 128, 128, 8, 4, way="descriptors")
            # Three programs run on a multiprocessor: two compute products while one adds its
            # product to the sums in registers. Of large tiles loaded by pointers, one fits.
            found = small | found if tokens > 256 else found | small
            if tokens > 256:
                found["descriptors"] = large
                found["persistent"] = large._replace(persistent=True)
        # cuBLAS supports blocks of 128 whose rows are multiples of four floats.
        by_torch = block[1] >= K or (block == (128, 128) and -(-K // 128) % 4 == 0)
        if tokens >= 128 and N % 16 == 0 and by_torch and (block[0] == 1 or one_scale):
            found["torch"] = first._replace(splits=1, two=False, way="torch")
    case = f"{tokens} x {N} x {K}, {block[0]} x {block[1]}, {str(dtype).removeprefix('torch.')}"
    return case, MappingProxyType(found)


def _tiles(
    tokens: int,
    N: int,
    K: int,
    block: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> ScaledMatmulConfig:
    """Return the default of a bucket.

    Up to 128 tokens, the time is that of reading the weight. Tiles are small, and K is split until
    there are programs for the whole GPU: two for each of 132 multiprocessors, with 64 KiB of the
    weight in flight. Splits depend only on the weight's shape, so that in a batch of up to 128
    tokens the order of a token's sums does not depend on the other tokens. Beyond, the tensor cores
    and the L2 cache limit the speed: tiles are large, and sums have another order.
    """
    fp8, grouped = dtype == _FP8, block[1] < K
    slow = dtype == torch.float32 or K % 16 != 0  # an odd K is loaded byte by byte
    depth = 32 if slow else 128 if fp8 or tokens <= 64 else 64
    depth = max(32, min(depth, next_power_of_2(block[1])))
    if tokens <= 128:
        splits = 1
        while splits * -(-N // 64) < 256 and splits * 1024 <= K:
            splits *= 2
        rows = min(tokens, 64 if slow else 128)
        return ScaledMatmulConfig(rows, 64, depth, 4, 5 if tokens <= 32 else 4, splits)
    if slow or (grouped and block[0] % 128 and block[0] < N):
        return ScaledMatmulConfig(64, 64, depth, 4, 3)
    if tokens <= 256 or capability < (9, 0):
        return ScaledMatmulConfig(64, 128, depth, 4, 4)
    if tokens <= 512 or (fp8 and grouped):
        # The scales of each step leave no registers for a second tile.
        return ScaledMatmulConfig(128, 128, depth, 8, 3)
    return ScaledMatmulConfig(128, 128, depth, 8, 4, two=True)
