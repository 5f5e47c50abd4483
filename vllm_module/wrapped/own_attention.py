"""Replacing attention that transformers modules compute themselves with ours.

Older classes do not call transformers' interface for attention. Some have a method for it,
``_attn``. It is called on a few numbers, which shows its scale and its window. Others compute
attention in the forward pass, which is run on meta. Modules that are not understood stay unchanged,
and the model is refused.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_module.base.outside import NO_FAILURES
from vllm_module.errors import UnsupportedModelError
from vllm_module.wrapped.attention import PROBING, attend
from vllm_module.wrapped.inline_attention import InlineAttention, Understood, understood
from vllm_module.wrapped.mask import Mask, MaskRule
from vllm_module.wrapped.probe import constants_on_meta, probe_of, watched
from vllm_module.wrapped.scores import Noted, ScoreProducts, Scores

_ARGUMENTS = ["self", "query", "key", "value", "attention_mask"]
_SIZES = 16, 64  # head sizes that are tried, because a scale may depend on them
_ROUNDING = 4e-3  # relative error; a scale may be kept in bfloat16


class Measured(NamedTuple):
    """Measured behaviour of a method ``_attn``.

    Attributes:
        scales: factors of the scores, for each head size in _SIZES.
        window: number of tokens that the last one attends to; ``None`` for all.
        is_causal: True if the method itself masks later tokens.

    """

    scales: tuple[float, float]
    window: int | None
    is_causal: bool

    def scale(self, head_size: int) -> float | None:
        """Return the factor of scores for heads of ``head_size``; ``None`` if it is unknown."""
        by_size = head_size**-0.5
        expected = [size**-0.5 for size in _SIZES]
        for scale, alike in (
            (by_size, expected),
            (by_size, [by_size, by_size]),
            (1.0, [1.0, 1.0]),
        ):
            pairs = zip(self.scales, alike, strict=True)
            if all(math.isclose(*pair, rel_tol=_ROUNDING) for pair in pairs):
                return scale
        return None


class OwnAttention:
    """Replacement for the method ``_attn`` of ``module``, which computes ``measured``."""

    def __init__(self, module: nn.Module, measured: Measured) -> None:
        self.module, self.measured = module, measured
        self.is_causal = measured.is_causal  # else the model's mask decides

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return ``[1, heads, tokens, value_size]``, and None for the attention weights."""
        measured = self.measured
        size = query.shape[-1]
        scale = measured.scale(size)
        if scale is None:
            raise UnsupportedModelError(
                f"{type(self.module).__name__}._attn multiplies scores by {measured.scales[0]:.3g}:"
                f" expected 1, or one over the root of the head size {size}"
            )
        if isinstance(attention_mask, Mask) and attention_mask.rule == MaskRule():
            attention_mask = None  # the method has its own window
            self.is_causal = True
        query, key = query.to(value.dtype), key.to(value.dtype)
        output, _ = attend(
            self.module,
            query,
            key,
            value,
            attention_mask,
            scaling=scale,
            sliding_window=measured.window,
            is_causal=self.is_causal,
        )
        return output.transpose(1, 2), None


class Diverted(NamedTuple):
    """Result of replacing attention that modules compute themselves.

    Attributes:
        reason: why a module was left unchanged; empty if none was.
        takes_positions: True if more than attention depends on the tokens' positions.

    """

    reason: str = ""
    takes_positions: bool = True


def divert(model: Any, longest: int) -> Diverted:
    """Replace the attention that modules of ``model`` compute themselves by ours.

    ``longest`` is the largest number of tokens that the model takes. Tensors that the methods read
    may not be on meta.
    """
    if model._supports_attention_backend:
        return Diverted()
    return Diverted() if divert_methods(model, longest) else _divert_forward(model, longest)


def _divert_forward(model: Any, longest: int) -> Diverted:
    """Replace attention that modules compute in the forward pass."""
    calls: dict[nn.Module, list[Understood]] = {}
    multiplying: set[nn.Module] = set()  # modules that multiply other activations
    running: list[nn.Module] = []

    def begin(query: torch.Tensor, key: torch.Tensor, notes: list[Noted]) -> Scores | None:
        if query.shape[-2] == key.shape[-2] == longest:
            return Scores.of(query, key, finish, notes)
        multiplying.update(running)
        return None

    def finish(scores: Scores, value: torch.Tensor) -> torch.Tensor:
        calls.setdefault(running[-1], []).append(understood(scores, constants))
        return value.new_empty(*scores.query.shape[:-1], value.shape[-1])

    def before(module: nn.Module, args: Any) -> None:
        running.append(module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    on_meta = constants_on_meta(model, PROBING, probe_of(model, longest))
    try:
        watch = watched(model, after, before)
        with watch, on_meta as (constants, given), constants, ScoreProducts(begin):
            model(**given)
    except UnsupportedModelError as error:
        return Diverted(str(error))
    for module, each in calls.items():
        if module in multiplying:
            return Diverted(f"{type(module).__name__} multiplies more than queries and keys")
        vars(module)["forward"] = InlineAttention(module, each)
    by_distance = all(call.slopes for each in calls.values() for call in each)
    return Diverted(takes_positions=constants.positions_enter or not (calls and by_distance))


def divert_methods(model: nn.Module, longest: int) -> bool:
    """Replace methods ``_attn``; return whether there was one."""
    found = False
    for module in model.modules():
        method = getattr(type(module), "_attn", None)
        if method is None or list(inspect.signature(method).parameters) != _ARGUMENTS:
            continue
        try:
            measured = _measured(module, longest)
        except BaseException as error:  # code from outside
            if isinstance(error, NO_FAILURES):
                raise
            measured = None
        if measured is not None:
            vars(module)["_attn"] = OwnAttention(module, measured)
            found = True
    return found


@torch.no_grad()
def _measured(module: Any, longest: int) -> Measured | None:
    """Return the method's behaviour; ``None`` if it is no softmax of scaled products."""
    scales = []
    for size in _SIZES:
        first, second = (_scale(module, size, factor) for factor in (1.0, 3.0))
        if not math.isclose(first, second, rel_tol=1e-3):
            return None  # scores are not linear in the product: a soft cap, for example
        scales.append(first)
    # With scores of zero, all tokens that are attended to have equal weight.
    positions = torch.arange(longest, dtype=torch.float64)
    mean, squares = _uniform(module, 1, torch.stack([positions, positions**2], -1))[0].tolist()
    window = round(2 * (longest - 1 - mean)) + 1
    expected = positions[longest - window :]
    if window < 1 or not (
        math.isclose(mean, float(expected.mean()), rel_tol=1e-4)
        and math.isclose(squares, float((expected**2).mean()), rel_tol=1e-4)
    ):
        return None
    weights = _uniform(module, 3, torch.eye(3, dtype=torch.float64))
    is_causal = bool((weights.triu(1) == 0).all())
    return Measured((scales[0], scales[1]), window if window < longest else None, is_causal)


def _scale(module: Any, size: int, factor: float) -> float:
    """Return the factor of a product ``factor`` of query and key, from the weights of two keys."""
    key = torch.zeros(1, 1, 2, size, dtype=torch.float32)
    key[..., 0, 0] = factor
    query = torch.zeros(1, 1, 1, size, dtype=torch.float32)
    query[..., 0] = 1.0
    value = torch.eye(2, dtype=torch.float32)[None, None]
    one, other = module._attn(query, key, value)[0].flatten().tolist()
    return math.log(one / other) / factor


def _uniform(module: Any, queries: int, value: torch.Tensor) -> torch.Tensor:
    """Return the means of the rows of ``value`` that the last queries attend to."""
    query = torch.zeros(1, 1, queries, _SIZES[0], dtype=torch.float32)
    key = torch.zeros(1, 1, len(value), _SIZES[0], dtype=torch.float32)
    output: torch.Tensor = module._attn(query, key, value[None, None])[0]
    return output[0, 0]
