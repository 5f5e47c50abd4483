"""Files of layouts: what was changed, cut short or cannot be is refused."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from vllm_module import vLLMModule
from vllm_module.errors import CheckpointFormatError
from vllm_module.layers import FusedMoE, QKVParallelLinear, RowParallelLinear
from vllm_module.layout import parse_layout
from vllm_module.layout.layout_file import layout_json

# Pytest's importlib mode has no imports between test files.
PLANNED = runpy.run_path(str(Path(__file__).with_name("planned.py")))
layout_of = PLANNED["layout_of"]


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


def test_ranks_that_are_named_twice_or_not_there_are_refused() -> None:
    """In each list of ranks: those of shapes, and those that hold boxes; as of all their values."""
    value = written()
    kept = [("partition", at, held) for at, each in enumerate(value["partitions"])
            for held in range(len(each["held"]))]  # fmt: skip
    kept += [("shapes", at, 0) for at in range(len(value["shapes"]))]
    for kind, at, entry in kept:
        for ranks in ([0, 0], [0, 1, 1], [1, 0, 1], [0, 1, 2]):
            other = json.loads(json.dumps(value))
            if kind == "shapes":
                other["shapes"][at][entry][0] = ranks
            else:
                other["partitions"][at]["held"][entry]["ranks"] = ranks
            with pytest.raises(CheckpointFormatError, match=f"{kind} {at} names? a rank twice, or"):
                parse_layout(resealed(other))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("ranges", [[(0, 1), (1, 2), (3, 1)], [(2, 2), (0, 2)], [(0, 3), (3, 1)]])
def test_experts_may_be_written_in_several_entries(ranks: int, ranges: list[Any]) -> None:
    """As those are whose names differ by more than a number; each stays where it was."""

    def build() -> nn.Module:
        return FusedMoE(num_experts=4, top_k=2, hidden_size=4, intermediate_size=4)

    whole = layout_of(build, 4, experts=ranks)
    value = json.loads(layout_json(whole))
    of_experts = [entry for entry in value["tensors"] if "experts" in entry]
    assert len(of_experts) == 3
    for entry in of_experts:
        assert entry["experts"] == [0, 4]
        value["tensors"] += [{**entry, "experts": each} for each in ranges]
        value["tensors"].remove(entry)
    split = parse_layout(resealed(value))
    for name in (f"{part}_proj.weight" for part in ("gate", "up", "down")):
        for expert in range(4):
            boxes = [PLANNED["boxes"](each, f"layer.{expert}.{name}") for each in (whole, split)]
            assert boxes[0] == boxes[1] != []
    value["tensors"].append({**of_experts[0], "experts": [ranges[1][0], 1]})
    with pytest.raises(CheckpointFormatError, match=f"has expert {ranges[1][0]} twice"):
        parse_layout(resealed(value))


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
