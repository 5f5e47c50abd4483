"""NVFP4, MXFP8 and FP8 blocks whose scales are powers of two, beside the libraries' numbers."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from vllm_module import LoadConfig, ModelConfig, get_model
from vllm_module.distributed import expert_parallel, run_ranks
from vllm_module.errors import (
    ShardingError,
    UnsupportedModelError,
    WeightLoadError,
    WeightReadError,
)
from vllm_module.layers import FusedMoE
from vllm_module.layers.linear import RowParallelLinear
from vllm_module.quantization import EightBitMethod, rules_for
from vllm_module.quantization.nvfp4 import COMPRESSED_TENSORS, MODELOPT, NVFP4Method
from vllm_module.quantization.scheme import MXFP8, Scheme

_HERE = Path(__file__).parent
layouts = SimpleNamespace(**runpy.run_path(str(_HERE / "layouts.py")))
packing = SimpleNamespace(**runpy.run_path(str(_HERE / "packing.py")))

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
EXPERTS, HIDDEN, INNER = 3, 64, 128
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
UP = "model.layers.0.mlp.up_proj"


def preset(name: str) -> QuantizationScheme:
    return preset_name_to_scheme(name, ["Linear"])


def nvfp4(weight: torch.Tensor) -> Any:
    """Return ``weight`` rounded and stored by compressed-tensors, and what it reads from that."""
    scheme = preset("NVFP4")
    whole = generate_gparam(weight.amin(), weight.amax())
    groups = weight.view(len(weight), -1, 16)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, whole)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    stored = NVFP4PackedCompressor.compress(state, scheme)
    read = NVFP4PackedCompressor.decompress(
        stored | {"weight_scale": stored["weight_scale"].float()}, scheme
    )
    wide = {  # the library multiplies in the dtype of its codes, which is bfloat16
        "weight": by_formula(stored["weight_packed"], stored["weight_scale"].float() / whole)
    }
    torch.testing.assert_close(wide["weight"], read["weight"].float(), rtol=2**-7, atol=0)
    return packing.Layer(stored | {"input_global_scale": torch.tensor([3.0])}, wide["weight"])


def modelopt(weight: torch.Tensor) -> Any:
    """Return the codes of compressed-tensors as ModelOpt stores them: its scale multiplies."""
    stored = dict(nvfp4(weight).stored)
    whole = (1 / stored["weight_global_scale"]).view(())
    made = {
        "weight": stored["weight_packed"],
        "weight_scale": stored["weight_scale"],
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.25),
    }
    wide = by_formula(made["weight"], made["weight_scale"].float() * whole)
    return packing.Layer(made, wide)


def modelopt_without_inputs(weight: torch.Tensor) -> Any:
    """Return what ModelOpt stores where it quantizes the weight alone: no scale of the inputs."""
    made = modelopt(weight)
    del made.stored["input_scale"]
    return made


def by_formula(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes times scales, written out: a sign and a number of E2M1, the low half first."""
    values = torch.tensor([*E2M1, *(-each for each in E2M1)])
    codes = torch.stack((packed.int() % 16, packed.int() // 16), -1).flatten(1)
    return values[codes] * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)


def mxfp8(weight: torch.Tensor) -> Any:
    """Return ``weight`` rounded and stored by compressed-tensors, and what it reads from that."""
    scheme = preset("MXFP8")
    groups = weight.view(len(weight), -1, 32)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    scale = torch.exp2(scale.float().log2().floor())
    state = {"weight": weight, "weight_scale": scale}
    stored = MXFP8QuantizationCompressor.compress(state, scheme)
    assert stored["weight_scale"].dtype == torch.uint8
    read = MXFP8QuantizationCompressor.decompress(dict(stored), scheme)["weight"].float()
    return packing.Layer(stored, read)


def ct(name: str, form: str) -> dict[str, Any]:
    group = preset(name).model_dump(mode="json") | {"format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


OF_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
CASES: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any]]] = {
    "nvfp4": (nvfp4, ct("NVFP4", "nvfp4-pack-quantized")),
    "nvfp4 of modelopt": (modelopt, OF_MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}),
    "nvfp4 weights of modelopt": (
        modelopt_without_inputs,
        OF_MODELOPT | {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    ),
    "mxfp8": (mxfp8, ct("MXFP8", "mxfp8-quantized")),
    "mxfp8 of modelopt": (mxfp8, OF_MODELOPT | {"quant_algo": "MXFP8"}),
}


@pytest.fixture(scope="module")
def checkpoints(_quiet: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = {}
    for name, (make, config) in CASES.items():

        def of(path: str, weight: torch.Tensor, make: Any = make) -> Any:
            return None if path == "lm_head" else make(weight)

        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        made[name] = packing.publish(folder, layouts.QWEN3, of, config)
    return made


def loaded(folder: Path, **how: Any) -> Any:
    return get_model(model_config=ModelConfig(model=str(folder), dtype="float32"), **how)


def of_prompt(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model.compute_logits(model(ids, torch.arange(len(ids))))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_weights_multiplied_out(
    checkpoints: dict[str, Any], name: str, size: int
) -> None:
    """Any ranks compute transformers' logits, also after an update of every tensor of a layer."""
    checkpoint = checkpoints[name]
    part = {key: value for key, value in checkpoint.tensors.items() if key.startswith(UP)}

    def work(rank: int) -> list[torch.Tensor]:
        model = loaded(checkpoint.folder)
        found = [of_prompt(model, checkpoint.ids)]
        scale = {key: value.clone() for key, value in part.items() if key.endswith("weight_scale")}
        model.update_weights({key: value.flip(0) for key, value in scale.items()})
        assert (of_prompt(model, checkpoint.ids) - found[0]).abs().max() > 0.01
        model.update_weights(part)
        return [*found, of_prompt(model, checkpoint.ids)]

    for each in run_ranks(size, work):
        for computed in each:
            torch.testing.assert_close(computed, checkpoint.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_librarys(checkpoints: dict[str, Any], name: str) -> None:
    """Each number of each layer is, bit for bit, and plans and dummy weights fit the model."""
    model, make = loaded(checkpoints[name].folder), CASES[name][0]
    layer = model.model.layers[0].mlp.gate_up_proj
    stored = checkpoints[name].tensors
    for slot, name_of in (("gate_proj", "gate_proj"), ("up_proj", "up_proj")):
        tensors = {
            key.rpartition(".")[2]: value
            for key, value in stored.items()
            if key.startswith(f"model.layers.0.mlp.{name_of}.")
        }
        wide = layer.quant_method.full_precision(layer).split(128)[slot == "up_proj"]
        assert torch.equal(wide, expected_of(make, tensors)), slot
    dummy = loaded(checkpoints[name].folder, load_config=LoadConfig(load_format="dummy"))
    assert of_prompt(dummy, checkpoints[name].ids).isfinite().all()


def expected_of(make: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    if make is mxfp8:
        exponents = tensors["weight_scale"].double() - 127
        return (tensors["weight"].double() * 2 ** exponents.repeat_interleave(32, 1)).float()
    if make in (modelopt, modelopt_without_inputs):
        scale = tensors["weight_scale"].float() * tensors["weight_scale_2"]
        return by_formula(tensors["weight"], scale)
    scale = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    return by_formula(tensors["weight_packed"], scale)


def fp8(weight: torch.Tensor) -> Any:
    """Return a weight in FP8 with a scale for each row, or for all of a wide one."""
    scale = weight.abs().amax(-1, keepdim=True) / 448
    if weight.shape[1] == INNER:
        scale = scale.amax().view(())
    stored = {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    return packing.Layer(stored, stored["weight"].float() * scale)


METHODS = {
    "fp8 per channel or tensor": (fp8, EightBitMethod(Scheme("channel", or_tensor=True))),
    "nvfp4": (nvfp4, NVFP4Method(COMPRESSED_TENSORS, static_inputs=True)),
    "nvfp4 of modelopt": (modelopt, NVFP4Method(MODELOPT, static_inputs=True)),
    "mxfp8": (mxfp8, EightBitMethod(MXFP8)),
}


@pytest.mark.parametrize(("size", "spread"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", METHODS)
def test_experts(name: str, size: int, spread: bool) -> None:
    """Ranks with parts of experts, or with whole ones, have the library's numbers."""
    make, method = METHODS[name]
    generator = torch.Generator().manual_seed(3)
    layers = {
        f"{expert}.{part}": make(torch.randn(*shape, generator=generator) * 2.0**expert)
        for expert in range(EXPERTS)
        for part, shape in SHAPES.items()
    }
    stored = {f"{n}.{attr}": t for n, each in layers.items() for attr, t in each.stored.items()}
    x, logits = torch.randn(5, HIDDEN), torch.randn(5, EXPERTS)

    def moe_of() -> Any:
        moe: Any = FusedMoE(EXPERTS, 2, HIDDEN, INNER)
        for layer in (moe.w13, moe.w2):
            layer.quantize(method)
        moe.load_weights(stored)
        return moe

    def work(rank: int) -> torch.Tensor:
        if not spread:
            return moe_of()(x, logits)
        with expert_parallel():
            return moe_of()(x, logits)

    weights, chosen = logits.double().softmax(-1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    expected = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up, down = (layers[f"{expert}.{part}"].weight.double() for part in SHAPES)
            expected[token] += weight * (down @ (F.silu(gate @ row) * (up @ row)))
    for computed in run_ranks(size, work):
        largest = expected.abs().max()
        torch.testing.assert_close(
            computed.double() / largest, expected / largest, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("whole", [0.0123, 7.0])
@pytest.mark.parametrize("form", [COMPRESSED_TENSORS, MODELOPT])
def test_every_scale_and_code_of_nvfp4(form: Any, whole: float) -> None:
    """A layer multiplies by the value of each code with each scale of FP8 that is no NaN."""
    scales = torch.arange(128, dtype=torch.uint8)
    scales[127] = 1
    stored = {
        form.words: torch.arange(256, dtype=torch.uint8).repeat(4, 4)[:, :1024],
        form.scales: scales.view(1, 128).repeat(4, 1).view(torch.float8_e4m3fn),
        form.whole: torch.tensor([whole]),
    }
    layer: Any = RowParallelLinear(2048, 4, bias=False)
    layer.quantize(NVFP4Method(form, static_inputs=False))
    layer.load_weights(stored)
    wide = stored[form.scales].float()
    wide = wide / whole if form.divides else wide * whole
    expected = by_formula(stored[form.words], wide)
    assert torch.equal(layer.quant_method.full_precision(layer), expected)
    assert torch.equal(layer(torch.eye(2048)).T, expected)


@pytest.mark.parametrize("form", [COMPRESSED_TENSORS, MODELOPT])
def test_a_scale_of_nvfp4_is_taken_up_to_the_one_that_overflows(form: Any) -> None:
    """A scale of all numbers is taken as long as the largest number of a block is finite."""
    stored = {
        form.words: torch.full((4, 8), 0x77, dtype=torch.uint8),  # 6.0 twice
        form.scales: torch.full((4, 1), 448.0).to(torch.float8_e4m3fn),
    }
    limit = torch.tensor([torch.finfo(torch.float32).max / (448.0 * 6.0)])
    if form.divides:
        limit = 1 / limit
    wholes = [limit * factor for factor in (0.15, 0.5, 0.99, 1.01, 2.0, 7.0)]
    taken = []
    for whole in wholes:
        layer: Any = RowParallelLinear(16, 4, bias=False)
        layer.quantize(NVFP4Method(form, static_inputs=False))
        try:
            layer.load_weights(stored | {form.whole: whole})
            taken.append(True)
        except WeightReadError:
            taken.append(False)
    wide = [448.0 / whole if form.divides else 448.0 * whole for whole in wholes]
    finite = [by_formula(stored[form.words], each.expand(4, 1)).isfinite() for each in wide]
    assert taken == [bool(each.all()) for each in finite]
    assert sum(taken) == 3


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize(
    "stored_as", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu]
)
@pytest.mark.parametrize("size", [1, 2])
def test_fp8_blocks_with_powers_of_two(
    published: Any, tmp_path: Path, stored_as: Any, scale_fmt: str | None, size: int
) -> None:
    """Scales as floats or as exponents are the same; bytes need ``scale_fmt``, which names them."""
    checkpoint = published("fp8-block")
    tensors, plain = checkpoint.tensors, {}
    for name in [name for name in tensors if name.endswith("_inv")]:
        exponents = (tensors[name].float().log2().round() + 127).to(torch.uint8)
        plain[name] = torch.exp2(exponents.float() - 127)
        if stored_as.itemsize == 1:
            tensors[name] = exponents.view(stored_as)
        else:
            tensors[name] = plain[name].to(stored_as)
    config = json.loads((checkpoint.folder / "config.json").read_text())
    if scale_fmt:
        config["quantization_config"]["scale_fmt"] = scale_fmt
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")

    def work(rank: int) -> bool:
        model, other = loaded(tmp_path), loaded(checkpoint.folder)
        other.update_weights(plain)
        ids = checkpoint.ids
        return torch.equal(of_prompt(model, ids), of_prompt(other, ids))

    if stored_as == torch.uint8 and not scale_fmt:
        with pytest.raises(
            WeightLoadError, match=r"weight_scale_inv: expected dtype .* got .*int8"
        ):
            run_ranks(size, work)
    else:
        assert all(run_ranks(size, work))


def damaged(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        new = change(tensors.pop(name))
        if new is not None:
            tensors[name] = new

    return edit


def bits(at: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8)[1, 1] = at
        return tensor

    return change


def value(of: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, of)


WORDS = {"nvfp4": "weight_packed", "nvfp4 of modelopt": "weight", "mxfp8": "weight"}
WHOLE = {"nvfp4": "weight_global_scale", "nvfp4 of modelopt": "weight_scale_2"}
INPUTS = {"nvfp4": "input_global_scale", "nvfp4 of modelopt": "input_scale"}
DAMAGES: list[tuple[str, str, Any]] = [
    *(
        (case, f"{UP}.{attr}", change)
        for case in WORDS
        for attr in ("weight_scale", WORDS[case])
        for change in (lambda t: None, lambda t: t[:-1].clone())
    ),
    *((case, f"{UP}.weight_scale", lambda t: t[:, :-1].clone()) for case in WORDS),
    *((case, f"{UP}.weight_scale", lambda t: t.view(torch.int8)) for case in WORDS),
    *((case, f"{UP}.weight_scale", lambda t: t.view(torch.uint8).float()) for case in WORDS),
    *((case, f"{UP}.{WORDS[case]}", lambda t: t.view(torch.int8)) for case in WORDS),
    ("mxfp8", f"{UP}.weight_scale", bits(255)),
    ("mxfp8", f"{UP}.weight", bits(0x7F)),
    *((case, f"{UP}.weight_scale", bits(code)) for case in WHOLE for code in (0x7F, 0xFF, 0x81)),
    *(
        (case, f"{UP}.{attr}", change)
        for case in WHOLE
        for attr in (WHOLE[case], INPUTS[case])
        for change in (
            lambda t: None, value(0.0), value(-1.0), value(torch.nan), value(torch.inf),
            lambda t: torch.ones(2), lambda t: t.view(torch.int32),
        )
    ),
    ("nvfp4", f"{UP}.weight_global_scale", value(1e-38)),
    ("nvfp4 of modelopt", f"{UP}.weight_scale_2", value(3e38)),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(DAMAGES)))
def test_damages_are_refused_by_name(checkpoints: dict[str, Any], tmp_path: Path, at: int) -> None:
    """What is missing, misshapen, of another dtype or no number is named."""
    case, name, change = DAMAGES[at]
    checkpoint = checkpoints[case]
    tensors = load_file(checkpoint.folder / "model.safetensors")
    damaged(name, change)(tensors)
    (tmp_path / "config.json").write_text((checkpoint.folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightLoadError) as refused:
        loaded(tmp_path)
    attr, message = name.rpartition(".")[2], str(refused.value)
    assert name in message or f"gate_up_proj.{attr} (slot 'up_proj')" in message, message


def test_a_file_that_ends_early_is_refused(checkpoints: dict[str, Any], tmp_path: Path) -> None:
    """The file is named."""
    folder = checkpoints["nvfp4"].folder
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    stored = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(stored[:-7])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", WORDS)
def test_a_block_that_is_cut_is_refused(name: str) -> None:
    """Two ranks cannot share a block of inputs, and NVFP4 has no part of one."""

    def work(rank: int) -> None:
        layer: Any = RowParallelLinear(48, 16, bias=False)
        layer.quantize(METHODS[name][1])

    with pytest.raises(ShardingError, match=r"48|24"):
        run_ranks(2, work)


@pytest.mark.parametrize(
    ("config", "static"),
    [
        (ct("NVFP4", "nvfp4-pack-quantized"), True),
        (ct("NVFP4A16", "nvfp4-pack-quantized"), False),
    ],
)
def test_weights_alone_have_no_scale_of_inputs(config: dict[str, Any], static: bool) -> None:
    """A configuration without inputs, or with dynamic ones, expects none in the file."""
    rules = rules_for(None, config)
    assert rules is not None
    assert rules.rule_of("model.layers.0.mlp.up_proj")[1] == NVFP4Method(COMPRESSED_TENSORS, static)
    if static:
        (group,) = config["config_groups"].values()
        group["input_activations"] |= {"dynamic": True, "observer": None}
        rules = rules_for(None, config)
        assert rules is not None
        method = rules.rule_of("model.layers.0.mlp.up_proj")[1]
        assert method == NVFP4Method(COMPRESSED_TENSORS, static_inputs=False)


def edited(config: dict[str, Any], **entries: Any) -> dict[str, Any]:
    (group,) = config["config_groups"].values()
    key = "input_activations" if "dynamic" in entries or "type" in entries else "weights"
    return config | {"config_groups": {"group_0": group | {key: group[key] | entries}}}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (edited(CASES["nvfp4"][1], group_size=32), "weights.*groups of 16"),
        (edited(CASES["nvfp4"][1], symmetric=False), "weights.*groups of 16"),
        (edited(ct("MXFP8A16", "mxfp8-quantized"), group_size=64), "weights.*groups of 32"),
        (edited(CASES["mxfp8"][1], dynamic=False), "input_activations"),
        (edited(CASES["mxfp8"][1], type="int"), "input_activations"),
        (ct("MXFP6A16", "mxfp6-pack-quantized"), "weights.*expected symmetric FP8"),
        (OF_MODELOPT | {"quant_algo": "NVFP4", "group_size": 32}, "group_size.*16 for NVFP4"),
    ],
)
def test_other_settings_are_refused(config: dict[str, Any], named: str) -> None:
    """Other groups, zeros and inputs than a format has are refused by the entry."""
    with pytest.raises(UnsupportedModelError, match=named):
        rules_for(None, config)
