from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_module.cli.options import DType
from vllm_module.config import HFConfig, ModelConfig
from vllm_module.loader import build_model, parameter_dtype, read_config
from vllm_module.module import vLLMModule
from vllm_module.weights import Checkpoint, open_checkpoint, resolve


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint's folder, and the model it describes: to be built and loaded by any rank."""

    folder: Path
    config: HFConfig
    dtype: torch.dtype

    @classmethod
    def find(cls, checkpoint: str, dtype: DType) -> ModelSource:
        """Read the configuration; the checkpoint's headers are checked on the way."""
        entries: dict[str, Any] = {"model": checkpoint, "dtype": dtype.value}
        model_config = ModelConfig(**entries)
        folder = resolve(checkpoint, None)
        config = read_config(folder, model_config)
        with open_checkpoint(folder) as opened:
            return cls(folder, config, parameter_dtype(model_config, config, opened))

    def open(self) -> Checkpoint:
        """Open the checkpoint; its count of bytes read starts at zero."""
        return open_checkpoint(self.folder)

    def build(self, device: torch.device) -> vLLMModule:
        """Build this rank's model, its parameters on the meta device until they are loaded."""
        return build_model(self.config, self.dtype, device).eval()
