"""The formats of weights that a user may ask for. The names are vLLM's and SGLang's."""

from __future__ import annotations

from typing import Literal

# All other lists of these names come from this one. "auto" looks for the formats of files in their
# order here, which is that of weights.formats.FORMATS. "layered" is "auto": every load quantizes
# one module after the other. "dummy" has no files.
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
