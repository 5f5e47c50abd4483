"""Layouts of plans: compared with boxes written by hand, and with what ranks load."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm_module import vLLMModule
from vllm_module.core.given import Renamed
from vllm_module.core.layout_of import layout_of_module
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.errors import CheckpointFormatError, MissingWeightError, WeightLoadError
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
    layout_of_stages,
    parse_layout,
)
from vllm_module.layout.layout_file import layout_json, problems
from vllm_module.quantization import ONLINE, EightBitMethod
from vllm_module.weights import open_checkpoint
from vllm_module.weights.region import Region

TREE = runpy.run_path(str(Path(__file__).parents[1] / "module" / "tree.py"))


class Holder(vLLMModule):
    """A module with one child, named ``layer``."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = build()


def layout_of(build: Callable[[], nn.Module], size: int, *, experts: int = 0) -> Layout:
    spread = expert_parallel(rank=0, size=experts) if experts else nullcontext()
    with tensor_parallel(rank=0, size=size), spread:
        module = Holder(build)
    regions = {name: Region.of(name, tensor) for name, tensor in module.expected_weights().items()}
    return module.plan_weights(regions).layout()


def boxes(layout: Layout, name: str) -> list[tuple[list[int], Any, Any, int, Any, Any]]:
    """Return ranks, start, size, offset, shape and strides of each box of a tensor."""
    entry, expert = layout.find(name)
    return [
        (list(ranks), box.start, box.size, box.held.offset, box.held.shape, box.held.strides)
        for ranks, box in layout.held_by(entry, expert)
    ]


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


@pytest.mark.parametrize("tokens", [130, 10, 0])
@pytest.mark.parametrize("sizes", [(2,), (1, 1), (2, 1), (1, 2, 4), (2, 2, 2)])
def test_the_layout_of_stages_is_that_of_each_of_them(sizes: tuple[int, ...], tokens: int) -> None:
    """On each rank it has what the layout of its stage alone says, and nothing besides.

    All stages hold a table, if there is one, and each a layer and experts of its own. Of 10 tokens,
    which one rank holds and others the padding, stages of any number of ranks hold the same boxes.
    """

    def stage(number: int) -> nn.Module:
        module = vLLMModule()
        if tokens:
            module.table = VocabParallelEmbedding(tokens, 4)
        own = vLLMModule()
        own.qkv_proj = QKVParallelLinear(5, 2, 4, 2)
        own.experts = FusedMoE(3, 2, 6, 8)
        module.add_module(f"stage{number}", own)
        return module

    def held(layout: Layout, rank: int) -> dict[str, Any]:
        return {
            name: (entry.shape, boxes, layout.shape_of(entry.parameter, rank))
            for name, entry, boxes in layout.held_on(rank)
        }

    stages = [layout_of(partial(stage, number), size) for number, size in enumerate(sizes)]
    if tokens == 130 and len({*sizes}) > 1:
        with pytest.raises(ValueError, match=r"cut layer\.table\.weight, .* same number of ranks"):
            layout_of_stages(stages)
        return
    whole = layout_of_stages(stages)
    ranks = [(each, rank) for each in stages for rank in range(each.ranks)]
    assert [held(whole, rank) for rank in range(whole.ranks)] == [held(*each) for each in ranks]
    assert parse_layout(layout_json(whole)) == whole


@pytest.mark.parametrize("experts", [0, 2])
def test_stages_may_hold_parts_of_one_tensor(experts: int) -> None:
    """Where an override divides it, for example: other rows, or other experts."""
    build = partial(FusedMoE, 4, 2, 6, 8) if experts else partial(RowParallelLinear, 8, 3)
    whole = layout_of(build, 1 if experts else 2, experts=experts)

    def of_rank(rank: int) -> Layout:
        cuts = [[each for each in cut.held if rank in each.ranks] for cut in whole.partitions]
        return replace(
            whole,
            ranks=1,
            shapes=tuple(
                tuple(((0,), shape) for ranks, shape in each if rank in ranks)
                for each in whole.shapes
            ),
            partitions=tuple(Partition(tuple(replace(e, ranks=(0,)) for e in cut)) for cut in cuts),
        )

    joined = layout_of_stages([of_rank(0), of_rank(1)])
    assert parse_layout(layout_json(joined)) == joined
    for name, _, _ in whole.names():
        assert boxes(joined, name) == boxes(whole, name)


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


def written(size: int = 2) -> dict[str, Any]:
    """Return a small layout as JSON has it: a fused layer, a row-parallel one, and experts."""

    def build() -> nn.Module:
        layer = vLLMModule()
        layer.qkv_proj = QKVParallelLinear(4, 2, 4, 2)
        layer.o_proj = RowParallelLinear(8, 4)
        layer.experts = FusedMoE(num_experts=4, top_k=2, hidden_size=4, intermediate_size=4)
        return layer

    layout: dict[str, Any] = json.loads(layout_json(layout_of(build, size)))
    return layout


def resealed(value: dict[str, Any]) -> bytes:
    """Return an edited layout with the digest of its new entries."""
    import hashlib

    value.pop("sha256", None)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return json.dumps({**value, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def numbers(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every number in JSON."""
    if isinstance(value, dict):
        return [each for key, item in value.items() for each in numbers(item, (*path, key))]
    if isinstance(value, list):
        return [each for at, item in enumerate(value) for each in numbers(item, (*path, at))]
    return [path] if isinstance(value, int) else []


def changed(value: Any, path: tuple[Any, ...], by: int) -> Any:
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] += by
    return copy


def test_any_number_that_is_off_by_one_is_refused() -> None:
    """The digest finds each; without it, every number of a cut is, because boxes then overlap.

    What boxes do not show is left: how many ranks there are, and that a parameter is larger.
    """
    value = written()
    assert parse_layout(resealed(value))
    paths, missed = numbers(value), []
    assert len(paths) > 200
    for path in paths:
        for by in (-1, 1):
            other = changed(value, path, by)
            with pytest.raises(CheckpointFormatError):
                parse_layout(json.dumps(other).encode())
            try:
                parse_layout(resealed(other))
            except CheckpointFormatError:
                continue
            missed.append((path, by))
    assert all(path[0] != "partitions" for path, _ in missed), missed
    assert len(missed) < len(paths) / 10


def test_a_parameter_of_another_shape_is_refused() -> None:
    """Each parameter by itself, though the tensors of several are cut alike."""

    def build() -> nn.Module:
        layer = vLLMModule()
        layer.one, layer.two, layer.three = (RowParallelLinear(8, 4, bias=False) for _ in range(3))
        return layer

    text = layout_json(layout_of(build, 2))
    paths = [f"layer.{name}.weight" for name in ("one", "two", "three")]
    for path in paths:
        value = json.loads(text)
        assert len({each["partition"] for each in value["tensors"]}) == 1
        value["shapes"].append([[[0, 1], [4, 3]]])
        value["parameters"][path]["shapes"] = len(value["shapes"]) - 1
        with pytest.raises(CheckpointFormatError, match="of 12 values are filled") as caught:
            parse_layout(resealed(value))
        assert path in str(caught.value)


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "vllm-module layout' in version 1": lambda value: value.update(version=2),
    "expected format": lambda value: value.update(format="other"),
    "Unexpected": lambda value: value.update(more=1),
    "Field required": lambda value: value.pop("partitions"),
    "ranks": lambda value: value.update(ranks=0),
    "outside of 2": lambda value: value["partitions"][0]["held"][0].update(ranks=[7]),
    "name": lambda value: value["tensors"][0].update(name=3),
    "SHA-256": lambda value: value.update(model="Other"),
    "is not there": lambda value: value["tensors"][0].update(parameter="elsewhere"),
    "greater than or equal": lambda value: value["tensors"][0].update(partition=-1),
    "valid integer": lambda value: value["tensors"][0].update(shape=[2.5, True]),
    "overlap": lambda value: value["partitions"][0]["held"][1]["boxes"].__setitem__(
        0, {**value["partitions"][0]["held"][0]["boxes"][0], "start": [1, 0]}
    ),
    "of its": lambda value: value["partitions"][0]["held"].pop(),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_a_file_that_was_changed_is_refused(message: str) -> None:
    """The message says what is wrong, and what to do."""
    value = written()
    HOSTILE[message](value)
    data = json.dumps(value).encode() if message == "SHA-256" else resealed(value)
    with pytest.raises(CheckpointFormatError, match=message) as caught:
        parse_layout(data, "a.json")
    assert str(caught.value).startswith("a.json")
    assert "plan --layout" in str(caught.value)


def test_a_file_that_is_cut_short_is_refused() -> None:
    data = json.dumps(written()).encode()
    for end in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(CheckpointFormatError, match="plan --layout"):
            parse_layout(data[:end])


def test_the_same_element_on_a_rank_twice_is_refused() -> None:
    """Two slots at the same place of a parameter are named, with the rank."""
    value = written(1)
    (q,) = [each for each in value["tensors"] if each["name"] == "layer.q_proj.weight"]
    (k,) = [each for each in value["tensors"] if each["name"] == "layer.k_proj.weight"]
    value["partitions"][k["partition"]]["held"][0]["boxes"][0]["held"]["offset"] = 0
    with pytest.raises(CheckpointFormatError) as caught:
        parse_layout(resealed(value))
    assert "layer.q_proj.weight and layer.k_proj.weight fill the same values" in str(caught.value)
    assert f"{q['parameter']} on rank 0" in str(caught.value)


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
