"""What config.json says of a classifier's logits: which function makes scores of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_module.errors import UnsupportedModelError
from vllm_module.messages import shorten

Activation = Callable[[torch.Tensor], torch.Tensor]

# By the last component of a class of torch, as sentence-transformers' cross-encoders write it.
_NAMED: Mapping[str, Activation] = {"Identity": lambda x: x, "Sigmoid": torch.sigmoid}


def classifier_activation(config: Any) -> Activation:
    """Return the function from logits ``[texts, labels]`` to scores.

    A cross-encoder of sentence-transformers names it. Else ``problem_type`` decides, and without
    it, classes exclude each other if there are several. Raises ``UnsupportedModelError`` for a
    function that is not implemented.
    """
    settings = getattr(config, "sentence_transformers", None)
    name = settings.get("activation_fn") if isinstance(settings, Mapping) else None
    name = name or getattr(config, "sbert_ce_default_activation_function", None)
    if name is not None:
        known = _NAMED.get(str(name).rpartition(".")[2])
        if known is None:
            raise UnsupportedModelError(
                f"config.json asks for the activation {shorten(name)} of classes: only "
                f"{' and '.join(_NAMED)} of torch.nn are implemented"
            )
        return known
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return _NAMED["Identity"]
    if problem == "multi_label_classification" or config.num_labels == 1:
        return torch.sigmoid
    return lambda x: torch.softmax(x, dim=-1)
