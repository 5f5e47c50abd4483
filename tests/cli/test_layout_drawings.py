"""The layout on the page of a plan: what is drawn of each tensor, and where its bytes are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_module import ModelConfig
from vllm_module.build.model_source import ModelSource
from vllm_module.cli.pictures.layout_drawings import (
    MOST_RECTANGLES,
    layout_drawings,
    sheet_of,
    span_of,
)
from vllm_module.cli.pictures.plan_page import _data
from vllm_module.cli.pictures.tiles import tiles_of
from vllm_module.cli.rank_plan import plan_ranks
from vllm_module.layout import HeldBox, Strided

Run = Callable[..., Any]
NOWHERE = Strided(0, (), ())
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model of experts, a layer in each of two files but for one expert."""
    path = tmp_path_factory.mktemp("moe")
    (path / "config.json").write_text(json.dumps(MOE))
    files: list[dict[str, list[int]]] = [
        {"model.embed_tokens.weight": [96, 32], "model.norm.weight": [32]},
        {"lm_head.weight": [96, 32]},
        {},
    ]
    for number, shapes in enumerate(files[:2]):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": [32],
            f"{layer}.post_attention_layernorm.weight": [32],
            f"{layer}.self_attn.q_proj.weight": [32, 32],
            f"{layer}.self_attn.k_proj.weight": [16, 32],
            f"{layer}.self_attn.v_proj.weight": [16, 32],
            f"{layer}.self_attn.o_proj.weight": [32, 32],
            f"{layer}.self_attn.q_norm.weight": [8],
            f"{layer}.self_attn.k_norm.weight": [8],
            f"{layer}.mlp.gate.weight": [8, 32],
        }
        for expert in range(8):
            at = f"{layer}.mlp.experts.{expert}"
            shapes = files[2] if (number, expert) == (1, 6) else files[number]
            shapes[f"{at}.gate_proj.weight"] = shapes[f"{at}.up_proj.weight"] = [16, 32]
            shapes[f"{at}.down_proj.weight"] = [32, 16]
    for number, shapes in enumerate(files):
        generator = torch.Generator().manual_seed(number)
        tensors = {
            name: torch.randn(shape, generator=generator).bfloat16()
            for name, shape in shapes.items()
        }
        save_file(tensors, path / f"model-{number}.safetensors")
    return path


def drawn(folder: Path, tp_size: int, ep_size: int = 1, **entries: Any) -> dict[str, Any]:
    source = ModelSource.find(ModelConfig(model=str(folder), **entries))
    with source.open() as checkpoint:
        ranks = plan_ranks(source, checkpoint, tp_size, ep_size)
        data = layout_drawings(ranks[0].load, ranks[0].load.layout(len(ranks)))
    read: dict[str, Any] = json.loads(json.dumps(data))
    return read


def by_name(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {", ".join(drawing["names"]): drawing for drawing in data["drawings"]}


def ranks_of(data: dict[str, Any], slot: dict[str, Any]) -> list[list[int]]:
    boxes = data["sheets"][slot["sheet"]]["boxes"]
    return [data["rankLists"][holder[0]] for box in boxes for holder in box["holders"]]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], HeldBox]:
    """Draw a shape, and a box of it or of a view of it."""
    view = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start = tuple(draw(st.integers(0, size - 1)) for size in view)
    size = tuple(draw(st.integers(1, n - at)) for n, at in zip(view, start, strict=True))
    cut = draw(st.integers(0, len(view) - 1))
    shape = (*view[:cut], math.prod(view[cut:])) if draw(st.booleans()) else view
    return shape, HeldBox(start, size, NOWHERE, None if shape == view else view)


@given(boxes())
def test_rectangles_are_the_boxes_elements(drawn_box: tuple[tuple[int, ...], HeldBox]) -> None:
    """The rectangles of a box, and its span, are the elements that torch's narrow has of it."""
    shape, box = drawn_box
    elements = torch.arange(math.prod(shape)).reshape(box.view or shape)
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        elements = elements.narrow(dim, start, size)
    expected = elements.flatten().tolist()

    sheet = sheet_of(shape, [box])
    marks = torch.zeros(sheet.rows, sheet.columns, dtype=torch.int)
    for row, column, rows, columns in sheet.boxes[0][1]:
        marks[row : row + rows, column : column + columns] += 1
    assert marks.flatten().nonzero().flatten().tolist() == sorted(expected)
    assert marks.max() == 1
    assert sheet.drawn == 1

    first, last, runs = span_of(box, shape)
    assert (first, last) == (min(expected), max(expected) + 1)
    gaps = sum(after - before > 1 for before, after in pairwise(expected))
    assert gaps + 1 <= runs <= len(expected)


def test_stripes_become_few_rectangles() -> None:
    """Boxes of every other row are columns of a picture that is twice as wide."""
    view = 4096, 2, 64
    halves = [HeldBox((0, at, 0), (4096, 1, 64), NOWHERE, view) for at in (0, 1)]
    sheet = sheet_of((8192, 64), halves)
    assert (sheet.rows, sheet.columns) == (4096, 128)
    assert [rectangles for _, rectangles in sheet.boxes] == [
        [(0, 0, 4096, 64)],
        [(0, 64, 4096, 64)],
    ]
    # Columns of the inner dimension are stripes in every picture: some of them are drawn.
    inner = [HeldBox((0, 0, 0, 0), (600, 1, 600, 1), NOWHERE, (600, 2, 600, 2))]
    sheet = sheet_of((1200, 1200), inner)
    assert 0 < sheet.drawn < 1
    assert 0 < sum(len(each) for _, each in sheet.boxes) <= MOST_RECTANGLES


def test_parameters_that_are_cut_alike_share_a_drawing(folder: Path) -> None:
    """A drawing has the names of all layers, and the slots of a fused parameter in its order."""
    data = drawn(folder, 4)
    drawings = by_name(data)
    fused = drawings["model.layers.{0..2}.self_attn.qkv_proj.weight"]
    assert [slot["slot"] for slot in fused["slots"]] == ["q_proj", "k_proj", "v_proj"]
    assert fused["slots"][1]["names"] == ["model.layers.{0..2}.self_attn.k_proj.weight"]
    assert len(fused["members"]) == 3
    # There are two heads of keys: with four ranks, two hold the same one.
    assert ranks_of(data, fused["slots"][0]) == [[0], [1], [2], [3]]
    assert ranks_of(data, fused["slots"][1]) == [[0, 1], [2, 3]]
    assert "model.embed_tokens.weight, lm_head.weight" in drawings
    (norms,) = (each for name, each in drawings.items() if "model.norm.weight" in name)
    assert len(norms["members"]) == 1 + 2 * 3
    sheet = data["sheets"][norms["slots"][0]["sheet"]]
    assert (sheet["rows"], sheet["columns"]) == (1, 32)


def test_experts_are_in_one_drawing(moe: Path) -> None:
    """Ranks hold whole experts; layers share the drawing and the order of experts in files."""
    data = drawn(moe, 2, 4)
    up = by_name(data)["model.layers.{0..1}.mlp.experts.w13.weight"]
    assert [(slot["slot"], slot["experts"]) for slot in up["slots"]] == [
        ("gate_proj", [0, 8]),
        ("up_proj", [0, 8]),
    ]
    sheet = data["sheets"][up["slots"][1]["sheet"]]
    held = {
        tuple(box["experts"]): data["rankLists"][box["holders"][0][0]] for box in sheet["boxes"]
    }
    assert held == {(0, 2): [0], (2, 2): [1], (4, 2): [2], (6, 2): [3]}
    assert len(data["expertPlaces"]) == 2  # one a layer: gate, up and down are in equal places
    assert len(up["members"]) == 2
    everyone = by_name(drawn(moe, 2))["model.layers.{0..1}.mlp.experts.w13.weight"]
    assert everyone["slots"][0]["experts"] == [0, 8]


@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), (1, 4)])
def test_byte_ranges_hold_the_boxes(moe: Path, tp_size: int, ep_size: int) -> None:
    """The bytes of files at the ranges of boxes that are one run are the boxes' elements."""
    data = drawn(moe, tp_size, ep_size)
    compared = 0
    for drawing in data["drawings"]:
        for path, stored in drawing["members"]:
            for slot, (name, file, begin, *places) in zip(drawing["slots"], stored, strict=True):
                for box in data["sheets"][slot["sheet"]]["boxes"]:
                    first, last, runs = box["span"]
                    for expert in range(*(box["experts"] or (0, 1))):
                        at = [0, 0]
                        if places:
                            at = data["expertPlaces"][places[0]][2 * expert : 2 * expert + 2]
                        found = moe / data["files"][file + at[0]]
                        full = (name or path).replace("{expert}", str(expert))
                        with safe_open(found, framework="pt") as opened:
                            tensor = opened.get_tensor(full)
                        for dim, (start, size) in enumerate(
                            zip(box["start"], box["size"], strict=True)
                        ):
                            tensor = tensor.narrow(dim, start, size)
                        where = begin + at[1] + first * slot["itemsize"]
                        length = (last - first) * slot["itemsize"]
                        if runs == 1:
                            compared += 1
                            read = found.read_bytes()[where : where + length]
                            assert read == bytes(
                                tensor.contiguous().view(torch.uint8).flatten().tolist()
                            )
    assert compared > 20


def test_ranks_that_are_alike_share_a_list_of_tiles(moe: Path) -> None:
    """The numbers of a rank, put into the texts of the list, give the names of its own tiles."""
    source = ModelSource.find(ModelConfig(model=str(moe)))
    with source.open() as checkpoint:
        for tp_size, ep_size, lists in ((1, 4, 2), (1, 8, 8), (4, 1, 4)):
            ranks = plan_ranks(source, checkpoint, tp_size, ep_size)
            tiles = tiles_of(ranks)
            data = json.loads(json.dumps(_data(ranks, tiles, 1.0)))
            assert len(data["lists"]) == lists
            for rank, expected in zip(data["ranks"], tiles, strict=True):
                shown = data["lists"][rank["list"]]
                assert [row[1:] for row in shown] == [[*(t.byte_range or ())] for t in expected]
                texts = [
                    [
                        text
                        if isinstance(text, str)
                        else "".join(p if isinstance(p, str) else rank["numbers"][p] for p in text)
                        for text in data["tiles"][row[0]][:4]
                    ]
                    for row in shown
                ]
                assert texts == [[t.layer, t.name, t.parameter, t.slot] for t in expected]
                assert [data["tiles"][row[0]][5] for row in shown] == [t.bytes for t in expected]


def test_what_the_layer_fills_by_itself_is_drawn(moe: Path) -> None:
    """A slot that the checkpoint lacks has a rectangle, which says so."""
    source = ModelSource.find(ModelConfig(model=str(moe)))
    with source.open() as checkpoint:
        (rank,) = plan_ranks(source, checkpoint, 1, 1)
        layout = rank.load.layout()
        lacking = replace(layout, tensors=layout.tensors[:-1], absent=layout.tensors[-1:])
        data = layout_drawings(rank.load, lacking)
    absent = [
        slot["names"] for each in data["drawings"] for slot in each["slots"] if slot["absent"]
    ]
    assert absent == [[layout.tensors[-1].name]]


def test_what_is_quantized_names_its_scales(folder: Path) -> None:
    """A box of a weight that is quantized while loading says where its scales are."""
    data = drawn(folder, 2, quantization="fp8_per_channel")
    down = by_name(data)["model.layers.{0..2}.mlp.down_proj.weight"]
    sheet = data["sheets"][down["slots"][0]["sheet"]]
    assert "float8" in sheet["conversion"]
    assert [made[0] for made in sheet["boxes"][1]["holders"][0][6]] == ["weight_scale"]
    assert down["dtype"] == "float8_e4m3fn"
    assert down["slots"][0]["itemsize"] == 2


def test_a_sharded_state_has_no_layout(run: Run, folder: Path, tmp_path: Path) -> None:
    """The page of a sharded state leaves the section out, and that of a checkpoint has it."""
    state, page = tmp_path / "state", tmp_path / "plan.html"
    assert run("shard", folder, "--out", state, "--tp", 2).code == 0
    for path, expected in ((state, False), (folder, True)):
        assert run("plan", path, "--tp", 2, "--html", page).code == 0
        assert ('class="layouts"' in page.read_text()) is expected
