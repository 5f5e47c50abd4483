"""The vocabulary, cut over the ranks: tokens to features, and features to logits."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from vllm_module.core.module import vLLMModule
from vllm_module.distributed import tensor_parallel_group
from vllm_module.layers.linear import LinearBase
from vllm_module.layers.lora import LayerAdapters
from vllm_module.parameters import Dim, ModelWeightParameter

DEFAULT_VOCAB_PADDING_SIZE = 64


class VocabParallelEmbedding(vLLMModule):
    """An embedding whose rows are cut over the ranks.

    Args:
        num_embeddings: rows of the checkpoint's table.
        embedding_dim: features of a token.
        params_dtype: of the weight; torch's default dtype unless given.
        padding_size: rows of zeros pad the table to a multiple of this and of the number of ranks.

    Attributes:
        adapters: what LoRA adapters add to the rows; ``None`` while none adapts the layer.

    """

    adapters: LayerAdapters | None = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
    ) -> None:
        super().__init__()
        self.tp_group = group = tensor_parallel_group()
        self.num_embeddings = num_embeddings
        self.weight = ModelWeightParameter(
            _padded_vocabulary(num_embeddings, padding_size),
            Dim.whole(embedding_dim),
            tp_rank=group.rank,
            tp_size=group.size,
            dtype=params_dtype or torch.get_default_dtype(),
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map token ids ``[...]`` to ``[..., embedding_dim]``.

        Raises ``IndexError`` for ids outside the vocabulary (on a CUDA device, a device assertion).
        """
        if self.tp_group.size == 1:
            rows = F.embedding(input_ids, self.weight[: self.num_embeddings])
            adapters = self.adapters
            return rows if adapters is None else adapters.add_embedded(input_ids, None, rows)
        (shard,) = self.weight.shards[0]
        local = input_ids - shard.start
        elsewhere = (local < 0) | (local >= shard.length)
        # Ids outside of the vocabulary raise on all ranks: they would wait in the sum for one.
        outside = (input_ids < 0) | (input_ids >= self.num_embeddings)
        local = local.masked_fill(elsewhere, 0).masked_fill(outside, -1)
        rows = F.embedding(local, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.adapters is not None:
            rows = self.adapters.add_embedded(local, elsewhere, rows)
        return self.tp_group.all_reduce(rows)


class ParallelLMHead(LinearBase):
    """The projection to logits; its rows are padded and cut like the embedding's.

    Args:
        num_embeddings: tokens of the vocabulary.
        embedding_dim: input features.
        bias: whether there is one; it is padded and cut like the rows.
        params_dtype, padding_size: as in :class:`VocabParallelEmbedding`.

    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
    ) -> None:
        vocabulary = _padded_vocabulary(num_embeddings, padding_size)
        super().__init__(vocabulary, Dim.whole(embedding_dim), bias, False, params_dtype)
        self.num_embeddings = num_embeddings

    def tie_weights(self, embedding: VocabParallelEmbedding) -> None:
        """Share ``embedding``'s weight; a checkpoint may store it under either name, or both.

        Raises ``ValueError`` if the head is quantized, or if the two differ in vocabulary, shape,
        rank or size.
        """
        if self.is_quantized:
            raise ValueError("a head that is quantized cannot be tied: tie it first")
        head_group, group = self.tp_group, embedding.tp_group
        if (head_group.rank, head_group.size) != (group.rank, group.size):
            raise ValueError(
                f"a head of rank {head_group.rank} of {head_group.size} cannot be tied to an "
                f"embedding of rank {group.rank} of {group.size}"
            )
        same_shape = embedding.weight.shape == self.weight.shape
        if not same_shape or embedding.num_embeddings != self.num_embeddings:
            raise ValueError(
                f"a head of {self.num_embeddings} tokens {list(self.weight.shape)} cannot be tied "
                f"to an embedding of {embedding.num_embeddings} tokens "
                f"{list(embedding.weight.shape)}"
            )
        self.weight = embedding.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``hidden [..., embedding_dim]`` to logits ``[..., num_embeddings]`` on every rank."""
        logits = self._multiply(hidden, self.bias)
        if self.tp_group.size > 1:
            logits = self.tp_group.all_gather(logits)
        return logits[..., : self.num_embeddings]


def _padded_vocabulary(num_embeddings: int, padding_size: int) -> Dim:
    """Return the rows of a vocabulary, padded so that all ranks hold the same number of them."""
    size = tensor_parallel_group().size
    multiple = math.lcm(padding_size, size)
    padded = -(-num_embeddings // multiple) * multiple
    return Dim.cut(num_embeddings, size, padded=padded)
