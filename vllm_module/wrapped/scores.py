"""Placeholders for attention scores that record the operations on them.

A module that computes attention itself multiplies queries by keys, scales and masks the scores, and
multiplies their softmax by values. :class:`ScoreProducts` replaces the first product by
:class:`Scores`, and the last one by a call of our attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from vllm_module.errors import UnsupportedModelError

PRODUCTS = frozenset(("matmul", "__matmul__", "bmm"))
_QUERIES = frozenset(("size", "dim", "ndimension", "numel", "is_floating_point", "__len__"))
# Functions that keep each score in its row and column.
_KEEPING = frozenset(
    (
        "view", "reshape", "unsqueeze", "squeeze", "unflatten", "flatten", "contiguous", "to",
        "float", "half", "bfloat16", "type", "type_as", "clone", "detach", "dropout",
    )
)  # fmt: skip
# Operations on scores that are recorded, by the names of torch's functions.
_NAMES = {
    "add": ("add", "__add__", "__radd__", "__iadd__", "add_"),
    "subtract": ("sub", "__sub__", "__isub__", "sub_"),
    "multiply": ("mul", "__mul__", "__rmul__", "__imul__", "mul_"),
    "divide": ("div", "__truediv__", "__itruediv__", "div_"),
    "fill": ("masked_fill", "masked_fill_"),
    "where": ("where",),
    "most": ("max", "maximum"),
}
_NOTED = {name: kind for kind, names in _NAMES.items() for name in names}


class Noted(NamedTuple):
    """One recorded operation on scores.

    Attributes:
        kind: a key of _NAMES, or ``"product"`` for a sum and a product at once.
        operands: the arguments, with ``None`` in place of the scores.
        shape: the shape of the scores.
        options: keyword arguments, by name.

    """

    kind: str
    operands: tuple[Any, ...]
    shape: tuple[int, ...]
    options: dict[str, Any]


class Scores(torch.Tensor):
    """A placeholder on meta, of the right shape, for scores or their softmax.

    Attributes:
        query, key: ``[1, heads, tokens, features]`` each; keys may have fewer heads.
        notes: operations in order; one list is shared by all tensors made from one product.
        noted: number of notes when this tensor was made.
        weights: True after the softmax.
        finish: a function of the softmax and the values ``[1, heads, tokens, features]`` that
            computes attention.

    """

    query: torch.Tensor
    key: torch.Tensor
    notes: list[Noted]
    noted: int
    weights: bool
    finish: Callable[[Scores, torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, query: Any, key: Any, finish: Any, notes: list[Noted]) -> Scores:
        """Return placeholder scores of ``query``, ``[..., tokens, features]``, and ``key``."""
        shape = *query.shape[:-1], key.shape[-2]
        scores = torch.empty(shape, dtype=query.dtype, device="meta").as_subclass(cls)
        heads = math.prod(query.shape[:-2])
        given = {"query": in_heads(query, heads), "key": in_heads(key, heads)}
        vars(scores).update(given, notes=notes, noted=len(notes), weights=False, finish=finish)
        return scores

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the operation ``func`` on scores.

        Raises ``UnsupportedModelError`` for operations that our attention does not have.
        """
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__" or name in _QUERIES:
            of_device = func == torch.Tensor.device.__get__
            return args[0].query.device if of_device else _plain(func, args, kwargs)
        scores = next((each for each in args if isinstance(each, Scores)), None)
        if scores is None or scores.noted != len(scores.notes):
            raise UnsupportedModelError(f"scores of attention are used twice, by {name}")
        if args[0] is scores:
            if name in _KEEPING:
                return scores._kept(func, args[1:], kwargs)
            if name == "softmax" and not scores.weights:
                return scores._softmax(*args[1:], **kwargs)
            if name in PRODUCTS and scores.weights and not isinstance(args[1], Scores):
                return scores._times(args[1])
        if name not in _NOTED or scores.weights:
            stage = "the softmax of scores" if scores.weights else "scores"
            raise UnsupportedModelError(f"{stage} of attention are given to {name}")
        operands = tuple(None if each is scores else each for each in args)
        return scores._changed(_NOTED[name], operands, kwargs)

    def _kept(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if func.__name__ == "dropout" and options.get("training", len(args) > 1 and args[1]):
            raise UnsupportedModelError("the softmax of scores of attention has dropout")
        args = tuple("meta" if isinstance(each, torch.device) else each for each in args)
        args = tuple(each.dtype if isinstance(each, torch.Tensor) else each for each in args)
        options = {**options, "device": "meta"} if "device" in options else options
        named = torch.Tensor.to if func.__name__ == "type_as" else func
        new = _plain(named, (self, *args), options)
        if not isinstance(new, torch.Tensor) or new.shape[-2:] != self.shape[-2:]:
            raise UnsupportedModelError(f"scores of attention are reshaped by {func.__name__}")
        return self._like(new)

    def _softmax(
        self, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Scores:
        if dim not in (-1, self.ndim - 1):
            raise UnsupportedModelError(f"the softmax of scores is over dimension {dim}")
        return self._like(_plain(torch.Tensor.to, (self, dtype or self.dtype), {}), weights=True)

    def _changed(self, kind: str, operands: tuple[Any, ...], options: dict[str, Any]) -> Scores:
        self.notes.append(Noted(kind, operands, tuple(self.shape), options))
        return self._like(self)

    def _times(self, value: torch.Tensor) -> torch.Tensor:
        """Return the output of attention, in the shape of the product with ``value``."""
        leading = self.shape[:-2]
        output = self.finish(self, in_heads(value, math.prod(leading)))
        return output.reshape(*leading, *output.shape[-2:]).contiguous()

    def _like(self, tensor: torch.Tensor, **changes: Any) -> Scores:
        new = _plain(torch.Tensor.view, (tensor, tensor.shape), {}).as_subclass(Scores)
        vars(new).update({**vars(self), "noted": len(self.notes), **changes})
        return new


def _plain(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def in_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Reshape ``[..., tokens, features]`` to ``[1, heads, tokens, features]``, or to one head."""
    leading = math.prod(tensor.shape[:-2])
    if leading not in (1, heads):
        raise UnsupportedModelError(f"{heads} heads attend to {leading} of keys or values")
    return tensor.reshape(1, leading, *tensor.shape[-2:])


class ScoreProducts(TorchFunctionMode):
    """A mode in which the product of two activations becomes :class:`Scores`.

    Args:
        begin: a function of query and key, ``[..., tokens, features]`` each, and the notes; returns
            Scores, or ``None`` if the product should be computed.

    """

    def __init__(
        self, begin: Callable[[torch.Tensor, torch.Tensor, list[Noted]], Scores | None]
    ) -> None:
        super().__init__()
        self.begin = begin

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "baddbmm":
            begun = self._with_sum(*args, **kwargs)
        elif name in PRODUCTS and len(args) == 2:
            begun = self._of(args[0], args[1], [])
        else:
            begun = None
        return func(*args, **kwargs) if begun is None else begun

    def _of(self, first: Any, second: Any, notes: list[Noted]) -> Scores | None:
        if any(isinstance(each, Scores) or each.ndim < 3 for each in (first, second)):
            return None
        return self.begin(first, second.transpose(-1, -2), notes)

    def _with_sum(
        self, added: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1
    ) -> Scores | None:
        shape = batch1.shape[0], batch1.shape[1], batch2.shape[2]
        return self._of(batch1, batch2, [Noted("product", (added, beta, alpha), shape, {})])
