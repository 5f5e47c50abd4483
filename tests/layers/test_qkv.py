"""The fused query, key and value projection: which rank holds which heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm_module.distributed import run_ranks, tensor_parallel
from vllm_module.errors import ShardingError
from vllm_module.layers import QKVParallelLinear
from vllm_module.parameters import Slot

HIDDEN, HEAD = 10, 6  # heads times head size is not the hidden size
SHARED = [
    # query heads, key-value heads, size
    (1, 1, 1),
    (6, 2, 1),
    (4, 4, 2),
    (4, 2, 2),
    (4, 1, 2),
    (6, 3, 3),
    (6, 1, 3),
    (12, 6, 3),
    (8, 8, 4),
    (8, 4, 4),
    (8, 2, 4),
    (8, 1, 4),
    (16, 2, 8),
    (16, 4, 8),
]
shared = pytest.mark.parametrize(("heads", "kv_heads", "size"), SHARED)


def checkpoint(heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """Return integers, so that sums are exact."""
    features = {"q_proj": heads * HEAD, "k_proj": kv_heads * HEAD, "v_proj": kv_heads * HEAD}
    stored = {}
    for name, count in features.items():
        stored[f"{name}.weight"] = torch.randint(-9, 10, (count, HIDDEN)).float()
        stored[f"{name}.bias"] = torch.randint(-9, 10, (count,)).float()
    return stored


@shared
def test_ranks_share_the_heads(heads: int, kv_heads: int, size: int) -> None:
    """A rank computes its part of the query heads and only the key-value heads that they use."""
    stored = checkpoint(heads, kv_heads)
    x = torch.randint(-9, 10, (5, HIDDEN)).float()
    q, k, v = (
        F.linear(x, stored[f"{n}.weight"], stored[f"{n}.bias"]).unflatten(-1, (-1, HEAD))
        for n in ("q_proj", "k_proj", "v_proj")
    )

    def rank_fn(rank: int) -> tuple[list[int], list[int]]:
        layer = QKVParallelLinear(HIDDEN, HEAD, heads, kv_heads)
        layer.load_weights(stored)
        own = list(range(heads))[rank * heads // size : (rank + 1) * heads // size]
        used = sorted({head * kv_heads // heads for head in own})
        assert layer.num_heads == len(own)
        assert layer.num_kv_heads == len(used)
        parts = layer(x).split(layer.output_sizes, dim=-1)
        for part, whole, mine in zip(parts, (q, k, v), (own, used, used), strict=True):
            assert torch.equal(part.unflatten(-1, (-1, HEAD)), whole[:, mine])
        return own, used

    queries, keys = zip(*run_ranks(size, rank_fn), strict=True)
    assert [head for own in queries for head in own] == list(range(heads))
    held = [head for used in keys for head in used]
    copies = max(1, size // kv_heads)
    assert sorted(held) == sorted(list(range(kv_heads)) * copies)
    assert held == sorted(held), "copies of a head are on neighbouring ranks"


def test_as_many_key_value_heads_as_query_heads_unless_given() -> None:
    """The number of key-value heads is that of query heads unless given."""
    with tensor_parallel(rank=1, size=2):
        layer = QKVParallelLinear(HIDDEN, HEAD, 4, bias=False)
    assert (layer.num_heads, layer.num_kv_heads) == (2, 2)
    assert layer.output_sizes == [2 * HEAD] * 3
    assert layer.weight.shape == (6 * HEAD, HIDDEN)
    assert layer.bias is None


def test_other_names_of_the_projections() -> None:
    """The projections are loaded by the shard_names that the layer was given."""
    layer = QKVParallelLinear(HIDDEN, HEAD, 2, 1, bias=False, shard_names=["query", "key", "value"])
    stored = checkpoint(2, 1)
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    layer.load_weights({f"{new}.weight": stored[f"{old}.weight"] for new, old in names.items()})
    assert torch.equal(layer.weight, torch.cat([stored[f"{n}.weight"] for n in names.values()]))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "message"),
    [
        (6, 6, 4, "6 attention heads .* 4 "),
        (12, 4, 3, "4 key-value heads .* 3 "),
        (9, 3, 2, "9 attention heads .* 2 "),
        (12, 6, 4, "6 key-value heads .* 4 "),
        (1, 1, 2, "1 attention heads .* 2 "),
        (8, 3, 1, "8 attention heads .* 3 key-value heads"),
        (4, 8, 1, "4 attention heads .* 8 key-value heads"),
    ],
)
def test_heads_that_cannot_be_shared(heads: int, kv_heads: int, size: int, message: str) -> None:
    """Heads that cannot be divided evenly are refused when the layer is built, with the numbers."""
    with tensor_parallel(rank=0, size=size), pytest.raises(ShardingError, match=message):
        QKVParallelLinear(HIDDEN, HEAD, heads, kv_heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"),
    [(8, 2, (1, 2, 4)), (8, 4, (1, 2, 4, 8)), (4, 4, (1, 2, 4)), (6, 3, (1, 3))],
)
def test_groups_of_heads_are_those_of_falcon(
    heads: int, kv_heads: int, sizes: tuple[int, ...]
) -> None:
    """transformers' Falcon decides which rows of its one tensor are whose."""
    from types import SimpleNamespace

    from transformers.models.falcon.modeling_falcon import FalconAttention

    falcon: Any = SimpleNamespace(
        new_decoder_architecture=True, num_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD
    )
    fused = torch.randint(-9, 10, ((heads + 2 * kv_heads) * HEAD, HIDDEN)).float()
    x = torch.randint(-9, 10, (5, HIDDEN)).float()
    parts = FalconAttention._split_heads(falcon, F.linear(x, fused)[None])
    q, k, v = (part[0] for part in parts)  # k and v are repeated for each query head

    def rank_fn(rank: int) -> None:
        layer = QKVParallelLinear(HIDDEN, HEAD, heads, kv_heads, bias=False, groups=kv_heads)
        layer.load_weights({"weight": fused})
        ours = [part.unflatten(-1, (-1, HEAD)) for part in layer(x).split(layer.output_sizes, -1)]
        own = slice(rank * layer.num_heads, (rank + 1) * layer.num_heads)
        assert torch.equal(ours[0], q[:, own])
        repeats = layer.num_heads // layer.num_kv_heads
        for mine, theirs in zip(ours[1:], (k, v), strict=True):
            assert torch.equal(mine.repeat_interleave(repeats, 1), theirs[:, own])

    for size in sizes:
        run_ranks(size, rank_fn)


def test_groups_that_have_no_whole_heads_are_refused() -> None:
    """The message has both numbers."""
    with pytest.raises(ShardingError, match="3 key-value heads cannot be stored in 2 equal groups"):
        QKVParallelLinear(HIDDEN, HEAD, 6, 3, groups=2)


def test_a_slot_may_say_what_is_never_on_two_ranks() -> None:
    """A rank that would hold half of a head is refused; without the unit, it is not seen."""
    assert Slot("q", 3 * HEAD, 3, unit=HEAD).parts == 3
    assert Slot("q", 4 * HEAD, 2, unit=2 * HEAD).parts == 2
    assert Slot("q", 3 * HEAD, 2).parts == 2
    with pytest.raises(ShardingError, match=r"end inside a unit of 6, .* divides its 3 units"):
        Slot("q", 3 * HEAD, 2, unit=HEAD)
    with pytest.raises(ShardingError, match="end inside a unit of 0"):
        Slot("q", 3 * HEAD, 2, unit=0)
