"""Layers with recurrent state: whole sequences, sequences in parts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm_module.distributed import run_ranks, tensor_parallel
from vllm_module.errors import ShardingError, UnsupportedModelError, WeightLoadError
from vllm_module.kernels.recurrent.causal_conv1d import causal_conv1d
from vllm_module.layers import (
    AttentionMetadata,
    CausalConv1d,
    GatedDeltaNet,
    GatedRMSNorm,
    GroupedGatedRMSNorm,
    Mamba2Mixer,
    RecurrentLayer,
    layer_kind,
)
from vllm_module.parameters import Dim
from vllm_module.quantization import ONLINE, EightBitMethod, QuantizableLayer
from vllm_module.testing import random_weights

HIDDEN = 6
BUILD: dict[str, Callable[[], RecurrentLayer]] = {
    "mamba2": lambda: Mamba2Mixer(HIDDEN, 8, head_dim=3, n_groups=4, state_size=5),
    "mamba2, one group": lambda: Mamba2Mixer(HIDDEN, 4, 3, n_groups=1, state_size=5, bias=True),
    "gated delta net": lambda: GatedDeltaNet(HIDDEN, 4, 8, key_dim=3, value_dim=5),
    "gated delta net, few keys": lambda: GatedDeltaNet(HIDDEN, 2, 8, key_dim=3, value_dim=5),
}
WITHIN = {"rtol": 1e-5, "atol": 1e-5}


def loaded(name: str) -> RecurrentLayer:
    layer = BUILD[name]()
    layer.load_weights(random_weights(BUILD[name]().expected_weights()))
    return layer


def keep_states(layer: RecurrentLayer, slots: int) -> None:
    """Give the layer states that hold what an earlier sequence left: large numbers."""
    layer.states = {
        name: torch.full((slots, *shape), 1e3, dtype=layer.state_dtypes[name] or torch.float32)
        for name, shape in layer.state_shapes.items()
    }


def step(slots: list[int], lengths: list[int], contexts: list[int]) -> AttentionMetadata:
    """Return the metadata of a step of sequences in ``slots`` with so many tokens."""
    starts = [sum(lengths[:end]) for end in range(len(lengths) + 1)]
    nothing = torch.zeros(0, dtype=torch.int64)
    return AttentionMetadata(
        nothing,
        torch.zeros(len(slots), 0, dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        max(lengths),
        state_slots=torch.tensor(slots),
    )


@pytest.fixture(params=BUILD)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@torch.inference_mode()
def test_sequences_in_parts_equal_each_sequence_alone(name: str) -> None:
    """Prompts in chunks beside single tokens, in any slots, give what each sequence gives alone."""
    compare_in_parts(loaded(name))


def compare_in_parts(layer: RecurrentLayer) -> None:
    x, y = torch.randn(9, HIDDEN), torch.randn(6, HIDDEN)
    alone = layer(x), layer(y)
    keep_states(layer, 4)
    parts: list[list[torch.Tensor]] = [[], []]
    done = [0, 0]
    # 5 tokens of one; 3 of it beside the other's first; one of each; each alone.
    for lengths in ([5, 0], [3, 2], [1, 1], [0, 1], [0, 2]):
        of = [at for at in (0, 1) if lengths[at]]
        taken = [(x, y)[at][done[at] : done[at] + lengths[at]] for at in of]
        contexts = [done[at] + lengths[at] for at in of]
        metadata = step([(2, 0)[at] for at in of], [lengths[at] for at in of], contexts)
        out = layer(torch.cat(taken), metadata).split([len(each) for each in taken])
        for at, part in zip(of, out, strict=True):
            parts[at].append(part)
            done[at] += lengths[at]
    for got, expected in zip(parts, alone, strict=True):
        torch.testing.assert_close(torch.cat(got), expected, **WITHIN)


def places_as(
    change: Callable[..., Any],
) -> Callable[[RecurrentLayer, AttentionMetadata | None], Any]:
    """Return a faulty ``kept``: ``change`` is given what it returns of the step's sequences."""
    right = RecurrentLayer.kept

    def kept(layer: RecurrentLayer, metadata: AttentionMetadata | None) -> Any:
        states, (slots, starts, contexts, most) = right(layer, metadata)
        if metadata is None:
            return states, (slots, starts, contexts, most)
        return states, (*change(slots, starts, contexts), most)

    return kept


def convolve_too_late(conv: CausalConv1d, x: torch.Tensor, state: Any, places: Any) -> torch.Tensor:
    """Convolve, and keep inputs that are one too old."""
    y = causal_conv1d(x, conv.weight.squeeze(1), conv.bias, state, *places)
    if state is not None:
        state.copy_(state.roll(1, -1))
    return y


FAULTS: dict[str, tuple[type, str, Any]] = {
    "a new sequence's state is not zeroed": (
        RecurrentLayer,
        "kept",
        places_as(lambda slots, starts, contexts: (slots, starts, contexts + 1)),
    ),
    "the state of another sequence": (
        RecurrentLayer,
        "kept",
        places_as(lambda slots, starts, contexts: (slots.flip(0), starts, contexts)),
    ),
    "the state of a chunk is dropped": (
        RecurrentLayer,
        "kept",
        places_as(lambda slots, starts, contexts: (slots, starts, starts.diff())),
    ),
    "the convolution's tail is off by one": (CausalConv1d, "forward", convolve_too_late),
}


@torch.inference_mode()
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_states_shows(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of sequences in parts fails with each fault of where states are."""
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError, match="not close"):
        compare_in_parts(loaded(name))


@torch.inference_mode()
def test_one_token_at_a_time_equals_the_whole_sequence(name: str) -> None:
    """A sequence decoded token by token gives what its whole prompt gives, from its first token."""
    layer = loaded(name)
    x = torch.randn(7, HIDDEN)
    expected = layer(x)
    keep_states(layer, 1)
    steps = [layer(x[at : at + 1], step([0], [1], [at + 1])) for at in range(len(x))]
    torch.testing.assert_close(torch.cat(steps), expected, **WITHIN)


@torch.inference_mode()
def test_padding_stores_nothing(name: str) -> None:
    """A sequence in slot -1 leaves every state as it is."""
    layer = loaded(name)
    keep_states(layer, 2)
    assert layer.states is not None
    before = {key: state.clone() for key, state in layer.states.items()}
    metadata = step([-1], [1], [1])
    assert layer(torch.randn(1, HIDDEN), metadata).isfinite().all()
    assert all(torch.equal(layer.states[key], before[key]) for key in before)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_keep_their_heads_states(name: str, size: int) -> None:
    """At any size the chunks of a sequence give what one rank gives; a state has a rank's heads."""
    x, one = torch.randn(8, HIDDEN), BUILD[name]()
    weights = random_weights(one.expected_weights())
    one.load_weights(weights)
    with torch.inference_mode():
        expected = one(x)

    def chunks(rank: int) -> tuple[torch.Tensor, Any]:
        layer = BUILD[name]()
        layer.load_weights(weights)
        keep_states(layer, 2)
        with torch.inference_mode():
            first = layer(x[:5], step([1], [5], [5]))
            return torch.cat([first, layer(x[5:], step([1], [3], [8]))]), layer.state_shapes

    for got, shapes in run_ranks(size, chunks):
        torch.testing.assert_close(got, expected, **WITHIN)
        assert shapes["recurrence"][0] == one.state_shapes["recurrence"][0] // size


def test_what_decides_steps_is_float32_in_a_model_of_bfloat16(name: str) -> None:
    """A_log, dt_bias and D keep their bits, and the recurrence's state its own dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = BUILD[name]()
    finally:
        torch.set_default_dtype(before)
    weights = random_weights(BUILD[name]().expected_weights())
    layer.load_weights(weights)
    wide = {key for key, tensor in layer.named_parameters() if tensor.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias"} | ({"D"} if "mamba2" in name else set())
    for key in wide:
        assert torch.equal(layer.get_parameter(key), weights[key])
    assert layer.state_dtypes == {"conv": None, "recurrence": torch.float32}
    with torch.inference_mode():
        assert layer(torch.randn(3, HIDDEN, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_decides_steps_stays_float32_in_a_model_that_is_cast(
    name: str, dtype: torch.dtype
) -> None:
    """A cast of the layer rounds its projections, and neither A_log, A, dt_bias nor D."""
    layer, weights = BUILD[name](), random_weights(BUILD[name]().expected_weights())
    layer.load_weights(weights)
    cast: Any = torch.nn.Sequential(layer).to(dtype)[0]
    assert cast.out_proj.weight.dtype == cast.conv1d.weight.dtype == dtype
    for key in ("A_log", "dt_bias", *(["D"] if "mamba2" in name else [])):
        assert torch.equal(cast.get_parameter(key), weights[key])
    assert cast.A.dtype == torch.float32
    torch.testing.assert_close(cast.A, -weights["A_log"].exp())
    with torch.inference_mode():
        assert cast(torch.randn(3, HIDDEN, dtype=dtype)).dtype == dtype
    assert cast.to("meta").A.is_meta


def test_only_matmuls_are_quantized(name: str) -> None:
    """FP8 while loading makes the projections narrow, and nothing else."""
    layer = BUILD[name]()
    for module in layer.modules():
        if isinstance(module, QuantizableLayer):
            module.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
    layer.load_weights(random_weights(BUILD[name]().expected_weights()))
    narrow = {key for key, tensor in layer.named_parameters() if tensor.dtype.itemsize == 1}
    assert narrow
    assert all("_proj" in key and key.endswith(".weight") for key in narrow)


@torch.inference_mode()
def test_an_update_of_the_decay_is_computed_with_in_place(name: str) -> None:
    """After update_weights of A_log the layer computes with it, at the same address."""
    layer, x = loaded(name), torch.randn(6, HIDDEN)
    address, before = layer.A.data_ptr(), layer(x)
    weights = random_weights(BUILD[name]().expected_weights()) | {
        "A_log": torch.linspace(-2, 1, len(layer.A))
    }
    layer.update_weights({"A_log": weights["A_log"]})
    fresh = BUILD[name]()
    fresh.load_weights(weights)
    assert layer.A.data_ptr() == address
    assert torch.equal(layer(x), fresh(x))
    assert not torch.equal(layer(x), before)


def test_a_decay_that_is_trained(name: str) -> None:
    """Its gradient is that of finite differences, and the layer computes with each new value."""
    layer, x = loaded(name), torch.randn(6, HIDDEN)
    layer.A_log.requires_grad_(True)
    direction = torch.linspace(-1, 1, len(layer.A_log))
    layer(x).square().sum().backward()
    weights = random_weights(BUILD[name]().expected_weights())

    def fresh(step: float) -> torch.Tensor:
        """Return what a layer computes that has loaded other values."""
        other = BUILD[name]()
        other.load_weights({**weights, "A_log": weights["A_log"] + step * direction})
        with torch.no_grad():
            return other(x)

    change = (fresh(0.01).square().sum() - fresh(-0.01).square().sum()) / 0.02
    assert change.abs() > 1e-4
    torch.testing.assert_close((layer.A_log.grad * direction).sum(), change, rtol=2e-2, atol=1e-4)
    with torch.no_grad():
        layer.A_log.add_(direction)  # as an optimizer does
        assert torch.equal(layer(x), fresh(1.0))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 100.0])
def test_a_decay_without_a_number_is_refused(name: str, value: float) -> None:
    """A_log whose exponential is no number is refused by its name, and the value."""
    weights = random_weights(BUILD[name]().expected_weights())
    weights["A_log"][1] = value
    reason = "A_log has a NaN" if value != value else f"A_log has 1 of .* such as {value}"
    with pytest.raises(WeightLoadError, match=reason):
        BUILD[name]().load_weights(weights)


def test_a_convolution_of_another_width_is_refused(name: str) -> None:
    """A checkpoint whose convolution has another width is refused by name, before it is written."""
    weights = random_weights(BUILD[name]().expected_weights())
    weights["conv1d.weight"] = weights["conv1d.weight"][..., 1:]
    layer = BUILD[name]()
    with pytest.raises(WeightLoadError, match=r"conv1d\.weight"):
        layer.load_weights(weights)
    assert layer.conv1d.weight.is_meta


def test_metadata_without_states_is_an_error(name: str) -> None:
    """A step whose states or slots are not set says which."""
    layer, metadata = loaded(name), step([0], [1], [1])
    with pytest.raises(RuntimeError, match="needs states"):
        layer(torch.randn(1, HIDDEN), metadata)
    keep_states(layer, 1)
    object.__setattr__(metadata, "state_slots", None)
    with pytest.raises(RuntimeError, match="needs state_slots"):
        layer(torch.randn(1, HIDDEN), metadata)


@pytest.mark.parametrize(
    ("build", "size", "message"),
    [
        (lambda: Mamba2Mixer(6, 6, 2, 1, 4), 4, "6 heads .* 4 tensor-parallel"),
        (lambda: Mamba2Mixer(6, 12, 2, 4, 4), 6, "4 groups .* 6 tensor-parallel"),
        (lambda: Mamba2Mixer(6, 6, 2, 4, 4), 1, "6 heads .* 4 groups"),
        (lambda: Mamba2Mixer(6, 12, 2, 3, 4), 2, "3 groups .* 2 tensor-parallel"),
        (lambda: GatedDeltaNet(6, 2, 4, 2, 2), 8, "2 key heads and 4 value heads .* 8 tensor-par"),
        (lambda: GatedDeltaNet(6, 4, 12, 2, 2), 6, "4 key heads and 12 value heads .* 6 tensor-p"),
        (lambda: GatedDeltaNet(6, 4, 6, 2, 2), 1, "6 value heads .* 4 key heads"),
        (lambda: GroupedGatedRMSNorm(12, 3, 1e-5), 2, "12 features in 3 groups .* 2"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers(
    build: Callable[[], Any], size: int, message: str
) -> None:
    """Heads and groups that ranks cannot share are refused before anything is built."""
    with tensor_parallel(rank=0, size=size), pytest.raises(ShardingError, match=message):
        build()


@pytest.mark.parametrize("width", [1, 9])
def test_a_kernel_that_is_too_small_or_large_is_refused(width: int) -> None:
    """A convolution that no kernel computes is refused when it is built, with its width."""
    with pytest.raises(UnsupportedModelError, match=f"kernel of {width}: expected 2 to 8"):
        Mamba2Mixer(6, 2, 2, 1, 2, conv_kernel=width)


@pytest.mark.parametrize("width", [2, 8])
def test_the_smallest_and_the_largest_kernel_are_torchs_convolution(width: int) -> None:
    """Each channel is convolved with its last inputs as torch does it, and SiLU follows."""
    conv = CausalConv1d(Dim.whole(5), width, bias=True)
    weights = random_weights(conv.expected_weights())
    conv.load_weights(weights)
    x = torch.randn(11, 5)
    before = F.pad(x.T, (width - 1, 0))
    expected = F.silu(F.conv1d(before, weights["weight"], weights["bias"], groups=5).T)
    torch.testing.assert_close(conv(x), expected, **WITHIN)


@pytest.mark.parametrize("types", [["linear_attention"], ["linear_attention", "mamba"]])
def test_a_layer_of_unknown_kind_is_refused(types: list[str]) -> None:
    """A list of layers that is too short, or has an unknown kind, is refused by the entry."""
    config = SimpleNamespace(layer_types=types, num_hidden_layers=2)
    assert layer_kind(config, 0) == "linear_attention"
    with pytest.raises(UnsupportedModelError, match=r"layer_types(\[1\] is | has 1 entries)"):
        layer_kind(config, 1)


@pytest.mark.parametrize(("groups", "before"), [(1, False), (2, False), (2, True)])
def test_the_gated_norm_is_its_formula(groups: int, before: bool) -> None:
    """Of each group the norm is x / rms(x) * weight, with the gate's SiLU before or after it."""
    norm = GroupedGatedRMSNorm(8, groups, 1e-5, norm_before_gate=before)
    weight, x, gate = torch.rand(8) + 0.5, torch.randn(3, 8), torch.randn(3, 8)
    norm.load_weights({"weight": weight})
    wide = x.double() if before else x.double() * F.silu(gate.double())
    parts = wide.view(3, groups, -1)
    expected = (parts / (parts.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).view(3, 8) * weight
    if before:
        expected = expected * F.silu(gate.double())
    torch.testing.assert_close(norm(x, gate).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", [False, True])
def test_mamba2_is_its_formula(before: bool) -> None:
    """Token by token: a convolution, the state times its decay, D, and the gated norm."""
    heads, size, groups, state_size = 4, 3, 2, 5
    inner, shared = heads * size, groups * state_size
    layer = Mamba2Mixer(HIDDEN, heads, size, groups, state_size, norm_before_gate=before)
    weights = random_weights(layer.expected_weights())
    layer.load_weights(weights)
    w = {name: weight.double() for name, weight in weights.items()}
    x = torch.randn(7, HIDDEN)
    z, xbc, dt = (x.double() @ w["in_proj.weight"].T).split([inner, inner + 2 * shared, heads], -1)
    taps = F.pad(xbc, (0, 0, 3, 0)).unfold(0, 4, 1)  # [tokens, channels, 4]
    xbc = F.silu((taps * w["conv1d.weight"].squeeze(1)).sum(-1) + w["conv1d.bias"])
    dt = F.softplus(dt + w["dt_bias"])
    state, rows = torch.zeros(heads, size, state_size, dtype=torch.float64), []
    for token in range(len(x)):
        xs, b, c = xbc[token].split([inner, shared, shared])
        xs = xs.view(heads, size)
        b, c = (each.view(groups, -1).repeat_interleave(heads // groups, 0) for each in (b, c))
        step = dt[token, :, None, None]
        state = state * (-w["A_log"].exp()[:, None, None] * step).exp()
        state = state + step * xs[:, :, None] * b[:, None, :]
        rows.append(((state * c[:, None, :]).sum(-1) + w["D"][:, None] * xs).flatten())
    y, gate = torch.stack(rows), F.silu(z)
    parts = (y if before else y * gate).view(-1, groups, inner // groups)
    y = (parts / (parts.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * w["norm.weight"]
    expected = (y * gate if before else y) @ w["out_proj.weight"].T
    torch.testing.assert_close(layer(x).double(), expected, **WITHIN)


def test_the_gated_norm_of_one_group_is_its_formula() -> None:
    """The norm is x / rms(x) * (weight + offset), and is multiplied by the gate's SiLU."""
    norm = GatedRMSNorm(8, 1e-5, weight_offset=1.0)
    weight, x, gate = torch.rand(8), torch.randn(3, 8), torch.randn(3, 8)
    norm.load_weights({"weight": weight})
    rms = (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = x.double() / rms * (weight.double() + 1) * F.silu(gate.double())
    torch.testing.assert_close(norm(x, gate).double(), expected, rtol=1e-5, atol=1e-6)
