"""Rows that norms and activations quantize for the linear layer that reads them.

Products on a CPU do not quantize their inputs. A fixture lets them do so, as on a GPU, by the
definition written out.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from vllm_module import vLLMModule
from vllm_module.core.state import unguard
from vllm_module.distributed import run_ranks
from vllm_module.kernels import dtypes
from vllm_module.kernels.matmul import scaled_matmul
from vllm_module.layers import (
    ColumnParallelLinear,
    GeluAndMul,
    LayerNorm,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    SiluAndMul,
    SwigluOAIAndMul,
    fuse,
)
from vllm_module.layers.fusion import is_plain
from vllm_module.quantization import ONLINE, EightBitMethod, QuantizableLayer, Scheme, rows
from vllm_module.quantization.rows import QuantizedRows
from vllm_module.testing.checkpoints import random_weights

E4M3 = torch.float8_e4m3fn
FEATURES = 64
DYNAMIC = Scheme("channel")
SCHEMES = [
    ONLINE["fp8_per_tensor"],
    ONLINE["fp8_per_channel"],
    Scheme("block", block=(16, 16)),
    Scheme("block", block=(16, 128)),  # wider than a row
    Scheme("tensor", activations="static"),
    Scheme("channel", activations="static"),
]
WHOLE = [
    Scheme("channel", activations="none"),
    ONLINE["int8_per_channel_weight_only"],
    Scheme("tensor", torch.int8, "dynamic"),
    Scheme("block", block=(16, 24)),  # no kernel finds the scales of such groups
]


def as_quantized(x: torch.Tensor, group: int | None, scale: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` rounded to what its FP8 numbers and scales stand for, by the definition."""
    if scale is None and group is not None and group < x.shape[-1]:
        return torch.cat([as_quantized(part, None, None) for part in x.split(group, -1)], -1)
    wide = x.float()
    if scale is None:
        scale = (wide.abs().amax(-1, keepdim=True) / 448).clamp(min=torch.finfo(torch.float32).tiny)
    return ((wide / scale).clamp(-448, 448).to(E4M3).float() * scale).to(x.dtype)


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FP8 products quantize their input on this CPU."""
    apply = EightBitMethod.apply

    def quantizing(self: Any, layer: Any, x: torch.Tensor, bias: Any) -> torch.Tensor:
        scheme, static = self.scheme, None
        if scheme.dtype == E4M3 and scheme.activations != "none":
            if scheme.activations == "static":
                static = layer.input_scale.max()
            x = as_quantized(x, scheme.block[1] if scheme.strategy == "block" else None, static)
        return apply(self, layer, x, bias)

    monkeypatch.setattr(EightBitMethod, "apply", quantizing)
    monkeypatch.setattr(rows, "quantizes_inputs", lambda x: x.dtype != torch.float64)


class Writing(nn.Module):
    """A module that returns what its child would give to the reader."""

    sole_readers = {"module": "reader"}

    def __init__(self, reader: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.reader, self.module = reader, module

    def forward(self, *args: torch.Tensor) -> Any:
        return self.module(*args)


def rows_for(reader: nn.Module, module: nn.Module, *args: torch.Tensor) -> Any:
    """Return what ``module`` returns where nothing but ``reader`` reads it."""
    return fuse(Writing(reader, module))(*args)


pytestmark = pytest.mark.usefixtures("_as_on_a_gpu")


def ready(module: Any, *args: torch.Tensor) -> Any:
    """Return ``module`` after a first call, before which a hook checks that it is loaded."""
    module(*args)
    return module


def loaded(module: Any, scheme: Scheme | None = None) -> Any:
    """Return ``module``, quantized and filled."""
    for layer in module.modules():
        if scheme is not None and isinstance(layer, QuantizableLayer):
            layer.quantize(EightBitMethod(scheme))
    module.load_weights(random_weights(module.expected_weights()))
    return module


LAYERS: dict[str, Callable[[torch.dtype], Any]] = {
    "replicated": lambda dtype: ReplicatedLinear(FEATURES, 32, params_dtype=dtype),
    "column": lambda dtype: ColumnParallelLinear(FEATURES, 32, False, params_dtype=dtype),
    "gathered": lambda dtype: ColumnParallelLinear(
        FEATURES, 32, gather_output=True, params_dtype=dtype
    ),
    "fused": lambda dtype: MergedColumnParallelLinear(
        FEATURES, [32, 32], skip_bias_add=True, params_dtype=dtype, shard_names=["a", "b"]
    ),
    "heads": lambda dtype: QKVParallelLinear(FEATURES, 16, 2, 1, params_dtype=dtype),
    "row": lambda dtype: RowParallelLinear(FEATURES, 32, params_dtype=dtype),
}
WRITERS: dict[str, Callable[[torch.dtype], tuple[Any, int]]] = {  # and how wide its input is
    "norm": lambda dtype: (loaded(RMSNorm(FEATURES, params_dtype=dtype)), FEATURES),
    "Gemma's norm": lambda dtype: (
        loaded(RMSNorm(FEATURES, params_dtype=dtype, weight_offset=1.0)),
        FEATURES,
    ),
    "norm with a wider weight": lambda dtype: (
        loaded(RMSNorm(FEATURES, params_dtype=torch.float32)),
        FEATURES,
    ),
    "silu": lambda dtype: (SiluAndMul(), 2 * FEATURES),
    "gelu": lambda dtype: (GeluAndMul(), 2 * FEATURES),
    "gelu by tanh": lambda dtype: (GeluAndMul("tanh"), 2 * FEATURES),
}


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("writer", WRITERS)
@torch.no_grad()
def test_a_product_of_quantized_rows(scheme: Scheme, writer: str) -> None:
    """Rows that are quantized by the one who computes them give the bits of the product."""
    for dtype in (torch.bfloat16, torch.float32):
        module, features = WRITERS[writer](dtype)
        ready(module, torch.ones(1, features, dtype=dtype))
        product = torch.promote_types(
            dtype, getattr(module, "weight", torch.empty(0, dtype=dtype)).dtype
        )
        for name, build in LAYERS.items():
            layer = loaded(build(product), scheme)
            # The second has rows of zeros, and of numbers that are far apart.
            for x in (torch.randn(5, features), torch.randn(2, 3, features) ** 9):
                x = x.to(dtype)
                x[..., 0, :] = 0
                quantized = rows_for(layer, module, x)
                assert isinstance(quantized, QuantizedRows)
                assert torch.equal(layer(quantized), layer(module(x))), name
                if isinstance(module, RMSNorm):
                    (quantized, total), residual = rows_for(layer, module, x, x * 3), x * 3
                    assert torch.equal(total, x + residual)
                    assert torch.equal(layer(quantized), layer(module(x, residual)[0])), name
            assert layer(rows_for(layer, module, x[:0])).shape[0] == 0


class Reading(vLLMModule):
    """A module that hands its input to one layer, as an MLP does."""

    sole_readers = {"x": "layer"}

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = linear() if layer is None else layer
        unguard(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Halving(Reading):
    """A module with a method of its own that a subclass may override."""

    sole_readers = {"x": "layer"}

    def forward(self, x: Any) -> torch.Tensor:
        return self.layer(self.given(x))

    def given(self, x: Any) -> Any:
        return x


class Halved(Halving):
    def given(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class ReadingTwice(Reading):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.sum()


class Wrapped(Reading):
    @wraps(Reading.forward)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2)


class Undeclared(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        unguard(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Doubling(ReplicatedLinear):
    def forward(self, x: Any) -> torch.Tensor:
        return super().forward(x * 2)


class DoubledNorm(RMSNorm):
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return super().forward(x, residual) * 2


class DoubledGate(SiluAndMul):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * 2


class DoublingMethod(EightBitMethod):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(layer, x * 2, bias)


class OwnMethod(Undeclared):
    def __init__(self) -> None:
        super().__init__()
        self.layer.quant_method = DoublingMethod(DYNAMIC)


def linear(cls: Any = ReplicatedLinear, scheme: Scheme | None = DYNAMIC, **options: Any) -> Any:
    return loaded(cls(FEATURES, 32, **options), scheme)


def norm(cls: Any = RMSNorm) -> Any:
    return loaded(cls(FEATURES))


def watched(module: Any, register: str) -> Any:
    """Return the module with a hook that refuses anything but tensors."""

    def hook(_: nn.Module, *seen: Any) -> None:
        for each in seen:
            for value in each if isinstance(each, tuple) else (each,):
                assert value is None or isinstance(value, torch.Tensor)

    getattr(module, register)(hook)
    return module


def replaced(module: Any) -> Any:
    forward = module.forward
    module.forward = lambda *args: forward(*args)
    return module


def given_another() -> Any:
    class Given(Reading):
        sole_readers = {"x": "layer"}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2)

    Given.forward = doubled  # type: ignore[method-assign]
    return Given()


class Layerless(Reading):
    """A module that in some configurations has other layers."""

    sole_readers = {"x": "missing"}

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = None, self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x)


class Compiled(Reading):
    """A module whose call is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self._compiled_call_impl = self._call_impl


# Of each, what reads, and what computes the rows; by default a norm.
TENSORS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "a layer in full precision": lambda: (linear(scheme=None),),
    **{str(scheme): lambda scheme=scheme: (linear(scheme=scheme),) for scheme in WHOLE},
    "a layer of torch": lambda: (nn.Linear(FEATURES, 32),),
    "a layer that changes its input": lambda: (linear(Doubling),),
    "a method that changes its input": lambda: (OwnMethod().layer,),
    "a layer that takes its part": lambda: (linear(RowParallelLinear, input_is_parallel=False),),
    "a layer with a forward of its own": lambda: (replaced(linear()),),
    **{
        f"a layer with {hook}": lambda hook=hook: (watched(linear(), f"register_{hook}"),)
        for hook in ("forward_pre_hook", "forward_hook", "full_backward_hook",
                     "full_backward_pre_hook")
    },
    "an undeclared module": lambda: (Undeclared(),),
    "a module with a wrapped forward": lambda: (Wrapped(),),
    "a module that reads twice": lambda: (ReadingTwice(),),
    "a module with a hook": lambda: (watched(Reading(), "register_forward_pre_hook"),),
    "a module with a method that does more": lambda: (Halved(),),
    "a module whose class was given another forward": lambda: (given_another(),),
    "a compiled module": lambda: (Compiled(),),
    "a module with a forward of its own": lambda: (replaced(Reading()),),
    "a module whose layer has a hook": lambda: (
        Reading(watched(linear(), "register_forward_pre_hook")),
    ),
    "a module whose layer is of torch": lambda: (Reading(nn.Linear(FEATURES, 32)),),
    "a module without its layer": lambda: (Layerless(),),
    "a module whose layer declares another": lambda: (Reading(Reading()),),
    "a norm with a hook": lambda: (linear(), watched(norm(), "register_forward_hook")),
    "a norm that changes its output": lambda: (linear(), norm(DoubledNorm)),
    "a norm with a forward of its own": lambda: (linear(), replaced(norm())),
    "a norm of another kind": lambda: (linear(), norm(LayerNorm)),
    "a gate that changes its output": lambda: (linear(), DoubledGate()),
    "a gate of another kind": lambda: (linear(), SwigluOAIAndMul()),
    "a gate of torch": lambda: (linear(), nn.GLU()),
}  # fmt: skip


def args_of(module: nn.Module) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    if isinstance(module, (RMSNorm, LayerNorm)):
        return torch.randn(3, FEATURES), torch.randn(3, FEATURES)
    return (torch.randn(3, 2 * FEATURES),)


@pytest.mark.parametrize("case", TENSORS)
@torch.no_grad()
def test_all_others_are_given_tensors(case: str) -> None:
    """What does more than read rows, or may, gets a tensor, and the result does not change."""
    reader, *rest = TENSORS[case]()
    module = rest[0] if rest else norm()
    args = args_of(module)
    given, expected = rows_for(reader, module, *args), module(*args)
    if isinstance(expected, tuple):
        assert torch.equal(given[1], expected[1])
        given, expected = given[0], expected[0]
    assert type(given) is torch.Tensor
    assert torch.equal(given, expected)
    assert torch.equal(reader(given), reader(expected))


@torch.no_grad()
def test_a_module_that_declares_its_reader() -> None:
    """The layer that a module declares is given the rows, through the module."""
    reader, module = Reading(), norm()
    args = args_of(module)
    given, total = rows_for(reader, module, *args)
    assert isinstance(given, QuantizedRows)
    assert torch.equal(reader(given), reader(module(*args)[0]))
    assert torch.equal(total, sum(args))


def test_nothing_takes_rows_for_a_tensor() -> None:
    """Rows have no operations, cannot be unpacked or changed, and say so at once."""
    with torch.no_grad():
        given, _ = rows_for(linear(), norm(), *args_of(norm()))
    for use in (
        lambda: given + 1,
        lambda: given.float(),
        lambda: tuple(given),
        lambda: nn.functional.linear(given, torch.ones(2, FEATURES)),
        lambda: linear(scheme=None)(given),
        lambda: linear(RowParallelLinear, input_is_parallel=False)(given),
    ):
        with pytest.raises((TypeError, AttributeError, NotImplementedError, AssertionError)):
            use()
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.scales = None


def test_derivatives_need_tensors() -> None:
    """Where derivatives are recorded, nothing is quantized for another one."""
    layer, module, args = linear(), norm(), args_of(norm())
    assert isinstance(rows_for(layer, module, *args)[0], torch.Tensor)
    with torch.inference_mode():
        assert isinstance(rows_for(layer, module, *args)[0], QuantizedRows)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward", "full_backward_pre"])
@torch.no_grad()
def test_a_hook_of_all_modules_sees_tensors(kind: str) -> None:
    """Where a hook is registered for every module, all of them are called with tensors."""
    reader, module, seen = Reading(), norm(), []
    register = getattr(nn.modules.module, f"register_module_{kind}_hook")
    with register(lambda _, args, *rest: seen.extend(args)):
        given, _ = rows_for(reader, module, *args_of(module))
        reader(given)
    assert len(seen) == (0 if "backward" in kind else 6)
    assert all(type(each) is torch.Tensor for each in (given, *seen))


def test_a_class_with_a_call_of_its_own_is_given_tensors() -> None:
    """Its ``__call__`` may do more than its forward pass."""

    class Calling(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().__call__(x)

    assert is_plain(nn.Linear(2, 2))
    assert not is_plain(Calling(2, 2))


@torch.no_grad()
def test_a_module_that_is_not_ready_is_called_as_ever() -> None:
    """A layer put to sleep refuses to run, as it does without quantized rows."""
    layer, module = linear(), norm()
    for sleeping in (layer, module):
        sleeping.sleep()
        with pytest.raises(RuntimeError, match="cannot run: not loaded"):
            layer(rows_for(layer, module, *args_of(module))[0])
        sleeping.load_weights(random_weights(sleeping.expected_weights()))
    assert isinstance(rows_for(layer, module, *args_of(module))[0], QuantizedRows)


@torch.no_grad()
def test_a_scale_that_is_updated() -> None:
    """A static scale is the layer's own, in its memory, also after an update."""
    layer, module = linear(scheme=Scheme("tensor", activations="static")), norm()
    args = args_of(module)
    before, _ = rows_for(layer, module, *args)
    layer.update_weights({"input_scale": torch.tensor(0.5)})
    after, _ = rows_for(layer, module, *args)
    assert after.scales is before.scales is layer.input_scale_for_matmul
    assert torch.equal(layer(after), layer(module(*args)[0]))
    assert not torch.equal(before.values.float(), after.values.float())


class Pair(vLLMModule):
    """A gated MLP that is cut over ranks."""

    sole_readers = {"x": "gate_up", "act": "down"}

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = MergedColumnParallelLinear(FEATURES, [128, 128], shard_names=["gate", "up"])
        self.act = SiluAndMul()
        self.down = RowParallelLinear(128, FEATURES)
        self.handed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act(self.gate_up(x))
        self.handed += isinstance(inner, QuantizedRows)
        return self.down(inner)


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_quantize_their_own_part(scheme: Scheme, size: int, monkeypatch: Any) -> None:
    """However many ranks share the features, each quantizes its part of a row as its product."""
    x = torch.randn(3, FEATURES)
    weights = random_weights(Pair().expected_weights())

    def run(rank: int) -> tuple[torch.Tensor, int]:
        model = Pair()
        for layer in (model.gate_up, model.down):
            layer.quantize(EightBitMethod(dataclasses.replace(scheme, online=True)))
        fuse(model)
        model.load_weights(weights)
        module = loaded(RMSNorm(FEATURES))
        with torch.no_grad():
            return model(rows_for(model, module, x)), model.handed

    together = run_ranks(size, run)
    assert [handed for _, handed in together] == [1] * size
    monkeypatch.setattr(rows, "quantizes_inputs", lambda _: False)
    apart = run_ranks(size, run)
    assert all(
        torch.equal(one, other) and not handed
        for (one, _), (other, handed) in zip(together, apart, strict=True)
    )


def test_only_a_gpu_quantizes_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are quantized on a GPU, and not where a graph is traced."""
    quantizes_inputs = scaled_matmul.quantizes_inputs
    with FakeTensorMode():
        x = torch.empty(2, 4, device="cuda")
        host = torch.empty(2, 4, device="cpu")
    assert not quantizes_inputs(x)  # traced
    # The class of a fake tensor is that of a traced one.
    monkeypatch.setattr(scaled_matmul.torch, "Tensor", type(x))
    assert quantizes_inputs(x)
    assert not quantizes_inputs(x.double())
    assert not quantizes_inputs(host)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not quantizes_inputs(x)
    monkeypatch.undo()


@torch.no_grad()
def test_a_gpu_that_does_not_multiply_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products dequantize the weight, so nothing is quantized for them."""
    layer, module = linear(), norm()
    assert isinstance(rows_for(layer, module, *args_of(module))[0], QuantizedRows)
    monkeypatch.setattr(dtypes, "capability", lambda _: (8, 0))
    assert isinstance(rows_for(layer, module, *args_of(module))[0], torch.Tensor)


class Layer(Writing):
    """A module whose child's output one reader reads."""

    sole_readers = {"module": "reader"}

    def forward(self, *args: torch.Tensor) -> Any:
        x, _ = self.module(*args)
        return self.reader(x)


class Changing(Layer):
    """A user's module, which does more than its base."""

    def forward(self, *args: torch.Tensor) -> Any:
        x, residual = self.module(*args)
        return self.reader(x + residual)


class Failing(Layer):
    sole_readers = {"module": "reader"}

    def forward(self, *args: torch.Tensor) -> Any:
        raise KeyError("failed")


@torch.no_grad()
def test_a_norm_that_anyone_else_calls() -> None:
    """A norm gives rows to its reader only, and tensors to all who call it themselves."""
    layer = fuse(Layer(Reading(), norm()))
    args, given = args_of(layer.module), []
    multiply = layer.reader.layer.quant_method.apply_rows
    layer.reader.layer.quant_method.apply_rows = lambda *rows: given.append(rows) or multiply(*rows)
    expected = layer.reader(layer.module(*args)[0])
    assert not given
    assert torch.equal(layer(*args), expected)
    assert len(given) == 1
    assert isinstance(layer.module(*args)[0], torch.Tensor)
    assert isinstance(fuse(layer)(*args), torch.Tensor)  # once more changes nothing
    assert len(given) == 2


@torch.no_grad()
def test_a_forward_pass_that_fails() -> None:
    """After an error, a norm gives tensors as before."""
    layer = fuse(Failing(Reading(), norm()))
    args = args_of(layer.module)
    with pytest.raises(KeyError):
        layer(*args)
    assert isinstance(layer.module(*args)[0], torch.Tensor)


@torch.no_grad()
def test_an_override_of_the_declaring_forward() -> None:
    """A subclass that overrides the forward pass which declares is given tensors."""
    layer = Changing(Reading(), norm())
    args = args_of(layer.module)
    expected = layer(*args)
    assert torch.equal(fuse(layer)(*args), expected)
    assert not layer._forward_pre_hooks


@torch.no_grad()
def test_a_copy_hands_over_its_own_rows() -> None:
    """A deep copy of a model has its own norms and readers."""
    layer, seen = fuse(Layer(Reading(), norm())), []
    args = args_of(layer.module)
    expected = layer(*args)
    copied = copy.deepcopy(layer)
    layer.module.weight.zero_()
    assert torch.equal(copied(*args), expected)
    with copied.reader.register_forward_pre_hook(lambda _, args: seen.extend(args)):
        assert torch.equal(copied(*args), expected)
    assert [type(each) for each in seen] == [torch.Tensor]


@torch.no_grad()
def test_of_several_readers_a_module_has_one() -> None:
    """Where a class names several readers, the one that the module has is given rows."""

    class Either(Layer):
        sole_readers = {"module": ("other", "reader")}

        def forward(self, *args: torch.Tensor) -> Any:
            return self.module(*args)

    module = norm()
    one, both = Either(Reading(), module), Either(Reading(), module)
    both.other = Reading()
    assert isinstance(fuse(one)(*args_of(module))[0], QuantizedRows)
    assert isinstance(fuse(both)(*args_of(module))[0], torch.Tensor)
