"""LoRA adapters: checkpoints that are loaded by the base model's declarations."""

from vllm_module.adapters.adapter import Adapter
from vllm_module.adapters.attached import attach, check_used, detach
from vllm_module.adapters.config import AdapterConfig, adapter_config, read_adapter_config
from vllm_module.adapters.files import (
    base_names,
    file_versions,
    fingerprint,
    gathered,
    open_adapter,
)
from vllm_module.adapters.made_for import check_base
from vllm_module.adapters.plans import AdapterPlans
from vllm_module.adapters.slot_bytes import slot_bytes

__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterPlans",
    "adapter_config",
    "attach",
    "base_names",
    "check_base",
    "check_used",
    "detach",
    "file_versions",
    "fingerprint",
    "gathered",
    "open_adapter",
    "read_adapter_config",
    "slot_bytes",
]
