"""What models with Mamba-2 in some layers share: entries of config.json, and a layer's mixer."""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from vllm_module.hf_config import ConvKernel, Size, TimeStepLimit
from vllm_module.layers import Mamba2Mixer
from vllm_module.models.llama import LlamaConfig

_KINDS = {"attention": "full_attention", "mamba": "linear_attention"}  # older names


class Mamba2HybridConfig(LlamaConfig):
    attribute_map: ClassVar = {"layer_types": "layers_block_type"}

    hidden_act: Literal["silu", "swish"] = "silu"  # of the convolutions too
    mamba_n_heads: Size = 128
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_conv: ConvKernel = 4
    mamba_expand: Size = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: TimeStepLimit = (0.0, inf)

    @property
    def mamba_features(self) -> tuple[int, str]:
        """The features that a mixer's heads have together, and the entries that say so."""
        entries = f"mamba_expand {self.mamba_expand} * hidden_size {self.hidden_size}"
        return self.mamba_expand * self.hidden_size, entries

    @model_validator(mode="after")
    def _fill_layer_types(self) -> Mamba2HybridConfig:
        if self.layer_types is not None:
            types = [_KINDS.get(kind, kind) for kind in self.layer_types]
            vars(self)["layer_types"] = types  # the fields are frozen
        return self

    @model_validator(mode="after")
    def _fill_head_dim(self) -> Mamba2HybridConfig:
        (features, entries), heads = self.mamba_features, self.mamba_n_heads
        if heads % self.mamba_n_groups:
            raise ValueError(
                f"mamba_n_heads {heads} should be a multiple of mamba_n_groups "
                f"{self.mamba_n_groups}"
            )
        if self.mamba_d_head == "auto":
            if features % heads:
                raise ValueError(
                    f"mamba_d_head is 'auto', and mamba_n_heads {heads} does not divide "
                    f"{features}, which is {entries}"
                )
            vars(self)["mamba_d_head"] = features // heads
        given = bool({"mamba_expand", "mamba_d_ssm"} & self.model_fields_set)
        if given and heads * int(self.mamba_d_head) != features:
            raise ValueError(
                f"mamba_n_heads {heads} * mamba_d_head {self.mamba_d_head} should be {entries}"
            )
        return self


class HybridMamba2Mixer(Mamba2Mixer):
    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(
            config.hidden_size,
            config.mamba_n_heads,
            config.mamba_d_head,
            config.mamba_n_groups,
            config.mamba_d_state,
            config.mamba_d_conv,
            config.rms_norm_eps,
            config.mamba_proj_bias,
            config.mamba_conv_bias,
            time_step_limit=config.time_step_limit,
            **options,
        )
