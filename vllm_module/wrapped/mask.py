"""Finding which tokens a transformers model masks, from the function that it makes masks by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class MaskRule(NamedTuple):
    """The set of tokens that a token attends to: itself and earlier ones.

    Attributes:
        window: number of latest tokens, itself included; ``None`` for all.
        chunk: number of positions in a chunk; tokens attend inside their chunk. ``None``: no
            chunks.

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


_SLICES = slice, type(...)  # indices that keep the order of what they keep


class Mask(torch.Tensor):
    """A placeholder on meta for a mask, while a model is probed or runs its own attention code.

    Attributes:
        rule: the masking rule; ``None`` if it is none that we know.

    """

    rule: MaskRule | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the rule when a mask is cast, moved to another device, or cut at its ends."""
        kwargs = kwargs or {}
        parent: Any = super()
        if func is torch.Tensor.__getitem__:
            cut, index = parent.__torch_function__(func, types, args, kwargs), args[1]
            index = index if isinstance(index, tuple) else (index,)
            if cut.shape == args[0].shape and all(isinstance(i, _SLICES) for i in index):
                cut.rule = args[0].rule
            return cut
        if func is not torch.Tensor.to or not isinstance(args[0], Mask):
            return parent.__torch_function__(func, types, args, kwargs)
        mask: Mask = args[0]
        given = [*args[1:], *kwargs.values()]
        dtype = next((each for each in given if isinstance(each, torch.dtype)), mask.dtype)
        marker = torch.empty(mask.shape, dtype=dtype, device="meta").as_subclass(Mask)
        marker.rule = mask.rule
        return marker


def standing_mask(*, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
    """Return a placeholder mask, which is ignored; called by transformers' mask interface."""
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
    """Return a placeholder with the rule of ``mask_function``; called by transformers."""
    marker = torch.empty(1, 1, q_length, kv_length, device="meta").as_subclass(Mask)
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        # The function also reads padding, which is on meta.
        marker.rule = MaskRule(chunk=local_size)
    else:
        marker.rule = rule_of(mask_function, local_size)
    return marker


def rule_of(function: Callable[..., torch.Tensor], local_size: int | None) -> MaskRule | None:
    """Return the rule that gives the values of ``function``, or ``None``.

    It is called as ``function(batch, head, query, key)`` at positions near the edges of a window
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
    except Exception:  # a function of the model's own may raise anything
        return None
