"""What a model of transformers masks, found from the function that it makes masks by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class MaskRule(NamedTuple):
    """Which tokens a token attends to: those before it, and itself.

    Attributes:
        window: only so many, itself included; ``None`` for all.
        chunk: only those in the same chunk of so many positions; ``None`` for all.

    """

    window: int | None = None
    chunk: int | None = None

    def attends(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return whether the token at position ``query`` attends to the one at ``key``."""
        kept = key <= query
        if self.window is not None:
            kept = kept & (key > query - self.window)
        if self.chunk is not None:
            kept = kept & (key // self.chunk == query // self.chunk)
        return kept


class Mask(torch.Tensor):
    """Stands for a mask while a model is probed, or attends in its own way; on meta.

    Attributes:
        rule: what it masks; ``None`` if it is no rule that we know.

    """

    rule: MaskRule | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the rule of a mask that gets another dtype or device."""
        kwargs = kwargs or {}
        if func is not torch.Tensor.to or not isinstance(args[0], Mask):
            parent: Any = super()
            return parent.__torch_function__(func, types, args, kwargs)
        mask: Mask = args[0]
        given = [*args[1:], *kwargs.values()]
        dtype = next((each for each in given if isinstance(each, torch.dtype)), mask.dtype)
        marker = torch.empty(mask.shape, dtype=dtype, device="meta").as_subclass(Mask)
        marker.rule = mask.rule
        return marker


def standing_mask(*, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
    """Return a mask that is not read; called by transformers' mask interface."""
    marker = torch.empty(1, 1, q_length, kv_length, device="meta").as_subclass(Mask)
    marker.rule = MaskRule()
    return marker


def probing_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Return the mask that stands for ``mask_function``; called by transformers' mask interface."""
    marker = torch.empty(1, 1, q_length, kv_length, device="meta").as_subclass(Mask)
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        marker.rule = MaskRule(chunk=local_size)  # the function reads padding, which is on meta
    else:
        marker.rule = rule_of(mask_function, local_size)
    return marker


def rule_of(function: Callable[..., torch.Tensor], local_size: int | None) -> MaskRule | None:
    """Return the rule that ``function`` agrees with, or ``None``.

    It is called as ``function(batch, head, query, key)`` with positions near the edges of a window
    or chunk of ``local_size``.
    """
    size = local_size or 5
    near = (0, 1, 2, size - 1, size, size + 1, size + 2, 2 * size - 1, 2 * size, 2 * size + 1)
    positions = torch.tensor(sorted({each for each in near if each >= 0}), device="cpu")
    query, key = positions[:, None], positions[None, :]
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    rules = [MaskRule()]
    if local_size is not None:
        rules = [MaskRule(window=local_size), MaskRule(chunk=local_size), *rules]
    try:
        masked = torch.as_tensor(function(zero, zero, query, key), device="cpu").broadcast_to(
            len(positions), len(positions)
        )
        return next((rule for rule in rules if torch.equal(rule.attends(query, key), masked)), None)
    except Exception:  # a function of the model's own, of any kind
        return None
