"""Encoders with a head: ``LLM.classify`` and ``LLM.score`` return what it says of texts."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import model_validator
from torch import nn

from vllm_module.hf_config import HFConfig, Size
from vllm_module.layers import ReplicatedLinear
from vllm_module.models.bert import HEADS, BertConfig, BertModel
from vllm_module.models.roberta import RobertaConfig, RobertaModel


class _Labels(HFConfig):
    """``num_labels`` are the classes of the head: unless given, those that have a name, or two."""

    id2label: dict[str, str] | None = None
    num_labels: Size = 2

    @model_validator(mode="before")
    @classmethod
    def _count_labels(cls, entries: Any) -> Any:
        if not isinstance(entries, dict) or entries.get("num_labels") is not None:
            return entries
        named = entries.get("id2label")
        return {**entries, "num_labels": len(named) if isinstance(named, dict) else 2}


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
