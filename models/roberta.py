"""RoBERTa and XLM-RoBERTa: BERT whose positions begin after that of the padding token."""

from __future__ import annotations

from typing import Any

import torch

from vllm_module.hf_config import Count
from vllm_module.models.bert import HEADS, POOLER, BertConfig, BertEmbeddings, BertModel


class RobertaConfig(BertConfig):
    pad_token_id: Count = 1

    @property
    def context_length(self) -> int:
        """The positions after the padding token's."""
        return max(1, self.max_position_embeddings - self.pad_token_id - 1)


class RobertaEmbeddings(BertEmbeddings):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.pad_token_id = config.pad_token_id

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_type_ids: torch.Tensor
    ) -> torch.Tensor:
        """Embed tokens. As in transformers, padding tokens of a text are not counted as positions.

        Each padding token has the position of padding, wherever it is.
        """
        is_padding = input_ids == self.pad_token_id
        padding = is_padding.cumsum(0)
        first = (torch.arange(len(positions), device=positions.device) - positions).clamp(min=0)
        before = padding[first] - is_padding[first].long()  # of other sequences
        counted = positions + 1 - (padding - before)
        stored = self.pad_token_id + counted.masked_fill(is_padding, 0)
        return super().forward(input_ids, stored, token_type_ids)


class RobertaModel(BertModel):
    config_class = RobertaConfig
    embeddings_class = RobertaEmbeddings
    weight_aliases = {"roberta.embeddings": "embeddings", "roberta.encoder": "encoder"}
    skipped_weights = {"pooler": POOLER, "roberta.pooler": POOLER, "lm_head": HEADS}
