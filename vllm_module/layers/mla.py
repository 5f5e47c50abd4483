"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

Shapes of one head: ``nope`` features of a query and key without positions, ``rope`` with them, and
``v`` of a value. All heads share ``latent`` features of a token, from which the projection of
:mod:`~vllm_module.layers.mla_projections` would compute keys and values.
"""

from __future__ import annotations

import torch

from vllm_module.kernels.attention.concat_and_cache_mla import concat_and_cache_mla
from vllm_module.kernels.attention.mla_attention import mla_attention
from vllm_module.kernels.attention.paged_attention import causal_attention
from vllm_module.kernels.attention.rotate_and_cache_mla import rotate_and_cache_mla
from vllm_module.layers.attention import AttentionMetadata
from vllm_module.layers.deferred import Normed, Rotated, Rotation, computed, unrotated
from vllm_module.layers.mla_projections import HeadWeight
from vllm_module.quantization import QuantizableKVCache


class MLAAttention(QuantizableKVCache):
    """Causal attention of this rank's heads to latents, which a paged cache holds.

    The projection from latents to keys and values is absorbed: queries are multiplied by ``w_uk``
    before, and outputs by ``w_uv`` afterwards.

    Args:
        num_heads: heads of this rank.
        kv_lora_rank: features of a latent.
        qk_nope_head_dim, qk_rope_head_dim: features of a head without and with positions.
        scale: factor of the scores; ``(nope + rope) ** -0.5`` unless given.

    Attributes:
        scale: as above; it may be set after the layer is built.
        kv_cache: ``[1, pages, block_size, 1, latent + rope]``; set by the runtime. An FP8 cache
            holds rows divided by ``k_scale``; ``v_scale`` is not used.

    """

    def __init__(
        self,
        num_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.kv_lora_rank = kv_lora_rank
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 if scale is None else scale
        self.token_shape = 1, 1, kv_lora_rank + qk_rope_head_dim

    def forward(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor | Rotated,
        kv_c: torch.Tensor | Normed,
        k_pe: torch.Tensor | Rotated,
        w_uk: HeadWeight,
        w_uv: HeadWeight,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Return the attention output, ``[tokens, num_heads * v]``.

        Without ``metadata`` the tokens are one whole sequence, and nothing is cached. With
        ``metadata``, torch.compile breaks the graph here, so ``fullgraph`` is not possible.

        Args:
            q_nope, q_pe: the two parts of the queries, ``[tokens, num_heads, nope]`` and, rotated,
                ``[tokens, num_heads, rope]``.
            kv_c: latents, normalized, ``[tokens, latent]``.
            k_pe: keys that all heads share, rotated, ``[tokens, 1, rope]``.
            w_uk, w_uv: ``[num_heads, nope, latent]`` and ``[num_heads, latent, v]``, as of
                :meth:`MLAUpProjection.absorbed`.
            metadata: the step's sequences; ``kv_c`` and ``k_pe`` are written to the cache first.

        """
        q_pe, k_pe, rotate = unrotated(q_pe, k_pe)
        if rotate is not None:
            plain = isinstance(w_uk, torch.Tensor) and isinstance(w_uv, torch.Tensor)
            if metadata is not None and isinstance(kv_c, Normed) and plain and _fuses(q_pe, kv_c):
                assert isinstance(w_uk, torch.Tensor)
                assert isinstance(w_uv, torch.Tensor)
                given = q_nope, q_pe, kv_c, k_pe.squeeze(1), w_uk, w_uv
                return self._in_fewest_launches(*given, metadata, rotate)
            q_pe, k_pe = rotate(q_pe, k_pe)
        kv_c, k_pe = computed(kv_c), k_pe.squeeze(1)
        absorbed = _bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
        query = torch.cat((absorbed, q_pe), -1)
        if metadata is None:
            if self.kv_cache is not None:
                self.ran_without_metadata = True
            keys = torch.cat((kv_c, k_pe), -1).unsqueeze(0)
            # Whole rows as values: torch's fused attention needs keys and values of one size.
            output = causal_attention(query.transpose(0, 1), keys, keys, self.scale)
            output = output[..., : self.kv_lora_rank]
        else:
            attend = self._attend_to_cache
            if torch.compiler.is_compiling():  # see Attention.forward
                attend = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
            output = attend(query, kv_c, k_pe, metadata).transpose(0, 1)
        return _bmm(output, w_uv).transpose(0, 1).flatten(1)

    def _in_fewest_launches(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_c: Normed,
        k_pe: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        metadata: AttentionMetadata,
        rotate: Rotation,
    ) -> torch.Tensor:
        """Attend to the cache; both products write to where their result is read."""
        latent = self.kv_lora_rank
        query = q_pe.new_empty(*q_pe.shape[:2], latent + q_pe.shape[2])
        torch.bmm(q_nope.transpose(0, 1), w_uk, out=query[..., :latent].transpose(0, 1))
        norm = kv_c.weight, kv_c.eps, kv_c.weight_offset
        cos, sin = rotate.cos_sin
        rotate_and_cache_mla(
            q_pe, kv_c.x, k_pe, cos, sin, query[..., latent:], self._cache(),
            metadata.slot_mapping, self.k_scale, *norm, rotate.is_neox_style,
        )  # fmt: skip
        output = self._attend(query, metadata)
        y = output.new_empty(len(output), self.num_heads, w_uv.shape[2])
        torch.bmm(output.transpose(0, 1), w_uv, out=y.transpose(0, 1))
        return y.flatten(1)

    def _attend_to_cache(
        self,
        query: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        concat_and_cache_mla(kv_c, k_pe, self._cache(), metadata.slot_mapping, self.k_scale)
        return self._attend(query, metadata)

    def _cache(self) -> torch.Tensor:
        if self.kv_cache is None:
            raise RuntimeError("attention with metadata needs a kv_cache, and it is not set")
        return self.kv_cache[0].squeeze(2)

    def _attend(self, query: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        return mla_attention(
            query,
            self._cache(),
            metadata.block_tables,
            metadata.context_lens,
            metadata.query_start_loc,
            metadata.max_query_len,
            self.kv_lora_rank,
            self.scale,
            self.k_scale,
        )


def _bmm(x: torch.Tensor, weight: HeadWeight) -> torch.Tensor:
    return torch.bmm(x, weight) if isinstance(weight, torch.Tensor) else weight.multiply(x)


def _fuses(query: torch.Tensor, latents: Normed) -> bool:
    """Return whether fewer launches pay. On a CPU, a product to where it is read takes longer."""
    return not query.is_cpu and latents.weight.dtype == query.dtype
