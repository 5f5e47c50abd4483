"""What is no name, no pair and no plain tensor is refused by name, before anything is written."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses import FakeTensorMode

from vllm_module import vLLMModule
from vllm_module.core import fill
from vllm_module.errors import (
    MisshapenWeightError,
    UnexpectedWeightError,
    WeightLoadError,
    WeightReadError,
)
from vllm_module.layers import RMSNorm
from vllm_module.testing.checkpoints import assert_same_state, state, write_checkpoint
from vllm_module.weights import open_checkpoint

tree = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tree.py"))))

FORMS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "mapping": lambda weights: weights,
    "list": lambda weights: list(weights.items()),
    "stream": lambda weights: iter(weights.items()),
}
CALLS = ("load_weights", "update_weights", "plan_weights")


@pytest.fixture(scope="module")
def model():
    model = tree.Model(1).eval()
    model.load_weights(tree.checkpoint(1))
    return model


def fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def handle(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes, narrow=None, read_into=None)


# From a full tensor to what is given instead, and what the refusal says of it.
STRANGE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "sparse": (torch.Tensor.to_sparse, r"one dense tensor, got torch\.sparse_coo; call its to_d"),
    "mkldnn": (torch.Tensor.to_mkldnn, r"one dense tensor, got torch\._mkldnn"),
    "nested": (
        lambda x: torch.nested.nested_tensor([x], layout=torch.jagged),
        "one dense tensor, got a nested one",
    ),
    "nested, strided": (
        lambda x: torch.nested.nested_tensor([x], layout=torch.strided),
        "one dense tensor, got a nested one",
    ),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        r"not quantized, got torch\.qint8; call its dequantize",
    ),
    "lazy": (lambda x: nn.UninitializedParameter(), "a shape, got one that is not initialized"),
    "complex": (lambda x: x.to(torch.complex64), r"torch\.float32 or one that .* torch\.complex64"),
    "integers": (torch.Tensor.int, r"dtype torch\.float32 or one that .* got torch\.int32"),
    "eight bits": (lambda x: x.to(torch.float8_e5m2), r"torch\.float32 .* got torch\.float8_e5m2"),
    "array": (torch.Tensor.numpy, "a tensor or a handle, got ndarray"),
    "list": (torch.Tensor.tolist, "a tensor or a handle, got list"),
    "none": (lambda x: None, "a tensor or a handle, got NoneType"),
    "no shape": (lambda x: handle(shape=None, dtype=x.dtype), "got NoneType and dtype"),
    "no dtype": (lambda x: handle(shape=x.shape, dtype="float32"), "got Size and str"),
}
WITHOUT_DATA = {  # a plan does without it
    "meta": (lambda x: x.to("meta"), "data, got one on the meta device"),
    "fake": (fake, "a plain tensor, got FakeTensor; unwrap it"),
}
if hasattr(torch, "float4_e2m1fn_x2"):
    STRANGE["four bits"] = (
        lambda x: x.to(torch.uint8).view(torch.float4_e2m1fn_x2),
        r"torch\.float32 .* got torch\.float4_e2m1fn_x2",
    )


@pytest.mark.filterwarnings("ignore:.*deprecated|.*nested tensors:UserWarning")  # by PyTorch
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [*STRANGE, *WITHOUT_DATA])
def test_what_is_no_plain_tensor_is_refused_by_name(model, kind: str, form: str) -> None:
    """The report has the name, what was expected and what came: of slots, tensors and buffers."""
    strange, message = (STRANGE | WITHOUT_DATA)[kind]
    before = state(model)
    for name in (
        "blocks.0.q_proj.weight",
        "blocks.0.plain.0.weight",
        "blocks.0.plain.1.running_var",
    ):
        tensor = tree.checkpoint(1)[name]
        weights = {name: strange(tensor)}
        for call in CALLS[: 2 if kind in WITHOUT_DATA else 3]:
            if call == "plan_weights":
                (problem,) = model.plan_weights(FORMS[form](weights)).report.misshapen
                assert problem.name == name
                continue
            with pytest.raises(
                MisshapenWeightError if call[0] == "u" else WeightLoadError
            ) as error:
                getattr(model, call)(FORMS[form](weights))
            assert f"{name}: expected " in str(error.value)
            error.match(message)
            error.match("Nothing was written to the model")
    assert_same_state(state(model), before, "after it refused")
    model(torch.arange(3))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [0, None, b"head.weight", ("head", "weight"), 1.5])
def test_names_are_strings(model, name: object, form: str) -> None:
    """A name of another type is in the report, with its type, and nothing else is wrong with it."""
    weights: dict[Any, Any] = {name: torch.rand(10, 8)}
    with pytest.raises(UnexpectedWeightError, match=f"this is of type {type(name).__name__}") as e:
        model.update_weights(FORMS[form](weights))
    assert "Nothing was written" in str(e.value)
    (problem,) = model.plan_weights(FORMS[form](weights)).report.unexpected
    assert problem.name == repr(name)


NO_PAIRS: list[tuple[Iterable[Any], str]] = [
    ([("head.weight", torch.rand(10, 8), 0)], r"a tuple of 3 \(str, Tensor, int\)"),
    ([("head.weight",)], r"a tuple of 1 \(str\)"),
    (["head.weight"], "'head.weight'"),
    (["ab"], "'ab'"),
    ({"head.weight": 0}.keys(), "'head.weight'"),
    ([None], "an object of type NoneType"),
    ([{"head.weight": torch.rand(10, 8)}], "an object of type dict"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("weights", "message"), NO_PAIRS, ids=[text for _, text in NO_PAIRS])
def test_what_is_no_pair_is_refused(model, weights: Any, message: str, call: str) -> None:
    """A collection or stream of anything but pairs is refused with what came."""
    for form in (list, iter):
        with pytest.raises(
            WeightLoadError, match=f"expected pairs of name and tensor, got {message}"
        ):
            getattr(model, call)(form(weights))
    model(torch.arange(3))


@pytest.mark.parametrize(
    "weights", [None, 3, "folder", b"x", Path("folder"), torch.rand(2, 2), nn.Linear(1, 1)]
)
def test_what_holds_no_pairs_is_refused(model, weights: Any) -> None:
    """A path, a module or one tensor is not what a load takes; the message says what to pass."""
    for call in CALLS:
        with pytest.raises(
            TypeError, match=r"expected pairs .*: open a checkpoint with .*state_dict"
        ):
            getattr(model, call)(weights)


def test_tensors_of_any_memory_load(model) -> None:
    """Gradients, strides, negative bits, expansion and subclasses change no value."""

    class Subclass(torch.Tensor):
        pass

    values = torch.rand(8, 8)
    for weight in (
        values.clone().requires_grad_(),
        nn.Parameter(values),
        values.t().contiguous().t(),
        torch.complex(values, -values).conj().imag,
        values.as_subclass(Subclass),
    ):
        model.update_weights({"blocks.0.q_proj.weight": weight})
        assert torch.equal(model.blocks[0].qkv_proj.weight[:8], values)
        assert not model.blocks[0].qkv_proj.weight.requires_grad
    model.update_weights({"blocks.0.q_proj.weight": values[:1].expand(8, 8)})
    assert torch.equal(model.blocks[0].qkv_proj.weight[:8], values[:1].expand(8, 8))


NAN = "blocks.0.v_proj.weight"


def with_nan(dtype: torch.dtype = torch.float32, place: int = -1, sign: float = 1.0) -> Any:
    """Return a checkpoint one of whose tensors, of ``dtype``, has a NaN."""
    tensors = tree.checkpoint(1)
    tensors[NAN] = tensors[NAN].to(dtype)
    tensors[NAN].view(-1)[place] = torch.tensor(torch.nan).copysign(torch.tensor(sign))
    return tensors


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", ["load_weights", "update_weights"])
def test_a_nan_is_refused_by_its_name(model, call: str, form: str) -> None:
    """Of what can be looked at first, nothing is written then; a stream is written up to it."""
    before = state(model)
    with pytest.raises(WeightReadError, match=rf"^{NAN} has a NaN, .* set allow_nan") as refused:
        getattr(model, call)(FORMS[form](with_nan()))
    assert ("Nothing was written" in str(refused.value)) == (form != "stream")
    if form != "stream":
        assert_same_state(state(model), before, "after a refusal")
        model.check_ready()
    model.load_weights(tree.checkpoint(1))


@pytest.mark.parametrize("call", ["load_weights", "update_weights"])
def test_a_nan_of_a_small_tensor_in_a_file_is_refused_on_a_cpu(
    model, tmp_path: Path, call: str
) -> None:
    """Such as a norm's or a bias: a load finds it once it is read, an update before it writes."""
    write_checkpoint(tmp_path, with_nan(), config={})
    before = state(model)
    with (
        open_checkpoint(tmp_path) as files,
        pytest.raises(WeightReadError, match=rf"^{NAN} has a NaN") as refused,
    ):
        getattr(model, call)(files)
    assert ("Nothing was written" in str(refused.value)) == (call == "update_weights")
    if call == "update_weights":
        assert_same_state(state(model), before, "after a refusal")
        model.check_ready()
    model.load_weights(tree.checkpoint(1))


@pytest.mark.parametrize("shape", [(), (1,), (700, 1000), (1, 700, 1000), (700_000,), (3, 300_000)])
def test_a_nan_at_any_place_of_a_large_tensor_in_a_file_is_found(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """It is read in pieces of whole rows, as many as fit; no piece is left out."""
    numbers = math.prod(shape)
    row = numbers // shape[0] if shape else 1
    piece = max(1, (1 << 18) // row) * row  # of four bytes each
    for place in {0, min(piece, numbers) - 1, min(piece, numbers - 1), numbers - 1}:
        tensor = torch.zeros(shape)
        tensor.view(-1)[place] = torch.nan
        save_file({"fine": torch.zeros(3), "wrong": tensor}, tmp_path / "model.safetensors")
        with open_checkpoint(tmp_path) as files:
            with pytest.raises(WeightReadError, match=r"^wrong has a NaN"):
                fill.refuse_nan_sent(files.items())
            fill.refuse_nan_sent({"fine": files["fine"]}.items())


@pytest.mark.parametrize("place", [0, 13, -1])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_nan_of_a_file_is_refused_by_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    sign: float,
    place: int,
) -> None:
    """On a device, in any dtype, at any place of a slot; the model can be loaded again."""
    monkeypatch.setattr(fill, "_is_looked_at", lambda tensor: True)
    write_checkpoint(tmp_path, with_nan(dtype, place, sign), config={})
    fresh = tree.Model(1)
    with open_checkpoint(tmp_path) as files:
        with pytest.raises(WeightReadError, match=rf"^{NAN} has a NaN"):
            fresh.load_weights(files)
        fresh.allow_nan = True
        fresh.load_weights(files)
    assert fresh.blocks[0].qkv_proj.weight.isnan().sum() == 1


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, 6e4])
def test_infinities_and_large_numbers_load(value: float) -> None:
    """A bias of minus infinity excludes a token; numbers whose sum overflows are numbers."""
    tensors = tree.checkpoint(1)
    wide = torch.full((8, 8), value, dtype=torch.float16)
    wide[0, 0] = -wide[0, 0]
    for given in ({"blocks.0.q_proj.weight": wide}, {"blocks.0.q_proj.weight": wide.float()}):
        fresh = tree.Model(1)
        fresh.load_weights(tensors | given)
        assert torch.equal(fresh.blocks[0].qkv_proj.weight[:8], wide.float())


def test_a_slot_that_waits_for_its_weights_has_no_nan_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that fills one slot of new memory is not refused for the others."""
    monkeypatch.setattr(fill, "_is_looked_at", lambda tensor: True)
    tensors = tree.checkpoint(1)
    write_checkpoint(tmp_path, tensors, config={})
    fresh = tree.Model(1)
    with open_checkpoint(tmp_path) as files:
        for name in files:
            fresh.update_weights([(name, files[name])])
    fresh.check_ready()


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (
    *FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


class Held(vLLMModule):
    """One parameter of a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        data = torch.empty(2, dtype=dtype, device="meta")
        self.weight = nn.Parameter(data, requires_grad=False)


@pytest.mark.parametrize("held", DTYPES, ids=str)
def test_a_dtype_whose_values_may_be_lost_is_refused(held: torch.dtype) -> None:
    """Of all pairs, floats of 16 bits and more are converted, and int32 where int64 is held."""
    for stored in DTYPES:
        model, weight = Held(held), torch.tensor([0, 1]).to(stored)
        floats = stored in FLOATS and held in FLOATS
        if stored == held or floats or (stored, held) == (torch.int32, torch.int64):
            model.load_weights({"weight": weight})
            assert model.weight.tolist() == [0, 1]
            continue
        with pytest.raises(MisshapenWeightError, match=f"expected dtype {held} .*, got {stored}"):
            model.load_weights({"weight": weight})


class Forgotten(nn.Module):
    """A fused layer that is no vLLMModule."""

    shard_names = ("q_proj", "k_proj")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))


class Untyped(vLLMModule):
    """A fused layer whose weight has no slots."""

    shard_names = ("q_proj", "k_proj")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            Forgotten,
            r"Parent\.fused declares shard_names, which has no effect.*Forgotten is no vLLM",
        ),
        (
            Untyped,
            r"fused\.weight is a plain Parameter, which has no slots such as 'q_proj'.*typed",
        ),
    ],
)
def test_a_fused_layer_of_ones_own_that_lacks_something_says_what(layer: Any, message: str) -> None:
    """The refusal of a slot's name tells how the layer is to be written."""

    class Parent(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.fused = layer()

    with pytest.raises(WeightLoadError, match=message):
        Parent().load_weights({f"{name}.weight": torch.zeros(2, 4) for name in layer.shard_names})


@pytest.mark.parametrize(
    ("held", "name", "message"),
    [
        ([RMSNorm(2)], "held.0.weight", "is a list, .*: make it an nn.ModuleList"),
        ((RMSNorm(2),), "held.0.weight", "is a tuple, .*: make it an nn.ModuleList"),
        ({"a": RMSNorm(2)}, "held.a.weight", "is a dict, .*: make it an nn.ModuleDict"),
        (torch.zeros(2), "held", "is a plain tensor: make it an nn.Parameter, or a buffer"),
        ([1], "held.0.weight", "has no 'held'; it has norm"),
    ],
)
def test_what_pytorch_does_not_see_is_named(held: Any, name: str, message: str) -> None:
    """Weights are expected where an attribute has them, and only registered ones are loaded."""

    class Parent(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.held = RMSNorm(2), held

    with pytest.raises(WeightLoadError, match=f"Parent.*{message}"):
        Parent().load_weights({"norm.weight": torch.zeros(2), name: torch.zeros(2)})


class Buffers(vLLMModule):
    """A buffer that PyTorch's state dict has, and one that it leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stored", torch.zeros(3))
        self.register_buffer("computed", torch.ones(3), persistent=False)


@pytest.mark.parametrize("form", FORMS)
def test_a_buffer_that_is_not_stored_is_not_loaded(form: str) -> None:
    """A checkpoint holds what ``state_dict`` does."""
    weights = {"stored": torch.full((3,), 5.0), "computed": torch.full((3,), 6.0)}
    module = Buffers()
    module.load_weights({name: weights[name] for name in module.state_dict()})
    with pytest.raises(UnexpectedWeightError, match="computed"):
        module.load_weights(FORMS[form](weights))
    assert module.computed.tolist() == [1, 1, 1]
    assert module.stored.tolist() == [5, 5, 5]
