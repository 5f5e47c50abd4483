"""The vocabulary cut over the ranks, in whole numbers that float32 adds exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from vllm_module import vLLMModule
from vllm_module.distributed import run_ranks, tensor_parallel
from vllm_module.layers import ParallelLMHead, VocabParallelEmbedding

DIM = 6
sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])
# 1: all but one rank hold padding alone. 64, 192: no padding at 1 and 2, at 3.
vocabularies = pytest.mark.parametrize("vocab", [1, 63, 64, 65, 130, 192])


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 10, shape).float()


@sizes
@vocabularies
def test_embedding(vocab: int, size: int) -> None:
    """Every rank looks up every token, wherever the shards' edges fall, in any shape of ids."""
    table = numbers(vocab, DIM)

    def rank_fn(rank: int) -> list[torch.Tensor]:
        layer = VocabParallelEmbedding(vocab, DIM)
        layer.load_weights({"weight": table})
        ids = torch.arange(vocab)
        return [layer(ids), layer(ids.flip(0).view(1, -1, 1)), layer(ids.int()), layer(ids[:0])]

    for whole, shaped, short, nothing in run_ranks(size, rank_fn):
        assert torch.equal(whole, table)
        assert torch.equal(shaped, table.flip(0).view(1, -1, 1, DIM))
        assert torch.equal(short, table)
        assert nothing.shape == (0, DIM)


@sizes
@vocabularies
@pytest.mark.parametrize("padding", [64, 1, 10])
def test_padding(vocab: int, size: int, padding: int) -> None:
    """Rows are padded with zeros to the least multiple of the padding that the size divides."""
    table = numbers(vocab, DIM) + 100  # no zeros but the padding's
    multiple = math.lcm(padding, size)

    def rank_fn(rank: int) -> torch.Tensor:
        layer = VocabParallelEmbedding(vocab, DIM, padding_size=padding)
        layer.load_weights({"weight": table})
        return layer.weight.data

    shards = run_ranks(size, rank_fn)
    assert len({shard.shape for shard in shards}) == 1
    rows = torch.cat(shards)
    assert len(rows) % padding == 0
    assert 0 <= len(rows) - vocab < multiple
    assert torch.equal(rows[:vocab], table)
    assert not rows[vocab:].any()


def test_padding_is_to_64_unless_given() -> None:
    """At size 3 a vocabulary is padded to a multiple of 192, of which each rank holds a third."""
    for rank in range(3):
        with tensor_parallel(rank=rank, size=3):
            assert VocabParallelEmbedding(193, DIM).weight.shape == (128, DIM)
            assert ParallelLMHead(192, DIM).weight.shape == (64, DIM)


@sizes
@vocabularies
@pytest.mark.parametrize("bias", [False, True])
def test_head(vocab: int, size: int, bias: bool) -> None:
    """Every rank gets the logits of the whole vocabulary, and none of the padding."""
    stored = {"weight": numbers(vocab, DIM), "bias": numbers(vocab)}
    if not bias:
        del stored["bias"]
    hidden = numbers(2, 3, DIM)

    def rank_fn(rank: int) -> torch.Tensor:
        head = ParallelLMHead(vocab, DIM, bias=bias)
        head.load_weights(stored)
        return head(hidden)

    for logits in run_ranks(size, rank_fn):
        assert torch.equal(logits, F.linear(hidden, stored["weight"], stored.get("bias")))


class Tied(vLLMModule):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(vocab, DIM)
        self.lm_head = ParallelLMHead(vocab, DIM)
        self.lm_head.tie_weights(self.embed_tokens)


@sizes
@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_tied_head(size: int, names: list[str]) -> None:
    """A tied head and its embedding are one parameter, loaded under either name or both."""
    table, hidden = numbers(130, DIM), numbers(5, DIM)

    def rank_fn(rank: int) -> None:
        model = Tied(130)
        model.load_weights({f"{name}.weight": table.clone() for name in names})
        assert model.lm_head.weight is model.embed_tokens.weight
        assert len(list(model.parameters())) == 1
        assert torch.equal(model.lm_head(hidden), F.linear(hidden, table))
        assert torch.equal(model.embed_tokens(torch.arange(130)), table)

    run_ranks(size, rank_fn)


@pytest.mark.parametrize(("vocab", "dim"), [(200, DIM), (130, DIM + 1)])
def test_a_head_is_tied_to_its_own_shape_only(vocab: int, dim: int) -> None:
    """A head and an embedding of different shapes cannot be tied; the error has both shapes."""
    head, embedding = ParallelLMHead(130, DIM), VocabParallelEmbedding(vocab, dim)
    shapes = rf"\[192, {DIM}\].*\[{embedding.weight.shape[0]}, {dim}\]"
    with pytest.raises(ValueError, match=shapes):
        head.tie_weights(embedding)


@pytest.mark.parametrize("vocab", [129, 192])
def test_vocabularies_that_pad_alike_are_not_alike(vocab: int) -> None:
    """A head of another vocabulary is not tied because both are padded to the same rows."""
    head, embedding = ParallelLMHead(130, DIM), VocabParallelEmbedding(vocab, DIM)
    assert head.weight.shape == embedding.weight.shape
    with pytest.raises(ValueError, match=f"130.* {vocab}"):
        head.tie_weights(embedding)
