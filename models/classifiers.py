"""Encoders with a head: ``LLM.classify`` and ``LLM.score`` return what it says of texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_module.hf_config import HFConfig
from vllm_module.layers import ReplicatedLinear
from vllm_module.models.bert import HEADS, BertConfig, BertModel
from vllm_module.models.roberta import RobertaConfig, RobertaModel


class _Labels(HFConfig):
    id2label: dict[str, str] | None = None

    @property
    def num_labels(self) -> int:
        """The classes of the head; transformers writes them unless there are two."""
        return 2 if self.id2label is None else len(self.id2label)


class BertClassifierConfig(_Labels, BertConfig):
    pass


class RobertaClassifierConfig(_Labels, RobertaConfig):
    pass


class BertForSequenceClassification(BertModel):
    config_class = BertClassifierConfig
    weight_aliases = {**BertModel.weight_aliases, "bert.pooler": "pooler"}
    skipped_weights = {"cls": HEADS}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.pooler = nn.ModuleDict({"dense": ReplicatedLinear(hidden, hidden)})
        self.classifier = ReplicatedLinear(hidden, config.num_labels)

    def classify(self, first: torch.Tensor) -> torch.Tensor:
        """Map first tokens' hidden states, ``[texts, hidden]``, to logits ``[texts, labels]``."""
        return self.classifier(torch.tanh(self.pooler["dense"](first)))


class RobertaForSequenceClassification(RobertaModel):
    config_class = RobertaClassifierConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        dense = ReplicatedLinear(config.hidden_size, config.hidden_size)
        out_proj = ReplicatedLinear(config.hidden_size, config.num_labels)
        self.classifier = nn.ModuleDict({"dense": dense, "out_proj": out_proj})

    def classify(self, first: torch.Tensor) -> torch.Tensor:
        """Map first tokens' hidden states, ``[texts, hidden]``, to logits ``[texts, labels]``."""
        return self.classifier["out_proj"](torch.tanh(self.classifier["dense"](first)))
