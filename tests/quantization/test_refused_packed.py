"""Packed checkpoints that contradict themselves, their configuration or the ranks are refused."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module import ModelConfig, get_model
from vllm_module.errors import (
    CheckpointFormatError,
    MisshapenWeightError,
    MissingWeightError,
    ShardingError,
    UnsupportedModelError,
    WeightLoadError,
    WeightReadError,
)
from vllm_module.quantization.packed import GPTQ as GPTQ_FORMAT
from vllm_module.quantization.packed import PackedMethod

_HERE = Path(__file__).parent
packing = SimpleNamespace(**runpy.run_path(str(_HERE / "packing.py")))
layouts = SimpleNamespace(**runpy.run_path(str(_HERE / "layouts.py")))
_refusing = runpy.run_path(str(_HERE / "refusing.py"))
refuse, refuse_weights = _refusing["refuse"], _refusing["refuse_weights"]
ADVICE, LAYERS, assert_names = (_refusing[name] for name in ("ADVICE", "LAYERS", "assert_names"))

QWEN3 = layouts.QWEN3
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
SYMMETRIC, ORDERED = GPTQ | {"sym": True}, GPTQ | {"desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
Edit = Callable[[dict[str, torch.Tensor]], object]


def _ct(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights
    inputs = args.pop("inputs", None)
    group = {"targets": ["Linear"], "weights": args, "input_activations": inputs}
    method = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    return method | {"format": form, "config_groups": {"group_0": group}}


@pytest.fixture(scope="module")
def packed(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a checkpoint of one of four layouts by its name; each is written once."""

    def make(how: Callable[..., Any], name: str, weight: torch.Tensor) -> Any:
        return None if name == "lm_head" else how(weight)

    kinds: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "gptq": (lambda w: packing.gptq(*w.shape), GPTQ),
        "symmetric": (lambda w: packing.gptq(*w.shape, symmetric=True), SYMMETRIC),
        "ordered": (
            lambda w: packing.gptq(*w.shape, order=packing.act_order(w.shape[1], 32)),
            ORDERED,
        ),
        "awq": (lambda w: packing.awq(*w.shape), AWQ),
        "ct": (packing.by_compressed_tensors, _ct()),
    }
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            how, quantization = kinds[name]
            folder = tmp_path_factory.mktemp(name)
            made[name] = packing.publish(folder, QWEN3, partial(make, how), quantization)
        return made[name]

    return get


def put(name: str, at: tuple[int, ...], value: float) -> Edit:
    """Return an edit that writes one number."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][at] = value

    return edit


@pytest.mark.parametrize(
    ("layer", "number"),
    [*((layer, torch.nan) for layer in LAYERS), (DOWN, torch.inf), (DOWN, -torch.inf)],
)
def test_scales_that_are_not_finite(packed: Any, edited: Any, layer: str, number: float) -> None:
    """A scale that is not finite is refused by name and slot."""
    broken = edited(packed("gptq"), put(f"{layer}.scales", (1, 3), number))
    message = refuse_weights(broken, WeightReadError)
    assert_names(message, layer, "scales")
    assert "must be finite: quantize the checkpoint again" in message


def test_a_negative_scale_is_taken(packed: Any, edited: Any) -> None:
    """Scales may be negative: those of AutoRound are, where the longer half of the range is needed.

    The weight is then minus what it was.
    """
    name = f"{DOWN}.scales"
    model, other = (
        get_model(model_config=ModelConfig(model=str(each.folder), dtype="float32"))
        for each in (
            packed("symmetric"),
            edited(packed("symmetric"), lambda tensors: tensors[name].neg_()),
        )
    )
    x = torch.randn(2, 128)
    for each, sign in ((model, 1), (other, -1)):
        layer: Any = each.get_submodule(DOWN)
        expected = sign * model.get_submodule(DOWN)(x)
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("number", [-1, 4, 1 << 30])
def test_groups_out_of_range(packed: Any, edited: Any, number: int) -> None:
    """A group that does not exist is refused, and nothing is read beyond the scales."""
    broken = edited(packed("ordered"), put(f"{DOWN}.g_idx", (7,), number))
    message = refuse_weights(broken, WeightReadError)
    assert f"{DOWN}.g_idx has {number}, and must be a group, from 0 to 3" in message


def zeros(tensors: dict[str, torch.Tensor]) -> None:
    """Have a hole where ``g_idx`` was: a file system returns zeros for it."""
    tensors[f"{DOWN}.g_idx"].zero_()


def empty_group(tensors: dict[str, torch.Tensor]) -> None:
    groups = tensors[f"{DOWN}.g_idx"]
    groups[groups == 2] = 1


@pytest.mark.parametrize("size", [1, 7, 32, 48, 127, 128])
def test_the_last_group_has_what_is_left(size: int) -> None:
    """Groups are those of AutoGPTQ's ``i // group_size``, in any order; the nearest are refused."""
    method = PackedMethod(GPTQ_FORMAT, 4, size, act_order=True)
    layer = SimpleNamespace(experts=None)
    groups = (torch.arange(128) // size).int()[torch.randperm(128)]
    method._count_groups(layer, groups, size)  # type: ignore[arg-type]
    last = int(groups.max())
    for group, other in {(0, last), (last, 0)} - {(0, 0)}:
        wrong = groups.clone()
        wrong[int((groups == group).nonzero()[0])] = other
        with pytest.raises(WeightReadError, match="g_idx has"):
            method._count_groups(layer, wrong, size)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (zeros, "128 inputs in group 0"),
        (empty_group, "64 inputs in group 1"),
        ("nearest", "31 inputs in group 0"),  # one input moves to the next group
    ],
    ids=["a hole", "an empty group", "one input"],
)
def test_groups_of_another_size(
    packed: Any, edited: Any, damage: Any, found: str, size: int
) -> None:
    """Groups in range whose numbers of inputs are not those of the format are refused."""

    def nearest(tensors: dict[str, torch.Tensor]) -> None:
        groups = tensors[f"{DOWN}.g_idx"]
        groups[int((groups == 0).nonzero()[0])] = 1

    broken = edited(packed("ordered"), nearest if damage == "nearest" else damage)
    message = refuse(broken, WeightReadError, size=size)
    assert f"{DOWN}.g_idx has {found}, and must have 32" in message


def test_groups_in_another_order_than_the_configuration_says(packed: Any, edited: Any) -> None:
    """Groups that are out of order without ``desc_act`` are refused, not ignored."""
    broken = edited(packed("ordered"), quantization=GPTQ)
    message = refuse_weights(broken, WeightReadError)
    assert "groups in another order" in message
    assert "desc_act: set it to true" in message
    swapped = edited(packed("gptq"), put(f"{DOWN}.g_idx", (40,), 0))
    for size in (1, 2):
        assert f"{DOWN}.g_idx has groups in another" in refuse(swapped, WeightReadError, size=size)


def test_fused_layers_with_groups_of_their_own(packed: Any, edited: Any) -> None:
    """Slots of one layer whose groups differ are refused by name."""

    def shuffle(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.g_idx"] = tensors[f"{Q}.g_idx"].flip(0)

    message = refuse_weights(edited(packed("ordered"), shuffle), WeightReadError)
    assert "self_attn.qkv_proj.g_idx (slot 'k_proj') is another one than that of slot 'q_proj'" in (
        message
    )


@pytest.mark.parametrize("name", ["g_idx", "scales", "qzeros", "qweight"])
def test_tensors_of_another_length(packed: Any, edited: Any, name: str) -> None:
    """A tensor that is too short for its layer is refused with both shapes."""

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{DOWN}.{name}"] = tensors[f"{DOWN}.{name}"][:-1].clone()

    message = refuse_weights(edited(packed("gptq"), shorten), MisshapenWeightError)
    assert f"{DOWN}.{name}: expected shape" in message


def test_zeros_of_a_symmetric_checkpoint(packed: Any, edited: Any) -> None:
    """A zero that is not in the middle is refused where the configuration says it is."""
    broken = edited(packed("symmetric"), put(f"{DOWN}.qzeros", (0, 0), 0x77777776))
    message = refuse_weights(broken, WeightReadError)
    assert f"{DOWN}.qzeros stands for a zero of 7, and must stand for 8" in message
    fused = edited(packed("symmetric"), put(f"{Q}.qzeros", (0, 0), 0x77777776))
    assert "qkv_proj.qzeros (slot 'q_proj') stands for" in refuse(fused, WeightReadError)
    wrong = edited(packed("gptq"), quantization=SYMMETRIC)
    assert "says sym: set it to false" in refuse(wrong, WeightReadError)


def test_another_shape_than_the_stored_one(packed: Any, edited: Any) -> None:
    """``weight_shape`` has to be that of the uncut weight, on any ranks."""
    broken = edited(packed("ct"), put(f"{DOWN}.weight_shape", (1,), 120))
    for size in (1, 2):
        message = refuse(broken, WeightReadError, size=size)
        assert f"{DOWN}.weight_shape has [64, 120], and must have [64, 128]" in message


# Configuration and weights that do not belong together


def without_quantization(broken: Any) -> Any:
    path = broken.folder / "config.json"
    entries = json.loads(path.read_text())
    del entries["quantization_config"]
    path.write_text(json.dumps(entries))
    return broken


@pytest.mark.parametrize(
    ("layout", "name"), [("gptq", "qweight"), ("awq", "qweight"), ("ct", "weight_packed")]
)
def test_packed_weights_without_their_configuration(
    packed: Any, edited: Any, layout: str, name: str
) -> None:
    """Packed tensors are unexpected where config.json does not say what they are."""
    message = refuse(without_quantization(edited(packed(layout))), WeightLoadError)
    assert f"{name}: " in message
    assert f"{name} is packed: does config.json lack its quantization_config?" in message
    assert ADVICE in message


@pytest.mark.parametrize("quantization", [GPTQ, AWQ, _ct()])
def test_a_configuration_without_packed_weights(
    full_precision: Any, edited: Any, quantization: dict[str, Any]
) -> None:
    """Full precision is refused where config.json says that weights are packed."""
    message = refuse(edited(full_precision, quantization=quantization), WeightLoadError)
    assert f"{DOWN.replace('1', '{0..1}')}.weight" in message
    assert ADVICE in message


def test_gptq_and_awq_are_told_apart(packed: Any, edited: Any) -> None:
    """A checkpoint that is taken for the other format does not fit."""
    refuse(edited(packed("awq"), quantization=GPTQ), WeightLoadError)
    refuse(edited(packed("gptq"), quantization=AWQ), WeightLoadError)
    lacking = edited(packed("gptq"), lambda tensors: tensors.pop(f"{DOWN}.g_idx"), desc_act=True)
    assert f"{DOWN}.g_idx: expected shape [128]" in refuse(lacking, MissingWeightError)


@pytest.mark.parametrize(
    ("layout", "entries", "size", "named"),
    [
        # Each of four ranks has 32 inputs of down_proj, half a group.
        ("gptq", {"group_size": 64}, 4, ["o_proj", "32 features (128 in 4 parts)", "group of 64"]),
        ("gptq", {"group_size": 48}, 2, ["o_proj", "64 features", "group of 48"]),
        ("awq", {"group_size": 64}, 4, ["o_proj", "scale group of 64"]),
    ],
)
def test_edges_that_fall_inside(
    packed: Any, edited: Any, layout: str, entries: Any, size: int, named: list[str]
) -> None:
    """A shard that ends inside a group or word is refused with the numbers."""
    broken = edited(packed(layout), **entries)
    message = refuse(broken, ShardingError, size=size)
    assert all(text in message for text in named), message


# quantization_config

INVALID: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "bits-5": (GPTQ | {"bits": 5}, CheckpointFormatError, ["bits", "2, 3, 4 or 8"]),
    "bits-text": (GPTQ | {"bits": "4"}, CheckpointFormatError, ["bits"]),
    "bits-none": ({"quant_method": "gptq", "group_size": 32}, CheckpointFormatError, ["bits"]),
    "group-0": (GPTQ | {"group_size": 0}, CheckpointFormatError, ["group_size"]),
    "group-minus-2": (GPTQ | {"group_size": -2}, CheckpointFormatError, ["group_size"]),
    "group-text": (GPTQ | {"group_size": "32"}, CheckpointFormatError, ["group_size"]),
    "group-huge": (GPTQ | {"group_size": 2**70}, MisshapenWeightError, ["scales"]),
    "sym-text": (GPTQ | {"sym": "yes"}, CheckpointFormatError, ["sym"]),
    "marlin": (
        GPTQ | {"checkpoint_format": "marlin"},
        UnsupportedModelError,
        ["expected gptq or gptq_v2", "'marlin'"],
    ),
    **{
        f"planes-{bits}": (
            GPTQ | {"checkpoint_format": "gptq_p", "bits": bits},
            UnsupportedModelError,
            ["2, 4 or 8 with checkpoint_format gptq_p", "quantize again", f"got {bits}"],
        )
        for bits in (3, 5, 6, 7)
    },
    "planes-of-a-layer": (
        GPTQ | {"checkpoint_format": "gptq_p", "dynamic": {"x": {"bits": 3}}},
        UnsupportedModelError,
        ["2, 4 or 8 with checkpoint_format gptq_p"],
    ),
    "exllama": (GPTQ | {"format": "bitblas"}, UnsupportedModelError, ["'bitblas'"]),
    "pack-dtype": (GPTQ | {"pack_dtype": "int64"}, CheckpointFormatError, ["pack_dtype"]),
    "dynamic-list": (GPTQ | {"dynamic": ["-:x"]}, CheckpointFormatError, ["dynamic"]),
    "dynamic-bits": (GPTQ | {"dynamic": {"x": {"bits": 5}}}, CheckpointFormatError, ["bits"]),
    "dynamic-pattern": (
        GPTQ | {"dynamic": {"+:[x": {"bits": 8}}},
        CheckpointFormatError,
        ["'re:[x' is not a valid regular expression"],
    ),
    "dynamic-slow": (
        GPTQ | {"dynamic": {"-:(x+)+y": {}}},
        UnsupportedModelError,
        ["could take forever"],
    ),
    "dynamic-one-slot": (
        GPTQ | {"dynamic": {"-:.*k_proj": {}}},
        UnsupportedModelError,
        ["fuses layers that are not quantized alike", "k_proj: not quantized"],
    ),
    "modules-text": (
        GPTQ | {"modules_in_block_to_quantize": "mlp"},
        CheckpointFormatError,
        ["modules_in_block_to_quantize"],
    ),
    "awq-bits": (AWQ | {"bits": 8}, CheckpointFormatError, ["bits"]),
    "awq-gemv-fast": (
        AWQ | {"version": "gemv_fast"},
        UnsupportedModelError,
        ["expected gemm", "'gemv_fast'"],
    ),
    "awq-format": (
        {**AWQ, "version": None, "format": "gemv_fast"},
        UnsupportedModelError,
        ["quantization_config.format", "'gemv_fast'"],
    ),
    "awq-skip": (
        AWQ | {"modules_to_not_convert": "mlp"},
        CheckpointFormatError,
        ["modules_to_not_convert"],
    ),
    "ct-bits": (_ct(num_bits=5), UnsupportedModelError, ["2, 3, 4, 8 bits per channel or group"]),
    "ct-tensor": (
        _ct(strategy="tensor", group_size=None),
        UnsupportedModelError,
        ["channel or group"],
    ),
    "ct-static-packed": (
        _ct(inputs={"num_bits": 8, "type": "int", "strategy": "tensor"}),
        UnsupportedModelError,
        ["input_activations", "expected dynamic ones"],
    ),
    "ct-4-bit-inputs": (
        _ct(inputs={"num_bits": 4, "type": "int", "strategy": "token", "dynamic": True}),
        UnsupportedModelError,
        ["input_activations", "expected 8-bit integers or floats"],
    ),
    "ct-sparse-weights": (
        _ct() | {"sparsity_config": {"format": "sparse-24-bitmask", "targets": ["Linear"]}},
        UnsupportedModelError,
        ["quantization_config.sparsity_config", "sparse-24-bitmask"],
    ),
    "ct-int8-asymmetric": (
        _ct("int-quantized", num_bits=8, symmetric=False),
        UnsupportedModelError,
        ["config_groups.group_0.weights", "symmetric"],
    ),
    "ct-int8-static-asymmetric": (
        _ct(
            "int-quantized",
            num_bits=8,
            inputs={"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False},
        ),
        UnsupportedModelError,
        ["input_activations", "dynamic or symmetric"],
    ),
    "ct-sparse": (_ct("marlin-24"), UnsupportedModelError, ["format", "marlin-24"]),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_configuration(packed: Any, edited: Any, case: str) -> None:
    """Settings that are not supported are refused in one line that names the entry."""
    entries, kind, named = INVALID[case]
    message = refuse(edited(packed("gptq"), quantization=entries), kind)
    assert all(text in message for text in named), message
