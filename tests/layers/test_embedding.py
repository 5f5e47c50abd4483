"""The vocabulary cut over the ranks, with integers that float32 adds exactly."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from vllm_module.distributed import run_ranks, tensor_parallel
from vllm_module.layers import ParallelLMHead, VocabParallelEmbedding

DIM = 6
sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])
# 1: all ranks but one hold only padding. 64 at sizes 1 and 2, 192 at size 3: no padding.
vocabularies = pytest.mark.parametrize("vocab", [1, 3, 63, 64, 65, 130, 192])


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 10, shape).float()


@sizes
@vocabularies
@pytest.mark.parametrize("padding_size", [1, 64])  # 1: a rank may have a single row, or none
def test_embedding(vocab: int, size: int, padding_size: int) -> None:
    """Every rank gets the rows of all tokens, for any cut and any shape of ids."""
    table = numbers(vocab, DIM)

    def rank_fn(rank: int) -> list[torch.Tensor]:
        layer = VocabParallelEmbedding(vocab, DIM, padding_size=padding_size)
        layer.load_weights({"weight": table})
        ids = torch.arange(vocab)
        return [layer(ids), layer(ids.flip(0).view(1, -1, 1)), layer(ids.int()), layer(ids[:0])]

    for whole, shaped, short, nothing in run_ranks(size, rank_fn):
        assert torch.equal(whole, table)
        assert torch.equal(shaped, table.flip(0).view(1, -1, 1, DIM))
        assert torch.equal(short, table)
        assert nothing.shape == (0, DIM)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("token", [-1, 130, 131, 200])
def test_tokens_outside_of_the_vocabulary_fail(token: int, size: int) -> None:
    """An id outside the vocabulary raises, as in an uncut table, and never returns padding."""

    def rank_fn(rank: int) -> None:
        layer = VocabParallelEmbedding(130, DIM)
        layer.load_weights({"weight": numbers(130, DIM)})
        with pytest.raises(IndexError):  # on each rank: none waits for another in a sum
            layer(torch.tensor([0, token]))

    run_ranks(size, rank_fn)


@pytest.mark.parametrize("layer", [VocabParallelEmbedding, ParallelLMHead])
@pytest.mark.parametrize(
    ("vocab", "size", "padding", "rows"),
    [
        (1, 1, {}, 64),
        (64, 2, {}, 32),
        (65, 2, {}, 64),
        (192, 3, {}, 64),  # to a multiple of 64 and of 3
        (193, 3, {}, 128),
        (130, 4, {"padding_size": 1}, 33),
        (130, 4, {"padding_size": 10}, 35),
        (130, 1, {"padding_size": 10}, 130),
    ],
)
def test_padding(layer: type, vocab: int, size: int, padding: dict[str, int], rows: int) -> None:
    """Rows are padded to a multiple of padding_size, 64 unless given, and of the size."""
    for rank in range(size):
        with tensor_parallel(rank=rank, size=size):
            assert layer(vocab, DIM, **padding).weight.shape == (rows, DIM)


@sizes
@vocabularies
@pytest.mark.parametrize("bias", [False, True])
def test_head(vocab: int, size: int, bias: bool) -> None:
    """Every rank gets the logits of the whole vocabulary, without the padding."""
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


@pytest.mark.parametrize(("vocab", "dim"), [(200, DIM), (130, DIM + 1)])
def test_a_head_is_only_tied_to_its_own_shape(vocab: int, dim: int) -> None:
    """A head cannot be tied to an embedding of another shape; the error has both shapes."""
    head, embedding = ParallelLMHead(130, DIM), VocabParallelEmbedding(vocab, dim)
    shapes = rf"\[192, {DIM}\].*\[{embedding.weight.shape[0]}, {dim}\]"
    with pytest.raises(ValueError, match=shapes):
        head.tie_weights(embedding)


@pytest.mark.parametrize("vocab", [129, 192])
def test_a_head_is_only_tied_to_its_own_vocabulary(vocab: int) -> None:
    """A head cannot be tied to an embedding of another vocabulary with the same padded rows."""
    head, embedding = ParallelLMHead(130, DIM), VocabParallelEmbedding(vocab, DIM)
    assert head.weight.shape == embedding.weight.shape
    with pytest.raises(ValueError, match=f"130.* {vocab}"):
        head.tie_weights(embedding)


def test_a_head_is_only_tied_to_its_own_rank() -> None:
    """A head cannot be tied to an embedding that holds other rows; the error has both ranks."""
    with tensor_parallel(rank=0, size=2):
        head = ParallelLMHead(128, DIM)
    with tensor_parallel(rank=1, size=2):
        embedding = VocabParallelEmbedding(128, DIM)
    with pytest.raises(ValueError, match=r"rank 0 of 2 cannot be tied .* rank 1 of 2"):
        head.tie_weights(embedding)
