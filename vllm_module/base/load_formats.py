"""Formats of weights that a user may request, under the names of vLLM and SGLang."""

from __future__ import annotations

from typing import Literal

# All other lists of these names are derived from this one. "auto" looks for the formats of files in
# this order, which is that of weights.formats.FORMATS. "layered" is "auto", because every load
# quantizes one module after the other. "dummy" has no files.
LoadFormat = Literal[
    "auto",
    "sharded_state",
    "safetensors",
    "pt",
    "npcache",
    "gguf",
    "mistral",
    "dcp",
    "layered",
    "dummy",
]
