from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_module.config import HFConfig, ModelConfig
from vllm_module.loader import build_model, parameter_dtype, quantization_rules, read_config
from vllm_module.module import vLLMModule
from vllm_module.quantization import Rules
from vllm_module.weights import Checkpoint, open_checkpoint, resolve


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint's folder, and the model it describes: to be built and loaded by any rank."""

    folder: Path
    config: HFConfig
    dtype: torch.dtype
    rules: Rules | None

    @classmethod
    def find(cls, model_config: ModelConfig) -> ModelSource:
        """Read the configuration; the checkpoint's headers are checked on the way."""
        folder = resolve(model_config.model, model_config.revision)
        config = read_config(folder, model_config)
        rules = quantization_rules(model_config, config)
        with open_checkpoint(folder) as opened:
            return cls(folder, config, parameter_dtype(model_config, config, opened), rules)

    def open(self) -> Checkpoint:
        """Open the checkpoint; its count of bytes read starts at zero."""
        return open_checkpoint(self.folder)

    def build(self, device: torch.device) -> vLLMModule:
        """Build this rank's model, its parameters on the meta device until they are loaded."""
        return build_model(self.config, self.dtype, device, self.rules).eval()
