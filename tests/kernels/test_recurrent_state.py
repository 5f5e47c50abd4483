"""Operations with a recurrent state, against their recurrences written out in float64."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vllm_module.kernels.recurrent import causal_conv1d as conv
from vllm_module.kernels.recurrent import gated_delta_rule as delta
from vllm_module.kernels.recurrent import mamba2_scan as mamba

SLOTS = 6


class Operation(NamedTuple):
    """One operation.

    Attributes:
        call: with inputs, a state and places; ``None`` for what is left out.
        runs: both implementations, called like ``call``.
        inputs: draws the inputs of some tokens.
        state: the shape of a sequence's state.
        exactly: one sequence's outputs and last state, from its inputs and the state before, in
            whose dtype all is computed.
        name: of the operator.
        fixed: how many of the inputs are not of tokens, at the end.

    """

    call: Callable[..., torch.Tensor]
    runs: tuple[Callable[..., torch.Tensor], ...]
    inputs: Callable[[int, torch.dtype], list[torch.Tensor]]
    state: tuple[int, ...]
    exactly: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    name: str
    fixed: int


def convolution(channels: int = 21, width: int = 4, silu: bool = True) -> Operation:
    def inputs(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
        x = torch.randn(2 * tokens, 2 * channels).to(dtype)[::2, 1::2]
        return [x, torch.randn(channels, width).to(dtype), torch.randn(channels).to(dtype)]

    def exactly(x, weight, bias, state) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, bias = (each.to(state.dtype) for each in (x, weight, bias))
        window = torch.cat([state, x.t()], 1)
        rows = [(window[:, t : t + width] * weight).sum(1) for t in range(len(x))]
        y = torch.stack(rows) + bias
        return F.silu(y) if silu else y, window[:, 1 - width :]

    def run(by: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args: by(*args, silu)

    runs = run(conv.causal_conv1d_reference), run(conv.causal_conv1d_triton)
    shape = channels, width - 1
    return Operation(run(conv.causal_conv1d), runs, inputs, shape, exactly, "causal_conv1d", 2)


def mamba2_recurrence(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    h: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one sequence token by token; ``dt`` is the steps, and ``h`` the state before."""
    repeats = x.shape[1] // b.shape[1]
    b, c = (each.to(h.dtype).repeat_interleave(repeats, 1) for each in (b, c))
    x, dt, a, d = (each.to(h.dtype) for each in (x, dt, a, d))
    outputs = []
    for t in range(len(x)):
        step = dt[t].view(-1, 1, 1)
        h = (step * a.view(-1, 1, 1)).exp() * h + step * x[t].unsqueeze(2) * b[t].unsqueeze(1)
        outputs.append((h * c[t].unsqueeze(1)).sum(2))
    return torch.stack(outputs) + d.view(-1, 1) * x, h


def scan(heads: int = 2, groups: int = 2, features: int = 19, n: int = 10) -> Operation:
    limits = 0.01, 1.5

    def inputs(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
        x = torch.randn(tokens, 2, heads, features).to(dtype)[:, 1]
        dt, (b, c) = torch.randn(tokens, heads), torch.randn(2, tokens, groups, n)
        a, d, bias = -4 * torch.rand(heads), torch.randn(heads), torch.randn(heads)
        return [x, dt.to(dtype), b.to(dtype), c.to(dtype), a, d.to(dtype), bias.to(dtype)]

    def exactly(x, dt, b, c, a, d, bias, state) -> tuple[torch.Tensor, torch.Tensor]:
        steps = F.softplus(dt.to(state.dtype) + bias.to(state.dtype)).clamp(*limits)
        return mamba2_recurrence(x, steps, a, b, c, d, state)

    def run(by: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, dt, b, c, a, d, bias, *places: by(
            x, dt, a, b, c, d, bias, *places, *limits
        )

    runs = run(mamba.mamba2_scan_reference), run(mamba.mamba2_scan_triton)
    shape = heads, features, n
    return Operation(run(mamba.mamba2_scan), runs, inputs, shape, exactly, "mamba2_scan", 3)


def gated_delta_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    s: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one sequence token by token, with queries and keys normalized; ``s`` is its state."""
    q, k, v, g, beta = (each.to(s.dtype) for each in (q, k, v, g, beta))
    outputs = []
    for t in range(len(q)):
        s = g[t].exp().view(-1, 1, 1) * s
        u = beta[t].view(-1, 1) * (v[t] - (s * k[t].unsqueeze(2)).sum(1))
        s = s + k[t].unsqueeze(2) * u.unsqueeze(1)
        outputs.append((s * q[t].unsqueeze(2)).sum(1))
    return torch.stack(outputs), s


def rule(heads: int = 2, key_heads: int = 1, dk: int = 12, dv: int = 21) -> Operation:
    def inputs(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k = torch.randn(tokens, 2, key_heads, dk).to(dtype).unbind(1)
        v, beta = torch.randn(tokens, heads, dv), torch.rand(tokens, heads)
        return [q, k, v.to(dtype), -2 * torch.rand(tokens, heads), beta.to(dtype)]

    def exactly(q, k, v, g, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (x.to(state.dtype).repeat_interleave(heads // key_heads, 1) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        return gated_delta_recurrence(q * dk**-0.5, k, v, g, beta, state)

    def run(by: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args: by(*args, dk**-0.5, True)

    runs = run(delta.gated_delta_rule_reference), run(delta.gated_delta_rule_triton)
    shape = heads, dk, dv
    return Operation(delta.gated_delta_rule, runs, inputs, shape, exactly, "gated_delta_rule", 0)


OPERATIONS = {
    "convolution": convolution(),
    "convolution alone": convolution(width=3, silu=False),
    "scan": scan(),
    "delta rule": rule(),
}
EACH = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a few tokens fill several chunks."""
    monkeypatch.setattr(conv, "_TOKENS", 4)
    monkeypatch.setattr(conv, "_CHANNELS", 16)
    for module in (mamba, delta):
        monkeypatch.setattr(module, "CHUNK", 8)
        monkeypatch.setattr(module, "_TOKENS", 16)
    monkeypatch.setattr(mamba, "_FEATURES", 16)
    monkeypatch.setattr(delta, "_COLUMNS", 16)


def places(slots: list[int], counts: list[int], before: list[int]) -> tuple[Any, ...]:
    """Return the places of sequences with ``counts`` tokens, after others."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    contexts = torch.tensor([c + b for c, b in zip(counts, before, strict=True)]).int()
    return torch.tensor(slots), starts, contexts, max(counts)


sequences = st.lists(
    st.tuples(st.integers(1, 20), st.sampled_from([0, 0, 1, 40])), min_size=1, max_size=3
)


@EACH
@settings(max_examples=5)
@given(sequences, st.booleans(), st.permutations(range(SLOTS)), st.booleans(), st.booleans())
def test_each_sequence_continues_from_its_own_state(
    operation, as_accurate, drawn, half, slots, single, padded
) -> None:
    """Outputs and states are those of each sequence by itself; a first token starts from zeros.

    States of other places stay, and so do all if a sequence is padding, whatever the places hold.
    Tokens of no sequence, which follow padding here, get zeros.
    """
    counts, before = [1 if single else count for count, _ in drawn], [b for _, b in drawn]
    dtype = torch.float16 if half else torch.float32
    inputs = operation.inputs(sum(counts) + 3 * padded, dtype)
    per_token = len(inputs) - operation.fixed
    chosen = [*slots[: len(counts)]]
    state = torch.randn(SLOTS, *operation.state)
    for slot, earlier in zip(chosen, before, strict=True):
        if not earlier:
            state[slot] = torch.nan
    if padded:
        chosen[-1] = -1
    where = places(chosen, counts, before)
    for run in (operation.call, *operation.runs):
        held = state.clone()
        y = run(*inputs, held, *where)
        assert not y[sum(counts) :].any()
        begin, used = 0, []
        for slot, count, earlier in zip(chosen, counts, before, strict=True):
            rows = slice(begin, begin := begin + count)
            if slot < 0:
                continue
            used.append(slot)
            own = [x[rows] for x in inputs[:per_token]] + inputs[per_token:]
            first = state[slot] if earlier else torch.zeros(operation.state)
            exact, last = operation.exactly(*own, first.double())
            as_accurate(y[rows], exact, operation.exactly(*own, first)[0].to(dtype))
            # Chunks subtract sums of decays, which a recurrence does not.
            torch.testing.assert_close(held[slot].double(), last, rtol=1e-4, atol=1e-5)
        others = [slot for slot in range(SLOTS) if slot not in used]
        assert torch.equal(held[others].nan_to_num(7.0), state[others].nan_to_num(7.0))


@EACH
@pytest.mark.parametrize("counts", [[1, 1], [3, 1]], ids=str)
@pytest.mark.parametrize("earlier", [0, 1, 40])
def test_padding_reads_no_state(operation, counts: list[int], earlier: int) -> None:
    """What it computes is finite though every place holds NaN, and a place beside it is right."""
    inputs = operation.inputs(sum(counts), torch.float32)
    zeros = torch.zeros(1, *operation.state)
    right = operation.call(*inputs, zeros, *places([-1, 0], counts, [0, 0]))
    where = places([-1, 2], counts, [earlier, 0])
    for run in (operation.call, *operation.runs):
        held = torch.full((SLOTS, *operation.state), torch.nan)
        y = run(*inputs, held, *where)
        assert y.isfinite().all()
        torch.testing.assert_close(y[counts[0] :], right[counts[0] :])
        assert [slot for slot in range(SLOTS) if not held[slot].isnan().any()] == [2]


@EACH
def test_a_sequence_without_a_place_is_whole(operation) -> None:
    """Without a state, the tokens are one sequence that starts from zeros."""
    inputs = operation.inputs(21, torch.float32)
    exact, _ = operation.exactly(*inputs, torch.zeros(operation.state).double())
    for run in operation.runs:
        y = run(*inputs, None, None, None, None, 0)
        torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)
    called = operation.call(*inputs, None, None, None, None, 0)
    torch.testing.assert_close(called.double(), exact, rtol=1e-4, atol=1e-5)


@EACH
@pytest.mark.parametrize("longest", [0, 1, 5])
@pytest.mark.parametrize("sequences", [0, 1, 2])
def test_no_tokens_and_no_sequences(operation, sequences, longest) -> None:
    """A step of nothing returns nothing and leaves states alone; without states, too."""
    inputs, state = operation.inputs(0, torch.float32), torch.randn(SLOTS, *operation.state)
    before = state.clone()
    nothing = torch.zeros(sequences + 1).int(), torch.zeros(sequences).int(), longest
    for run in (operation.call, *operation.runs):
        y = run(*inputs, state, torch.arange(sequences), *nothing)
        alone = run(*inputs, None, None, None, None, 0)
        expected = run(*operation.inputs(1, torch.float32), None, None, None, None, 0)[:0]
        assert y.shape == alone.shape == expected.shape
    assert torch.equal(state, before)


@EACH
def test_strides_beyond_32_bits(operation) -> None:
    """A state's place is found where its offset has more than 32 bits."""
    inputs = operation.inputs(3, torch.float32)
    step = 2**29 + 64
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (4 * step + 4096)), dtype=torch.float16)
    strides = torch.empty(operation.state).stride()
    state = memory.as_strided((5, *operation.state), (step, *strides))
    slots, starts, contexts, longest = places([4], [3], [5])
    state[4] = 0.5
    expected = operation.runs[0](*inputs, state[4:].clone(), slots - 4, starts, contexts, longest)
    y = operation.runs[1](*inputs, state, slots, starts, contexts, longest)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


def test_a_chunk_of_equal_keys_is_stable() -> None:
    """Keys that are all the same make the worst triangular system, in both implementations."""
    operation = rule()
    inputs = operation.inputs(32, torch.float32)
    inputs[1][:] = inputs[1][:1].clone()
    inputs[3][:], inputs[4][:] = 0.0, 1.0
    exact, _ = operation.exactly(*inputs, torch.zeros(operation.state).double())
    for run in operation.runs:
        y = run(*inputs, None, None, None, None, 0)
        torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)


def test_small_steps_are_not_rounded_away() -> None:
    """The softplus of a very negative number is its exponential, and not zero."""
    operation = scan()
    inputs = operation.inputs(4, torch.float32)
    inputs[1][:], inputs[-1][:] = -17.0, 0.0
    x, dt, b, c, a, _, bias = inputs
    outputs = [
        run(x, dt, a, b, c, None, bias, None, None, None, None, 0, 0.0, torch.inf)
        for run in (mamba.mamba2_scan_reference, mamba.mamba2_scan_triton)
    ]
    assert float(outputs[0].abs().max()) > 0
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("forgotten", [-3e4, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["scan", "delta rule"])
def test_what_is_forgotten_leaves_later_decays_exact(
    as_accurate, name: str, dtype: torch.dtype, forgotten: float
) -> None:
    """A token that decays a state to nothing costs the next decays no places, and gives no NaN."""
    operation = OPERATIONS[name]
    inputs = operation.inputs(24, dtype)
    gone = torch.arange(24) % 5 < 3
    if name == "scan":  # steps of 1.5 and of 0.01, which are the limits
        inputs[1][:] = torch.where(gone, 9.0, -9.0)[:, None]
        inputs[4][:] = max(forgotten, -3e38)
    else:
        inputs[3][:] = torch.where(gone, forgotten, -0.01)[:, None]
    start = torch.zeros(operation.state)
    exact, rounded = (operation.exactly(*inputs, h)[0] for h in (start.double(), start))
    for run in operation.runs:
        y = run(*inputs, None, None, None, None, 0)
        if dtype == torch.float32:  # chunks subtract sums of decays, which a recurrence does not
            torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-5)
        else:
            as_accurate(y, exact, rounded.to(dtype))


@EACH
def test_bad_input(operation) -> None:
    """Places that do not fit each other, are shared or are not there are refused by name."""
    inputs, state = operation.inputs(4, torch.float32), torch.zeros(SLOTS, *operation.state)
    slots, starts, contexts, longest = places([1, 0], [2, 2], [0, 0])

    def refused(match: str, *args: Any) -> None:
        with pytest.raises(ValueError, match=match):
            operation.call(*inputs, *args)

    rest = starts, contexts, longest
    refused("state is given, and state_slots is not", state, None, *rest)
    refused("state_slots is given, and state is not", None, slots, *rest)
    refused("query_start_loc must have the shape", state, slots, starts[1:], contexts, longest)
    refused("context_lens must be torch.int32", state, slots, starts, contexts.long(), longest)
    refused("state must have the shape", state[:, 1:], slots, *rest)
    refused("share memory", state[:1].expand_as(state), slots, *rest)
    refused("two sequences have the same state slot", state, slots * 0, *rest)
    refused(f"a state slot is {SLOTS}, and there are {SLOTS}", state, slots + SLOTS - 1, *rest)


@pytest.mark.parametrize("longest", [1, 4, 512])
@pytest.mark.parametrize("lengths", [[1] * 9, [1, 0, 1], [3, 1], [40, 1, 0, 16, 17], [0, 0, 15]])
def test_a_convolution_starts_no_more_programs_than_its_tokens_need(
    lengths: list[int], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a sequence may be, there is one for 4 tokens and one for each sequence."""
    grids: list[tuple[int, int]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **constants: None

    monkeypatch.setattr(conv, "_convolve", Kernel())  # counts programs, and runs none
    *where, most = places([*range(len(lengths))], lengths, [0] * len(lengths))
    x, weight = torch.randn(sum(lengths), 33), torch.randn(33, 4)
    state = torch.zeros(len(lengths), 33, 3)
    conv.causal_conv1d_triton(x, weight, None, state, *where, max(longest, most), True)
    (programs, blocks), used = grids[0], sum(-(-each // 4) for each in lengths)
    one_each = max(longest, most) == 1
    assert programs == len(lengths) if one_each else used <= programs <= len(x) // 4 + len(lengths)
    assert blocks == 3


def test_other_shapes_are_refused() -> None:
    """Heads that are no multiple, and convolutions of another width, are refused with numbers."""
    x = torch.randn(3, 4)
    for width in (1, 9):
        with pytest.raises(ValueError, match=f"2 to 8 weights of each channel, got {width}"):
            conv.causal_conv1d(x, torch.randn(4, width))
    heads, shared = torch.randn(3, 4, 2), torch.randn(3, 3, 2)
    with pytest.raises(ValueError, match="4 heads, no multiple of the 3 groups"):
        mamba.mamba2_scan(heads, x, torch.zeros(4), shared, shared)
    with pytest.raises(ValueError, match="4 heads, no multiple of the 3 heads"):
        delta.gated_delta_rule(shared, shared, heads, torch.zeros(3, 4), torch.zeros(3, 4))


@EACH
def test_the_operator_is_one(operation) -> None:
    """It has a schema and a fake, works with meta tensors, and states are written in place."""
    inputs, state = operation.inputs(4, torch.float32), torch.randn(SLOTS, *operation.state)
    where = places([1, 0], [2, 2], [0, 3])
    called: list[tuple[Any, ...]] = []
    op = getattr(torch.ops.vllm_module, operation.name).default
    module = {"causal_conv1d": conv, "mamba2_scan": mamba}.get(operation.name, delta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, f"_{operation.name}", lambda *args: called.append(args) or args[0])
        operation.call(*inputs, state, *where)
    torch.library.opcheck(op, called[0])
    meta = [x.to("meta") for x in (*inputs, state, *where[:3])]
    assert operation.call(*meta, where[3]).device.type == "meta"
