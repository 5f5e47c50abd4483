"""The values of options that name one of several things."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, get_args

from vllm_module.base import load_formats


class DType(str, Enum):
    """The dtypes that a model runs in."""

    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Quantization(str, Enum):
    """The schemes that weights are quantized with while they load, and formats to insist on."""

    fp8 = "fp8"
    fp8_per_tensor = "fp8_per_tensor"
    fp8_per_channel = "fp8_per_channel"
    fp8_per_block = "fp8_per_block"
    int8_per_channel_weight_only = "int8_per_channel_weight_only"
    int4_per_group = "int4_per_group"
    compressed_tensors = "compressed-tensors"
    gptq = "gptq"
    awq = "awq"
    bitsandbytes = "bitsandbytes"


if TYPE_CHECKING:

    class LoadFormat(str, Enum):
        """The formats of weights; type checkers need to know only those that the code names."""

        auto = "auto"
        dummy = "dummy"

else:
    _names = get_args(load_formats.LoadFormat)
    LoadFormat = Enum("LoadFormat", {name: name for name in _names}, type=str)


class ModelImpl(str, Enum):
    """Whose model is built."""

    auto = "auto"
    native = "native"
    transformers = "transformers"


class CacheDType(str, Enum):
    """The dtypes of the keys and values in the KV cache."""

    auto = "auto"
    fp8 = "fp8"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"


FORMATS = Quantization.compressed_tensors, Quantization.gptq, Quantization.awq
_LONGEST = Quantization.int8_per_channel_weight_only
SHORT_SCHEMES = [each for each in Quantization if each not in (*FORMATS, _LONGEST)]
