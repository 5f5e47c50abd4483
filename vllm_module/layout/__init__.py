"""Which part of which checkpoint tensor lies where on which rank, as data without a model."""

from vllm_module.layout.layout import (
    HeldBox,
    HeldParameter,
    Layout,
    Made,
    Owner,
    Partition,
    RankBoxes,
    StoredTensorLayout,
)
from vllm_module.layout.layout_file import parse_layout, read_layout
from vllm_module.layout.strided import Strided

__all__ = [
    "HeldBox",
    "HeldParameter",
    "Layout",
    "Made",
    "Owner",
    "Partition",
    "RankBoxes",
    "StoredTensorLayout",
    "Strided",
    "parse_layout",
    "read_layout",
]
