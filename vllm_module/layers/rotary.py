"""Rotary position embedding (arXiv:2104.09864) with the scalings of Hugging Face's configs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.core.tensors import without_casts
from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.attention.rotary_embedding import rotary_embedding
from vllm_module.layers.deferred import (
    DEFERRED,
    CosSin,
    Deferred,
    Normed,
    Rotated,
    computed,
)
from vllm_module.rope_parameters import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    RopeParameters,
    YarnRope,
    rope_parameters,
)


@dataclass(eq=False)
class Positions:
    """The positions of a step's tokens, whose cosines and sines are computed once for all layers.

    A model makes one in its forward pass. Layers that are given the tensor instead compute the
    same, each for itself.

    Args:
        tensor: int64 ``[tokens]``; it must not be written while this is used.

    """

    tensor: torch.Tensor
    _cos_sin: dict[int, CosSin] = field(default_factory=dict, init=False, repr=False)

    def cos_sin(self, rotary_emb: RotaryEmbedding) -> CosSin:
        """Return what ``rotary_emb``, which outlives this, computes for the positions."""
        key = id(rotary_emb)
        if key not in self._cos_sin:
            self._cos_sin[key] = rotary_emb.cos_sin(self.tensor)
        return self._cos_sin[key]


class RotaryEmbedding(vLLMModule):
    """Rotates queries and keys by their positions.

    Layers with the same settings share one instance. A model gives :class:`Positions` to all of
    them. A subclass overrides :meth:`frequencies` for frequencies of its own.

    The frequencies do not depend on the lengths of sequences. Scalings that transformers chooses
    by the length in each step (dynamic and longrope) are chosen once, by ``max_model_len``.

    Args:
        head_size: features of one head.
        max_position: ``max_position_embeddings`` of the configuration; ``None`` if it has none.
        base: ``rope_theta``.
        scaling: ``rope_type`` (default, dynamic, linear, llama3, longrope, proportional or yarn)
            and its settings, by Hugging Face's names; or these settings, checked already.
        rotary_dim: the first features of a head that are rotated; unless given, the scaling's
            ``partial_rotary_factor`` of them.
        is_neox_style: feature ``i`` is rotated with ``i + rotary_dim / 2`` (GPT-NeoX, Llama); else
            with its neighbour (GPT-J).
        max_model_len: most tokens of a sequence; ``max_position`` unless given.

    Attributes:
        rope: the settings, checked.
        inv_freq: angle per position of each pair of features, float32 ``[rotary_dim / 2]``.
        attention_scaling: factor on cosines and sines, and so squared on the scores.

    Raises:
        UnsupportedModelError: the ``rope_type`` is unknown, or a setting is missing or invalid.

    """

    skipped_weights = dict.fromkeys(
        ("inv_freq", "cos_cached", "sin_cached"),
        "rotary frequencies are computed from the configuration",
    )

    output_form: Deferred | None = None  # as of RMSNorm

    def __init__(
        self,
        head_size: int,
        max_position: int | None,
        base: float = 10000.0,
        scaling: Mapping[str, Any] | RopeParameters | None = None,
        rotary_dim: int | None = None,
        is_neox_style: bool = True,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.max_position = max_position
        self.max_model_len = max_model_len or max_position
        self.is_neox_style = is_neox_style
        if not isinstance(scaling, RopeParameters):
            given = {"rope_theta": base, "max_position_embeddings": max_position}
            scaling = _checked(SimpleNamespace(rope_parameters=scaling, **given))
        self.rope = scaling
        if rotary_dim is None:
            rotary_dim = self.rope.rotary_dim
        if rotary_dim is None:
            # The proportional type has frequencies of 0 for the features that are not rotated.
            share = self.rope.partial_rotary_factor
            whole = isinstance(self.rope, ProportionalRope)
            rotary_dim = head_size if whole else int(head_size * share)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
            raise UnsupportedModelError(
                "partial_rotary_factor (or rotary_dim): expected an even number of features that "
                f"is at most the head size {head_size}, got {rotary_dim}"
            )
        self.rotary_dim = rotary_dim
        inv_freq, self.attention_scaling = self.frequencies()
        if inv_freq.shape != (rotary_dim // 2,) or not inv_freq.isfinite().all():
            raise UnsupportedModelError(
                f"{type(self).__name__}.frequencies: expected {rotary_dim // 2} finite numbers, "
                f"got {inv_freq} from {self.rope}"
            )
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Cast and move the other tensors, but only move the frequencies.

        Rounded ones turn far positions wrongly.
        """
        kept = {self.inv_freq}
        # PyTorch gives _apply no types.
        return super()._apply(without_casts(fn, kept), recurse)  # type: ignore[no-untyped-call]

    @classmethod
    def from_config(
        cls, config: Any, layer_type: str | None = None, is_neox_style: bool = True
    ) -> RotaryEmbedding:
        """Build from a Hugging Face configuration.

        It reads ``rope_parameters``, for all layers or with an object for each layer type,
        ``rope_scaling``, ``rope_theta``, ``rope_local_base_freq`` (of sliding attention, as in
        Gemma 3), ``partial_rotary_factor`` and their older names. Defaults that a model's
        ``config_class`` declares count as entries.

        Args:
            config: has the entries of ``config.json`` as attributes, and may have
                ``max_model_len``.
            layer_type: as in ``layer_types``, if the settings differ by it.
            is_neox_style: as in the constructor.

        """
        head_size = getattr(config, "head_dim", None)
        head_size = head_size or config.hidden_size // config.num_attention_heads
        rope = _checked(config, layer_type)
        return cls(
            head_size,
            rope.max_position_embeddings,
            rope.rope_theta,
            rope,
            is_neox_style=is_neox_style,
            max_model_len=getattr(config, "max_model_len", None),
        )

    @classmethod
    def of_layers(cls, config: Any, is_neox_style: bool = True) -> Iterator[RotaryEmbedding]:
        """Yield the instance of each decoder layer; layers with the same settings share one.

        Settings differ by layer type: that of ``layer_types``, or by ``sliding_window_pattern``.
        ``is_neox_style`` is as in the constructor.
        """
        by_type: dict[str, RotaryEmbedding] = {}
        types = getattr(config, "layer_types", None) or ()
        pattern = getattr(config, "sliding_window_pattern", None)
        for layer in range(config.num_hidden_layers):
            slides = pattern and (layer + 1) % pattern
            kind = "sliding_attention" if slides else "full_attention"
            kind = str(types[layer]) if layer < len(types) else kind
            if kind not in by_type:
                rotary_emb = cls.from_config(config, kind, is_neox_style)
                shared = (each for each in by_type.values() if each.rope == rotary_emb.rope)
                by_type[kind] = next(shared, rotary_emb)
            yield by_type[kind]

    def frequencies(self) -> tuple[torch.Tensor, float]:
        """Return ``inv_freq``, float32 ``[rotary_dim / 2]``, and ``attention_scaling``.

        The constructor calls this once, when ``rope``, ``head_size``, ``rotary_dim``,
        ``max_position`` and ``max_model_len`` are set. The formulas are those of transformers'
        ``modeling_rope_utils.py``.
        """
        rope, base = self.rope, self.rope.rope_theta
        if isinstance(rope, DynamicRope):
            base = _dynamic_base(rope, self.rotary_dim, self.max_model_len)
        pairs = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32)
        inv_freq = 1.0 / base ** (pairs / self.rotary_dim)
        if isinstance(rope, LongRope):
            return _longrope(inv_freq, rope, self.max_model_len)
        if isinstance(rope, YarnRope):
            return _yarn(inv_freq, rope), _yarn_attention_scaling(rope)
        if isinstance(rope, Llama3Rope):
            return _llama3(inv_freq, rope), 1.0
        if isinstance(rope, ProportionalRope):
            inv_freq[int(rope.partial_rotary_factor * self.rotary_dim // 2) :] = 0
        if isinstance(rope, LinearRope) and not isinstance(rope, DynamicRope):
            inv_freq /= rope.factor
        return inv_freq, 1.0

    @property
    def score_scaling(self) -> float:
        """DeepSeek's factor on the scores beside ``attention_scaling``: YaRN's, squared; else 1."""
        rope = self.rope
        if isinstance(rope, YarnRope) and rope.mscale_all_dim:
            return _mscale(rope, rope.mscale_all_dim) ** 2
        return 1.0

    def cos_sin(self, positions: torch.Tensor) -> CosSin:
        """Return cosines and sines, float32 ``[tokens, 1, rotary_dim / 2]``.

        ``positions`` of the tokens are int64 ``[tokens]``.
        """
        angles = positions.unsqueeze(-1).float() * self.inv_freq.float()
        angles = angles.unsqueeze(1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    def forward(
        self,
        positions: torch.Tensor | Positions,
        query: torch.Tensor | Normed,
        key: torch.Tensor | Normed,
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[Rotated, Rotated]:
        """Rotate ``query`` and ``key``, each ``[tokens, heads, head_size]``, in place; return both.

        They may be views, for example of a fused projection's output. If either needs a gradient,
        or torch.compile traces this, copies are rotated and returned.
        """
        if isinstance(positions, Positions):
            cos_sin = positions.cos_sin(self)
        else:
            cos_sin = self.cos_sin(positions)
        if self.output_form == DEFERRED:
            rotated = Rotated.of(query, key, cos_sin, self.is_neox_style)
            return rotated, rotated
        query, key = computed(query), computed(key)
        differentiated = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        if differentiated or torch.compiler.is_compiling():
            # Autograd refuses writes to parts of a split, and inductor of torch 2.13 fails at them.
            query, key = (x.clone(memory_format=torch.contiguous_format) for x in (query, key))
        rotary_embedding(query, key, *cos_sin, self.is_neox_style)
        return query, key


def _checked(config: Any, layer_type: str | None = None) -> RopeParameters:
    try:
        return rope_parameters(config, layer_type)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from None


def _dynamic_base(rope: DynamicRope, rotary_dim: int, max_model_len: int | None) -> float:
    """Return the base for sequences of ``max_model_len`` tokens (NTK-aware scaling)."""
    if rotary_dim == 2:
        raise UnsupportedModelError(
            "rope_type: 'dynamic' needs more than 2 rotated features, got partial_rotary_factor "
            f"{rope.partial_rotary_factor}"
        )
    limit = rope.max_position_embeddings
    growth = rope.factor * max(max_model_len or 0, limit) / limit - (rope.factor - 1)
    return rope.rope_theta * growth ** (rotary_dim / (rotary_dim - 2))


def _longrope(
    inv_freq: torch.Tensor, rope: LongRope, max_model_len: int | None
) -> tuple[torch.Tensor, float]:
    """Divide each frequency by its factor for sequences of ``max_model_len`` tokens."""
    original = rope.original_max_position_embeddings
    if (max_model_len or 0) > original:
        name, factors, scaling = "long_factor", rope.long_factor, rope.long_mscale
    else:
        name, factors, scaling = "short_factor", rope.short_factor, rope.short_mscale
    if len(factors) != len(inv_freq):
        raise UnsupportedModelError(
            f"{name}: expected {len(inv_freq)} numbers, one for each pair of rotated features, "
            f"got {len(factors)}"
        )
    if scaling is None:
        scaling = rope.attention_factor
    if scaling is None:
        factor = rope.extension
        scaling = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inv_freq / torch.tensor(factors, dtype=torch.float32), scaling


def _yarn(inv_freq: torch.Tensor, rope: YarnRope) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, blend between (arXiv:2309.00071)."""
    rotary_dim = 2 * len(inv_freq)

    def pair_that_turns(rotations: float) -> float:
        """Return the pair, as a fraction, that turns so often over the original context."""
        turns = math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
        return rotary_dim * turns / (2 * math.log(rope.rope_theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001  # negative beyond every pair, in the original code as well
    pairs = torch.arange(len(inv_freq), dtype=torch.float32)
    divided = ((pairs - low) / width).clamp(0, 1)
    return inv_freq / rope.extension * divided + inv_freq * (1 - divided)


def _yarn_attention_scaling(rope: YarnRope) -> float:
    """Return YaRN's factor on cosines and sines; ``mscale`` and ``_all_dim`` are DeepSeek-V2's."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        scaling = _mscale(rope, rope.mscale) / _mscale(rope, rope.mscale_all_dim)
    else:
        scaling = _mscale(rope, 1.0)
    return scaling * rope.attn_factor


def _mscale(rope: YarnRope, weight: float) -> float:
    factor = rope.extension
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(inv_freq: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, blend (Llama 3.1's reference code)."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    # How often each pair turns over the original context.
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * (1 - kept) + inv_freq * kept
