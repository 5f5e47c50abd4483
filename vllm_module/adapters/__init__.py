"""LoRA adapters: checkpoints that are loaded by the base model's declarations."""

from vllm_module.adapters.adapter import Adapter, attach, detach
from vllm_module.adapters.config import AdapterConfig, adapter_config, read_adapter_config
from vllm_module.adapters.files import base_names, open_adapter

__all__ = [
    "Adapter",
    "AdapterConfig",
    "adapter_config",
    "attach",
    "base_names",
    "detach",
    "open_adapter",
    "read_adapter_config",
]
