"""How a product with a packed weight may be cut, by the bucket of its tokens.

This is no operation of its own: it belongs to :mod:`~vllm_module.kernels.matmul.packed_matmul`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from vllm_module.kernels.choices import choose
from vllm_module.kernels.matmul.scaled_matmul_configurations import BUCKETS, bucket_of

_FEW = 64  # tokens, at most, for which reading the weight takes the time


class PackedWeight(NamedTuple):
    """What the cut of a product depends on, apart from its tokens.

    Attributes:
        outputs, inputs: features.
        bits: of a code.
        along: the dimension in which neighbours share a word.
        group: inputs that share a scale; 0 if groups are in no order.
        codebook: whether codes stand for the values of a codebook.
        dtype: of ``x``.

    """

    outputs: int
    inputs: int
    bits: int
    along: int
    group: int
    codebook: bool
    dtype: torch.dtype


class Config(NamedTuple):
    """How a product is cut into programs, and a program into steps.

    Attributes:
        rows: tokens of a tile.
        columns: output features of a tile.
        depth: input features of a step.
        splits: programs that share the input features of a tile.
        scale_sums: where a step has one group, whether its scales multiply the step's sums; if not,
            they multiply the weight, before it is rounded to the dtype of ``x``.
        way: tiles of codes, or the weight is dequantized and multiplied by torch.

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
    """One way to multiply a bucket of tokens.

    Attributes:
        tokens: the most of the bucket; of the last bucket, which has no end, the fewest that fill
            whole tiles.
        name: of the candidate, for :func:`~vllm_module.kernels.choices.trying`.
        case: of the choice, for ``choices.json``.
        config: how it is cut.

    """

    tokens: int
    name: str
    case: str
    config: Config


def packed_configurations(weight: PackedWeight) -> list[PackedConfiguration]:
    """Return all configurations of products with one weight, for any number of tokens.

    To compile everything that :func:`~vllm_module.kernels.matmul.packed_matmul.packed_matmul` may
    launch for this weight, call it once with each number of ``tokens``.
    """
    return [
        PackedConfiguration(tokens, name, case, config)
        for tokens in BUCKETS
        for case, candidates in [_candidates(tokens, weight)]
        for name, config in candidates.items()
    ]


def config_of(M: int, weight: PackedWeight, x: torch.Tensor) -> Config:
    """Return the chosen configuration for the bucket of ``M`` rows of ``x``."""
    case, candidates = _candidates(bucket_of(M), weight)
    return choose("packed_matmul", case, candidates, x.device)


@lru_cache(maxsize=4096)
def _candidates(tokens: int, weight: PackedWeight) -> tuple[str, Mapping[str, Config]]:
    """Return the case, and the candidates of a bucket by name, the default first."""
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
        found["square tiles"] = Config(128, 128, 32, 8, 4, scale_sums=False)
    if tokens >= 256:
        found["torch"] = first._replace(way="torch")
    groups = f"groups of {weight.group}" if weight.group else "groups in no order"
    codes = f"{weight.bits} bits along {weight.along}{', codebook' * weight.codebook}"
    case = f"{tokens} x {weight.outputs} x {weight.inputs}, {codes}, {groups}"
    return f"{case}, {str(weight.dtype).removeprefix('torch.')}", MappingProxyType(found)


def one_scale(weight: PackedWeight, depth: int) -> bool:
    """Return whether all inputs of a step have one group."""
    return bool(weight.group) and (weight.group % depth == 0 or weight.group >= weight.inputs)


def tiles_for(tokens: int, weight: PackedWeight) -> Config:
    """Return the default of a bucket.

    Up to 64 tokens, reading the weight takes the time: tiles are small, and inputs are split until
    there are programs for the whole GPU, four for each of 132 multiprocessors. Splits depend on the
    weight's shape alone, so that in a batch of up to 64 tokens the order of a token's sums does not
    depend on the other tokens. Beyond, converting codes limits the speed: each tile of the weight
    meets as many tokens as registers hold the sums of.
    """
    slow = weight.dtype == torch.float32  # no tensor cores
    depth = 64 if one_scale(weight, 64) and not slow else 32
    if tokens <= _FEW:
        splits = 1
        while splits * -(-weight.outputs // 64) < 512 and splits * 512 <= weight.inputs:
            splits *= 2
        if not slow:
            return Config(tokens, 64, depth, 4, 5 if tokens <= 32 else 4, splits)
        return Config(min(tokens, 32), 64, depth, 8, 3, splits)
    if slow:
        return Config(32, 64, depth, 8, 3)
    if depth == 32:  # scales of all elements may be in registers
        return Config(64 if tokens <= 256 else 128, 128, depth, 8, 4, scale_sums=False)
    if tokens <= 256:
        return Config(64, 128, depth, 4, 3, scale_sums=False)
    return Config(256, 64, depth, 8, 3, scale_sums=False)
