"""Configurations of matmuls with quantized weights and with experts' weights, by their bucket.

This is no operation by itself. The bucket of a matmul is a range of its number of tokens; that of a
grouped matmul, whose weights are of experts, is a range of the average number of rows of an expert.
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
# The same of an expert's rows; they are the possible numbers of rows of a tile.
ROWS = (16, 32, 64, 128)

_FP8 = torch.float8_e4m3fn
_FEW = 64  # largest number of tokens for which packed weights take the time of reading them


class MatmulConfig(NamedTuple):
    """The tiles of a matmul and the steps of a program.

    Attributes:
        rows: tokens of a tile; in a grouped matmul all of one expert.
        columns: output features of a tile.
        depth: input features of a step.
        splits: programs that share the input features of a tile.
        two: True if a program computes two neighbouring tiles.
        way: loads by pointers or by tensor descriptors (TMA), or torch's own matmul, after
            dequantizing a packed weight.
        scale_sums: True if the scales of a packed weight multiply a step's sums, if the step has
            one group; False if they multiply the weight, before it is rounded to the dtype of the
            input.

    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    splits: int = 1
    two: bool = False
    way: Literal["pointers", "descriptors", "torch"] = "pointers"
    scale_sums: bool = True

    def launch(self) -> dict[str, int]:
        """Return the tiles and options of a launch."""
        return {
            "BLOCK_M": self.rows,
            "BLOCK_N": self.columns,
            "BLOCK_K": self.depth,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


class ScaledWeight(NamedTuple):
    """The properties of a weight, or of experts' weights, on which the configuration depends.

    Attributes:
        outputs, inputs: number of features.
        block: rows and columns of a weight that share a scale; ``(1, inputs)`` without scales.
        dtype: dtype of the input in the product: float8_e4m3fn, or the input's own if it is not
            quantized.
        capability: compute capability of the GPU.
        experts: number of experts.

    """

    outputs: int
    inputs: int
    block: tuple[int, int]
    dtype: torch.dtype
    capability: tuple[int, int] = (9, 0)
    experts: int = 1


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


# A bucket's case and its candidates by name, the default first.
_Candidates = tuple[str, Mapping[str, MatmulConfig]]


def scaled_config_of(M: int, weight: ScaledWeight, x: torch.Tensor) -> MatmulConfig:
    """Return the chosen configuration for the bucket of ``M`` rows of ``x``."""
    case, candidates = _scaled_candidates(bucket_of(M), weight)
    return choose("scaled_matmul", case, candidates, x.device)


def scaled_default_of(M: int, weight: ScaledWeight) -> MatmulConfig:
    """Return a configuration for tensors of any strides; it is the first of most buckets."""
    return _scaled_tiles(bucket_of(M), weight)


def packed_config_of(M: int, weight: PackedWeight, x: torch.Tensor) -> MatmulConfig:
    """Return the chosen configuration for the bucket of ``M`` rows of ``x``."""
    case, candidates = _packed_candidates(bucket_of(M), weight)
    return choose("packed_matmul", case, candidates, x.device)


def grouped_config_of(length: int, weights: ScaledWeight, x: torch.Tensor) -> MatmulConfig:
    """Return the chosen configuration for ``length`` rows of ``x``."""
    case, candidates = _grouped_candidates(rows_of_a_tile(length, weights.experts), weights)
    return choose("grouped_matmul", case, candidates, x.device)


def bucket_of(M: int) -> int:
    """Return the bucket of ``M`` tokens."""
    return min(max(BUCKETS[0], next_power_of_2(M)), BUCKETS[-1])


def rows_of_a_tile(length: int, count: int) -> int:
    """Return the rows of a tile, one of ROWS, by the average number of rows of an expert."""
    return min(max(ROWS[0], next_power_of_2(-(-length // max(1, count)))), ROWS[-1])


@lru_cache(maxsize=4096)
def _scaled_candidates(tokens: int, weight: ScaledWeight) -> _Candidates:
    N, K, block, dtype, capability, _ = weight
    first = _scaled_tiles(tokens, weight)
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
            small = {"small descriptors": MatmulConfig(64, 128, 128, 4, 3, way="descriptors")}
            # Three programs run on a multiprocessor: two compute products while one adds its
            # product to the sums in registers. Of large tiles loaded by pointers, one fits.
            found = small | found if tokens > 256 else found | small
            if tokens > 256:
                found["descriptors"] = MatmulConfig(128, 128, 128, 8, 4, way="descriptors")
        # One scale, one for each output, or blocks, of which cuBLAS takes rows of whole 16 bytes.
        by_torch = block[0] == 1 or block[0] >= N
        if block[1] < K:
            by_torch = block == (128, 128) and -(-K // 128) % 4 == 0
        if tokens >= 128 and N % 16 == 0 and by_torch:
            of_torch = {"torch": first._replace(splits=1, two=False, way="torch")}
            # From 512 rows on it took 0.60 to 0.78 of the time of ours, on an H200 (design/0029).
            found = of_torch | found if tokens > 256 else found | of_torch
    case = f"{tokens} x {N} x {K}, {block[0]} x {block[1]}, {_name(dtype)}"
    return case, MappingProxyType(found)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _scaled_tiles(tokens: int, weight: ScaledWeight) -> MatmulConfig:
    """Return the default of a bucket.

    Up to 128 tokens, the time is that of reading the weight. Tiles are small, and K is split until
    there are programs for the whole GPU: two for each of 132 multiprocessors, with 64 KiB of the
    weight in flight. Splits depend only on the weight's shape, so that in a batch of up to 128
    tokens the order of a token's sums does not depend on the other tokens. Beyond, the tensor cores
    and the L2 cache limit the speed: tiles are large, and sums have another order.
    """
    N, K, block, dtype, capability, _ = weight
    fp8, grouped = dtype == _FP8, block[1] < K
    slow = dtype == torch.float32 or K % 16 != 0  # an odd K is loaded byte by byte
    depth = 32 if slow else 128 if fp8 or tokens <= 64 else 64
    depth = max(32, min(depth, next_power_of_2(block[1])))
    if tokens <= 128:
        splits = _splits(N, K, 256, 1024)
        rows = min(tokens, 64 if slow else 128)
        return MatmulConfig(rows, 64, depth, 4, 5 if tokens <= 32 else 4, splits)
    if slow or (grouped and block[0] % 128 and block[0] < N):
        return MatmulConfig(64, 64, depth, 4, 3)
    if tokens <= 256 or capability < (9, 0):
        return MatmulConfig(64, 128, depth, 4, 4)
    if tokens <= 512 or (fp8 and grouped):
        # The scales of each step leave no registers for a second tile.
        return MatmulConfig(128, 128, depth, 8, 3)
    return MatmulConfig(128, 128, depth, 8, 4, two=True)


def _splits(outputs: int, inputs: int, programs: int, least: int) -> int:
    """Return the splits of inputs, with half of ``least`` or more of them, for ``programs``."""
    splits = 1
    while splits * -(-outputs // 64) < programs and splits * least <= inputs:
        splits *= 2
    return splits


@lru_cache(maxsize=4096)
def _packed_candidates(tokens: int, weight: PackedWeight) -> _Candidates:
    first = packed_tiles(tokens, weight)
    found = {"tiles": first}
    if tokens <= _FEW and first.splits > 1:
        found["fewer splits"] = first._replace(splits=first.splits // 2)
    if tokens >= 256:
        found["torch"] = first._replace(way="torch")
    groups = f"groups of {weight.group}" if weight.group else "groups in no order"
    codes = f"{weight.bits} bits along {weight.along}{', codebook' * weight.codebook}"
    case = f"{tokens} x {weight.outputs} x {weight.inputs}, {codes}, {groups}"
    return f"{case}, {_name(weight.dtype)}", MappingProxyType(found)


def one_scale(weight: PackedWeight, depth: int) -> bool:
    """Return whether all inputs of a step have one group."""
    return bool(weight.group) and (weight.group % depth == 0 or weight.group >= weight.inputs)


def packed_tiles(tokens: int, weight: PackedWeight) -> MatmulConfig:
    """Return the default of a bucket.

    Up to 64 tokens, tiles and splits are as in :func:`_scaled_tiles`, with four programs for each
    multiprocessor. Beyond, converting codes limits the speed: each tile of the weight is used for
    as many tokens as registers can hold sums of.
    """
    slow = weight.dtype == torch.float32  # float32 has no tensor cores
    depth = 64 if one_scale(weight, 64) and not slow else 32
    if tokens <= _FEW:
        splits = _splits(weight.outputs, weight.inputs, 512, 512)
        if not slow:
            return MatmulConfig(tokens, 64, depth, 4, 5 if tokens <= 32 else 4, splits)
        return MatmulConfig(min(tokens, 32), 64, depth, 8, 3, splits)
    if slow:
        return MatmulConfig(32, 64, depth, 8, 3)
    if depth == 32:  # each element's scale may be in registers
        return MatmulConfig(64 if tokens <= 256 else 128, 128, depth, 8, 4, scale_sums=False)
    if tokens <= 256:
        return MatmulConfig(64, 128, depth, 4, 3, scale_sums=False)
    return MatmulConfig(256, 64, depth, 8, 3, scale_sums=False)


@lru_cache(maxsize=4096)
def _grouped_candidates(rows: int, weights: ScaledWeight) -> _Candidates:
    outputs, inputs, block, dtype, capability, count = weights
    first = _grouped_tiles(rows, weights)
    found = {"tiles": first}
    one_scale = block[0] % 128 == 0 or block[0] >= outputs or block[1] >= inputs
    if rows <= 32 and one_scale and first.depth == 128:
        found["wide tiles"] = first._replace(columns=128)
    if rows <= 32:
        found["more stages"] = first._replace(stages=5)
    if first.rows == 128:
        # Two programs for each multiprocessor: one computes products while the other scales or
        # waits.
        found["small tiles"] = MatmulConfig(64, 128, first.depth, 4, 4)
        found["three stages"] = first._replace(stages=3)
    whole = block[1] >= inputs or block[1] % first.depth == 0
    if capability == (9, 0) and inputs % 16 == 0 and whole:
        for name in tuple(found):
            found[f"{name}, descriptors"] = found[name]._replace(way="descriptors")
        if (two := "small tiles, descriptors") in found:
            found = {two: found[two]} | found
    blocks = f"{block[0]} x {block[1]}"
    case = f"{rows} of {count} x {outputs} x {inputs}, {blocks}, {_name(dtype)}"
    return case, MappingProxyType(found)


def _grouped_tiles(rows: int, weights: ScaledWeight) -> MatmulConfig:
    """Return the default for an average of ``rows`` rows of an expert.

    Up to 32 rows, the time is that of reading the weights, of which 64 KiB are in flight. Beyond,
    tensor cores and the L2 cache limit the speed.
    """
    outputs, inputs, block, dtype, capability, _ = weights
    fp8, grouped = dtype == _FP8, block[1] < inputs
    slow = dtype == torch.float32 or inputs % 16 != 0  # an odd row is loaded byte by byte
    depth = 32 if slow else 128 if fp8 or rows <= 32 else 64
    if grouped:
        depth = max(32, min(depth, next_power_of_2(block[1])))
    if rows <= 32:
        return MatmulConfig(rows, 64, depth, 4, 4)
    if slow or (grouped and block[0] % 128 and block[0] < outputs):
        return MatmulConfig(64, 64, depth, 4, 3)
    if rows == 64 or capability < (9, 0):
        return MatmulConfig(64, 128, depth, 4, 4)
    return MatmulConfig(128, 128, depth, 8, 4)


def mxfp4_config_of(length: int, count: int, x: torch.Tensor) -> MatmulConfig:
    """Return the configuration for ``length`` rows of ``x`` and experts with MXFP4 weights."""
    rows = rows_of_a_tile(length, count)
    if x.dtype == torch.float32:
        return MatmulConfig(min(rows, 64), 64, 32, 4, 3)
    if rows <= 32:
        return MatmulConfig(rows, 64, 128, 4, 4)
    if rows == 64 or capability(x) < (9, 0):
        return MatmulConfig(64, 128, 64, 4, 3)
    return MatmulConfig(128, 128, 64, 8, 4)
