"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), and the projection that it absorbs.

Shapes of one head: ``nope`` features of a query and key without positions, ``rope`` with them, and
``v`` of a value. All heads share ``latent`` features of a token, from which ``kv_b_proj`` would
compute keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from vllm_module.distributed import tensor_parallel_group
from vllm_module.errors import ShardingError, UnsupportedModelError
from vllm_module.kernels.attention.concat_and_cache_mla import concat_and_cache_mla
from vllm_module.kernels.attention.mla_attention import mla_attention
from vllm_module.kernels.attention.paged_attention import causal_attention
from vllm_module.kernels.attention.rotate_and_cache_mla import rotate_and_cache_mla
from vllm_module.layers.attention import AttentionMetadata
from vllm_module.layers.deferred import Normed, Rotated, Rotation, computed, unrotated
from vllm_module.layers.linear import ColumnParallelLinear
from vllm_module.layers.lora import LayerAdapters
from vllm_module.quantization import QuantizableKVCache


class AdaptedHeads(NamedTuple):
    """A weight of heads, with what adapters add to it.

    Attributes:
        weight: ``[num_heads, input, output]``.
        adapters: of the projection that the weight is a part of.
        features: those of a head, in the projection's output, that the weight is for.
        gives_features: the product has these features, and x has latents; else the other way.

    """

    weight: torch.Tensor
    adapters: LayerAdapters
    features: slice
    gives_features: bool

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x [num_heads, tokens, input]``; return ``[num_heads, tokens, output]``."""
        y = torch.bmm(x, self.weight)
        rows_of_step = self.adapters.rows
        rows_of_step.check(x.shape[1])
        if (in_slots := self.adapters.in_slots()) is not None:
            heads = rows_of_step.by_slot(len(x))
            in_slots[0].add_heads(x, y, heads, self.features, back=not self.gives_features)
            return y
        for _, (a, b, parts, _), rows in self.adapters.present():
            (part,) = parts
            of_heads = b.view(len(x), -1, b.shape[1])[:, self.features, : part.rank.stop]
            if self.gives_features:
                added = (x[:, rows] @ a.t()) @ of_heads.transpose(1, 2)
            else:
                added = (x[:, rows] @ of_heads) @ a
            y[:, rows] += added * part.scale
        return y


HeadWeight: TypeAlias = torch.Tensor | AdaptedHeads


class _OfHeads(ColumnParallelLinear):
    """A projection from latents that is cut by heads, and multiplied by in another shape.

    Args:
        features: of one head.
        shapes: by name, of one head's part of the weight as it is multiplied by.

    """

    def __init__(
        self,
        kv_lora_rank: int,
        num_heads: int,
        features: int,
        params_dtype: torch.dtype | None,
        shapes: dict[str, tuple[int, int]],
    ) -> None:
        size = tensor_parallel_group().size
        if num_heads % size:
            raise ShardingError(
                f"{num_heads} attention heads cannot be shared evenly by {size} tensor-parallel "
                "ranks: choose a size that divides them"
            )
        super().__init__(kv_lora_rank, num_heads * features, bias=False, params_dtype=params_dtype)
        self.num_heads = num_heads // size
        self.own_buffer_names = tuple(shapes)
        for name, shape in shapes.items():
            try:
                computed = torch.empty(self.num_heads, *shape, dtype=self.params_dtype)
            except RuntimeError as error:  # a configuration that no checkpoint's weight has
                raise UnsupportedModelError(
                    f"{name} of {self.num_heads} heads, {shape[0]} by {shape[1]} each, cannot be "
                    "allocated: check num_attention_heads, kv_lora_rank, qk_nope_head_dim and "
                    f"v_head_dim ({str(error).splitlines()[0]})"
                ) from None
            self.register_buffer(name, computed, persistent=False)

    def process_weights_after_loading(self) -> None:
        for name, part in zip(self.own_buffer_names, self._parts(), strict=True):
            self._set_buffer(name, part)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Compute them from the weight of a state dict, which does not have them."""
        super()._load_from_state_dict(*args, **kwargs)
        if not any(parameter.is_meta for parameter in self.parameters(recurse=False)):
            with torch.no_grad():
                self.process_weights_after_loading()

    def absorbed(self) -> tuple[HeadWeight, ...]:
        """Return what is computed, or where a weight is trained, all of it as functions of that.

        In a step with adapters, it is given with what they add.
        """
        # Without autograd too: an optimizer may have written to the weight.
        if any(parameter.requires_grad for parameter in self.parameters(recurse=False)):
            return self._parts()
        parts = tuple(self.get_buffer(name) for name in self.own_buffer_names)
        if self.adapters is None or not self.adapters.rows.any:
            return parts
        ranges = zip(parts, self._ranges(), strict=True)
        return tuple(AdaptedHeads(part, self.adapters, *each) for part, each in ranges)

    def _of_heads(self) -> torch.Tensor:
        """Return the weight, ``[num_heads, features, latent]``."""
        weight = self.quant_method.full_precision(self)
        return weight.view(self.num_heads, -1, weight.shape[1])

    def _parts(self) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    def _ranges(self) -> tuple[tuple[slice, bool], ...]:
        """Return for each part its features of a head, and whether they are those of its product.

        Else they are those of what is multiplied.
        """
        raise NotImplementedError


class MLAUpProjection(_OfHeads):
    """``kv_b_proj``: keys and values of the heads from latents, cut by heads.

    The rows of the weight are, for each head, those of its key and then those of its value.
    :class:`MLAAttention` multiplies by ``w_uk`` and ``w_uv`` instead of calling this layer.

    Args:
        kv_lora_rank: features of a latent.
        num_heads: heads of the unsharded layer.
        qk_nope_head_dim, v_head_dim: features of one head's key and value.
        params_dtype: of the weight; torch's default dtype unless given.

    Attributes:
        num_heads: heads of this rank.
        w_uk, w_uv: the weight, for keys ``[num_heads, nope, latent]`` and for values
            ``[num_heads, latent, v]``, in ``params_dtype``; computed once the weight is loaded.

    Raises:
        ShardingError: the heads cannot be divided evenly among the ranks.
        UnsupportedModelError: ``w_uk`` and ``w_uv`` are too large for the memory.

    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor

    def __init__(
        self,
        kv_lora_rank: int,
        num_heads: int,
        qk_nope_head_dim: int,
        v_head_dim: int,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        features = qk_nope_head_dim + v_head_dim
        shapes = {"w_uk": (qk_nope_head_dim, kv_lora_rank), "w_uv": (kv_lora_rank, v_head_dim)}
        super().__init__(kv_lora_rank, num_heads, features, params_dtype, shapes)
        self.qk_nope_head_dim = qk_nope_head_dim

    def _parts(self) -> tuple[torch.Tensor, ...]:
        weight, nope = self._of_heads(), self.qk_nope_head_dim
        return weight[:, :nope], weight[:, nope:].transpose(1, 2)

    def _ranges(self) -> tuple[tuple[slice, bool], ...]:
        nope = self.qk_nope_head_dim
        return (slice(0, nope), False), (slice(nope, None), True)


class MLAHeadProjection(_OfHeads):
    """``k_b_proj`` or ``v_b_proj``: keys or values of the heads, where a checkpoint has them apart.

    Args:
        kv_lora_rank: features of a latent.
        num_heads: heads of the unsharded layer.
        head_dim: features of one head's key or value.
        transposed_product: whether ``w`` is ``[num_heads, latent, head_dim]``, as values need it.
        params_dtype: of the weight; torch's default dtype unless given.

    Attributes:
        num_heads: heads of this rank.
        w: the weight, ``[num_heads, head_dim, latent]`` or transposed, in ``params_dtype``;
            computed once the weight is loaded.

    Raises:
        ShardingError: the heads cannot be divided evenly among the ranks.
        UnsupportedModelError: ``w`` is too large for the memory.

    """

    w: torch.Tensor

    def __init__(
        self,
        kv_lora_rank: int,
        num_heads: int,
        head_dim: int,
        transposed_product: bool = False,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        shape = (kv_lora_rank, head_dim) if transposed_product else (head_dim, kv_lora_rank)
        super().__init__(kv_lora_rank, num_heads, head_dim, params_dtype, {"w": shape})
        self._transposed_product = transposed_product

    def _parts(self) -> tuple[torch.Tensor, ...]:
        weight = self._of_heads()
        return (weight.transpose(1, 2) if self._transposed_product else weight,)

    def _ranges(self) -> tuple[tuple[slice, bool], ...]:
        return ((slice(None), self._transposed_product),)


def add_up_projections(
    module: nn.Module,
    kv_lora_rank: int,
    num_heads: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    *,
    apart: bool,
) -> tuple[MLAUpProjection | MLAHeadProjection, ...]:
    """Add ``kv_b_proj`` to a module, or ``k_b_proj`` and ``v_b_proj`` where they are ``apart``.

    Returns them; what they have ``absorbed`` is, one after the other, ``w_uk`` and ``w_uv`` of
    :class:`MLAAttention`. The other arguments are those of :class:`MLAUpProjection`.
    """
    layers: dict[str, MLAUpProjection | MLAHeadProjection]
    if apart:
        values = MLAHeadProjection(kv_lora_rank, num_heads, v_head_dim, transposed_product=True)
        keys = MLAHeadProjection(kv_lora_rank, num_heads, qk_nope_head_dim)
        layers = {"k_b_proj": keys, "v_b_proj": values}
    else:
        up = MLAUpProjection(kv_lora_rank, num_heads, qk_nope_head_dim, v_head_dim)
        layers = {"kv_b_proj": up}
    for name, layer in layers.items():
        module.add_module(name, layer)
    return tuple(layers.values())


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
