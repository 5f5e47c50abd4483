"""A PyTorch framework in which the module tree loads itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_module.base.lazy import lazy_names

if TYPE_CHECKING:
    from vllm_module.base.version import __version__ as __version__
    from vllm_module.build.loader import get_model
    from vllm_module.build.registry import register_model
    from vllm_module.config import DeviceConfig, LoadConfig, ModelConfig, QuantizationConfig
    from vllm_module.core.module import vLLMModule
    from vllm_module.distributed import tensor_parallel
    from vllm_module.errors import WeightLoadError
    from vllm_module.parameters import BasevLLMParameter
    from vllm_module.runtime.async_llm import AsyncLLM
    from vllm_module.runtime.beam_search import BeamSearchParams
    from vllm_module.runtime.engine_args import EngineArgs
    from vllm_module.runtime.llm import LLM
    from vllm_module.runtime.outputs import CompletionOutput, RequestOutput
    from vllm_module.runtime.pooling_params import PoolingParams
    from vllm_module.runtime.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm_module.runtime.served_adapter import LoRARequest
    from vllm_module.runtime.text.prompts import TextPrompt, TokensPrompt
    from vllm_module.weights.source import register_source
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AsyncLLM": "vllm_module.runtime.async_llm",
            "BasevLLMParameter": "vllm_module.parameters",
            "BeamSearchParams": "vllm_module.runtime.beam_search",
            "CompletionOutput": "vllm_module.runtime.outputs",
            "DeviceConfig": "vllm_module.config",
            "EngineArgs": "vllm_module.runtime.engine_args",
            "LLM": "vllm_module.runtime.llm",
            "LoRARequest": "vllm_module.runtime.served_adapter",
            "LoadConfig": "vllm_module.config",
            "ModelConfig": "vllm_module.config",
            "PoolingParams": "vllm_module.runtime.pooling_params",
            "QuantizationConfig": "vllm_module.config",
            "RequestOutput": "vllm_module.runtime.outputs",
            "SamplingParams": "vllm_module.runtime.sampling_params",
            "StructuredOutputsParams": "vllm_module.runtime.sampling_params",
            "TextPrompt": "vllm_module.runtime.text.prompts",
            "TokensPrompt": "vllm_module.runtime.text.prompts",
            "WeightLoadError": "vllm_module.errors",
            "__version__": "vllm_module.base.version",
            "get_model": "vllm_module.build.loader",
            "register_model": "vllm_module.build.registry",
            "register_source": "vllm_module.weights.source",
            "tensor_parallel": "vllm_module.distributed",
            "vLLMModule": "vllm_module.core.module",
        },
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "BasevLLMParameter",
    "BeamSearchParams",
    "CompletionOutput",
    "DeviceConfig",
    "EngineArgs",
    "LoRARequest",
    "LoadConfig",
    "ModelConfig",
    "PoolingParams",
    "QuantizationConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WeightLoadError",
    "get_model",
    "register_model",
    "register_source",
    "tensor_parallel",
    "vLLMModule",
]
