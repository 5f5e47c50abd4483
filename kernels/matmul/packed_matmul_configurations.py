"""Configurations of matmuls with a packed weight, by the bucket of the number of tokens.

This is no operation by itself: it belongs to :mod:`~vllm_module.kernels.matmul.packed_matmul`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from vllm_module.kernels.choices import choose
from vllm_module.kernels.matmul.scaled_matmul_configurations import BUCKETS, bucket_of

_FEW = 64  # largest number of tokens for which the time is that of reading the weight


class PackedWeight(NamedTuple):
    """The properties of a packed weight on which the configuration depends.

    Attributes:
        outputs, inputs: number of features.
        bits: number of bits of a code.
        along: the dimension in which neighbours share a word.
        group: number of inputs that share a scale; 0 if groups are in no order.
        codebook: True if codes index a codebook.
        dtype: dtype of ``x``.

    """

    outputs: int
    inputs: int
    bits: int
    along: int
    group: int
    codebook: bool
    dtype: torch.dtype


class PackedMatmulConfig(NamedTuple):
    """The tiles of a matmul and the steps of a program.

    Attributes:
        rows: tokens of a tile.
        columns: output features of a tile.
        depth: input features of a step.
        splits: programs that share the input features of a tile.
        scale_sums: True if the scales of a step with one group multiply the step's sums; False if
            they multiply the weight, before it is rounded to the dtype of ``x``.
        way: ``"tiles"`` of codes, or ``"torch"`` after dequantizing the weight.

    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    splits: int = 1
    scale_sums: bool = True
    way: Literal["tiles", "torch"] = "tiles"


class PackedConfiguration(NamedTuple):
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
    config: PackedMatmulConfig


def packed_configurations(weight: PackedWeight) -> list[PackedConfiguration]:
    """Return all configurations of matmuls with one weight, for any number of tokens.

    To compile every variant that :func:`~vllm_module.kernels.matmul.packed_matmul.packed_matmul`
    may launch for this weight, call it once with each number of ``tokens``.
    """
    return [
        PackedConfiguration(tokens, name, case, config)
        for tokens in BUCKETS
        for case, candidates in [_candidates(tokens, weight)]
        for name, config in candidates.items()
    ]


def config_of(M: int, weight: PackedWeight, x: torch.Tensor) -> PackedMatmulConfig:
    """Return the chosen configuration for the bucket of ``M`` rows of ``x``."""
    case, candidates = _candidates(bucket_of(M), weight)
    return choose("packed_matmul", case, candidates, x.device)


@lru_cache(maxsize=4096)
def _candidates(tokens: int, weight: PackedWeight) -> tuple[str, Mapping[str, PackedMatmulConfig]]:
    """Return a bucket's case and its candidates by name, the default first."""
    first = tiles_for(tokens, weight)
    found = {"tiles": first}
    if tokens <= _FEW:
        if first.splits * 256 <= weight.inputs:
            found["more splits"] = first._replace(splits=first.splits * 2)
        if first.splits > 1:
            found["fewer splits"] = first._replace(splits=first.splits // 2)
        if tokens <= 32 and first.depth >= 64:
            found["wide tiles"] = first._replace(columns=128)
            found["narrow tiles"] = first._replace(columns=32)
            if one_scale(weight, 128):
                found["deep steps"] = first._replace(depth=128, warps=8, stages=4)
    if first.rows > 128:
        found["square tiles"] = PackedMatmulConfig(128, 128, 32, 8, 4, scale_sums=False)
    if tokens >= 256:
        found["torch"] = first._replace(way="torch")
    groups = f"groups of {weight.group}" if weight.group else "groups in no order"
    codes = f"{weight.bits} bits along {weight.along}{', codebook' * weight.codebook}"
    case = f"{tokens} x {weight.outputs} x {weight.inputs}, {codes}, {groups}"
    return f"{case}, {str(weight.dtype).removeprefix('torch.')}", MappingProxyType(found)


def one_scale(weight: PackedWeight, depth: int) -> bool:
    """Return whether all inputs of a step have one group."""
    return bool(weight.group) and (weight.group % depth == 0 or weight.group >= weight.inputs)


def tiles_for(tokens: int, weight: PackedWeight) -> PackedMatmulConfig:
    """Return the default of a bucket.

    Up to 64 tokens, the time is that of reading the weight: tiles are small, and inputs are split
    until
    there are programs for the whole GPU, four for each of 132 multiprocessors. Splits depend only
    on the weight's shape, so that in a batch of up to 64 tokens the order of a token's sums does
    not depend on the other tokens. Beyond, converting codes limits the speed: each tile of the
    weight is used for as many tokens as registers can hold sums of.
    """
    slow = weight.dtype == torch.float32  # float32 has no tensor cores
    depth = 64 if one_scale(weight, 64) and not slow else 32
    if tokens <= _FEW:
        splits = 1
        while splits * -(-weight.outputs // 64) < 512 and splits * 512 <= weight.inputs:
            splits *= 2
        if not slow:
            return PackedMatmulConfig(tokens, 64, depth, 4, 5 if tokens <= 32 else 4, splits)
        return PackedMatmulConfig(min(tokens, 32), 64, depth, 8, 3, splits)
    if slow:
        return PackedMatmulConfig(32, 64, depth, 8, 3)
    if depth == 32:  # each element's scale may be in registers
        return PackedMatmulConfig(64 if tokens <= 256 else 128, 128, depth, 8, 4, scale_sums=False)
    if tokens <= 256:
        return PackedMatmulConfig(64, 128, depth, 4, 3, scale_sums=False)
    return PackedMatmulConfig(256, 64, depth, 8, 3, scale_sums=False)
