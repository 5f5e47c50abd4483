"""Layouts of plans: compared with boxes written by hand, and with what ranks load."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm_module import vLLMModule
from vllm_module.core.given import Renamed
from vllm_module.core.layout_of import layout_of_module
from vllm_module.distributed import tensor_parallel
from vllm_module.errors import MissingWeightError, WeightLoadError
from vllm_module.layers import (
    ColumnParallelLinear,
    FusedMoE,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from vllm_module.layout import (
    HeldBox,
    HeldParameter,
    Layout,
    Made,
    Partition,
    RankBoxes,
    StoredTensorLayout,
    Strided,
    parse_layout,
)
from vllm_module.layout.layout_file import layout_json, problems
from vllm_module.quantization import ONLINE, EightBitMethod
from vllm_module.weights import open_checkpoint
from vllm_module.weights.region import Region

# Pytest's importlib mode has no imports between test files.
PLANNED = runpy.run_path(str(Path(__file__).with_name("planned.py")))
boxes, layout_of = PLANNED["boxes"], PLANNED["layout_of"]
TREE = runpy.run_path(str(Path(__file__).parents[1] / "module" / "tree.py"))


def test_rows_and_columns() -> None:
    """Rows of a column-parallel weight follow each other, columns of a row-parallel one do not."""
    column = layout_of(lambda: ColumnParallelLinear(3, 8), 2)
    assert boxes(column, "layer.weight") == [
        ([0], (0, 0), (4, 3), 0, (4, 3), (3, 1)),
        ([1], (4, 0), (4, 3), 0, (4, 3), (3, 1)),
    ]
    row = layout_of(lambda: RowParallelLinear(8, 3), 2)
    assert boxes(row, "layer.weight") == [
        ([0], (0, 0), (3, 4), 0, (3, 4), (4, 1)),
        ([1], (0, 4), (3, 4), 0, (3, 4), (4, 1)),
    ]
    assert row.shape_of("layer.weight", 1) == (3, 4)


def test_key_value_heads_that_ranks_share() -> None:
    """Four ranks share two heads: neighbours hold the same one, after their query heads."""
    layout = layout_of(lambda: QKVParallelLinear(5, 2, 4, 2), 4)
    assert layout.ranks == 4
    assert boxes(layout, "k_proj.weight") == [
        ([0, 1], (0, 0), (2, 5), 10, (2, 5), (5, 1)),
        ([2, 3], (2, 0), (2, 5), 10, (2, 5), (5, 1)),
    ]
    assert layout.owners("v_proj.weight", [3, 4]) == [
        (rank, "layer.weight", layout.owners("v_proj.weight", [3, 4])[0].held) for rank in (2, 3)
    ]
    assert layout.owners("v_proj.weight", [3, 4])[0].held.offset == 20 + 5 + 4


def test_a_padded_vocabulary() -> None:
    """What is beyond the vocabulary is in no box, and a rank of padding alone holds nothing."""
    layout = layout_of(lambda: VocabParallelEmbedding(10, 4), 2)
    assert boxes(layout, "layer.weight") == [([0], (0, 0), (10, 4), 0, (10, 4), (4, 1))]
    assert layout.shape_of("layer.weight", 1) == (32, 4)


def test_experts_are_ranges() -> None:
    """The experts of a layer are one entry, and a rank's experts one group, however many."""
    build = lambda: FusedMoE(num_experts=40, top_k=2, hidden_size=6, intermediate_size=4)  # noqa: E731
    layout = layout_of(build, 1, experts=4)
    (up,) = [entry for entry in layout.tensors if entry.name.endswith("up_proj.weight")]
    assert up.name.count("{expert}") == 1
    assert up.experts == (0, 40)
    assert len(layout.tensors) == 3
    name = up.name.replace("{expert}", "13")
    assert boxes(layout, name) == [([1], (0, 0), (4, 6), 3 * 48 + 24, (4, 6), (6, 1))]
    assert len(list(layout.names())) == 120
    assert [owner.rank for owner in layout.owners(name, [0, 0])] == [1]
    with pytest.raises(KeyError, match="no tensor"):
        layout.find(up.name.replace("{expert}", "40"))
    with pytest.raises(KeyError):
        layout.find(up.name)


def test_gate_and_up_that_alternate_and_are_padded() -> None:
    """Rows 0, 2, ... are the gate's, those between are up's: behind the gate and its zeros."""

    def build() -> nn.Module:
        return FusedMoE(2, 1, 3, 10, shard_names=None, block=4, interleaved=True)

    layout = layout_of(build, 1)
    assert layout.shape_of("layer.w13.weight", 0) == (2, 2 * 12, 3)
    assert boxes(layout, "layer.gate_up_proj") == [
        ([0], (0, 0, part, 0), (2, 10, 1, 3), part * 12 * 3, (2, 10, 1, 3), (72, 3, 3, 1))
        for part in (0, 1)
    ]


@pytest.mark.parametrize("scheme", ["fp8_per_channel", "fp8_per_block"])
def test_values_and_scales_of_a_layer_that_is_quantized_while_loading(scheme: str) -> None:
    """A box says which values and which scales are computed from it."""

    def build() -> nn.Module:
        layer = MergedColumnParallelLinear(128, [256, 256], bias=False, shard_names=["a", "b"])
        layer.quantize(EightBitMethod(ONLINE[scheme]))
        return layer

    layout = layout_of(build, 2)
    entry, _ = layout.find("b.weight")
    assert layout.partitions[entry.partition].conversion is not None
    ((_, box),) = [each for each in layout.held_by(entry) if list(each[0]) == [1]]
    assert (box.start, box.size, box.held.offset) == ((128, 0), (128, 128), 128 * 128)
    (made,) = box.made
    scales = layout.shape_of(f"layer.{made.attr}", 1)
    assert scales == ((256, 1) if scheme == "fp8_per_channel" else (2, 1))
    assert (made.held.offset, made.held.shape[0]) == (scales[0] // 2, scales[0] // 2)


def test_a_tied_tensor_is_held_once() -> None:
    """Two names that fill one tensor have the same boxes of one parameter."""
    with tensor_parallel(rank=0, size=1):
        model = TREE["Model"](tied=True)
    names = {**model.expected_weights(), "head.weight": torch.empty(10, 8, device="meta")}
    regions = {name: Region.of(name, tensor) for name, tensor in names.items()}
    layout = model.plan_weights(regions).layout()
    embed, _ = layout.find("embed.weight")
    head, _ = layout.find("head.weight")
    assert (head.parameter, head.partition, head.tied_to) == (
        "embed.weight",
        embed.partition,
        "embed.weight",
    )
    assert parse_layout(layout_json(layout)) == layout


def test_the_layout_of_a_plan_is_that_of_the_module() -> None:
    """Both say the same of a checkpoint with a tensor for each slot; buffers are among them."""
    with tensor_parallel(rank=1, size=2):
        model = TREE["Model"]()
    plan = model.plan_weights(model.expected_weights())
    assert plan.layout() == layout_of_module(model)
    assert "blocks.0.plain.1.running_mean" in plan.layout().parameters
    with tensor_parallel(rank=0, size=2):
        assert layout_of_module(TREE["Model"]()) == plan.layout()


class Halved(vLLMModule):
    """Loads two norms from the halves of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = RMSNorm(4), RMSNorm(4)

    def load_weights(self, weights: Any) -> set[str]:
        def halves() -> Any:
            for name, weight in weights:
                yield Renamed(f"one.{name}", name), weight.narrow(0, 0, 4)
                yield Renamed(f"other.{name}", name), weight.narrow(0, 4, 4)

        return super().load_weights(list(halves()))


def test_a_tensor_that_an_override_divides(tmp_path: Path) -> None:
    """Handles of files and regions know which part of the tensor they are; tensors do not."""
    module = Halved()
    save_file({"weight": torch.arange(8.0)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        layout = module.plan_weights(dict(checkpoint.items())).layout()
    regions = {"weight": Region.of("weight", torch.empty(8, device="meta"))}
    assert layout == module.plan_weights(regions).layout()
    assert [(entry.name, entry.parameter) for entry in layout.tensors] == [
        ("weight", "one.weight"), ("weight", "other.weight"),
    ]  # fmt: skip
    assert parse_layout(layout_json(layout)) == layout
    assert [[box.start for _, box in layout.held_by(entry)] for entry in layout.tensors] == [
        [(0,)],
        [(4,)],
    ]
    with pytest.raises(WeightLoadError, match="weight fills several parameters"):
        module.plan_weights({"weight": torch.arange(8.0)}).layout()


def test_what_has_no_layout() -> None:
    """A checkpoint that a load refuses is refused with the same words."""
    with tensor_parallel(rank=0, size=1):
        model = TREE["Model"]()
    weights = model.expected_weights()
    del weights["embed.weight"]
    with pytest.raises(MissingWeightError, match=r"embed\.weight"):
        model.plan_weights(weights).layout()
    with pytest.raises(ValueError, match="one rank or more"):
        layout_of_module(model, 0)


def test_an_index_outside_of_a_tensor_is_named() -> None:
    layout = layout_of(lambda: ColumnParallelLinear(3, 8), 2)
    for index in ([8, 0], [0, -1], [0], [0, 0, 0]):
        with pytest.raises(IndexError, match=r"layer\.weight has shape \[8, 3\]"):
            layout.owners("layer.weight", index)


@pytest.mark.parametrize("packed", [1, 2, 8])
def test_owners_of_an_element_of_any_expert(packed: int) -> None:
    """Each element is counted by hand: experts in their order, and values in their elements."""
    rows, columns, experts, ranks = 3, 16, 4, 2
    of_rank = experts // ranks
    numel = rows * columns
    place = Strided(numel, (rows, columns), (columns, 1), 2 * numel, packed)
    box = HeldBox((0, 0), (rows, columns), place)
    held = tuple(RankBoxes((at,), (box,), (at * of_rank, of_rank)) for at in range(ranks))
    layout = Layout(
        "vllm-module layout",
        1,
        "Model",
        ranks,
        {"w": HeldParameter("int32", 0)},
        (((tuple(range(ranks)), (of_rank, 2 * rows, columns // packed)),),),
        (Partition(held),),
        (StoredTensorLayout("{expert}.w", (rows, columns), "int32", "w", 0, None, (0, experts)),),
    )
    assert not list(problems(layout))
    whole = torch.arange(of_rank * 2 * numel).view(of_rank, 2 * rows, columns)
    for expert in range(experts):
        for row in range(rows):
            for column in range(columns):
                (owner,) = layout.owners(f"{expert}.w", [row, column])
                value = int(whole[expert % of_rank, rows + row, column])
                assert owner == (expert // of_rank, "w", Strided(value // packed, (), ()))


def test_what_is_made_of_any_expert() -> None:
    """A box of a later expert makes that expert's scales, by each way to ask for it."""
    rows, columns, experts, ranks = 3, 16, 4, 2
    of_rank = experts // ranks
    scales = Made("s", Strided(rows, (rows, 1), (1, 1), 2 * rows))
    box = HeldBox(
        (0, 0),
        (rows, columns),
        Strided(rows * columns, (rows, columns), (columns, 1), 2 * rows * columns),
        made=(scales,),
    )
    held = tuple(RankBoxes((at,), (box,), (at * of_rank, of_rank)) for at in range(ranks))
    shapes = (of_rank, 2 * rows, columns), (of_rank, 2 * rows, 1)
    layout = Layout(
        "vllm-module layout",
        1,
        "Model",
        ranks,
        {"w": HeldParameter("int8", 0), "s": HeldParameter("float32", 1)},
        tuple(((tuple(range(ranks)), shape),) for shape in shapes),
        (Partition(held, "int8"),),
        (StoredTensorLayout("{expert}.w", (rows, columns), "float32", "w", 0, None, (0, experts)),),
    )
    assert not list(problems(layout))
    whole = torch.arange(of_rank * 2 * rows).view(shapes[1])
    (entry,) = layout.tensors
    for expert in range(experts):
        expected = whole[expert % of_rank, rows:]
        on_rank = {name: found for name, _, found in layout.held_on(expert // of_rank)}
        ((_, by_rank),) = layout.held_by(entry, expert)
        for (found,) in (by_rank.made, on_rank[f"{expert}.w"][0].made):
            at = found.held
            assert torch.equal(whole.as_strided(at.shape, at.strides, at.offset), expected)
