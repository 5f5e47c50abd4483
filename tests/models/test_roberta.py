"""Roberta keeps the laws of loading."""

import pytest
import torch

from vllm_module.models.classifiers import RobertaForSequenceClassification
from vllm_module.models.roberta import RobertaModel
from vllm_module.testing import LAWS, model_configs


@pytest.mark.parametrize("law", LAWS)
def test_roberta_keeps_the_law(law) -> None:
    """Whatever the configuration and however many ranks share it, the law holds."""
    ids = torch.zeros(5, dtype=torch.int64)
    inputs = (ids, torch.arange(5), [2, 3])
    law(RobertaModel, model_configs("RobertaModel"), inputs=lambda model: inputs)


@pytest.mark.parametrize("law", LAWS)
def test_roberta_with_a_head_keeps_the_law(law) -> None:
    """The same of a classifier, whose head every rank has whole."""
    ids = torch.zeros(5, dtype=torch.int64)
    kw = {"inputs": lambda model: (ids, torch.arange(5), [2, 3])}
    law(RobertaForSequenceClassification, model_configs("RobertaForSequenceClassification"), **kw)
