"""Values of tensors that a model computes from neither weights nor tokens, while it runs on meta.

A mask, or a bias by the distance of two tokens, is made of ``arange``, ``ones`` and buffers. Their
values are known, although the model runs without values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from vllm_module.wrapped.scores import Scores

_META = torch.device("meta")
_OF_A_SHAPE = frozenset(
    ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)  # functions that do not read the values of their tensor
# Parts of function names whose results have no known values.
_WITHOUT_VALUES = frozenset(("empty", "rand", "randn"))
_MOST = 2**25  # elements of the largest tensor whose values are kept


class Constants(TorchFunctionMode):
    """A mode that repeats each operation on tensors with known values on a CPU.

    Args:
        values: values of tensors on meta that are known from the beginning.
        tokens: length of the sequence.

    Attributes:
        positions_enter: True if values that differ by token were combined with unknown tensors; a
            model that counts positions itself does that.

    """

    def __init__(self, values: Mapping[torch.Tensor, torch.Tensor], tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions_enter = False
        # Keyed by id; the tensor is kept alive, so that its id is not reused.
        self._known = {id(key): (key, value) for key, value in values.items()}

    def value(self, given: Any) -> Any:
        """Return the values of a tensor, or a number unchanged; ``None`` if they are unknown."""
        if not isinstance(given, torch.Tensor) or not given.is_meta:
            return given
        return self._known.get(id(given), (None, None))[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if any(isinstance(each, Scores) for each in given):  # recorded where they are used
            return func(*args, **kwargs)
        name = str(getattr(func, "__name__", ""))
        if name in _OF_A_SHAPE and given[0].is_meta and self.value(given[0]) is None:
            kept = torch.empty((), dtype=given[0].dtype, device="cpu").expand(given[0].shape)
            output = func(*args, **kwargs)
            if output.numel() <= _MOST:
                self._learn(output, self._computed(func, (kept, *args[1:]), kwargs))
            return output
        values = [self.value(each) for each in given]
        known = all(each is not None for each in values) and not _WITHOUT_VALUES.intersection(
            name.split("_")
        )
        if not known:
            self._note_mixed(given, values)
            in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
            if in_place or name == "__setitem__":
                self._forget(values[0])
            self._forget(self.value(kwargs.get("out")))
            return func(*args, **kwargs)
        try:
            output = func(*args, **kwargs)
        except Exception:  # the operation needs values; they are known here
            if not given:
                raise
            return self._computed(func, args, kwargs)
        if any(each.is_meta and each.numel() <= _MOST for each in _tensors(output)):
            self._learn(output, self._computed(func, args, kwargs))
        elif output is None and given and given[0].is_meta:  # an assignment such as x[i] = y
            self._computed(func, args, kwargs)
        return output

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(each: Any) -> Any:
            if isinstance(each, torch.Tensor):
                return self.value(each)
            is_meta = each == "meta" if isinstance(each, str) else each == _META
            return torch.device("cpu") if is_meta is True else each

        with torch.device("cpu"), torch._C.DisableTorchFunctionSubclass():
            return func(*tree_map(real, args), **tree_map(real, kwargs))

    def _learn(self, output: Any, value: Any) -> None:
        for each, its in zip(_tensors(output), _tensors(value), strict=True):
            if each.is_meta:
                self._known[id(each)] = each, its

    def _note_mixed(self, given: list[torch.Tensor], values: list[Any]) -> None:
        """Record that known and unknown tensors meet in an operation."""
        for tensor, value in zip(given, values, strict=True):
            if not self.positions_enter and value is not None and tensor.is_meta:
                self.positions_enter = _differs(value, self.tokens)

    def _forget(self, value: torch.Tensor | None) -> None:
        """Drop tensors that share memory with ``value``, which is overwritten by unknown values."""
        if value is not None:
            memory = value.untyped_storage().data_ptr()
            self._known = {
                key: pair
                for key, pair in self._known.items()
                if pair[1].untyped_storage().data_ptr() != memory
            }


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(tree)[0] if isinstance(each, torch.Tensor)]


def _differs(value: torch.Tensor, tokens: int) -> bool:
    """Return whether ``value`` varies along a dimension of length ``tokens``."""
    return any(
        size == tokens and bool((value != value.narrow(dim, 0, 1)).any())
        for dim, size in enumerate(value.shape)
    )
