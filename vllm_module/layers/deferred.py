"""What norms and rotary embeddings return to a reader that computes it in fewer launches.

None of these is a tensor, so nothing takes them for numbers. See
:func:`~vllm_module.layers.fusion.fuse` for when they are returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

from vllm_module.kernels.attention.rotary_embedding import rotary_embedding
from vllm_module.kernels.rows.rms_norm import rms_norm

CosSin = tuple[torch.Tensor, torch.Tensor]

# The form of an output that the reader computes.
DEFERRED: Final = "deferred"
Deferred = Literal["deferred"]


@dataclass(slots=True)
class Normed:
    """Rows before an :class:`RMSNorm`, with what it computes from."""

    x: torch.Tensor
    weight: torch.Tensor
    eps: float
    weight_offset: float | None

    def computed(self) -> torch.Tensor:
        return rms_norm(self.x, self.weight, self.eps, self.weight_offset)


@dataclass(slots=True)
class Rotation:
    """The norms of queries and keys, if they have any, and their rotation.

    Attributes:
        cos_sin: of the step's positions.
        is_neox_style: as in ``RotaryEmbedding``.
        q_weight, k_weight: of the norms, which are of the dtype of queries and keys; both or none.
        eps, weight_offset: of both norms.

    """

    cos_sin: CosSin
    is_neox_style: bool
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 0.0
    weight_offset: float | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both, ``[tokens, heads, head_size]``, normalized and rotated; may write them."""
        if self.q_weight is not None and self.k_weight is not None:
            query = rms_norm(query, self.q_weight, self.eps, self.weight_offset)
            key = rms_norm(key, self.k_weight, self.eps, self.weight_offset)
        rotary_embedding(query, key, *self.cos_sin, self.is_neox_style)
        return query, key


@dataclass(slots=True)
class Rotated:
    """Queries and keys before their norms and rotation. It stands for both."""

    query: torch.Tensor
    key: torch.Tensor
    rotation: Rotation

    @classmethod
    def of(
        cls,
        query: torch.Tensor | Normed,
        key: torch.Tensor | Normed,
        cos_sin: CosSin,
        is_neox_style: bool,
    ) -> Rotated:
        """Defer norms that the rotation can be computed with, and compute the others."""
        if isinstance(query, Normed) and isinstance(key, Normed):
            dtypes = {each.dtype for each in (query.x, key.x, query.weight, key.weight)}
            settings = query.eps, query.weight_offset
            if len(dtypes) == 1 and settings == (key.eps, key.weight_offset):
                norms = query.weight, key.weight, *settings
                return cls(query.x, key.x, Rotation(cos_sin, is_neox_style, *norms))
        return cls(computed(query), computed(key), Rotation(cos_sin, is_neox_style))


def computed(x: torch.Tensor | Normed) -> torch.Tensor:
    """Return the tensor that ``x`` is or stands for."""
    return x.computed() if isinstance(x, Normed) else x


def unrotated(
    query: torch.Tensor | Rotated, key: torch.Tensor | Rotated
) -> tuple[torch.Tensor, torch.Tensor, Rotation | None]:
    """Return queries and keys, and what is to be done to them first."""
    if isinstance(query, Rotated):
        return query.query, query.key, query.rotation
    assert isinstance(key, torch.Tensor)
    return query, key, None
