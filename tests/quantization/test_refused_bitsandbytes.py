"""Checkpoints of bitsandbytes that are damaged, or do not go with their configuration."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module import ModelConfig, get_model
from vllm_module.distributed import run_ranks
from vllm_module.errors import (
    CheckpointFormatError,
    MisshapenWeightError,
    MissingWeightError,
    ModelNotReadyError,
    ShardingError,
    UnsupportedModelError,
    WeightLoadError,
    WeightReadError,
)
from vllm_module.layers import RowParallelLinear
from vllm_module.quantization import rules_for
from vllm_module.quantization.bitsandbytes import BitsAndBytes4BitMethod
from vllm_module.quantization.online_nf4 import OnlineNF4Method

bnb = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("bnb_checkpoints.py"))))

LAYER = "model.layers.0.mlp.up_proj"
WEIGHT = f"{LAYER}.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"
HELD = "model.layers.0.mlp.gate_up_proj"

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], object]


@pytest.fixture(scope="module")
def nested(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bnb.publish(tmp_path_factory.mktemp("nested"), "qwen3", "nf4-nested")


@pytest.fixture(scope="module")
def int8(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bnb.publish(tmp_path_factory.mktemp("int8"), "qwen3", "int8")


def refused(
    folder: Path, checkpoint: Any, edit: Edit, config: dict[str, Any] | None = None
) -> WeightLoadError:
    """Return the error that an edited checkpoint is refused with."""
    tensors = dict(checkpoint.tensors)
    edit(tensors)
    bnb.write(folder, tensors, checkpoint.config if config is None else config)
    with pytest.raises(WeightLoadError) as error:
        get_model(model_config=ModelConfig(model=str(folder)))
    return error.value


def text(entries: str | bytes) -> torch.Tensor:
    data = entries.encode() if isinstance(entries, str) else entries
    return torch.tensor(list(data), dtype=torch.uint8)


def entries(tensors: Tensors) -> dict[str, Any]:
    return json.loads(bytes(tensors[STATE].tolist()))


def with_entry(**changes: Any) -> Edit:
    """Return an edit that changes entries of a quant_state; ``...`` removes one."""

    def edit(tensors: Tensors) -> None:
        changed = entries(tensors) | changes
        changed = {key: value for key, value in changed.items() if value is not ...}
        tensors[STATE] = text(json.dumps(changed))

    return edit


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name].clone())

    return edit


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (with_entry(shape=[128, 512]), "shape is [128, 512], expected [256, 256] or [512, 256]"),
        (with_entry(shape=[256]), "shape is [256], expected"),
        (with_entry(blocksize=128), "blocksize is 128, expected 64"),
        (with_entry(quant_type="fp4"), "quant_type is fp4, expected nf4"),
        (with_entry(nested_blocksize=128), "nested_blocksize is 128, expected 256"),
        (with_entry(nested_blocksize=...), "nested_blocksize is None, expected 256"),
        (with_entry(nested_dtype="bfloat16"), "nested_dtype is bfloat16, expected float32"),
        (with_entry(nested_offset=1e300), "stands for scales beyond float32"),
        (with_entry(nested_offset=...), "nested_offset is missing"),
        (with_entry(shape="256"), "shape: Input should be a valid list, got 256"),
        (with_entry(blocksize=True), "blocksize: Input should be a valid integer, got True"),
        (with_entry(blocksize=0), "blocksize: Input should be greater than 0, got 0"),
        (with_entry(quant_type=...), "quant_type: Field required"),
        (with_entry(nested_offset=float("nan")), "is not valid JSON: NaN is not JSON"),
    ],
)
def test_a_quant_state_of_something_else(
    nested: Any, tmp_path: Path, edit: Edit, problem: str
) -> None:
    """The message has the tensor's path and slot, what was expected and what came."""
    error = refused(tmp_path / "edited", nested, edit)
    assert isinstance(error, WeightReadError | CheckpointFormatError)
    assert str(error).startswith(f"{HELD}.weight.")
    assert " (slot 'up_proj')" in str(error)
    assert problem in str(error)


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b"[]", b"\0", b"{}", b'{"a": 1, "a": 2}'])
def test_a_quant_state_that_is_no_json(nested: Any, tmp_path: Path, data: bytes) -> None:
    """Bytes that are no JSON object are refused with the tensor's path."""
    error = refused(
        tmp_path / "edited", nested, lambda tensors: tensors.update({STATE: text(data)})
    )
    assert str(error).startswith(f"{HELD}.weight.quant_state (slot 'up_proj')")


def test_an_endless_quant_state(nested: Any, tmp_path: Path) -> None:
    """A text of more than 512 bytes is refused before it is read."""
    long = {STATE: text(" " * 600)}
    error = refused(tmp_path / "edited", nested, lambda tensors: tensors.update(long))
    assert isinstance(error, MisshapenWeightError)
    assert f"{STATE}: expected shape [512], got [600]" in str(error)


@pytest.mark.parametrize(
    "name",
    ["", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE[len(WEIGHT) :]],
)
def test_a_tensor_that_is_missing(nested: Any, tmp_path: Path, name: str) -> None:
    """It is named as the checkpoint would name it."""
    error = refused(tmp_path / "edited", nested, lambda tensors: tensors.pop(WEIGHT + name))
    assert isinstance(error, MissingWeightError)
    assert f"{WEIGHT}{name}: expected shape" in str(error)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("", lambda t: t[:-1], "expected shape [32768, 1], got [32767, 1]"),
        ("", lambda t: t.view(256, 128), "expected shape [32768, 1], got [256, 128]"),
        ("", lambda t: t.view(torch.int8), "expected dtype torch.uint8"),
        (".absmax", lambda t: t[::2].contiguous(), "expected shape [1024], got [512]"),
        (".absmax", lambda t: t.float(), "expected dtype torch.uint8"),
        (".quant_map", lambda t: t[:8], "expected shape [16], got [8]"),
        (".nested_quant_map", lambda t: t[:16], "expected shape [256], got [16]"),
        (".nested_absmax", lambda t: t[:1], "expected shape [4], got [1]"),
    ],
)
def test_another_shape_or_dtype(
    nested: Any, tmp_path: Path, name: str, change: Any, problem: str
) -> None:
    """Each tensor has one shape and dtype, and nothing is read if one has another."""
    error = refused(tmp_path / "edited", nested, with_tensor(WEIGHT + name, change))
    assert isinstance(error, MisshapenWeightError)
    assert f"{WEIGHT}{name}: " in str(error)
    assert problem in str(error)


@pytest.mark.parametrize("name", ["quant_map", "nested_absmax", "nested_quant_map"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(nested: Any, tmp_path: Path, name: str, value: float) -> None:
    """The message names the tensor and its slot."""
    edit = with_tensor(f"{WEIGHT}.{name}", first(value))
    error = refused(tmp_path / "edited", nested, edit)
    assert isinstance(error, WeightReadError)
    assert str(error).startswith(f"{HELD}.weight.{name} (slot 'up_proj') has {value:g}")


def test_scales_that_overflow(nested: Any, tmp_path: Path) -> None:
    """Finite scales of scales may still have a product that is not."""
    edits = (
        with_tensor(f"{WEIGHT}.nested_absmax", first(3e38)),
        with_tensor(f"{WEIGHT}.nested_quant_map", lambda t: t * 100),
    )
    error = refused(tmp_path / "edited", nested, lambda tensors: [e(tensors) for e in edits])
    assert str(error).startswith(f"{HELD}.weight.absmax (slot 'up_proj')")


def test_values_that_differ_between_slots(nested: Any, tmp_path: Path) -> None:
    """One product has one table of values, so a slot with another one is refused."""
    error = refused(
        tmp_path / "edited", nested, with_tensor(f"{WEIGHT}.quant_map", lambda t: t * 2)
    )
    assert str(error).startswith(f"{HELD}.weight.quant_map has values that differ")


def test_int8_in_another_order(int8: Any, tmp_path: Path) -> None:
    """Only rows are known, and scales must be finite."""
    edit = with_tensor(f"{LAYER}.weight_format", lambda t: t + 1)
    error = refused(tmp_path / "order", int8, edit)
    assert str(error).startswith(f"{HELD}.weight_format (slot 'up_proj') has 1, and must be 0")
    error = refused(tmp_path / "scale", int8, with_tensor(f"{LAYER}.SCB", first(float("nan"))))
    assert str(error).startswith(f"{HELD}.SCB (slot 'up_proj') has nan")


def test_without_its_configuration_and_the_reverse(nested: Any, int8: Any, tmp_path: Path) -> None:
    """Neither is taken for the other: all that does not fit is in one report."""
    plain = {k: v for k, v in nested.config.items() if k != "quantization_config"}
    error = refused(tmp_path / "no-config", nested, len, plain)
    assert f"{WEIGHT}.absmax" in str(error)
    assert error.report is not None
    assert error.report.misshapen
    folder = tmp_path / "full"
    bnb.write(folder, {"x": torch.zeros(1)}, nested.config)
    (folder / "model.safetensors").write_bytes((nested.plain / "model.safetensors").read_bytes())
    with pytest.raises(WeightLoadError) as raised:
        get_model(model_config=ModelConfig(model=str(folder)))
    assert f"{WEIGHT}: expected shape [32768, 1], got [256, 256]" in str(raised.value)
    assert f"{STATE}: " in str(raised.value)
    error = refused(tmp_path / "int8", int8, len, nested.config)
    assert f"{LAYER}.SCB" in str(error)
    asked = nested.config["quantization_config"] | {"bnb_4bit_use_double_quant": False}
    error = refused(
        tmp_path / "nested", nested, len, nested.config | {"quantization_config": asked}
    )
    assert f"{WEIGHT}.nested_absmax" in str(error)
    assert "expected dtype torch.float32" in str(error)


def test_a_broken_update_stops_the_model(nested: Any) -> None:
    """After scales that are not finite, the model refuses to run."""
    model: Any = get_model(model_config=ModelConfig(model=str(nested.folder)))
    name = f"{WEIGHT}.nested_absmax"
    broken = {name: torch.full_like(nested.tensors[name], float("inf"))}
    with pytest.raises(WeightReadError, match="up_proj"):
        model.update_weights(broken)
    with pytest.raises(ModelNotReadyError):
        model(nested.ids, torch.arange(len(nested.ids)))
    model.load_weights(nested.tensors)
    model.check_ready()


@pytest.mark.parametrize("method", [BitsAndBytes4BitMethod("nf4", nested=True), OnlineNF4Method()])
def test_a_cut_inside_of_a_block(method: Any) -> None:
    """Columns are cut between blocks only; the message has the numbers."""

    def build(columns: int) -> None:
        RowParallelLinear(columns, 64).quantize(method)

    for size, columns, number in ((4, 128, "32 features"), (1, 96, "96 features")):
        with pytest.raises(ShardingError, match=f"{number} .* inside a scale block of 64"):
            run_ranks(size, lambda rank, columns=columns: build(columns))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"load_in_8bit": True}, "load_in_4bit and load_in_8bit"),
        ({"load_in_4bit": False}, "load_in_4bit and load_in_8bit"),
        ({"load_in_4bit": "yes"}, "load_in_4bit"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules"),
        ({"llm_int8_skip_modules": ["re:(a+)+"]}, "could take forever"),
        ({"load_in_4bit": False, "load_in_8bit": True, "llm_int8_has_fp16_weight": True}, "fp16"),
    ],
)
def test_configurations_that_are_refused(entry: dict[str, Any], problem: str) -> None:
    """What is not supported, or contradicts itself, is refused by the entry's name."""
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True} | entry
    with pytest.raises((UnsupportedModelError, CheckpointFormatError), match=problem):
        rules_for(None, stored)


def test_what_is_skipped() -> None:
    """The head by default; else what the list names, by components or as a pattern."""

    def rules(**entries: Any) -> Any:
        return rules_for("bitsandbytes", {"quant_method": "bitsandbytes", **entries})

    names = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"]

    def kept(**entries: Any) -> list[bool]:
        given = rules(load_in_4bit=True, **entries)
        return [given.rule_of(name)[1] is None for name in names]

    assert kept() == [True, False, False]
    assert kept(llm_int8_skip_modules=[]) == [False, False, False]
    assert kept(llm_int8_skip_modules=["model.layers.1"]) == [False, True, False]
    assert kept(llm_int8_skip_modules=["model.layers.1*.mlp"]) == [False, True, True]
    assert kept(modules_to_not_convert=["up_proj"]) == [True, True, True]
    method = rules(load_in_4bit=True).rule_of("model.layers.0.mlp.up_proj")[1]
    assert (method.quant_type, method.nested) == ("fp4", False)  # transformers' defaults
