"""The vocabulary, cut over the ranks: tokens to features, and features to logits."""

from __future__ import annotations

import math

import torch

from vllm_module.distributed import tensor_parallel_group
from vllm_module.layers.linear import LinearBase
from vllm_module.layers.lora import LayerAdapters
from vllm_module.parameters import Dim
from vllm_module.quantization import QuantizableLayer

DEFAULT_VOCAB_PADDING_SIZE = 64


class VocabParallelEmbedding(QuantizableLayer):
    """An embedding whose rows are cut over the ranks.

    A head that is tied to it shares its weight, quantized or not.

    Args:
        num_embeddings: rows of the checkpoint's table.
        embedding_dim: features of a token.
        params_dtype: of the weight; torch's default dtype unless given.
        padding_size: rows of zeros pad the table to a multiple of this and of the number of ranks.

    Attributes:
        adapters: what LoRA adapters add to the rows; ``None`` while none adapts the layer.
        called_elsewhere: True if another pipeline stage calls the layer, and this one holds it for
            a tensor that it shares.

    """

    is_embedding = True
    adapters: LayerAdapters | None = None
    called_elsewhere = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
    ) -> None:
        super().__init__()
        self.tp_group = tensor_parallel_group()
        self.num_embeddings = num_embeddings
        vocabulary = _padded_vocabulary(num_embeddings, padding_size)
        dtype = params_dtype or torch.get_default_dtype()
        self.create_weight(vocabulary, Dim.whole(embedding_dim), dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map token ids ``[...]`` to ``[..., embedding_dim]``.

        Raises ``IndexError`` for ids outside the vocabulary (on a CUDA device, a device assertion).
        """
        if self.tp_group.size == 1:
            rows = self.quant_method.embed(self, input_ids, self.num_embeddings)
            adapters = self.adapters
            return rows if adapters is None else adapters.add_embedded(input_ids, None, rows)
        (shard,) = self.output.shards(self.tp_group.rank, self.tp_group.size)
        local = input_ids - shard.start
        elsewhere = (local < 0) | (local >= shard.length)
        # Ids outside of the vocabulary raise on all ranks: they would wait in the sum for one.
        outside = (input_ids < 0) | (input_ids >= self.num_embeddings)
        local = local.masked_fill(elsewhere, 0).masked_fill(outside, -1)
        rows = self.quant_method.embed(self, local, shard.padded)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
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

        Raises ``ValueError`` if the head is quantized by itself, or if the two differ in
        vocabulary, shape, rank or size.
        """
        if self.is_quantized:
            raise ValueError("a head that is quantized cannot be tied: tie it first")
        head_group, group = self.tp_group, embedding.tp_group
        if (head_group.rank, head_group.size) != (group.rank, group.size):
            raise ValueError(
                f"a head of rank {head_group.rank} of {head_group.size} cannot be tied to an "
                f"embedding of rank {group.rank} of {group.size}"
            )
        shape, theirs = _held_shape(self), _held_shape(embedding)
        if shape != theirs or embedding.num_embeddings != self.num_embeddings:
            raise ValueError(
                f"a head of {self.num_embeddings} tokens {shape} cannot be tied to an embedding of "
                f"{embedding.num_embeddings} tokens {theirs}"
            )
        self.share_weight(embedding)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``hidden [..., embedding_dim]`` to logits ``[..., num_embeddings]`` on every rank."""
        logits = self._multiply(hidden, self.bias)
        if self.tp_group.size > 1:
            logits = self.tp_group.all_gather(logits)
        return logits[..., : self.num_embeddings]


def _held_shape(layer: QuantizableLayer) -> list[int]:
    """Return the rows and columns that this rank holds of a weight."""
    (shard,) = layer.output.shards(layer.tp_group.rank, layer.tp_group.size)
    return [shard.padded, layer.input.size]


def _padded_vocabulary(num_embeddings: int, padding_size: int) -> Dim:
    """Return the rows of a vocabulary, padded so that all ranks hold the same number of them."""
    size = tensor_parallel_group().size
    multiple = math.lcm(padding_size, size)
    padded = -(-num_embeddings // multiple) * multiple
    return Dim.cut(num_embeddings, size, padded=padded)
