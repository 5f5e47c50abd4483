"""Single tokens of recurrent layers in the loops for a CPU, beside formulas in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm_module.kernels.matmul.products import Products, products
from vllm_module.kernels.recurrent import causal_conv1d as convolutions
from vllm_module.kernels.recurrent import gated_delta_rule as rules
from vllm_module.kernels.recurrent import mamba2_scan as scans
from vllm_module.kernels.recurrent.causal_conv1d import causal_conv1d
from vllm_module.kernels.recurrent.gated_delta_rule import gated_delta_rule
from vllm_module.kernels.recurrent.mamba2_scan import mamba2_scan

pytest.importorskip("numba")
DTYPES = torch.float32, torch.bfloat16
# Slots of the sequences, of which one is padding, and their contexts, of which one is new.
SLOTS, CONTEXTS = torch.tensor([4, -1, 0, 2, 5]), torch.tensor([3, 1, 9, 1, 2], dtype=torch.int32)
TOKENS = len(SLOTS)
KEEPS = (SLOTS >= 0) & (CONTEXTS > 1)
USED = SLOTS >= 0
PLACES = {
    "state_slots": SLOTS, "context_lens": CONTEXTS, "max_query_len": 1,
    "query_start_loc": torch.arange(TOKENS + 1, dtype=torch.int32),
}  # fmt: skip


@pytest.fixture(autouse=True, params=[1, 2])
def _chosen(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    with torch.inference_mode(), products(Products(pages=True)):
        yield
    torch.set_num_threads(before)


@pytest.fixture
def only_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("torch computed it")

    # Results do not tell what computed them.
    monkeypatch.setattr(scans, "_mamba2_scan", refuse)
    monkeypatch.setattr(rules, "_gated_delta_rule", refuse)
    monkeypatch.setattr(convolutions, "_causal_conv1d", refuse)


def before_of(state: torch.Tensor) -> torch.Tensor:
    """Return the states before the step, in float64; those that are not kept are zeros."""
    found = state.double()[SLOTS.clamp(min=0)]
    return torch.where(KEEPS.view(-1, *[1] * (state.dim() - 1)), found, 0)


def assert_states(state: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> None:
    """Used slots have the new states, within a rounding of their dtype; others are as before."""
    near = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[state.dtype]
    torch.testing.assert_close(state[SLOTS[USED]].double(), new[USED], rtol=near, atol=near)
    others = [slot for slot in range(len(state)) if slot not in SLOTS]
    assert torch.equal(state[others], old[others])


@pytest.mark.usefixtures("only_loops")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize(("groups", "features", "size"), [(1, 5, 7), (2, 16, 33), (6, 8, 64)])
@pytest.mark.parametrize("whole", [False, True])
def test_a_step_of_mamba2_is_the_recurrence(
    dtype: torch.dtype, state_dtype: torch.dtype, groups: int, features: int, size: int, whole: bool
) -> None:
    """With ``d``, a bias and limits of the step, and without; inputs are parts of one tensor."""
    heads, limits = 6, {"dt_min": 0.3, "dt_max": 0.9} if whole else {}
    widths = [heads * features, groups * size, groups * size, heads]
    x, b, c, dt = (3 * torch.randn(TOKENS, sum(widths))).to(dtype).split(widths, 1)
    x = x.unflatten(1, (heads, features))
    b, c = (each.unflatten(1, (groups, size)) for each in (b, c))
    a, d, bias = -torch.rand(heads) - 0.1, torch.randn(heads), torch.randn(heads)
    d, bias = (each.to(dtype) if whole else None for each in (d, bias))
    state = torch.randn(7, heads, features, size).to(state_dtype)
    old = state.clone()
    y = mamba2_scan(x, dt, a, b, c, d, bias, state, **PLACES, **limits)

    def wide(given: torch.Tensor | None) -> Any:
        return 0 if given is None else given.double()

    step = F.softplus(dt.double() + wide(bias))
    step = step.clamp(*limits.values()) if whole else step
    each_b, each_c = (v.double().repeat_interleave(heads // groups, 1) for v in (b, c))
    decay = (step * a.double()).exp()[..., None, None]
    added = (step[..., None] * x.double())[..., None] * each_b[:, :, None]
    new = decay * before_of(old) + added
    skipped = 0 if d is None else d.double()[:, None] * x.double()
    expected = (new * each_c[:, :, None]).sum(-1) + skipped
    assert (y.dtype, y.shape) == (dtype, x.shape)
    near = {torch.float32: 1e-4, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(y.double()[USED], expected[USED], rtol=near, atol=20 * near)
    assert y.isfinite().all()
    assert_states(state, old, new)


@pytest.mark.usefixtures("only_loops")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize(("channels", "width"), [(1, 2), (11, 3), (70, 4), (5, 8)])
@pytest.mark.parametrize("whole", [False, True])
def test_a_step_of_a_convolution_has_the_last_inputs(
    dtype: torch.dtype, state_dtype: torch.dtype, channels: int, width: int, whole: bool
) -> None:
    """With a bias and SiLU, and without; the state keeps the inputs, the oldest first."""
    x = torch.randn(TOKENS, channels + 3).to(dtype)[:, 3:]
    weight, bias = torch.randn(channels, width).to(dtype), torch.randn(channels).to(dtype)
    state = torch.randn(7, channels, width - 1).to(state_dtype)
    old = state.clone()
    y = causal_conv1d(x, weight, bias if whole else None, state, **PLACES, silu=whole)
    window = torch.cat([before_of(old), x.double()[..., None]], 2)
    expected = (window * weight.double()).sum(2)
    expected = F.silu(expected + bias.double()) if whole else expected
    near = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(y.double()[USED], expected[USED], rtol=near, atol=near)
    assert y.isfinite().all()
    assert_states(state, old, window[:, :, 1:])
    exact = state_dtype == torch.float32 or dtype == torch.bfloat16
    assert not exact or torch.equal(state[SLOTS[USED]].double(), window[USED, :, 1:])


@pytest.mark.usefixtures("only_loops")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize(("key_heads", "keys", "values"), [(1, 1, 5), (3, 16, 33), (6, 40, 16)])
@pytest.mark.parametrize("whole", [False, True])
def test_a_step_of_the_gated_delta_rule_replaces_the_value_of_a_key(
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    key_heads: int,
    keys: int,
    values: int,
    whole: bool,
) -> None:
    """Keys have the length one, or their own; the scale is the usual one, or given."""
    heads, options = 6, {} if whole else {"scale": 0.7, "l2_norm": False}
    widths = [key_heads * keys, key_heads * keys, heads * values, heads]
    q, k, v, beta = torch.randn(TOKENS, sum(widths)).to(dtype).split(widths, 1)
    q, k = (each.unflatten(1, (key_heads, keys)) for each in (q, k))
    v, beta = v.unflatten(1, (heads, values)), beta.sigmoid()
    g = -torch.rand(heads, TOKENS).t()
    state = torch.randn(7, heads, keys, values).to(state_dtype)
    old = state.clone()
    y = gated_delta_rule(q, k, v, g, beta, state, **PLACES, **options)
    of_keys = [each.double().repeat_interleave(heads // key_heads, 1) for each in (q, k)]
    if whole:
        of_keys = [each * (each.square().sum(-1, True) + 1e-6).rsqrt() for each in of_keys]
    wide_q, wide_k = of_keys[0] * (keys**-0.5 if whole else 0.7), of_keys[1]
    before = g.double().exp()[..., None, None] * before_of(old)
    found = (before * wide_k[..., None]).sum(2)
    u = beta.double()[..., None] * (v.double() - found)
    new = before + wide_k[..., None] * u[:, :, None]
    expected = (new * wide_q[..., None]).sum(2)
    assert (y.dtype, y.shape) == (dtype, v.shape)
    near = {torch.float32: 1e-4, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(y.double()[USED], expected[USED], rtol=near, atol=20 * near)
    assert y.isfinite().all()
    assert_states(state, old, new)


@pytest.mark.parametrize("case", ["several tokens", "half", "derivatives", "a state in columns"])
def test_torch_computes_what_the_loops_do_not_take(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens of a sequence, float16, derivatives, and states that are not rows in memory."""
    with torch.inference_mode(case != "derivatives"):
        x, weight, state = torch.randn(TOKENS, 4), torch.randn(4, 3), torch.zeros(7, 4, 2)
    places: dict[str, Any] = dict(PLACES)
    if case == "several tokens":
        places |= {
            "state_slots": SLOTS[:1], "context_lens": torch.tensor([TOKENS], dtype=torch.int32),
            "query_start_loc": torch.tensor([0, TOKENS], dtype=torch.int32),
            "max_query_len": TOKENS,
        }  # fmt: skip
    elif case == "half":
        x, weight = x.half(), weight.half()
    elif case == "a state in columns":
        state = torch.zeros(7, 2, 4).transpose(1, 2)
    # Results do not tell what computed them.
    monkeypatch.setattr(convolutions, "convolve_states", lambda *_: pytest.fail("in the loops"))
    with torch.inference_mode(case != "derivatives"):
        before = state.clone(memory_format=torch.preserve_format)
        y = causal_conv1d(x, weight, None, state, **places, silu=False)
        with products(Products()):
            expected = causal_conv1d(x, weight, None, before, **places, silu=False)
    torch.testing.assert_close(y[USED], expected[USED])


def _drawn(operation: str) -> dict[str, Any]:
    """Return the arguments of an operation, all contiguous."""
    heads, keys, values = 4, 6, 5
    of_keys, of_values = (torch.randn(TOKENS, heads, n) for n in (keys, values))
    if operation == "mamba2_scan":
        own = {
            "x": of_values, "dt": torch.randn(TOKENS, heads), "a": -torch.rand(heads),
            "b": of_keys, "c": torch.randn(TOKENS, heads, keys), "d": torch.randn(heads),
            "dt_bias": torch.randn(heads), "state": torch.randn(7, heads, values, keys),
        }  # fmt: skip
    elif operation == "gated_delta_rule":
        own = {
            "q": of_keys, "k": torch.randn(TOKENS, heads, keys), "v": of_values,
            "g": -torch.rand(TOKENS, heads), "beta": torch.rand(TOKENS, heads),
            "state": torch.randn(7, heads, keys, values),
        }  # fmt: skip
    else:
        own = {
            "x": torch.randn(TOKENS, keys), "weight": torch.randn(keys, 4),
            "bias": torch.randn(keys), "state": torch.randn(7, keys, 3),
        }  # fmt: skip
    return own | PLACES


@pytest.mark.parametrize("operation", [mamba2_scan, gated_delta_rule, causal_conv1d])
def test_any_argument_may_be_a_view_with_gaps(operation: Any) -> None:
    """Outputs and states are those of contiguous arguments, whatever lies between the numbers."""
    given = _drawn(operation.__name__)
    whole = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    expected = operation(**whole)
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        between = torch.full_like(tensor, 1 if name in PLACES else torch.nan)  # slot 1 is unused
        arguments = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        arguments[name] = torch.stack((tensor, between), -1)[..., 0]
        y = operation(**arguments)
        torch.testing.assert_close(y[USED], expected[USED], msg=f"with gaps in {name}")
        torch.testing.assert_close(arguments["state"], whole["state"], msg=f"with gaps in {name}")
