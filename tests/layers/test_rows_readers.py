"""Which modules are given quantized rows, and that all others are given tensors."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vllm_module import vLLMModule
from vllm_module.core.state import unguard
from vllm_module.layers import (
    LayerNorm,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    SiluAndMul,
    SwigluOAIAndMul,
    fuse,
)
from vllm_module.layers.fusion import is_plain
from vllm_module.quantization import EightBitMethod
from vllm_module.quantization.rows import QuantizedRows

# Pytest's importlib mode has no imports between test files.
READERS: Any = runpy.run_path(str(Path(__file__).with_name("readers.py")))
FEATURES, DYNAMIC, WHOLE = (READERS[name] for name in ("FEATURES", "DYNAMIC", "WHOLE"))
Writing, rows_for, Reading = (READERS[name] for name in ("Writing", "rows_for", "Reading"))
linear, norm, args_of = (READERS[name] for name in ("linear", "norm", "args_of"))
_as_on_a_gpu = READERS["_as_on_a_gpu"]
pytestmark = pytest.mark.usefixtures("_as_on_a_gpu")


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
