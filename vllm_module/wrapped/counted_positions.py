"""Positions that a model counts itself, although it is given those of its tokens.

In a batch, the tokens of several sequences lie end to end, so counting gives wrong positions. Llama
4 counts them for the temperature of attention, on from the length that its cache tells. A stand-in
for the cache tells each token a length of its own, so that the counted positions are right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from vllm_module.errors import UnsupportedModelError
from vllm_module.wrapped.probe import probe_of, run_on_meta

TOKENS = 61  # length of the sequence; a prime, so that no number of heads or features is equal
# Functions that take only the shape, dtype or device of their second tensor.
_LIKE = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))
# Functions that read rows of their first tensor, and those that write their last tensor to them.
_READ_ROWS = frozenset(("__getitem__", "index_select", "gather", "take_along_dim"))
_WRITE_ROWS = frozenset(("__setitem__", "index_add_", "index_copy_", "index_put_", "scatter_add_"))


class EarlierTokens:
    """A stand-in for transformers' cache, which tells how many tokens were before a sequence's.

    Args:
        positions: position of each token, ``[tokens]``.

    Attributes:
        lengths: for each token, what has to be added to its index to have its position.

    """

    def __init__(self, positions: torch.Tensor) -> None:
        self.lengths = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return :attr:`lengths`, in place of the one length of a batch."""
        return self.lengths

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values unchanged: our attention has the earlier ones."""
        return key, value


class Counting(TorchFunctionMode):
    """A mode that finds counted positions in a forward pass on meta of TOKENS tokens.

    Args:
        right: a tensor that makes counted positions right when it is added to them.

    Attributes:
        function: name of the function by which counted positions first met other activations;
            ``None`` if none did.

    """

    def __init__(self, right: torch.Tensor | None = None) -> None:
        super().__init__()
        self.function: str | None = None
        self._right = right
        # By id; the tensor is kept alive, so that its id is not reused.
        self._counted: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is torch.arange:
            if output.shape == (TOKENS,):
                self._counted[id(output)] = output
            return output
        given = _tensors((args, kwargs)) if self._counted else []
        if not any(id(each) in self._counted for each in given):
            return output
        name = str(getattr(func, "__name__", ""))
        if self._chooses_rows(name, given):
            return output
        others = [each for each in given if id(each) not in self._counted and each.ndim]
        if name in _LIKE or not others:
            counted = {id(each): each for each in _tensors(output) if TOKENS in each.shape}
            self._counted.update(counted)
        elif not any(each is self._right for each in others):
            self.function = self.function or name
        return output

    def _chooses_rows(self, name: str, given: list[torch.Tensor]) -> bool:
        """Return whether counted positions only choose rows, where each token has its own."""
        values = given[:1] if name in _READ_ROWS else [given[0], given[-1]]
        is_row = name in _READ_ROWS or name in _WRITE_ROWS
        return is_row and TOKENS in given[0].shape and not self._counted.keys() & map(id, values)


def counts_positions(model: Any, part: Any, counting: Counting) -> bool:
    """Return whether ``part`` of ``model`` needs :class:`EarlierTokens` in place of a cache.

    ``counting`` has seen a forward pass without.

    Raises ``UnsupportedModelError`` if it counts positions with them, too.
    """
    if counting.function is None:
        return False
    earlier = EarlierTokens(torch.zeros(TOKENS, dtype=torch.int64, device="meta"))
    again = Counting(earlier.lengths)
    with again:
        found = probe_of(model, TOKENS)
        run_on_meta(model, part, found, masks=False, past_key_values=earlier)
    if again.function is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} counts positions itself, which enter by {again.function}: "
            "in a batch, tokens of all sequences but the first would get wrong ones"
        )
    return True


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(tree)[0] if isinstance(each, torch.Tensor)]
