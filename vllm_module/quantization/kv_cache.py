"""Layers with a paged KV cache, for which a checkpoint may store scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.errors import WeightReadError
from vllm_module.parameters import Dim, PerTensorScaleParameter

KV_SCALES = ("k_scale", "v_scale")


class QuantizableKVCache(vLLMModule):
    """A layer with a paged KV cache, for which an FP8 checkpoint may store scales.

    Attributes:
        token_shape: what the layer caches of a token: the number of tensors, their heads, and the
            features of a head. ``(2, num_kv_heads, head_size)`` is a key and a value.
        kv_cache: ``[tensors, pages, block_size, heads, features]``; set by the runtime.
        sliding_window: number of tokens that a token attends to: itself and those before it;
            ``None`` for all.
        k_scale, v_scale: float32 ``[1]``; the cache holds keys and values divided by them. ``None``
            before :meth:`create_kv_scales`.

    """

    token_shape: tuple[int, int, int]
    sliding_window: int | None = None
    k_scale: PerTensorScaleParameter | None
    v_scale: PerTensorScaleParameter | None

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache: torch.Tensor | None = None
        self.register_parameter("k_scale", None)
        self.register_parameter("v_scale", None)

    def create_kv_scales(self, stored: tuple[str, str] = KV_SCALES) -> None:
        """Create both scales on meta; a checkpoint stores them beside this layer, not below it.

        ``stored`` are their names there, such as ``"k_proj.k_scale"``.
        """
        self.stored_beside = dict(zip(KV_SCALES, stored, strict=True))
        for name in KV_SCALES:
            scale = PerTensorScaleParameter(Dim.whole(1), tp_rank=0, tp_size=1, dtype=torch.float32)
            self.register_parameter(name, scale)

    def processing(self) -> Sequence[Callable[[], None]]:
        own = () if self.k_scale is None else (self._check_scales,)
        return (*own, *super().processing())

    def _check_scales(self) -> None:
        for name in KV_SCALES:
            scale = self.get_parameter(name)
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise WeightReadError(f"{name} must be finite and positive, got {scale.item()}")
