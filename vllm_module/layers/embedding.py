"""The vocabulary, cut over the ranks: tokens to features and features to logits."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from vllm_module.distributed import tensor_parallel_group
from vllm_module.module import vLLMModule
from vllm_module.parameters import ColumnvLLMParameter, Dim, ModelWeightParameter
from vllm_module.quantization import QuantizableLayer

DEFAULT_VOCAB_PADDING_SIZE = 64


class VocabParallelEmbedding(vLLMModule):
    """An embedding whose rows are cut over the ranks.

    Args:
        num_embeddings: rows of the checkpoint's table.
        embedding_dim: features of a token.
        padding_size: the rows are padded with zeros to a multiple of this that the size divides.

    """

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
        multiple = math.lcm(padding_size, group.size)
        padded = -(-num_embeddings // multiple) * multiple
        self._vocab = Dim.cut(num_embeddings, group.size, padded=padded)
        self.weight = ModelWeightParameter(
            self._vocab,
            Dim.whole(embedding_dim),
            tp_rank=group.rank,
            tp_size=group.size,
            dtype=params_dtype or torch.get_default_dtype(),
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map token ids ``[...]`` to ``[..., embedding_dim]``."""
        if self.tp_group.size == 1:
            return F.embedding(input_ids, self.weight[: self.num_embeddings])
        (mine,) = self._vocab.shards(self.tp_group.rank, self.tp_group.size)
        local = input_ids - mine.start
        elsewhere = (local < 0) | (local >= mine.length)
        weight: torch.Tensor = self.weight
        if self.tp_group.rank == 0:  # fails on tokens that are nobody's, as a whole table does
            elsewhere &= (input_ids >= 0) & (input_ids < self.num_embeddings)
            weight = weight[: mine.length]
        rows = F.embedding(local.masked_fill(elsewhere, 0), weight)
        return self.tp_group.all_reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class ParallelLMHead(VocabParallelEmbedding, QuantizableLayer):
    """The projection to logits, its rows cut like the embedding's."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, params_dtype, padding_size)
        self.create_weight(self._vocab, Dim.whole(embedding_dim), self.weight.dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = ColumnvLLMParameter(
                self._vocab,
                tp_rank=self.tp_group.rank,
                tp_size=self.tp_group.size,
                dtype=self.params_dtype,
            )

    def tie_weights(self, embedding: VocabParallelEmbedding) -> None:
        """Use ``embedding``'s weight; a checkpoint may store it under either name, or both."""
        if self.weight.dtype != self.params_dtype:
            raise ValueError("a head that is quantized cannot be tied: tie it first")
        alike = embedding.weight.shape == self.weight.shape
        mine, its = self.tp_group, embedding.tp_group
        if (mine.rank, mine.size) != (its.rank, its.size):
            raise ValueError(
                f"a head of rank {mine.rank} of {mine.size} cannot be tied to an embedding of rank "
                f"{its.rank} of {its.size}"
            )
        if not alike or embedding.num_embeddings != self.num_embeddings:
            raise ValueError(
                f"a head of {self.num_embeddings} tokens {list(self.weight.shape)} cannot be tied "
                f"to an embedding of {embedding.num_embeddings} tokens "
                f"{list(embedding.weight.shape)}"
            )
        self.weight = embedding.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``hidden [..., embedding_dim]`` to logits ``[..., num_embeddings]`` on every rank."""
        logits = self.quant_method.apply(self, hidden, self.bias)
        return self.tp_group.all_gather(logits)[..., : self.num_embeddings]
