"""Recognizing attention that a transformers module computes in its forward pass.

On meta, the module shows its operations on the scores. Terms that are made of constants (a mask, a
bias by distance) have values. From these we find whether our attention computes the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_module.errors import UnsupportedModelError
from vllm_module.wrapped.attention import attend
from vllm_module.wrapped.constants import Constants
from vllm_module.wrapped.mask import Mask, MaskRule
from vllm_module.wrapped.scores import Noted, ScoreProducts, Scores

_MASKED = -9e3  # a smaller number added to a score is a mask; a bias by distance is larger
_LOWEST = -6e4  # a lower bound of scores that has no effect
_ROWS = 64  # number of queries whose masks are checked
_ROUNDING = 2**-7  # relative error of a bias that is kept in bfloat16


class Understood(NamedTuple):
    """Arguments by which our attention computes the same as a module's own.

    Attributes:
        kinds: kinds of its operations on the scores, in order.
        scale: factor of the scores.
        window: number of tokens that a token attends to; ``None`` for all before it.
        slopes: slopes of a bias by distance, one for each head; ``None`` without a bias.

    """

    kinds: tuple[str, ...]
    scale: float
    window: int | None
    slopes: tuple[float, ...] | None


class StandIn:
    """A replacement for the forward pass of a transformers ``module``.

    A model with one must get masks, whose values are ignored.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class InlineAttention(StandIn):
    """Forward pass of ``module`` in which our attention replaces its own.

    Args:
        module: the module of transformers.
        calls: its calls of attention, in order.

    """

    def __init__(self, module: nn.Module, calls: list[Understood]) -> None:
        super().__init__(module)
        self.calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's own forward pass, with None for attention weights."""
        if torch.compiler.is_compiling():  # torch.compile cannot trace the placeholder for scores
            return torch.compiler.disable(self.__call__)(*args, **kwargs)  # type: ignore[no-untyped-call]
        left = iter(self.calls)

        def finish(scores: Scores, value: torch.Tensor) -> torch.Tensor:
            call = next(left, None)
            if call is None or tuple(note.kind for note in scores.notes) != call.kinds:
                raise RuntimeError(
                    f"{type(self.module).__name__} computes attention differently than it did "
                    "when the model was built"
                )
            return finished(self.module, scores, value, call)

        def begin(query: torch.Tensor, key: torch.Tensor, notes: list[Noted]) -> Scores:
            return Scores.of(query, key, finish, notes)

        with ScoreProducts(begin):
            output = type(self.module).forward(self.module, *args, **kwargs)
        if isinstance(output, tuple):  # attention weights were not computed
            output = tuple(None if isinstance(each, Scores) else each for each in output)
        return output


def has_stand_in(model: nn.Module) -> bool:
    """Return whether a module of ``model`` has a :class:`StandIn`."""
    return any(isinstance(vars(each).get("forward"), StandIn) for each in model.modules())


def finished(
    module: nn.Module, scores: Scores, value: torch.Tensor, call: Understood
) -> torch.Tensor:
    """Compute attention; return ``[1, heads, tokens, value_size]``."""
    query, key = scores.query.to(value.dtype), scores.key.to(value.dtype)
    output, _ = attend(
        module,
        query,
        key,
        value,
        scaling=call.scale,
        sliding_window=call.window,
        alibi_slopes=call.slopes,
        is_causal=True,
    )
    return output.transpose(1, 2)


def understood(scores: Scores, constants: Constants) -> Understood:
    """Return the arguments of our attention for ``scores`` after the softmax.

    Raises ``UnsupportedModelError`` if our attention does not compute it.
    """
    tokens = scores.shape[-1]
    seen = _Seen(constants, scores.query.shape[1], tokens)
    for note in scores.notes:
        seen.note(note)
    keys = torch.arange(tokens)
    kept = seen.kept
    for mask in seen.masks:
        if mask.rule is None:
            raise UnsupportedModelError("scores get a mask that is no window")
        kept = kept & mask.rule.attends(seen.rows[:, None], keys)
    window = int(kept[0, -1].sum())
    rule = MaskRule(window=None if window == tokens else window)
    if not torch.equal(kept, rule.attends(seen.rows[:, None], keys).expand_as(kept)):
        raise UnsupportedModelError("scores get a mask that lets tokens attend to others than a "
                                    "number of those before them")  # fmt: skip
    for factor in seen.factors:
        if bool((factor != 1).logical_and(kept).any()):
            raise UnsupportedModelError("scores are multiplied by factors that differ")
    kinds = tuple(note.kind for note in scores.notes)
    return Understood(kinds, seen.scale, rule.window, _slopes(seen.bias, kept, seen.heads))


class _Seen:
    """Operations on the scores of some queries, collected.

    Attributes:
        rows: indices of the queries.
        scale: factor of the scores.
        bias: sum of the added terms, ``[1 or heads, 1 or rows, tokens]``.
        kept: True for scores that no constant masks, in the same shape.
        factors: tensors that the scores are multiplied by, in the same shape.
        masks: masks made by transformers.

    """

    def __init__(self, constants: Constants, heads: int, tokens: int) -> None:
        self.constants, self.heads = constants, heads
        count = min(tokens, _ROWS)
        self.rows = torch.arange(count) * (tokens - 1) // max(count - 1, 1)
        self.scale = 1.0
        self.bias = torch.zeros(1, 1, tokens, dtype=torch.float64)
        self.kept = torch.ones(1, len(self.rows), tokens, dtype=torch.bool)
        self.factors: list[torch.Tensor] = []
        self.masks: list[Mask] = []

    def note(self, note: Noted) -> None:
        kind, operands = note.kind, note.operands
        if note.options:
            raise UnsupportedModelError(f"scores get {', '.join(sorted(note.options))}")
        others = [each for each in operands if each is not None]
        if kind == "product":
            added, beta, alpha = operands
            self._scale(alpha)
            self._add(added, beta, note.shape)
        elif kind == "add":
            self._add(others[0], 1.0, note.shape)
        elif kind == "subtract" and operands[0] is None:
            self._add(others[0], -1.0, note.shape)
        elif kind == "multiply" or (kind == "divide" and operands[0] is None):
            if isinstance(others[0], torch.Tensor) and others[0].numel() > 1:
                if kind == "divide":
                    raise UnsupportedModelError("scores are divided by a tensor")
                self.factors.append(self._rows(others[0], note.shape))
            else:
                factor = self._number(others[0])
                self._scale(factor if kind == "multiply" else 1 / factor)
        elif kind in ("fill", "where"):
            self._fill(kind, operands, note.shape)
        elif kind == "most" and len(others) == 1 and self._number(others[0]) <= _LOWEST:
            pass
        else:
            raise UnsupportedModelError(f"scores are changed in a way that is not known: {kind}")

    def _scale(self, factor: float) -> None:
        if not factor > 0:
            raise UnsupportedModelError(f"scores are multiplied by {factor:.3g}")
        self.scale *= factor
        self.bias = self.bias * factor

    def _add(self, added: Any, factor: float, shape: tuple[int, ...]) -> None:
        if isinstance(added, Mask) and factor > 0:
            self.masks.append(added)
            return
        values = self._rows(added, shape) * factor
        masked = values < _MASKED
        self.bias = self.bias + values.masked_fill(masked, 0.0)
        self.kept = self.kept & ~masked

    def _fill(self, kind: str, operands: tuple[Any, ...], shape: tuple[int, ...]) -> None:
        if kind == "where":  # (condition, scores, number) or (condition, number, scores)
            mask, first, second = operands
            kept, number = first is None, second if first is None else first
        else:
            _, mask, number = operands
            kept = False
        if mask is None or not self._number(number) < _MASKED:
            raise UnsupportedModelError("scores are replaced by other numbers than a mask's")
        if isinstance(mask, Mask):
            self.masks.append(mask)
            return
        values = self._rows(mask, shape) != 0
        self.kept = self.kept & (values if kept else ~values)

    def _number(self, given: Any) -> float:
        value = self.constants.value(given)
        if value is None:
            raise UnsupportedModelError("scores meet a number that is computed from tokens")
        return float(value)

    def _rows(self, given: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the values of ``given``, which broadcasts to ``shape``, for the queries."""
        value = self.constants.value(given)
        if value is None:
            raise UnsupportedModelError("scores meet a tensor that is computed from tokens")
        values = torch.as_tensor(value, device="cpu")
        if values.ndim > len(shape) or any(
            size not in (1, most)
            for size, most in zip(reversed(values.shape), reversed(shape), strict=False)
        ):
            raise UnsupportedModelError(f"scores of {list(shape)} meet {list(values.shape)}")
        values = values.reshape((1,) * (len(shape) - values.ndim) + values.shape)
        if values.shape[-2] != 1:
            values = values[..., self.rows, :]
        if values.shape[:-2].numel() != 1:
            values = values.expand(*shape[:-2], *values.shape[-2:])
        values = values.reshape(-1, *values.shape[-2:]).double()
        return values.expand(*values.shape[:-1], shape[-1])


def _slopes(bias: torch.Tensor, kept: torch.Tensor, heads: int) -> tuple[float, ...] | None:
    """Return the slopes of ``bias`` by the key's position; ``None`` if there is no bias.

    Terms that are equal for all keys of a query are left out: a softmax does not depend on them.
    """
    tokens = bias.shape[-1]
    if bias.shape[1] == 1:  # equal for all queries: the last query has most keys
        kept = kept[:, -1:]
    weights = kept.double().expand(kept.shape[0], kept.shape[1], tokens)
    count = weights.sum(-1, keepdim=True)
    keys = torch.arange(tokens, dtype=torch.float64)
    from_mean = keys - (weights * keys).sum(-1, keepdim=True) / count
    centred = bias - (weights * bias).sum(-1, keepdim=True) / count
    last = (weights * from_mean)[:, -1]  # slopes from the query with most keys
    slopes = (last * centred[:, -1]).sum(-1) / (last * from_mean[:, -1]).sum(-1)
    rest = (weights * (centred - slopes[:, None, None] * from_mean)).abs().amax((1, 2))
    most = (weights * bias).abs().amax((1, 2))
    if bool((rest > _ROUNDING * most + 1e-6).any()):
        raise UnsupportedModelError("scores get a bias that is no multiple of the distance")
    if not bool((slopes.abs() * tokens > 1e-6).any()):
        return None
    return tuple(slopes.expand(heads).tolist())
