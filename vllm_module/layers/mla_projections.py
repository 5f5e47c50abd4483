"""The projection of multi-head latent attention from latents to keys and values.

It is absorbed: not latents are multiplied by it, but queries and outputs
(:class:`~vllm_module.layers.MLAAttention`, which says what the shapes are).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from vllm_module.distributed import tensor_parallel_group
from vllm_module.errors import ShardingError, UnsupportedModelError
from vllm_module.layers.linear import ColumnParallelLinear
from vllm_module.layers.lora import LayerAdapters


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
        if (row_slots := self.adapters.row_slots()) is not None:
            heads = rows_of_step.by_slot(len(x))
            row_slots[0].add_heads(x, y, heads, self.features, back=not self.gives_features)
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
    :class:`~vllm_module.layers.MLAAttention` multiplies by ``w_uk`` and ``w_uv`` instead of calling
    this layer.

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
    :class:`~vllm_module.layers.MLAAttention`. The other arguments are those of
    :class:`MLAUpProjection`.
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
