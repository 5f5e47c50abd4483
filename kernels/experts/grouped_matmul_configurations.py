"""Configurations of grouped matmuls, by the average number of rows of an expert.

This is no operation by itself: it belongs to :mod:`~vllm_module.kernels.experts.grouped_matmul`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import torch

from vllm_module.kernels.choices import choose
from vllm_module.kernels.dtypes import capability
from vllm_module.kernels.experts.grouped_tile import ROWS, rows_of_a_tile
from vllm_module.kernels.operators import next_power_of_2


class GroupedMatmulConfig(NamedTuple):
    """The tiles of a grouped matmul and the steps of a program.

    Attributes:
        rows: rows of a tile, all of one expert.
        columns: output features of a tile.
        depth: input features of a step.
        described: True if weights are loaded by a tensor descriptor (TMA) instead of pointers.

    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    described: bool = False


class GroupedConfiguration(NamedTuple):
    """A configuration for a bucket of rows.

    Attributes:
        rows: number of rows of all experts; a batch of the bucket's size.
        name: name of the candidate, for :func:`~vllm_module.kernels.choices.trying`.
        case: case of the choice, for ``choices.json``.
        config: tiles and steps.

    """

    rows: int
    name: str
    case: str
    config: GroupedMatmulConfig


def grouped_configurations(
    shape: tuple[int, int, int],
    block: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> list[GroupedConfiguration]:
    """Return all configurations of matmuls with some experts' weights, for any rows.

    To compile every variant that :func:`~vllm_module.kernels.experts.grouped_matmul.grouped_matmul`
    may launch for these weights, call it once with each number of ``rows``, which is tokens times
    ``top_k``.

    Args:
        shape: shape of the weights: count, output, input.
        block: rows and columns of a weight that share a scale; ``(1, input)`` without scales.
        dtype: dtype of the input in the product.
        device: a GPU; by default one with compute capability 9.0.

    """
    of = capability(torch.empty(0, device=device or torch.device("cpu")))
    return [
        GroupedConfiguration(rows * shape[0], name, case, config)
        for rows in ROWS
        for case, candidates in [_candidates(rows, shape, block, dtype, of)]
        for name, config in candidates.items()
    ]


def config_of(
    length: int, shape: tuple[int, int, int], block: tuple[int, int], x: torch.Tensor
) -> GroupedMatmulConfig:
    """Return the chosen configuration for ``length`` rows of ``x``."""
    rows = rows_of_a_tile(length, shape[0])
    case, candidates = _candidates(rows, shape, block, x.dtype, capability(x))
    return choose("grouped_matmul", case, candidates, x.device)


@lru_cache(maxsize=4096)
def _candidates(
    rows: int,
    shape: tuple[int, int, int],
    block: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> tuple[str, Mapping[str, GroupedMatmulConfig]]:
    """Return a bucket's case and its candidates by name, the default first."""
    count, outputs, inputs = shape
    first = _tiles(rows, shape, block, dtype, capability)
    found = {"tiles": first}
    one_scale = block[0] % 128 == 0 or block[0] >= outputs or block[1] >= inputs
    if rows <= 32 and one_scale and first.depth == 128:
        found["wide tiles"] = first._replace(columns=128)
    if rows <= 32:
        found["more stages"] = first._replace(stages=5)
    if first.rows == 128:
        # Two programs for each multiprocessor: one computes products while the other scales or
        # waits.
        found["small tiles"] = GroupedMatmulConfig(64, 128, first.depth, 4, 4)
        found["three stages"] = first._replace(stages=3)
    whole = block[1] >= inputs or block[1] % first.depth == 0
    if capability == (9, 0) and inputs % 16 == 0 and whole:
        for name in tuple(found):
            found[f"{name}, descriptors"] = found[name]._replace(described=True)
        if (two := "small tiles, descriptors") in found:
            found = {two: found[two]} | found
    blocks, name = f"{block[0]} x {block[1]}", str(dtype).removeprefix("torch.")
    case = f"{rows} of {count} x {outputs} x {inputs}, {blocks}, {name}"
    return case, MappingProxyType(found)


def _tiles(
    rows: int,
    shape: tuple[int, int, int],
    block: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> GroupedMatmulConfig:
    """Return the default for an average of ``rows`` rows of an expert.

    Up to 32 rows, the time is that of reading the weights, of which 64 KiB are in flight. Beyond,
    tensor cores and the L2 cache limit the speed.
    """
    _, outputs, inputs = shape
    fp8, grouped = dtype == torch.float8_e4m3fn, block[1] < inputs
    slow = dtype == torch.float32 or inputs % 16 != 0  # an odd row is loaded byte by byte
    depth = 32 if slow else 128 if fp8 or rows <= 32 else 64
    if grouped:
        depth = max(32, min(depth, next_power_of_2(block[1])))
    if rows <= 32:
        return GroupedMatmulConfig(rows, 64, depth, 4, 4)
    if slow or (grouped and block[0] % 128 and block[0] < outputs):
        return GroupedMatmulConfig(64, 64, depth, 4, 3)
    if rows == 64 or capability < (9, 0):
        return GroupedMatmulConfig(64, 128, depth, 4, 4)
    return GroupedMatmulConfig(128, 128, depth, 8, 4)
