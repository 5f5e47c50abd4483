"""Layers with a paged KV cache, for which a checkpoint may store scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vllm_module.core.module import vLLMModule
from vllm_module.errors import MissingWeightError, WeightReadError
from vllm_module.parameters import Dim, PerTensorScaleParameter

KV_SCALES = ("k_scale", "v_scale")
_ABSENT = -torch.inf  # until it is known that the other one is absent, too


class QuantizableKVCache(vLLMModule):
    """A layer with a paged KV cache, for which an FP8 checkpoint may store scales.

    Attributes:
        token_shape: what the layer caches of a token: the number of tensors, their heads, and the
            features of a head. ``(2, num_kv_heads, head_size)`` is a key and a value.
        kv_cache: ``[tensors, pages, block_size, heads, features]``; set by the runtime.
        ran_without_metadata: set once the layer has a cache and is called without metadata.
        sliding_window: number of tokens that a token attends to: itself and those before it;
            ``None`` for all.
        k_scale, v_scale: float32 ``[1]``; the cache holds keys and values divided by them. ``None``
            before :meth:`create_kv_scales`.

    """

    token_shape: tuple[int, int, int]
    sliding_window: int | None = None
    k_scale: PerTensorScaleParameter | None
    v_scale: PerTensorScaleParameter | None
    _scales_are_optional = False

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache: torch.Tensor | None = None
        self.ran_without_metadata = False
        self.register_parameter("k_scale", None)
        self.register_parameter("v_scale", None)

    def create_kv_scales(
        self, stored: tuple[str, str] = KV_SCALES, *, optional: bool = False
    ) -> None:
        """Create both scales on meta; a checkpoint stores them beside this layer, not below it.

        ``stored`` are their names there, such as ``"k_proj.k_scale"``. With ``optional``, a
        checkpoint may lack both, which are 1 then.
        """
        self._scales_are_optional = optional
        self.stored_beside = dict(zip(KV_SCALES, stored, strict=True))
        for name in KV_SCALES:
            scale = PerTensorScaleParameter(Dim.whole(1), tp_rank=0, tp_size=1, dtype=torch.float32)
            self.register_parameter(name, scale)

    def absent_weight(self, name: str, slot: str) -> torch.Tensor | None:
        if name in KV_SCALES and self._scales_are_optional:
            return torch.full((1,), _ABSENT)
        return super().absent_weight(name, slot)

    def processing(self) -> Sequence[Callable[[], None]]:
        own = () if self.k_scale is None else (self._check_scales,)
        return (*own, *super().processing())

    def _check_scales(self) -> None:
        scales = [self.get_parameter(name) for name in KV_SCALES]
        if self._scales_are_optional and all(scale.item() == _ABSENT for scale in scales):
            for scale in scales:
                scale.data.fill_(1)
        for name, scale in zip(KV_SCALES, scales, strict=True):
            if self._scales_are_optional and scale.item() == _ABSENT:
                raise MissingWeightError(
                    f"{name} ({self.stored_beside[name]} in the checkpoint) is missing, and the "
                    "layer's other scale is there: expected both or neither, so download it again"
                )
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise WeightReadError(f"{name} must be finite and positive, got {scale.item()}")
