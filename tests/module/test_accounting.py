"""What a load refuses, with which message, and what it skips by a rule."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_module import WeightLoadError, vLLMModule
from vllm_module.core import fill, fit
from vllm_module.errors import (
    DuplicateWeightError,
    MisshapenWeightError,
    MissingWeightError,
    ModelNotReadyError,
    UnexpectedWeightError,
)
from vllm_module.weights.changes import Changes

tree = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tree.py"))))

MISSING = {
    "blocks.1.q_proj.weight": "expected shape [8, 8], slot 'q_proj' of qkv_proj.weight",
    "blocks.0.norm.weight": "expected shape [8]",
    "blocks.0.plain.1.running_var": "expected shape [8]",
}
UNEXPECTED = {
    "blocks.0.qkqkv_proj.weight": "Block has no 'qkqkv_proj'; it has qkv_proj, q_proj, k_proj",
    "blocks.0.norm.bias": "RMSNorm has no 'bias'; it has weight",
    "blocks.0.mlp.up_proj.bias": "was built without 'bias' with a slot 'up_proj'",
    "blocks.9.norm.weight": "ModuleList has no such number; it has {0..1}",
    "blocks": "Model.blocks is known, but not with a name like this",
    "blocks.0.q_proj": "Block.q_proj is known, but not with a name like this",
    "embed.weight.x": "VocabParallelEmbedding.weight is known, but not with a name like this",
    "": "Model has no ''; it has embed, blocks, head",
}
MISSHAPEN = [
    ("blocks.0.k_proj.weight", torch.zeros(8, 8), "expected shape [4, 8], got [8, 8]"),
    ("embed.weight", torch.zeros(11, 8), "expected shape [10, 8], got [11, 8]"),
    ("embed.weight", torch.zeros(10, 8).char(), "expected dtype torch.float32 or one that conv"),
    ("embed.weight", torch.zeros(10, 8).to(torch.float8_e4m3fn), "got torch.float8_e4m3fn"),
    ("embed.weight", torch.zeros(10, 8, device="meta"), "with data, got one on the meta device"),
    ("embed.weight", [1.0], "expected a tensor or a handle, got list"),
]
DUPLICATED = [
    (
        "blocks.0.qkv_proj.weight",
        torch.zeros(16, 8),
        "blocks.0.qkv_proj.weight is already filled by 'blocks.0.q_proj.weight'",
    )
]
DAMAGES = [
    *((name, None, MissingWeightError, words) for name, words in MISSING.items()),
    *((name, torch.zeros(8), UnexpectedWeightError, words) for name, words in UNEXPECTED.items()),
    *((name, given, MisshapenWeightError, words) for name, given, words in MISSHAPEN),
    *((name, given, DuplicateWeightError, words) for name, given, words in DUPLICATED),
]


@pytest.mark.parametrize(("name", "given", "error", "words"), DAMAGES)
@pytest.mark.parametrize("streamed", [False, True])
def test_each_damage_is_refused_by_name(name, given, error, words, streamed: bool) -> None:
    """Law 1: the message has the full name, what was expected and what came; a reload succeeds."""
    tensors = tree.checkpoint() | {name: given}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    model = tree.Model().eval()
    with pytest.raises(error) as refused:
        model.load_weights(iter(tensors.items()) if streamed else tensors)
    assert isinstance(refused.value, WeightLoadError)
    assert not refused.value.report.ok
    (line,) = [line for line in str(refused.value).splitlines() if line.startswith("  ")]
    assert line.startswith(f"  {name}: ")
    assert words in line
    with pytest.raises(ModelNotReadyError):
        model(torch.arange(3))
    model.load_weights(tree.checkpoint())
    model(torch.arange(3))


def test_all_problems_come_in_one_report_with_layers_folded() -> None:
    """Law 1: problems of several kinds are one WeightLoadError; numbered names are folded."""
    tensors = tree.checkpoint(4)
    for i in range(4):
        del tensors[f"blocks.{i}.mlp.up_proj.weight"]
    tensors["extra"] = torch.zeros(1)
    tensors["embed.weight"] = torch.zeros(3)
    with pytest.raises(WeightLoadError) as refused:
        tree.Model(4).load_weights(tensors)
    assert type(refused.value) is WeightLoadError
    report = refused.value.report
    assert [len(x) for x in (report.missing, report.unexpected, report.misshapen)] == [4, 1, 1]
    assert "blocks.{0..3}.mlp.up_proj.weight: expected shape [12, 8]" in str(refused.value)


def test_skipped_names_are_reported_with_the_reason_of_the_rule() -> None:
    """Law 1: a name is skipped only by a declared rule, which holds below its module alone."""
    model = tree.Model()
    model.load_weights(tree.checkpoint() | {"blocks.0.rotary.inv_freq": torch.zeros(4)})
    assert model.load_report.skipped == {"blocks.0.rotary.inv_freq": "computed"}
    with pytest.raises(UnexpectedWeightError):
        model.load_weights(tree.checkpoint() | {"rotary.inv_freq": torch.zeros(4)})


@pytest.mark.parametrize("streamed", [False, True])
def test_tied_tensors_are_one_and_stored_with_one_value(streamed: bool) -> None:
    """A tied tensor stays one; if it is stored twice with two values, the error says what to do."""
    tensors = tree.checkpoint(1)
    tensors["head.weight"] = tensors["embed.weight"].clone()
    model = tree.Model(1, tied=True).eval()
    model.load_weights(iter(tensors.items()) if streamed else tensors)
    assert model.head.weight is model.embed.weight
    model(torch.arange(3))
    twice = [*tensors.items(), ("head.weight", tensors["head.weight"])]
    with pytest.raises(DuplicateWeightError, match="by another tensor of this name"):
        tree.Model(1, tied=True).load_weights(iter(twice) if streamed else twice)
    tensors["head.weight"] += 1
    model = tree.Model(1, tied=True).eval()
    with pytest.raises(DuplicateWeightError, match=r"head\.weight.*tie_word_embeddings"):
        model.load_weights(iter(tensors.items()) if streamed else tensors)
    with pytest.raises(ModelNotReadyError):
        model(torch.arange(3))


@pytest.mark.parametrize("rows", [1, 2.5, 3, None])
@pytest.mark.parametrize("row", [0, 4, 9])
def test_tied_tensors_are_compared_in_every_row(row: int, rows: float | None, monkeypatch) -> None:
    """A large tied tensor is compared so many of 10 rows at a time, or whole, and all of it is."""
    if rows is not None:
        monkeypatch.setattr(fill, "_COMPARED_BYTES", int(rows * 8 * 4))
    tensors = tree.checkpoint(1)
    tensors["head.weight"] = tensors["embed.weight"].clone()
    tree.Model(1, tied=True).load_weights(tensors)
    tensors["head.weight"][row, 7] += 1
    with pytest.raises(DuplicateWeightError, match=r"head\.weight.*their values differ"):
        tree.Model(1, tied=True).load_weights(tensors)


def test_tied_tensors_are_compared_bit_by_bit() -> None:
    """A NaN equals itself, and -0.0 is not 0.0."""
    tensors = tree.checkpoint(1)
    tensors["embed.weight"][0, :2] = torch.tensor([torch.nan, 0.0])
    tensors["head.weight"] = tensors["embed.weight"].clone()
    model = tree.Model(1, tied=True)
    model.allow_nan = True
    model.load_weights(tensors)
    tensors["head.weight"][0, 1] = -0.0
    with pytest.raises(DuplicateWeightError, match=r"head\.weight.*their values differ"):
        model.load_weights(tensors)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("bad", [torch.zeros(11, 8), torch.zeros(10, 8).char()])
def test_a_tied_tensor_is_not_compared_with_one_that_did_not_fit(bad, streamed: bool) -> None:
    """Only the name that does not fit is refused; nothing was read that the other could equal."""
    tensors = tree.checkpoint(1) | {"embed.weight": bad}
    assert next(iter(tensors)) == "embed.weight"  # before head.weight
    with pytest.raises(MisshapenWeightError) as refused:
        tree.Model(1, tied=True).load_weights(iter(tensors.items()) if streamed else tensors)
    report = refused.value.report
    assert [problem.name for problem in report.misshapen] == ["embed.weight"]
    assert report.loaded["head.weight"] == ["head.weight"]


SLOTS = ("gate", "up")


@pytest.mark.parametrize("sent", [("gate",), ("up",), SLOTS], ids=str)
@pytest.mark.parametrize("loaded", [(), ("gate",), ("up",), SLOTS], ids=str)
def test_elements_go_where_all_of_the_others_are_loaded(
    loaded: tuple[str, ...], sent: tuple[str, ...]
) -> None:
    """A part of a fused tensor is refused unless each slot that it is of holds values."""
    layer = tree.MLP().gate_up_proj
    layer.update_weights({f"{slot}_proj.weight": torch.ones(12, 8) for slot in loaded})
    name, rows = ("weight", 24) if sent == SLOTS else (f"{sent[0]}_proj.weight", 12)
    changes = Changes(torch.tensor([3, 60]), torch.tensor([5.0, 6.0]), (rows, 8))
    if not set(sent) <= set(loaded):
        with pytest.raises(WeightLoadError, match="nothing was loaded before: send the tensor"):
            layer.update_weights({name: changes})
        return
    layer.update_weights({name: changes})
    expected = torch.ones(rows * 8)
    expected[[3, 60]] = torch.tensor([5.0, 6.0])
    part = layer.weight[12:] if sent == ("up",) else layer.weight[:rows]
    assert torch.equal(part.flatten(), expected)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "names", [["embed.weight", "head.weight"], ["head.weight", "embed.weight"]]
)
@pytest.mark.parametrize("whole", [(), (0,), (1,)])
def test_elements_of_a_tied_tensor_are_sent_once(
    whole: tuple[int, ...], names: list[str], streamed: bool
) -> None:
    """Under both names, some elements are refused: nothing tells what the others should be."""
    tensors = tree.checkpoint(1)
    tensors["head.weight"] = new = tensors["embed.weight"].clone()
    model = tree.Model(1, tied=True)
    model.load_weights(tensors)
    changes = Changes(torch.tensor([3]), torch.tensor([7.0]), (10, 8))
    sent = {name: new.clone() if at in whole else changes for at, name in enumerate(names)}
    with pytest.raises(DuplicateWeightError) as refused:
        model.update_weights(iter(sent.items()) if streamed else sent)
    assert [problem.name for problem in refused.value.report.duplicated] == [names[1]]
    if not (streamed and whole == (0,)):  # a tensor of a stream is read at once
        model.check_ready()
        assert torch.equal(model.embed.weight[:10], new)
    model.load_weights(tensors)
    model.update_weights({names[1]: changes})
    new.view(-1)[3] = 7
    assert torch.equal(model.embed.weight[:10], new)


class Biasless(vLLMModule):
    zero_weights = {"bias": "it has none"}


@pytest.mark.parametrize("part", [1, 2.5, 3, 10, None])
def test_zeros_are_looked_for_in_every_part(part: float | None, monkeypatch) -> None:
    """A vector that may be zeros is read so many numbers at a time, and each of 10 is looked at."""
    if part is not None:
        # Smaller parts, so that a short vector has several.
        monkeypatch.setattr(fit, "_COMPARED_BYTES", int(part * 4))
    Biasless().load_weights({"bias": torch.zeros(10)})
    for place in range(10):
        bias = torch.zeros(10)
        bias[place] = -0.5
        with pytest.raises(UnexpectedWeightError, match=r"bias: expected zeros .*, got -0\.5"):
            Biasless().load_weights({"bias": bias})
