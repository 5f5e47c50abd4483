"""The attention function registered with transformers, which runs our paged attention.

A model looks it up by the name in its configuration. It calls it with the attention module, query
``[1, heads, tokens, head_size]``, and key and value with ``kv_heads`` heads. The result is ``[1,
tokens, heads, value_size]``. While the model runs, :func:`stepping` has the tokens' sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from vllm_module.layers import Attention, AttentionMetadata
from vllm_module.wrapped.library import library

NAME = "vllm_module"  # name of the attention function; no mask function is registered for it
PROBING = "vllm_module_probing"  # name of the same function, with a mask function for probing
# Name of the same function, for modules that fail without a mask; the mask is a placeholder.
MASKED = "vllm_module_masked"
# Child of an attention module that holds our layers, in the order of its calls.
LAYERS = "paged_attention"


class AttentionHandler(Protocol):
    """A handler of the attention calls of one forward pass."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Compute or record one call; return ``[1, tokens, heads, value_size]``."""


# A context variable, because ranks may be threads.
_step: ContextVar[AttentionHandler | None] = ContextVar("wrapped_attention_step", default=None)


@contextmanager
def stepping(step: AttentionHandler) -> Iterator[None]:
    """Handle the attention calls in the block by ``step``."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention by the current :class:`AttentionHandler`; called by transformers."""
    # Disabled as a whole: inductor of torch 2.13 fails on parts of it.
    if torch.compiler.is_compiling():
        return torch.compiler.disable(attend)(  # type: ignore[no-untyped-call]
            module, query, key, value, attention_mask, **options
        )
    step = _step.get()
    if step is None:
        raise RuntimeError(
            f"{type(module).__name__} was called by itself: call the model it is part of, which "
            "knows the sequences"
        )
    return step.attend(module, query, key, value, attention_mask, options), None


def register() -> None:
    """Register :func:`attend` and the mask functions with transformers, under our names."""
    from vllm_module.wrapped.mask import probing_mask, standing_mask

    for name in (NAME, PROBING, MASKED):
        library("modeling_utils").ALL_ATTENTION_FUNCTIONS.register(name, attend)
    masks = library("masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    masks.register(PROBING, probing_mask)
    masks.register(MASKED, standing_mask)


@dataclass
class Running:
    """A forward pass of the loaded model.

    Args:
        metadata: metadata of the sequences; ``None`` if the tokens are one whole sequence.

    """

    metadata: AttentionMetadata | None
    _calls: dict[nn.Module, int] = field(default_factory=dict)

    def attend(  # noqa: D102 # see AttentionHandler
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        call = self._calls.get(module, 0)
        self._calls[module] = call + 1
        layers: Any = module._modules[LAYERS]
        layer: Attention = layers[call]
        size, value_size = layer.head_size, value.shape[-1]
        # [tokens, heads, features]
        q, k, v = (padded(each[0].transpose(0, 1), size) for each in (query, key, value))
        output = layer(q, k, v, self.metadata, options.get("s_aux"))
        output = output.view(1, len(q), layer.num_heads, size)
        return output if value_size == size else output[..., :value_size]


def padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``tensor`` with zeros appended to its last dimension, up to ``size``."""
    missing = size - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor
