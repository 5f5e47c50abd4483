"""The formats of weights that a user may ask for. The names are vLLM's and SGLang's."""

from __future__ import annotations

from typing import Literal

# All other lists of these names come from this one. With "auto", the formats of files are looked
# for in this order, which is that of weights.checkpoint.FORMATS.
LoadFormat = Literal["auto", "safetensors", "pt", "dcp", "mistral"]
