"""Which part of which checkpoint tensor lies where on which rank, as data without a model."""

from vllm_module.layout.hops import Hop, Route
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
from vllm_module.layout.layout_file import layout_json, parse_layout, read_layout
from vllm_module.layout.makespan import Links, Simulated, fastest_plan, simulate
from vllm_module.layout.shards import layout_of_shards, rows
from vllm_module.layout.stages import layout_of_stages
from vllm_module.layout.state_dicts import layout_of_state_dict
from vllm_module.layout.strided import Strided
from vllm_module.layout.transfer import TransferPlan

__all__ = [
    "HeldBox",
    "HeldParameter",
    "Hop",
    "Layout",
    "Links",
    "Made",
    "Owner",
    "Partition",
    "RankBoxes",
    "Route",
    "Simulated",
    "StoredTensorLayout",
    "Strided",
    "TransferPlan",
    "fastest_plan",
    "layout_json",
    "layout_of_shards",
    "layout_of_stages",
    "layout_of_state_dict",
    "parse_layout",
    "read_layout",
    "rows",
    "simulate",
]
