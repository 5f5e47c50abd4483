"""A PyTorch framework in which the module tree loads itself."""

from vllm_module.config import DeviceConfig, LoadConfig, ModelConfig, QuantizationConfig
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import WeightLoadError
from vllm_module.loader import get_model
from vllm_module.module import vLLMModule
from vllm_module.parameters import BasevLLMParameter
from vllm_module.runtime.llm import LLM
from vllm_module.runtime.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "BasevLLMParameter",
    "DeviceConfig",
    "LoadConfig",
    "ModelConfig",
    "QuantizationConfig",
    "SamplingParams",
    "WeightLoadError",
    "get_model",
    "tensor_parallel",
    "vLLMModule",
]
