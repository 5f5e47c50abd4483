"""Attention over a paged KV cache, and the metadata of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.nn import functional as F

from vllm_module.core.module import vLLMModule
from vllm_module.errors import UnsupportedModelError
from vllm_module.kernels.attention.paged_attention import causal_attention, paged_attention
from vllm_module.kernels.attention.paged_layout import PagedLayout
from vllm_module.kernels.attention.reshape_and_cache import reshape_and_cache
from vllm_module.kernels.attention.rotate_and_cache import rotate_and_cache
from vllm_module.kernels.operators import checks_values
from vllm_module.layers.deferred import Rotated, Rotation, unrotated
from vllm_module.quantization import QuantizableKVCache


@dataclass(frozen=True)
class AttentionMetadata:
    """The sequences of one step, whose tokens lie end to end, and their pages in the KV cache.

    Args:
        slot_mapping: the cache slot of each token, int64 ``[tokens]``; -1 for padding.
        block_tables: the pages of each sequence, int32 ``[sequences, most_pages]``.
        context_lens: length of each sequence, this step included, int32 ``[sequences]``.
        query_start_loc: index of each sequence's first token in this step, and the number of
            tokens at the end, int32 ``[sequences + 1]``.
        max_query_len: most tokens of one sequence in this step; 1 in a step that only decodes.
        state_slots: the state slot of each sequence, int64 ``[sequences]``; -1 for padding. Layers
            with recurrent state read it.

    Attributes:
        layout: what layers share; ``None`` before :meth:`laid_out`, and not on a CPU.

    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    state_slots: torch.Tensor | None = field(default=None, kw_only=True)

    layout: PagedLayout | None = field(default=None, init=False, repr=False)

    def laid_out(self) -> AttentionMetadata:
        """Work out what all layers share, in inference mode on a CPU; return this object.

        The tensors must not be written afterwards.
        """
        slots = self.slot_mapping
        if slots.is_cpu and checks_values(slots) and torch.is_inference_mode_enabled():
            tables, lengths, starts = self.block_tables, self.context_lens, self.query_start_loc
            object.__setattr__(self, "layout", PagedLayout(tables, lengths, starts, slots))
        return self


class Attention(QuantizableKVCache):
    """Causal attention over a paged KV cache, for the heads of this rank.

    Args:
        num_heads, num_kv_heads: query heads and key-value heads of this rank; ``num_heads`` is a
            multiple of ``num_kv_heads``, which is ``num_heads`` unless given.
        head_size: features of one head.
        scale: factor of the scores; ``head_size ** -0.5`` unless given.
        sliding_window: number of tokens that a token attends to: itself and those before it.
        softcap: replaces the scores by ``softcap * tanh(scores / softcap)``.
        alibi_slopes: one for each head of this rank; slope times distance is added to the scores.

    Attributes:
        scale, softcap: as above; they may be set after the layer is built.
        kv_cache: keys and values, ``[2, pages, block_size, num_kv_heads, head_size]``; set by the
            runtime.

    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.token_shape = 2, self.num_kv_heads, head_size
        self.scale = head_size**-0.5 if scale is None else scale
        self.sliding_window = sliding_window
        self.softcap = softcap
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.alibi_slopes: torch.Tensor | None
        self.register_buffer("alibi_slopes", slopes, persistent=False)

    def forward(
        self,
        query: torch.Tensor | Rotated,
        key: torch.Tensor | Rotated,
        value: torch.Tensor,
        metadata: AttentionMetadata | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output, ``[tokens, num_heads * head_size]``.

        Without ``metadata`` the tokens are one whole sequence, and nothing is cached. With
        ``metadata``, torch.compile breaks the graph here, so ``fullgraph`` is not possible.

        Args:
            query: ``[tokens, num_heads, head_size]``.
            key, value: ``[tokens, num_kv_heads, head_size]``.
            metadata: the step's sequences; keys and values are written to the cache first.
            sinks: one extra score for each head, ``[num_heads]``, that counts in the softmax and
                has no value.

        """
        query, key, rotate = unrotated(query, key)
        if metadata is None:
            if self.kv_cache is not None:
                self.ran_without_metadata = True
            if rotate is not None:
                query, key = rotate(query, key)
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
            scores = self.softcap, self.alibi_slopes, sinks
            output = causal_attention(query, key, value, self.scale, self.sliding_window, *scores)
            return output.transpose(0, 1).flatten(1)
        attend = self._attend_to_cache
        if torch.compiler.is_compiling():
            # Compiled by torch 2.13, it writes to the wrong address if the layers' caches are views
            # of one tensor. Not a decorator, because that imports the compiler with this file.
            attend = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
        return attend(query, key, value, metadata, sinks, rotate)

    def _attend_to_cache(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None,
        rotate: Rotation | None,
    ) -> torch.Tensor:
        if self.kv_cache is None:
            raise RuntimeError("attention with metadata needs a kv_cache, and it is not set")
        k_cache, v_cache = self.kv_cache
        cache = k_cache, v_cache, metadata.slot_mapping, self.k_scale, self.v_scale
        scores = self.softcap, self.alibi_slopes, sinks
        same = query.dtype == key.dtype == value.dtype
        # The one operation stores rotated keys and returns none.
        if same and rotate is not None:
            cos, sin = rotate.cos_sin
            query = rotate_and_cache(
                query, key, value, cos, sin, *cache, rotate.is_neox_style, rotate.q_weight,
                rotate.k_weight, rotate.eps, rotate.weight_offset, layout=metadata.layout,
            )  # fmt: skip
        else:
            if rotate is not None:
                query, key = rotate(query, key)
            reshape_and_cache(key, value, *cache, layout=metadata.layout)
        return paged_attention(
            query,
            k_cache,
            v_cache,
            metadata.block_tables,
            metadata.context_lens,
            metadata.query_start_loc,
            metadata.max_query_len,
            self.scale,
            self.sliding_window,
            self.k_scale,
            self.v_scale,
            *scores,
            layout=metadata.layout,
        ).flatten(1)


class EncoderAttention(vLLMModule):
    """Attention of every token to all tokens of its sequence, for the heads of this rank.

    Nothing is cached.

    Args:
        num_heads: heads of this rank.
        head_size: features of one head.
        scale: factor of the scores; ``head_size ** -0.5`` unless given.

    """

    def __init__(self, num_heads: int, head_size: int, scale: float | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = head_size**-0.5 if scale is None else scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the attention output, ``[tokens, num_heads * head_size]``.

        Neighbouring sequences of one length are computed together, so sort sequences by length.

        Args:
            query, key, value: ``[tokens, num_heads, head_size]``.
            lengths: the tokens of each sequence; the sequences lie end to end. Without, the tokens
                are one sequence.

        Raises ``ValueError`` if the lengths do not add up to the tokens.

        """
        lengths = [len(query)] if lengths is None else lengths
        if sum(lengths) != len(query):
            raise ValueError(
                f"the lengths add up to {sum(lengths)}, and there are {len(query)} tokens"
            )
        features = self.num_heads * self.head_size
        outputs, begin = [query.new_empty(0, features)], 0
        for length, equal in groupby(lengths):
            count = len(list(equal))
            part = slice(begin, begin + count * length)
            begin = part.stop
            # [sequences, heads, length, head_size]
            q, k, v = (
                x[part].reshape(count, length, self.num_heads, self.head_size).transpose(1, 2)
                for x in (query, key, value)
            )
            output = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
            outputs.append(output.transpose(1, 2).reshape(count * length, features))
        return torch.cat(outputs)


def layer_sliding_window(config: Any, layer: int) -> int | None:
    """Return the sliding window of decoder layer ``layer``; ``None`` if it attends to all tokens.

    ``layer_types`` decides where the configuration has it, then ``sliding_window_pattern`` (every
    n-th layer has no window; Gemma, Cohere), then ``use_sliding_window`` with
    ``max_window_layers`` (Qwen). If ``use_sliding_window`` is false, no layer has a window.

    Raises ``UnsupportedModelError`` if ``layer_types`` lacks the layer or has an unknown type, if
    an entry that it takes is missing, or if two entries contradict each other.
    """
    used, types, pattern, first, window = (
        getattr(config, name, None)
        for name in (
            "use_sliding_window", "layer_types", "sliding_window_pattern", "max_window_layers",
            "sliding_window",
        )
    )  # fmt: skip
    if used is False:
        if pattern is not None and window is not None:  # transformers ignores the one, vLLM not
            raise UnsupportedModelError(
                f"use_sliding_window is false, and sliding_window_pattern is {pattern}: expected "
                "one of them; set the other, or sliding_window, to null in hf_overrides"
            )
        return None
    if types is not None:
        kind = types[layer] if layer < len(types) else None
        wrong = f"[{layer}] is {kind!r}" if layer < len(types) else f" has {len(types)} entries"
        reason = f"layer_types{wrong}"
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{reason}: expected full_attention or sliding_attention for each of the "
                f"{config.num_hidden_layers} layers"
            )
        has_window = kind == "sliding_attention"
    elif pattern is not None:
        reason = f"sliding_window_pattern is {pattern}"
        has_window = (layer + 1) % pattern != 0
    elif not used or window is None:  # Qwen's sliding_window may be null
        return None
    elif first is None:
        raise UnsupportedModelError("use_sliding_window is true, and max_window_layers is missing")
    else:
        return window if layer >= first else None
    if has_window and window is None:
        raise UnsupportedModelError(f"{reason}, and sliding_window is missing")
    return window if has_window else None
