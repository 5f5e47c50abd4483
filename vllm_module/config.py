"""Configurations: ours, closed and frozen, and Hugging Face's ``config.json``, open and frozen."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


OnlineScheme = Literal[
    "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel_weight_only"
]


class QuantizationConfig(_Closed):
    """How a full-precision checkpoint is quantized while it is loaded.

    Layers go by the checkpoint's names: a name, or some of its components in a row, stands for
    itself and all below it (``"mlp"``, ``"layers.0"``); ``re:`` and a regular expression for what
    it matches. What has no effect is refused.

    Attributes:
        scheme: of every linear layer that nothing below says otherwise of.
        ignore: layers that stay as they are.
        overrides: layers with a scheme of their own, or ``"none"``; the first that fits, and before
            ``ignore``.
        weight_block_size: rows and columns of a block of ``fp8_per_block``.

    """

    scheme: OnlineScheme
    ignore: tuple[str, ...] = ("lm_head",)
    overrides: dict[str, OnlineScheme | Literal["none"]] = Field(default_factory=dict)
    weight_block_size: tuple[PositiveInt, PositiveInt] = (128, 128)


class ModelConfig(_Closed):
    """Which model, and how it is built.

    Attributes:
        model: a local folder in Hugging Face layout, or a hub id.
        revision: of the hub repository: branch, tag or commit.
        dtype: of the parameters, by its name or torch's own; ``"auto"`` takes the checkpoint's.
        quantization: quantize while loading, by a scheme's name (``"fp8"`` is per tensor) or in
            detail. A checkpoint that is quantized already says so itself; ``"fp8"`` and
            ``"compressed-tensors"`` then only demand that it is.
        max_model_len: most tokens of a sequence; the configuration's own limit unless given.
        hf_overrides: entries that replace those of ``config.json``.

    """

    model: str
    revision: str | None = None
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        BeforeValidator(
            lambda dtype: (
                str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
            )
        ),
    ] = "auto"
    quantization: (
        OnlineScheme | Literal["fp8", "compressed-tensors"] | QuantizationConfig | None
    ) = None
    max_model_len: PositiveInt | None = None
    hf_overrides: dict[str, Any] = Field(default_factory=dict)


class LoadConfig(_Closed):
    """How weights are loaded.

    Attributes:
        show_progress: draw a progress bar with bytes and rate on standard error.
        timeout: seconds that a rank in a process of its own, once it is done, waits for the
            others to find (and download) the checkpoint, and then to load it.

    """

    show_progress: bool = False
    timeout: PositiveFloat = Field(default=1800.0, allow_inf_nan=False)


class EngineConfig(_Closed):
    """How a loaded model is served.

    Attributes:
        tensor_parallel_size: ranks, each a process with a device of its own.
        kv_cache_dtype: of the cache; ``"auto"`` is the model's, ``"fp8"`` is fp8_e4m3.
        block_size: tokens a page of the cache.
        gpu_memory_utilization: share of a GPU's memory that weights, a step and the cache take.
        kv_cache_memory_bytes: of the cache on each rank, in place of that; on a CPU, 1 GiB unless
            given.
        swap_space: GiB of host memory on each rank, for sequences that have to wait; 0 makes them
            start over, which costs little where their beginning is still in the cache.
        enable_prefix_caching: begin prompts with the pages of others that began alike.
        max_num_seqs: sequences in a step at most.
        max_num_batched_tokens: tokens in a step at most; longer prompts are computed in chunks.
        enforce_eager: run every step without CUDA graphs.
        enable_torch_compile: let torch.compile fuse what is between the attention of two layers.

    """

    tensor_parallel_size: PositiveInt = 1
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    block_size: PositiveInt = 16
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_cache_memory_bytes: PositiveInt | None = None
    swap_space: Annotated[float, Field(ge=0, le=2**20)] = 0.0
    enable_prefix_caching: bool = True
    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt = 2048
    enforce_eager: bool = False
    enable_torch_compile: bool = False


class DeviceConfig(_Closed):
    """Where the model lives: a device string of torch, or ``"auto"`` for CUDA if there is one."""

    device: str = "auto"

    @property
    def torch_device(self) -> torch.device:
        """The device itself."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise ValueError(
                f"{self.device!r} is no device: expected cpu, cuda, cuda:1 … or auto"
            ) from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device {self.device!r} was asked for, but torch finds no CUDA device"
            )
        return device


# Strict, because what is checked here is used as it was written: "5" * 2 is "55".
_Size = Annotated[int, Field(gt=0, lt=2**31, strict=True)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]


class _Rope(BaseModel):
    model_config = ConfigDict(extra="allow")

    factor: _Positive | None = None
    original_max_position_embeddings: _Size | None = None
    rope_theta: _Positive | None = None


# Entries that not every model has; where one is, it has to make sense.
_OPTIONAL: dict[str, TypeAdapter[Any]] = {
    "attention_bias": TypeAdapter(bool),
    "head_dim": TypeAdapter(_Size | None),
    "hidden_act": TypeAdapter(str),
    "intermediate_size": TypeAdapter(_Size),
    "layer_types": TypeAdapter(list[str] | None),
    "max_position_embeddings": TypeAdapter(_Size),
    "num_key_value_heads": TypeAdapter(_Size | None),
    "rms_norm_eps": TypeAdapter(_Positive),
    "rope_parameters": TypeAdapter(_Rope | None),
    "rope_scaling": TypeAdapter(_Rope | None),
    "rope_theta": TypeAdapter(_Positive | None),
    "sliding_window": TypeAdapter(_Size | None),
}


class HFConfig(BaseModel):
    """A checkpoint's ``config.json``: its entries are attributes, and the usual ones are checked.

    An entry that is not there is an ``AttributeError`` that says so; models read optional ones
    with ``getattr(config, name, default)``.
    """

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    architectures: list[str] = Field(min_length=1)
    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    vocab_size: _Size
    tie_word_embeddings: bool = False

    @model_validator(mode="after")
    def _check_optional(self) -> HFConfig:
        for name, value in (self.__pydantic_extra__ or {}).items():
            if name in _OPTIONAL:
                try:
                    _OPTIONAL[name].validate_python(value)
                except ValidationError as error:
                    problem = error.errors()[0]
                    path = ".".join(map(str, (name, *problem["loc"])))
                    raise ValueError(
                        f"{path}: {problem['msg']}, got {problem['input']!r}"
                    ) from None
        return self

    @property
    def context_length(self) -> int | None:
        """The most positions the model was made for, rope scaling included; None if unlimited.

        Scalings that stretch ``max_position_embeddings`` multiply it by their factor; yarn
        multiplies the original length, and llama3's limit is already the stretched one.
        """
        limit = getattr(self, "max_position_embeddings", None)
        scaling = getattr(self, "rope_scaling", None) or getattr(self, "rope_parameters", None)
        if not limit or not scaling:
            return limit
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "yarn" and scaling.get("original_max_position_embeddings"):
            limit = scaling["original_max_position_embeddings"]
        if kind in ("linear", "dynamic", "yarn"):
            limit = int(limit * (scaling.get("factor") or 1))
        return int(limit)

    def __getattr__(self, name: str) -> Any:
        extra = object.__getattribute__(self, "__pydantic_extra__") or {}
        if name in extra:
            return extra[name]
        raise AttributeError(f"config.json has no {name!r}")
