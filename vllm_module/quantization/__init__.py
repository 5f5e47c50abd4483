"""Quantization methods: which parameters a layer has, and how it multiplies by them."""

from vllm_module.quantization.eight_bit import EightBitMethod
from vllm_module.quantization.kv_cache import QuantizableKVCache
from vllm_module.quantization.method import (
    QuantizableLayer,
    QuantizeMethod,
    StoredTensor,
    UnquantizedMethod,
    valid_weights,
)
from vllm_module.quantization.requested_rules import online_rules, rules_for, said_in
from vllm_module.quantization.rows import ExpertRows, QuantizedRows, RowScheme
from vllm_module.quantization.rules import Rules, quantize
from vllm_module.quantization.scheme import ONLINE, Scheme

__all__ = [
    "ONLINE",
    "EightBitMethod",
    "ExpertRows",
    "QuantizableKVCache",
    "QuantizableLayer",
    "QuantizeMethod",
    "QuantizedRows",
    "RowScheme",
    "Rules",
    "Scheme",
    "StoredTensor",
    "UnquantizedMethod",
    "online_rules",
    "quantize",
    "rules_for",
    "said_in",
    "valid_weights",
]
