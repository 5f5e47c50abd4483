"""What a quantized model expects of a checkpoint is what it accepts, and what libraries write."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from vllm_module import vLLMModule
from vllm_module.errors import UnsupportedModelError
from vllm_module.layers import (
    ColumnParallelLinear,
    FusedMoE,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm_module.parameters import BlockQuantScaleParameter, Dim
from vllm_module.quantization import EightBitMethod, QuantizableLayer, QuantizeMethod
from vllm_module.quantization.bitsandbytes import BitsAndBytes4BitMethod, BitsAndBytes8BitMethod
from vllm_module.quantization.gguf import GGUFMethod
from vllm_module.quantization.method import UnquantizedMethod
from vllm_module.quantization.mxfp4 import MXFP4Method, MXFP4PackedMethod
from vllm_module.quantization.nvfp4 import COMPRESSED_TENSORS as CT_NVFP4
from vllm_module.quantization.nvfp4 import MODELOPT, NVFP4Method
from vllm_module.quantization.online_nf4 import OnlineNF4Method
from vllm_module.quantization.packed import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    GPTQ_V2,
    PackedMethod,
)
from vllm_module.quantization.packed_gemv import AWQ_GEMV, GEMVMethod
from vllm_module.quantization.packed_online import OnlinePackedMethod
from vllm_module.quantization.scheme import EXPONENTS, FLOATS_OR_E8M0, MXFP8, ONLINE, Scheme

METHODS: dict[str, QuantizeMethod] = {
    **{name: EightBitMethod(scheme) for name, scheme in ONLINE.items()},
    "fp8 static": EightBitMethod(Scheme("tensor", activations="static")),
    "fp8 channel": EightBitMethod(Scheme("channel", or_tensor=True)),
    "fp8 block": EightBitMethod(
        Scheme("block", block=(32, 32), scale_dtypes=FLOATS_OR_E8M0, scale_name="weight_scale_inv")
    ),
    "fp8 block, exponents too": EightBitMethod(
        Scheme("block", block=(32, 32), scale_dtypes=FLOATS_OR_E8M0 + EXPONENTS[:1])
    ),
    "mxfp8": EightBitMethod(MXFP8),
    "gptq": PackedMethod(GPTQ, 4, 32),
    "gptq act order": PackedMethod(GPTQ_V2, 4, 32, False, True),
    "awq": PackedMethod(AWQ, 4, 32, False),
    "pack-quantized": PackedMethod(COMPRESSED_TENSORS, 4, 32, False),
    "awq gemv": GEMVMethod(AWQ_GEMV, 4, 32, False),
    "int4 online": OnlinePackedMethod(group_size=32),
    "nf4 online": OnlineNF4Method(),
    "bitsandbytes": BitsAndBytes4BitMethod("nf4", nested=False),
    "bitsandbytes nested": BitsAndBytes4BitMethod("fp4", nested=True),
    "bitsandbytes int8": BitsAndBytes8BitMethod(),
    "nvfp4": NVFP4Method(CT_NVFP4, False),
    "nvfp4 modelopt": NVFP4Method(MODELOPT, True),
    "mxfp4": MXFP4Method(),
    "mxfp4 packed": MXFP4PackedMethod(),
    "q4_k": GGUFMethod(((None, "Q4_K"),)),
    "none": UnquantizedMethod(),
}


class Model(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.column = ColumnParallelLinear(256, 128)
        self.merged = MergedColumnParallelLinear(256, [128, 256], shard_names=["a", "b"])
        self.fused = MergedColumnParallelLinear(256, [128, 256], shard_names=None)
        self.row = RowParallelLinear(256, 128)
        self.experts = FusedMoE(2, 1, 256, 256)
        self.packed = FusedMoE(2, 1, 256, 256, shard_names=None, bias=True)


def quantized(method: QuantizeMethod) -> tuple[Model, int]:
    """Return a model with all layers quantized that the method knows, and how many there are."""
    model, count = Model(), 0
    for layer in model.modules():
        if isinstance(layer, QuantizableLayer):
            try:
                layer.quantize(method)
            except UnsupportedModelError:
                continue
            count += 1
    return model, count


def classes(of: type[Any]) -> Iterator[type[Any]]:
    for each in of.__subclasses__():
        yield each
        yield from classes(each)


@pytest.mark.parametrize("name", METHODS)
def test_a_model_accepts_what_it_expects(name: str) -> None:
    """A plan of tensors with the expected names, dtypes and shapes has no problem."""
    model, count = quantized(METHODS[name])
    assert count >= 2
    report = model.plan_weights(model.expected_weights()).report
    problems = report.missing, report.unexpected, report.duplicated, report.misshapen
    assert not any(problems), report


def test_every_method_is_looked_at() -> None:
    """The table above has each class of the package that creates weights."""
    known = {each for each in classes(QuantizeMethod) if each.__module__.startswith("vllm_module")}
    concrete = {each for each in known if not list(classes(each)) or each in {PackedMethod}}
    assert concrete <= {type(each) for each in METHODS.values()}


def test_mxfp8_has_the_dtypes_that_compressed_tensors_writes() -> None:
    """Scales are exponents of one byte, and values are of one byte."""
    args = QuantizationArgs(
        num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    given = {"weight": torch.randn(128, 256), "weight_scale": torch.ones(128, 8)}
    written = MXFP8QuantizationCompressor.compress(given, scheme)
    expected = quantized(METHODS["mxfp8"])[0].column.expected_weights()
    for name in ("weight", "weight_scale"):
        assert expected[name].shape == written[name].shape
        assert expected[name].dtype == written[name].dtype


@pytest.mark.parametrize(
    "dtypes",
    [
        *permutations((torch.float32, torch.bfloat16, torch.float8_e8m0fnu)),
        *permutations((torch.bfloat16, torch.float8_e8m0fnu)),
        (),
    ],
)
def test_of_several_dtypes_a_parameters_own_is_expected(dtypes: tuple[torch.dtype, ...]) -> None:
    """Else the first one; and what is expected is loaded, in the order in which it is declared."""

    class Scales(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.scale = BlockQuantScaleParameter(
                Dim.whole(96), Dim.whole(64), block=(32, 32), stored_dtypes=dtypes, tp_rank=0,
                tp_size=1, dtype=torch.float32,
            )  # fmt: skip

    module = Scales()
    (expected,) = module.expected_weights().values()
    own = torch.float32 in dtypes or not dtypes
    assert expected.dtype == (torch.float32 if own else dtypes[0])
    numbers = 2.0 ** torch.arange(6).view(3, 2)
    module.load_weights({"scale": numbers.to(expected.dtype)})
    assert torch.equal(module.scale.data, numbers)
