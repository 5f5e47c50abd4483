"""Sparse attention for sequences so short that all tokens are chosen.

DeepSeek-V3.2 and others score tokens by a small module and attend to the best ones
(arXiv:2512.02556). For sequences up to that number of tokens, this is attention to all earlier
tokens. Then the module need not run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_module.errors import UnsupportedModelError
from vllm_module.wrapped.attention import PROBING
from vllm_module.wrapped.inline_attention import StandIn
from vllm_module.wrapped.probe import constants_on_meta, probe_of, watched


class AllTokens(StandIn):
    """Replacement for the forward pass of a module that chooses tokens."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return an empty choice, which our attention ignores."""
        return torch.empty(0, dtype=torch.int32)


def choose_all(model: Any, longest: int) -> None:
    """Replace modules of ``model`` that choose tokens to attend to; all tokens are chosen.

    Raises ``UnsupportedModelError`` if one chooses fewer than ``longest``, or cannot be found.
    """
    outputs: dict[int, tuple[nn.Module, torch.Tensor]] = {}

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            outputs.setdefault(id(output), (module, output))

    found = probe_of(model, longest)
    with (
        watched(model, after),
        constants_on_meta(model, PROBING, found) as (constants, given),
        constants,
    ):
        model(**given)
    for path, indices in found.chosen:
        chosen = indices.shape[-1]
        if chosen < longest:
            raise UnsupportedModelError(
                f"{path} of {type(model).__name__} attends to {chosen} chosen tokens, which is the "
                f"same as all of them up to that length only: expected a max_model_len of at most "
                f"{chosen}, not {longest}"
            )
        module, _ = outputs.get(id(indices), (None, None))
        if module is None:
            raise UnsupportedModelError(f"{path} of {type(model).__name__} chooses tokens itself")
        vars(module)["forward"] = AllTokens(module)
