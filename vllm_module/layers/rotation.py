"""What is done to queries and keys before they are compared and stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from vllm_module.layers.norm import RMSNorm
from vllm_module.layers.plain import is_plain
from vllm_module.layers.rotary import CosSin, RotaryEmbedding

Rotate = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)  # torch.compile of 2.11 cannot call one that is frozen
class Rotation:
    """The norms of queries and keys, if they have any, and their rotation: a callable of both.

    Called with query and key, ``[tokens, heads, head_size]`` each, it calls the modules and returns
    both; it may write its arguments. :class:`~vllm_module.layers.Attention`, which takes one,
    computes it in one launch with writing the cache where :meth:`is_plain` allows it.

    Attributes:
        rotary_emb, cos_sin: the module, and what it computed for the step's positions.
        q_norm, k_norm: both or none, called with ``[tokens, heads, head_size]``.

    """

    rotary_emb: RotaryEmbedding
    cos_sin: CosSin
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        rotated: tuple[torch.Tensor, torch.Tensor] = self.rotary_emb(query, key, self.cos_sin)
        return rotated

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Return whether the modules normalize each head of ``dtype`` and rotate, and no more."""
        if not _runs(self.rotary_emb, RotaryEmbedding):
            return False
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            return True
        return (
            _runs(q_norm, RMSNorm)
            and _runs(k_norm, RMSNorm)
            and q_norm.weight.dtype == k_norm.weight.dtype == dtype
            and (q_norm.eps, q_norm.weight_offset) == (k_norm.eps, k_norm.weight_offset)
        )

    def norms(self) -> tuple[torch.Tensor | None, torch.Tensor | None, float, float]:
        """Return the weights of both norms, eps and offset; without norms, no weights."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            return q_norm.weight, k_norm.weight, q_norm.eps, q_norm.weight_offset
        return None, None, 0.0, 0.0


@dataclass(slots=True)  # torch.compile of 2.11 cannot call one that is frozen
class LatentRotation:
    """The rotation of queries and keys of latent attention, and the norm of latents: a callable.

    Called with queries ``[tokens, heads, rope]``, latents ``[tokens, latent]`` and keys ``[tokens,
    rope]``, it calls the modules and returns all three; it may write its arguments.
    :class:`~vllm_module.layers.MLAAttention` takes one, as ``Attention`` takes a :class:`Rotation`.
    """

    rotary_emb: RotaryEmbedding
    cos_sin: CosSin
    kv_norm: nn.Module

    def __call__(
        self, q_pe: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_pe, k_pe = self.rotary_emb(q_pe, k_pe.unsqueeze(1), self.cos_sin)
        return q_pe, self.kv_norm(kv_c), k_pe.squeeze(1)

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Return whether the modules normalize and rotate numbers of ``dtype``, and no more."""
        plain = _runs(self.rotary_emb, RotaryEmbedding) and _runs(self.kv_norm, RMSNorm)
        return plain and self.kv_norm.weight.dtype == dtype

    def norm(self) -> tuple[torch.Tensor, float, float]:
        """Return weight, eps and offset of the norm, which is plain."""
        norm = self.kv_norm
        assert isinstance(norm, RMSNorm)
        return norm.weight, norm.eps, norm.weight_offset


def _runs(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Return whether calling ``module`` runs the forward pass of ``cls``, and no hook."""
    return isinstance(module, cls) and type(module).forward is cls.forward and is_plain(module)
