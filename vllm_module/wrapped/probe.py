"""Running a model on meta to find its attention calls before it has weights.

The number of heads, their size, the scale, the window and more are arguments of the call. A call
that :class:`~vllm_module.layers.Attention` does not support is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_module.base.messages import describe_error, shorten
from vllm_module.base.outside import NO_FAILURES
from vllm_module.core.state import guard, modules_that_load, unguard
from vllm_module.errors import UnsupportedModelError
from vllm_module.wrapped.attention import MASKED, NAME, PROBING, stepping
from vllm_module.wrapped.constants import Constants
from vllm_module.wrapped.inline_attention import has_stand_in
from vllm_module.wrapped.mask import Mask, MaskRule

TOKENS = 3  # length of the sequence; no usual number of heads or features

# Options without effect here. Any other option that is not None is refused.
_WITHOUT_EFFECT = frozenset(
    (
        "cache_position", "input_ids", "is_causal", "labels", "logits_to_keep",
        "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits",
        "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
    )
)  # fmt: skip


class Call(NamedTuple):
    """Arguments of one attention call.

    Attributes:
        heads, kv_heads: number of heads of the query, and of key and value.
        head_size, value_size: features of a head of query and key, and of value.
        scale: factor of the scores.
        rule: tokens that are attended to.
        softcap: cap of the scores, or ``None``.
        slopes: slopes of a bias by distance, one for each head; ``None`` without a bias.

    """

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    scale: float
    rule: MaskRule
    softcap: float | None
    slopes: tuple[float, ...] | None


@dataclass
class Probe:
    """A recorder of the attention calls of one forward pass; it refuses unsupported ones.

    Args:
        paths: paths of the modules, for messages.
        tokens: length of the sequence.

    Attributes:
        calls: calls of each module, in order.
        order: the calling modules, once for each call.
        chosen: for modules that attend to chosen tokens, the path and the indices.

    """

    paths: Mapping[nn.Module, str]
    tokens: int = TOKENS
    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)
    order: list[nn.Module] = field(default_factory=list)
    chosen: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def attend(  # noqa: D102 # see AttentionHandler
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        path = self.paths.get(module, type(module).__name__)
        shapes = [list(each.shape) for each in (query, key, value)]
        if any(each.ndim != 4 or len(each) != 1 for each in (query, key, value)):
            raise _refused(path, f"query, key and value of shapes {shapes}: expected one sequence")
        heads, tokens, size = query.shape[1:]
        kv_heads = key.shape[1]
        same = value.shape[1:3] == key.shape[1:3]
        if key.shape[2] != self.tokens or tokens != self.tokens or not same:
            raise _refused(
                path, f"{shapes}: queries and keys should be those of {self.tokens} tokens"
            )
        if key.shape[-1] != size:
            raise _refused(path, f"queries of {size} features and keys of {key.shape[-1]}")
        if not kv_heads or heads % kv_heads:
            raise _refused(
                path, f"{heads} query heads that share {kv_heads} key-value heads unevenly"
            )
        options = {name: each for name, each in options.items() if each is not None}
        scale = options.pop("scaling", size**-0.5)
        window, softcap = options.pop("sliding_window", None), options.pop("softcap", None)
        options.pop("s_aux", None)
        slopes = options.pop("alibi_slopes", None)
        if slopes is not None and len(slopes) != heads:
            raise _refused(path, f"{len(slopes)} slopes of a bias, for {heads} heads")
        if isinstance(indices := options.pop("indices", None), torch.Tensor):
            self.chosen.append((path, indices))
        if options.pop("dropout", 0.0):
            raise _refused(path, "dropout")
        if not options.get("is_causal", getattr(module, "is_causal", True)):
            raise _refused(path, "attention to later tokens (is_causal is false)")
        if unknown := sorted(options.keys() - _WITHOUT_EFFECT):
            raise _refused(path, f"{', '.join(unknown)} in the call of attention")
        if not isinstance(scale, (int, float)):
            raise _refused(path, f"a scale that is {shorten(scale)}, not a number")
        if softcap is not None and not isinstance(softcap, (int, float)):
            raise _refused(path, f"a soft cap that is {shorten(softcap)}, not a number")
        rule = MaskRule(window=window if window else None)
        if mask is not None:
            known = getattr(mask, "rule", None) if isinstance(mask, Mask) else None
            if known is None:
                raise _refused(path, "a mask of its own")
            rule = known
        if rule.window is not None and rule.window < 1:
            raise _refused(path, f"a window of {rule.window} tokens")
        call = Call(
            heads, kv_heads, size, value.shape[-1], float(scale), rule, softcap or None, slopes
        )
        self.calls.setdefault(module, []).append(call)
        self.order.append(module)
        return query.new_empty(1, tokens, heads, value.shape[-1])


def _refused(path: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{path} asks for {what}, which is not supported")


class _GroupOnMeta:
    """A group whose collectives return tensors of the right shapes only."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim)


def probe_of(model: nn.Module, tokens: int = TOKENS) -> Probe:
    """Return an empty probe of ``model`` for a sequence of ``tokens``."""
    return Probe({module: path for path, module in model.named_modules()}, tokens)


@contextmanager
def watched(
    model: nn.Module,
    after: Callable[[nn.Module, Any, Any], None],
    before: Callable[[nn.Module, Any], None] | None = None,
) -> Iterator[None]:
    """Call ``before`` and ``after`` each forward pass of a module of ``model`` in the block."""
    modules = list(model.modules())
    hooks = [] if before is None else [m.register_forward_pre_hook(before) for m in modules]
    hooks += [module.register_forward_hook(after) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run_on_meta(model: Any, part: Any, found: Probe, *, masks: bool, **options: Any) -> None:
    """Run ``part`` of ``model`` on meta and record its attention calls in ``found``.

    With ``masks``, the model makes masks. ``options`` are further arguments of ``part``.

    Raises ``UnsupportedModelError`` if it fails, or for calls that are not supported.
    """
    name = PROBING if masks else NAME
    if has_stand_in(model):  # the module may read values of constants, such as positions
        with constants_on_meta(model, MASKED, found) as (constants, given), constants:
            part(**given, **options)
        return
    with on_meta(model, name, found):
        ids = torch.zeros(1, found.tokens, dtype=torch.int64)
        mask = torch.ones_like(ids) if masks else None
        part(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False, **options)


@contextmanager
def constants_on_meta(
    model: Any, name: str, found: Probe
) -> Iterator[tuple[Constants, dict[str, Any]]]:
    """Enter :func:`on_meta`; yield a mode that knows constants, and the arguments for ``model``.

    Positions have known values; tokens do not.
    """
    with on_meta(model, name, found) as values:
        ids = torch.zeros(1, found.tokens, dtype=torch.int64)
        positions = torch.zeros_like(ids)
        values = {**values, positions: torch.arange(found.tokens, device="cpu")[None]}
        given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        yield Constants(values, found.tokens), given


@contextmanager
def on_meta(model: Any, name: str, found: Probe) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """Put ``model`` on meta and record in ``found`` the calls of attention function ``name``.

    Yields the values of buffers that were computed when the model was built, by buffer on meta.
    """
    owner = type(model).__name__
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        values = stack.enter_context(_tensors_on_meta(model))
        stack.enter_context(implementation(model.config, name))
        stack.enter_context(stepping(found))
        stack.enter_context(torch.device("meta"))
        try:
            yield values
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{owner}: {error}") from None
        except BaseException as error:  # code from outside
            if isinstance(error, NO_FAILURES):
                raise
            raise UnsupportedModelError(
                f"{owner} does not run on tensors without values, by which its attention is found: "
                f"{describe_error(error)}"
            ) from error


@contextmanager
def implementation(config: Any, name: str) -> Iterator[None]:
    """Set the attention function of the model of ``config`` to ``name`` inside the block."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def _tensors_on_meta(model: nn.Module) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """Put the buffers of ``model`` on meta, and replace its groups by ones that do not wait.

    Yields the values of buffers that no checkpoint stores.
    """
    changed: list[tuple[dict[str, Any], str, Any]] = []
    values: dict[torch.Tensor, torch.Tensor] = {}

    def change(holder: dict[str, Any], name: str, value: Any) -> None:
        changed.append((holder, name, holder[name]))
        holder[name] = value

    loading = list(modules_that_load(model))
    for module in loading:
        unguard(module)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                moved = buffer.to("meta")
                change(module._buffers, name, moved)
                if name in module._non_persistent_buffers_set:
                    values[moved] = buffer
        attributes = vars(module)
        for name, value in list(attributes.items()):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                change(attributes, name, value.to("meta"))
                values[attributes[name]] = value
        group = attributes.get("tp_group")
        if group is not None and group.size > 1:
            change(attributes, "tp_group", _GroupOnMeta(group.rank, group.size))
    try:
        yield values
    finally:
        for holder, name, value in reversed(changed):
            holder[name] = value
        for module in loading:
            guard(module)
