"""All configurations of products, by bucket: what any number of tokens may launch.

To compile every variant that an operation may launch for a weight, call it once with each number of
``tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_module.kernels.matmul import matmul_configurations as home
from vllm_module.kernels.matmul.matmul_configurations import (
    MatmulConfig,
    PackedWeight,
    ScaledWeight,
)


class Configuration(NamedTuple):
    """A configuration for a bucket.

    Attributes:
        tokens: the bucket's largest number of tokens, or of rows of all experts; for the last
            bucket, which is unbounded, the smallest number that fills whole tiles.
        name: name of the candidate, for :func:`~vllm_module.kernels.choices.trying`.
        case: case of the choice, for ``choices.json``.
        config: tiles and steps.

    """

    tokens: int
    name: str
    case: str
    config: MatmulConfig


def scaled_configurations(weight: ScaledWeight) -> list[Configuration]:
    """Return those of :func:`~vllm_module.kernels.matmul.scaled_matmul.scaled_matmul`."""
    return _listed(home.BUCKETS, home._scaled_candidates, weight)


def packed_configurations(weight: PackedWeight) -> list[Configuration]:
    """Return those of :func:`~vllm_module.kernels.matmul.packed_matmul.packed_matmul`."""
    return _listed(home.BUCKETS, home._packed_candidates, weight)


def grouped_configurations(weights: ScaledWeight) -> list[Configuration]:
    """Return those of :func:`~vllm_module.kernels.experts.grouped_matmul.grouped_matmul`.

    Its number of rows is tokens times ``top_k``.
    """
    found = _listed(home.ROWS, home._grouped_candidates, weights)
    return [each._replace(tokens=each.tokens * weights.experts) for each in found]


def _listed(
    buckets: Sequence[int],
    candidates_of: Callable[[int, Any], tuple[str, Mapping[str, MatmulConfig]]],
    weight: Any,
) -> list[Configuration]:
    return [
        Configuration(bucket, name, case, config)
        for bucket in buckets
        for case, candidates in [candidates_of(bucket, weight)]
        for name, config in candidates.items()
    ]
