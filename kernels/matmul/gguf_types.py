"""Types of tensors in GGUF files (ggml types), with the values and bytes of a block.

Numbers and sizes: ggml.h, ``enum ggml_type``, and ggml-common.h of
https://github.com/ggml-org/llama.cpp. This file needs no torch, because headers are read without
it.
"""

from __future__ import annotations

from typing import NamedTuple


class BlockType(NamedTuple):
    """A type whose values share blocks: number of values and bytes of a block."""

    values: int
    nbytes: int


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18),
    "Q4_1": BlockType(32, 20),
    "Q5_0": BlockType(32, 22),
    "Q5_1": BlockType(32, 24),
    "Q8_0": BlockType(32, 34),
    "Q2_K": BlockType(256, 84),
    "Q3_K": BlockType(256, 110),
    "Q4_K": BlockType(256, 144),
    "Q5_K": BlockType(256, 176),
    "Q6_K": BlockType(256, 210),
    "TQ1_0": BlockType(256, 54),
    "TQ2_0": BlockType(256, 66),
    "IQ1_S": BlockType(256, 50),
    "IQ1_M": BlockType(256, 56),
    "IQ2_XXS": BlockType(256, 66),
    "IQ2_XS": BlockType(256, 74),
    "IQ2_S": BlockType(256, 82),
    "IQ3_XXS": BlockType(256, 98),
    "IQ3_S": BlockType(256, 110),
    "IQ4_NL": BlockType(32, 18),
    "IQ4_XS": BlockType(256, 136),
    "MXFP4": BlockType(32, 17),
}

# Names by the number in a file. Missing numbers were removed from the format.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
