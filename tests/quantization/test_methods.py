"""A quantization method names the parameters that it creates, and creates them only when needed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from vllm_module import vLLMModule
from vllm_module.errors import MissingWeightError, UnsupportedModelError
from vllm_module.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
)
from vllm_module.parameters import ModelWeightParameter
from vllm_module.quantization import (
    ONLINE,
    EightBitMethod,
    QuantizableKVCache,
    QuantizableLayer,
    QuantizeMethod,
    Scheme,
    UnquantizedMethod,
    online_rules,
    quantize,
    rules_for,
)
from vllm_module.quantization import rows as rows_module
from vllm_module.quantization.bitsandbytes import BitsAndBytes8BitMethod
from vllm_module.quantization.mxfp4 import MXFP4PackedMethod
from vllm_module.quantization.nvfp4 import MODELOPT, NVFP4Method
from vllm_module.quantization.online_nf4 import OnlineNF4Method
from vllm_module.quantization.packed import AWQ, PackedMethod
from vllm_module.quantization.packed_online import OnlinePackedMethod
from vllm_module.testing import LAWS, random_weights
from vllm_module.testing.checkpoints import made_up_weights

STORED = [
    Scheme("tensor", activations="static"),
    Scheme("tensor", activations="none"),
    Scheme("channel"),
    Scheme("block", block=(8, 8), scale_name="weight_scale_inv"),
]
SCHEMES = [*STORED, *(replace(scheme, block=(8, 8)) for scheme in ONLINE.values())]
METHODS = [UnquantizedMethod(), *map(EightBitMethod, SCHEMES)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(getattr(method, "scheme", "")))
def test_a_layer_names_what_its_method_creates_and_computes(method: QuantizeMethod) -> None:
    """They are all of its parameters but the bias, and all of its buffers; others replace them."""
    layer = QKVParallelLinear(16, 8, 2)
    for each in (EightBitMethod(STORED[0]), method):
        layer.quantize(each)
        assert (*layer.parameter_names, "bias") == tuple(dict(layer.named_parameters()))
        assert layer.buffer_names == tuple(dict(layer.named_buffers()))
        assert set(layer.weight_aliases.values()) < set(layer.parameter_names)


@pytest.mark.parametrize(
    "build",
    [
        lambda: QKVParallelLinear(16, 8, 2),
        lambda: RowParallelLinear(16, 8),
        lambda: ParallelLMHead(16, 8, bias=True),
    ],
    ids=["qkv", "row", "head"],
)
def test_a_weight_is_created_once_for_each_method(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building a layer and quantizing it create one weight each; moving and saving create none."""
    dtypes = []
    new_weight = QuantizableLayer.new_weight
    monkeypatch.setattr(
        QuantizableLayer,
        "new_weight",
        lambda self, dtype: (dtypes.append(dtype), new_weight(self, dtype))[1],
    )
    layer = build()
    assert not layer.is_quantized
    layer.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
    assert layer.is_quantized
    layer.half()
    layer.load_state_dict(layer.state_dict(), assign=True)
    assert dtypes == [torch.float32, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(getattr(method, "scheme", "")))
def test_a_cast_of_a_model_leaves_what_is_quantized(
    method: QuantizeMethod, dtype: torch.dtype
) -> None:
    """Codes, scales and what products compute from them keep dtype and bits; a bias is cast."""
    layer: Any = RowParallelLinear(16, 8, bias=True)
    layer.quantize(method)
    layer.load_weights(random_weights(layer.expected_weights()))
    before = {name: each.clone() for name, each in layer.named_parameters()}
    before |= {name: each.clone() for name, each in layer.named_buffers()}
    layer.to(dtype)
    after = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    bias = after.pop("bias")
    assert torch.equal(bias, before.pop("bias").to(dtype))
    for name, each in after.items():
        expected = before[name] if layer.is_quantized else before[name].to(dtype)
        assert each.dtype == expected.dtype, name
        bits = (one.detach().flatten().view(torch.uint8) for one in (each, expected))
        assert torch.equal(*bits), name
    assert after.keys() == before.keys()


CONV1D = Path(__file__).parents[2] / "docs/api/parameters.md"


def test_a_weight_stored_transposed_is_cut_rightly_and_never_quantized() -> None:
    """The layer of the reference keeps the laws; another method would load a square one wrongly."""
    (code,) = re.findall(r"```python title=.*?\n(.*?)```", CONV1D.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(code, "parameters.md", "exec", dont_inherit=True), namespace)

    class Model(vLLMModule):
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.fc = namespace["Conv1D"](8, inner, gather_output=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

    before = settings.get_current_profile_name()
    settings.register_profile("few", settings.get_profile(before), max_examples=4)
    settings.load_profile("few")
    for law in LAWS:
        law(Model, inner=st.integers(1, 4), inputs=lambda model: (torch.ones(2, 8),))
    settings.load_profile(before)
    weights = {"fc.weight": torch.rand(8, 8), "fc.bias": torch.rand(8)}
    model = Model(8)
    model.load_weights(weights)
    x = torch.rand(2, 8)
    torch.testing.assert_close(model(x), x @ weights["fc.weight"] + weights["fc.bias"])
    rules = online_rules("int8_per_channel_weight_only")
    with pytest.raises(UnsupportedModelError, match=r"fc cannot be held in .*TransposedMethod"):
        quantize(Model(8), rules)


class OwnWeight(ModelWeightParameter):
    pass


def test_a_weight_of_an_own_class_is_not_replaced() -> None:
    """A layer whose weight is cut in its own way is not quantized, by whatever call."""
    layer = RowParallelLinear(16, 8)
    own = OwnWeight(layer.output, layer.input, tp_rank=0, tp_size=1, dtype=torch.float32)
    layer._parameters["weight"] = own
    with pytest.raises(UnsupportedModelError, match="holds its weight in its own way"):
        layer.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_model_may_be_quantized_again_before_it_is_loaded(method: str) -> None:
    """Whatever parameters the first method has: the last one counts."""
    rules = rules_for(None, {"quant_method": method, "bits": 4, "group_size": 16})
    model = vLLMModule()
    model.fc = RowParallelLinear(32, 16)
    quantize(model, rules)
    names = {name for name, _ in model.named_parameters()}
    assert "fc.weight" not in names
    quantize(model, rules)
    assert {name for name, _ in model.named_parameters()} == names
    quantize(model, online_rules("int8_per_channel_weight_only"))
    model.load_weights({"fc.weight": torch.rand(16, 32), "fc.bias": torch.rand(16)})


def test_the_largest_static_input_scale_is_used() -> None:
    """All slots have one input: the largest of their scales divides it, wherever it stands."""
    for scales in ([0.5, 0.25], [0.25, 0.5]):
        layer = MergedColumnParallelLinear(4, [2, 3], False, shard_names=["a", "b"])
        layer.quantize(EightBitMethod(Scheme("tensor", activations="static")))
        tensors = random_weights(layer.expected_weights())
        for name, scale in zip("ab", scales, strict=True):
            shape = tensors[f"{name}.input_scale"].shape
            tensors[f"{name}.input_scale"] = torch.full(shape, scale)
        layer.load_weights(tensors)
        assert layer.input_scale_for_matmul.item() == 0.5
        assert layer.row_scheme().scale.item() == 0.5


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 12, 16, 24, 48])
@torch.inference_mode()
def test_a_norm_takes_the_groups_that_a_layer_asks_it_for(
    monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """Norms find scales for powers of two only; a layer with other blocks quantizes by itself."""
    monkeypatch.setattr(rows_module, "quantizes_inputs", lambda _: True)  # as on a GPU
    layer = RowParallelLinear(48, 8, False)
    layer.quantize(EightBitMethod(Scheme("block", block=(8, group))))
    rows = layer.row_scheme()
    assert (rows is None) == (group.bit_count() != 1)
    if rows is not None:
        norm = RMSNorm(48)
        norm.load_weights({"weight": torch.ones(48)})
        norm.output_form = rows  # as fusion sets it
        quantized = norm(torch.randn(3, 48))
        assert quantized.scales.shape == (3, 48 // group)


@pytest.mark.parametrize(
    "method",
    [OnlineNF4Method(), NVFP4Method(MODELOPT, static_inputs=True), MXFP4PackedMethod()],
    ids=str,
)
def test_values_of_codes_are_float32_whatever_the_default_dtype_is(method: QuantizeMethod) -> None:
    """Another dtype would round them, or products refuse it."""
    layer = RowParallelLinear(64, 8, bias=False, params_dtype=torch.bfloat16)
    x = torch.rand(2, 64, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer.quantize(method)
        layer.load_weights(made_up_weights(layer))
        y = layer(x)
    finally:
        torch.set_default_dtype(torch.float32)
    wide = method.full_precision(layer, torch.float32)
    torch.testing.assert_close(y.float(), x.float() @ wide.T, rtol=2**-6, atol=2**-6)
    assert layer.codebook.dtype == torch.float32


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "method",
    [
        *METHODS,
        BitsAndBytes8BitMethod(),
        MXFP4PackedMethod(),
        NVFP4Method(MODELOPT, static_inputs=True),
        OnlineNF4Method(),
        OnlinePackedMethod(group_size=32),
        PackedMethod(AWQ, 4, 32, symmetric=False),
    ],
    ids=str,
)
def test_a_weight_is_rounded_once_to_the_dtype_that_is_asked_for(
    method: QuantizeMethod, dtype: torch.dtype | None
) -> None:
    """It is the layer's unless given; float32 is what an identity matrix is multiplied by."""
    layer = RowParallelLinear(64, 8, bias=False, params_dtype=torch.bfloat16)
    layer.quantize(method)
    layer.load_weights(made_up_weights(layer))
    wide = method.full_precision(layer, torch.float32)
    found = method.full_precision(layer, dtype)
    assert wide.dtype == torch.float32
    assert found.dtype == (dtype or torch.bfloat16)
    assert torch.equal(found, wide.to(found.dtype))
    if not isinstance(method, (UnquantizedMethod, MXFP4PackedMethod)):
        assert not torch.equal(wide, wide.bfloat16().float())  # or this would see no rounding
        product = method.apply(layer, torch.eye(64), None)
        torch.testing.assert_close(product.T, wide, rtol=1e-3, atol=0)


@pytest.mark.parametrize("given", ["", "k", "v", "kv"])
@pytest.mark.parametrize("optional", [False, True])
def test_a_checkpoint_has_both_scales_of_a_cache_or_neither(given: str, optional: bool) -> None:
    """Where they are optional, a cache without any has 1; one alone is refused."""

    class Holder(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.attn = QuantizableKVCache()
            names = "k_proj.k_scale", "v_proj.v_scale"
            self.attn.create_kv_scales(names, optional=optional)

    holder = Holder()
    weights = {f"{each}_proj.{each}_scale": torch.tensor(0.5) for each in given}
    if given == "kv" or (optional and not given):
        holder.load_weights(weights)
        found = [holder.attn.k_scale.item(), holder.attn.v_scale.item()]
        assert found == ([0.5, 0.5] if given else [1.0, 1.0])
        return
    absent = {"": "[kv]", "k": "v", "v": "k"}[given]
    with pytest.raises(MissingWeightError, match=rf"{absent}_proj\.{absent}_scale"):
        holder.load_weights(weights)
