"""FusedMoE against a plain loop over tokens and their experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.nn import functional as F

from vllm_module.core.module import vLLMModule
from vllm_module.distributed import expert_parallel, run_ranks, tensor_parallel
from vllm_module.errors import ShardingError, UnsupportedModelError, WeightLoadError
from vllm_module.layers import FusedMoE, Router, SwigluOAIAndMul
from vllm_module.parameters import BasevLLMParameter, Dim
from vllm_module.quantization import ONLINE, Rules, Scheme, quantize
from vllm_module.quantization.online import QuantizeOnline
from vllm_module.testing import random_weights

Tensors = dict[str, torch.Tensor]
Parallel = Callable[[], AbstractContextManager[None]]

EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 8, 12  # 2 and 4 ranks share 5 experts unevenly
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def experts(**changes: Any) -> FusedMoE:
    arguments = {
        "num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INNER
    }  # fmt: skip
    return FusedMoE(**arguments | changes)


def stored(**changes: Any) -> Tensors:
    """Return a checkpoint of experts, each stored apart, whatever their layout."""
    packing = {"transposed", "interleaved"} | {key for key in changes if changes[key] is None}
    apart = {key: value for key, value in changes.items() if key not in packing}
    return random_weights(experts(**apart).expected_weights(), seed=0)


def packed(weights: Tensors, *, transposed: bool = False, interleaved: bool = False) -> Tensors:
    """Return a checkpoint with the same numbers in one tensor for all experts."""
    count = 1 + max(int(name.partition(".")[0]) for name in weights)
    kinds = sorted({name.rpartition(".")[2] for name in weights})
    result = {}
    gated = any("gate_proj" in name for name in weights)
    up = {"gate_up_proj": ("gate_proj", "up_proj")} if gated else {"up_proj": ("up_proj",)}
    for name, slots in {**up, "down_proj": ("down_proj",)}.items():
        for kind in kinds:
            each = [torch.stack([weights[f"{e}.{s}.{kind}"] for e in range(count)]) for s in slots]
            whole = torch.stack(each, 2).flatten(1, 2) if interleaved else torch.cat(each, 1)
            if transposed and whole.dim() > 2:
                whole = whole.transpose(-2, -1).contiguous()
            result[f"{name}_{kind}".replace("_weight", "", 1)] = whole
    return result


def tokens(count: int = 7, experts: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and the router's logits."""
    return torch.randn(count, HIDDEN), torch.randn(count, experts)


def softmax_of_the_best(logits: torch.Tensor, top_k: int = TOP_K) -> list[tuple[int, float]]:
    best, chosen = logits.topk(top_k)
    return list(zip(chosen.tolist(), best.softmax(-1).tolist(), strict=True))


def loop(
    weights: Tensors,
    x: torch.Tensor,
    logits: torch.Tensor,
    choose: Callable[[torch.Tensor], list[tuple[int, float]]] = softmax_of_the_best,
    *,
    on_input: bool = False,
) -> torch.Tensor:
    """Compute what :class:`FusedMoE` does, an expert of a token at a time."""

    def project(slot: str, y: torch.Tensor) -> torch.Tensor:
        return F.linear(y, weights[f"{slot}.weight"], weights.get(f"{slot}.bias"))

    out = torch.zeros_like(x)
    for token, row, its_logits in zip(out, x, logits, strict=True):
        for expert, weight in choose(its_logits):
            given = row * weight if on_input else row
            y = project(f"{expert}.up_proj", given)
            if f"{expert}.gate_proj.weight" in weights:
                y = y * F.silu(project(f"{expert}.gate_proj", given))
            else:
                y = y.clamp(min=0) ** 2
            token += project(f"{expert}.down_proj", y) * (1 if on_input else weight)
    return out


class Block(vLLMModule):
    """Experts with their router, as a model has them."""

    def __init__(self, correct: bool = False, **changes: Any) -> None:
        super().__init__()
        count = changes.get("num_experts", EXPERTS)
        self.gate = Router(HIDDEN, count, e_score_correction_bias=correct)
        bias = self.gate.e_score_correction_bias
        self.experts = experts(e_score_correction_bias=bias, **changes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.gate(x))


NO_GATE = {"shard_names": ("up_proj", "down_proj"), "activation": "relu2"}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "per expert": ({}, lambda weights: weights),
    "packed": ({}, packed),
    "per expert, no gate": (NO_GATE, lambda weights: weights),
    "packed, no gate": (NO_GATE, packed),
    "packed only, transposed": (
        {"shard_names": None, "transposed": True},
        lambda weights: packed(weights, transposed=True),
    ),
    "packed only, transposed and alternating": (
        {"shard_names": None, "transposed": True, "interleaved": True},
        lambda weights: packed(weights, transposed=True, interleaved=True),
    ),
}
RANKS: dict[str, tuple[int, Parallel]] = {
    "1": (1, nullcontext),
    "tp 2": (2, nullcontext),
    "tp 4": (4, nullcontext),
    "ep 2": (2, expert_parallel),
    "ep 4": (4, expert_parallel),
    "ep 7": (7, expert_parallel),  # two ranks have no expert
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sum_of_what_a_tokens_experts_compute(layout: str, ranks: str) -> None:
    """However experts are stored and shared, each rank returns what a loop over them does."""
    (arguments, store), (size, parallel) = LAYOUTS[layout], RANKS[ranks]
    for bias in (False, True):
        weights, (x, logits) = stored(bias=bias, **arguments), tokens()
        checkpoint = store(weights)

        def rank_fn(
            rank: int,
            checkpoint: Tensors = checkpoint,
            x: torch.Tensor = x,
            logits: torch.Tensor = logits,
            bias: bool = bias,
        ) -> torch.Tensor:
            with parallel():
                layer = experts(bias=bias, **arguments)
            layer.load_weights(checkpoint)
            return layer(x, logits)

        for computed in run_ranks(size, rank_fn):
            torch.testing.assert_close(computed, loop(weights, x, logits), **CLOSE)


PLACED: dict[str, tuple[int, list[int]]] = {
    "on one rank": (1, [3, 1, 0, 4, 2]),
    "in another order": (2, [3, 1, 0, 4, 2]),
    "and uneven": (4, [4, 0, 3, 1, 2]),
    "one twice": (2, [3, 1, 0, 2, 4, 3]),
    "one on every rank": (3, [2, 0, 1, 2, 3, 2, 4]),
    "all on every rank": (2, [4, 3, 2, 1, 0, 0, 1, 2, 3, 4]),
}


@pytest.mark.parametrize("placement", PLACED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_compute_the_same_wherever_they_are(layout: str, placement: str) -> None:
    """In any order and with copies, also if the ranks have tokens of their own."""
    (arguments, store), (size, placed) = LAYOUTS[layout], PLACED[placement]
    weights, inputs = (
        stored(bias=True, **arguments),
        [tokens(count) for count in (7, 1, 5, 0)[:size]],
    )

    def rank_fn(rank: int, own_tokens: bool) -> torch.Tensor:
        more = {"redundant": len(placed) - EXPERTS}
        with tensor_parallel(rank=0, size=1) if own_tokens else nullcontext():
            own = expert_parallel(rank=rank, size=size, **more)
            with own if own_tokens else expert_parallel(**more):
                layer = experts(bias=True, **arguments)
        layer.place_experts(placed)
        assert layer.w13.experts is layer.w2.experts is layer.experts
        layer.load_weights(store(weights))
        return layer(*inputs[rank if own_tokens else 0])

    for computed in run_ranks(size, lambda rank: rank_fn(rank, False)):
        torch.testing.assert_close(computed, loop(weights, *inputs[0]), **CLOSE)
    of_ranks = run_ranks(size, lambda rank: rank_fn(rank, True))
    for given, computed in zip(inputs, of_ranks, strict=True):
        torch.testing.assert_close(computed, loop(weights, *given), **CLOSE)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ([0, 1, 2, 3], "lacks expert 4"),
        ([0, 1, 2, 3, 5], "has expert 5, and there are 5 experts"),
        ([0, 1, 2, 3, -1], "has expert -1"),
        ([0, 1, 2, 3, 3], "lacks expert 4"),
        ([0, 1, 0, 2, 3, 4], "has expert 0 twice on rank 0 of 2"),
        ([0, 1, 2, 3, 4, 0], "has 6 places, and the layer's experts have 5"),
    ],
)
def test_an_impossible_placement_is_refused(placement: list[int], message: str) -> None:
    """Every expert has a place, none has two on one rank, and the number of places stays."""
    with tensor_parallel(rank=1, size=2), expert_parallel():
        layer = experts()
    before = layer.experts
    with pytest.raises(ShardingError, match=message):
        layer.place_experts(placement)
    assert layer.experts is layer.w2.experts is before
    assert layer.w13.weight.experts == before


def grouped(logits: torch.Tensor, bias: torch.Tensor) -> list[tuple[int, float]]:
    """Choose 2 experts of the best of 2 groups by biased scores, as DeepSeek-V3 does."""
    scores = logits.sigmoid()
    groups = (scores + bias).view(2, -1)
    best = int(groups.topk(2).values.sum(-1).argmax())
    chosen = [best * groups.shape[1] + int(i) for i in groups[best].topk(2).indices]
    total = sum(float(scores[expert]) for expert in chosen)
    return [(expert, 2.5 * float(scores[expert]) / total) for expert in chosen]


@pytest.mark.parametrize("own_tokens", [False, True])
def test_experts_are_chosen_by_the_arguments(own_tokens: bool) -> None:
    """Groups, sigmoid scores, a correction bias and a scaling factor reach the routing."""
    arguments = {
        "num_experts": 6,
        "use_grouped_topk": True,
        "num_expert_group": 2,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
    }
    expected_weights = Block(True, **arguments).expected_weights()
    assert "gate.e_score_correction_bias" in expected_weights
    assert "experts.e_score_correction_bias" not in expected_weights
    weights, (x, _) = random_weights(expected_weights, seed=0), tokens()
    each = {name.removeprefix("experts."): weight for name, weight in weights.items()}
    bias, logits = each["gate.e_score_correction_bias"], x @ each["gate.weight"].T
    expected = loop(each, x, logits, lambda row: grouped(row, bias))
    other = loop(each, x, logits, lambda row: grouped(row, bias * 0))
    assert not torch.allclose(expected, other, atol=0.1)

    def rank_fn(rank: int) -> torch.Tensor:
        with expert_parallel(rank=rank, size=2) if own_tokens else expert_parallel():
            block = Block(True, **arguments)
        block.load_weights(weights)
        return block(x)

    for computed in run_ranks(2, rank_fn):
        torch.testing.assert_close(computed, expected, **CLOSE)


class Corrected(vLLMModule):
    """Experts whose checkpoint has the correction bias as one row, as ERNIE 4.5's has."""

    def __init__(self) -> None:
        super().__init__()
        row = Dim.whole(1), Dim.whole(EXPERTS)
        self.bias = BasevLLMParameter(*row, tp_rank=0, tp_size=1, dtype=torch.float32)
        self.experts = experts(e_score_correction_bias=self.bias)


def test_a_correction_bias_may_be_a_row() -> None:
    """Experts are chosen by their softmax and the bias, and weighted by the softmax alone."""
    weights, (x, logits) = random_weights(Corrected().expected_weights(), seed=0), tokens()
    weights["bias"] = torch.linspace(-1, 1, EXPERTS)[None]
    each = {name.removeprefix("experts."): weight for name, weight in weights.items()}

    def best(logits: torch.Tensor) -> list[tuple[int, float]]:
        scores = logits.softmax(-1)
        chosen = (scores + weights["bias"][0]).topk(TOP_K).indices
        total = float(scores[chosen].sum())
        return [(int(expert), float(scores[expert]) / total) for expert in chosen]

    layer = Corrected()
    layer.load_weights(weights)
    expected = loop(each, x, logits, best)
    assert not torch.allclose(expected, loop(each, x, logits), atol=0.1)
    torch.testing.assert_close(layer.experts(x, logits), expected, **CLOSE)


def test_weights_that_are_not_renormalized_and_apply_to_the_input() -> None:
    """The softmax over all experts is kept, and multiplies an expert's input on request."""
    weights, (x, logits) = stored(), tokens()

    def best(logits: torch.Tensor) -> list[tuple[int, float]]:
        scores = logits.softmax(-1)
        return [(int(scores.argmax()), float(scores.max()))]

    for on_input in (False, True):
        layer = experts(top_k=1, renormalize=False, apply_router_weight_on_input=on_input)
        layer.load_weights(weights)
        expected = loop(weights, x, logits, best, on_input=on_input)
        torch.testing.assert_close(layer(x, logits), expected, **CLOSE)


@pytest.mark.parametrize("counts", [(3, 0, 4, 1), (0, 0, 0, 0), (0, 0, 2, 0, 0, 1)])
def test_ranks_with_tokens_of_their_own(counts: tuple[int, ...]) -> None:
    """Each rank gets the results for its own tokens, however many it and the others have.

    Each counts the tokens of all ranks, and no padding.
    """
    weights = stored(bias=True)
    inputs = [tokens(count) for count in counts]

    def rank_fn(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        with tensor_parallel(rank=0, size=1), expert_parallel(rank=rank, size=len(counts)):
            layer = experts(bias=True)
        layer.load_weights(packed(weights))
        layer.counts = torch.zeros(EXPERTS + 1, dtype=torch.int64)
        return layer(*inputs[rank], shared=inputs[rank][0]), layer.counts[:EXPERTS]

    chosen = torch.cat([logits.topk(TOP_K).indices for _, logits in inputs]).flatten()
    for (x, logits), (computed, counted) in zip(
        inputs, run_ranks(len(counts), rank_fn), strict=True
    ):
        torch.testing.assert_close(computed, loop(weights, x, logits) + x, **CLOSE)
        assert torch.equal(counted, chosen.bincount(minlength=EXPERTS))


def test_adapters_are_refused_where_ranks_have_tokens_of_their_own() -> None:
    """Each rank computes rows of all ranks, and knows the adapters of its own rows alone."""

    def rank_fn(rank: int) -> None:
        with tensor_parallel(rank=0, size=1), expert_parallel(rank=rank, size=2):
            layer = experts()
        layer.load_weights(stored())
        layer.w2.adapters = object()  # of one that is attached
        with pytest.raises(UnsupportedModelError, match="tokens of their own: leave out"):
            layer(*tokens(2))

    run_ranks(2, rank_fn)


@pytest.mark.parametrize("parallel", [nullcontext, expert_parallel])
def test_what_shared_experts_compute_is_summed_once(parallel: Parallel) -> None:
    """The ranks' parts of the shared experts' output are summed together with the experts'."""
    weights, (x, logits) = stored(), tokens()

    def rank_fn(rank: int) -> torch.Tensor:
        with parallel():
            layer = experts()
        layer.load_weights(weights)
        return layer(x, logits, shared=x * (rank + 1))

    for computed in run_ranks(2, rank_fn):
        torch.testing.assert_close(computed, loop(weights, x, logits) + 3 * x, **CLOSE)


def test_no_number_is_read_back_from_the_device() -> None:
    """Without tokens of their own, ranks need no value on the host, so a CUDA graph can replay."""
    layer = experts(activation=SwigluOAIAndMul(), bias=True)
    layer.load_weights(stored(bias=True))
    plain = {name: each.data.as_subclass(torch.Tensor) for name, each in layer.named_parameters()}
    with FakeTensorMode() as mode:  # raises where a value is asked for
        fake = {name: mode.from_tensor(each) for name, each in plain.items()}
        inputs = torch.empty(7, HIDDEN), torch.empty(7, EXPERTS)
        assert functional_call(layer, fake, inputs).shape == (7, HIDDEN)


def bytes_read(layer: nn.Module, checkpoint: Tensors) -> dict[str, int]:
    """Return the bytes that a load would read, by checkpoint name."""
    read = dict.fromkeys(checkpoint, 0)
    for each in layer.plan_weights(list(checkpoint.items())).reads():
        read[each.name] += each.source.shape.numel() * each.source.dtype.itemsize
    return read


@pytest.mark.parametrize("store", [lambda weights: weights, packed])
def test_a_rank_reads_only_its_experts(store: Callable[[Tensors], Tensors]) -> None:
    """At any expert-parallel size, each byte is read by one rank: the one that has the expert."""
    checkpoint = store(stored(num_experts=10, bias=True))

    def rank_fn(rank: int) -> dict[str, int]:
        with expert_parallel():
            layer = experts(num_experts=10, bias=True)
        kept = layer.experts.kept
        assert list(kept) == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]][rank]
        read = bytes_read(layer, checkpoint)
        for name, tensor in checkpoint.items():
            number = name.partition(".")[0]
            share = int(number) in kept if number.isdigit() else len(kept) / 10
            assert read[name] == tensor.nbytes * share
        assert layer.expected_weights().keys() == stored(num_experts=10, bias=True).keys()
        return read

    ranks = run_ranks(4, rank_fn)
    for name, tensor in checkpoint.items():
        assert sum(read[name] for read in ranks) == tensor.nbytes


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda weights: {name: each for name, each in weights.items() if name not in names}


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "an expert is missing": (
        without("3.gate_proj.weight", "3.up_proj.weight", "3.down_proj.weight"),
        r"missing 3.*3\.gate_proj\.weight",
    ),
    "all of a projection are missing": (
        without(*(f"{expert}.up_proj.weight" for expert in range(EXPERTS))),
        r"missing 5.*  \{0\.\.4\}\.up_proj\.weight",
    ),
    "gate without up": (without("2.up_proj.weight"), r"missing 1.*2\.up_proj\.weight"),
    "one expert too many": (
        lambda weights: weights | {"5.up_proj.weight": weights["4.up_proj.weight"]},
        r"unexpected 1.*5\.up_proj\.weight",
    ),
    "packed and per expert": (
        lambda weights: weights | packed(weights),
        r"duplicated 2.*gate_up_proj: w13\.weight is already filled by '0\.gate_proj\.weight",
    ),
    "packed, of another number of experts": (
        lambda weights: {name: each[:4] for name, each in packed(weights).items()},
        r"misshapen 2.*expected shape \[5, 24, 8\], got \[4, 24, 8\]",
    ),
    "packed gate without up": (
        lambda weights: {
            name: each[:, :INNER] if "up" in name else each
            for name, each in packed(weights).items()
        },
        r"misshapen 1.*expected shape \[5, 24, 8\], got \[5, 12, 8\]",
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_a_checkpoint_of_other_experts_is_refused(damage: str) -> None:
    """Each rank refuses it with one report, also for experts of other ranks; nothing is written."""
    change, message = REFUSED[damage]
    checkpoint = change(stored())
    for rank in range(2):
        with tensor_parallel(rank=rank, size=2), expert_parallel():
            layer = experts()
        with pytest.raises(WeightLoadError, match=f"(?s){message}"):
            layer.load_weights(checkpoint)
        assert all(parameter.is_meta for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 6}, "6 experts a token cannot be chosen from 5"),
        ({"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1}, "5 experts in 2"),
        (
            {"num_experts": 6, "use_grouped_topk": True, "num_expert_group": 2, "topk_group": 3},
            "of which 3",
        ),
        (
            {
                "num_experts": 6, "use_grouped_topk": True, "num_expert_group": 3, "topk_group": 1,
                "top_k": 3,
            },
            "3 experts a token cannot be chosen from 2",
        ),
        ({"apply_router_weight_on_input": True}, "2 experts a token cannot be applied"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh': expected 'softmax' or 'sigmoid'"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_chosen_are_refused(arguments: Any, message: str) -> None:
    """The layer is not built for more experts than there are, or for groups that do not divide."""
    with pytest.raises(UnsupportedModelError, match=message):
        experts(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"shard_names": ("up_proj",)},
        {"shard_names": ("gate_proj", "up_proj", "down_proj", "bias")},
        {"interleaved": True},
        {"interleaved": True, "shard_names": ("w1", "w3", "w2")},
    ],
)
def test_names_of_other_layouts_are_refused(arguments: Any) -> None:
    """Gate, up and down are three names, without a gate two; interleaved, they have none."""
    with pytest.raises(ValueError, match="shard_names must name gate, up and down, or") as refused:
        experts(**arguments)
    assert not isinstance(refused.value, WeightLoadError)  # no checkpoint is wrong


def test_only_whole_experts_fit_every_number_of_ranks() -> None:
    """A size that does not divide an expert is refused, unless ranks hold whole experts."""
    with tensor_parallel(rank=0, size=5):
        with pytest.raises(ShardingError, match="12 % 5 = 2"):
            experts()
        with expert_parallel():
            assert experts().w13.weight.shape == (1, 2 * INNER, HIDDEN)


SCHEMES = ONLINE | {"fp8_per_block": Scheme("block", block=(3, 2), online=True)}


def quantized(scheme: Scheme) -> FusedMoE:
    layer = experts()
    quantize(layer, Rules((("Linear", scheme),)))
    return layer


@pytest.mark.parametrize("ranks", ["1", "tp 2", "ep 2", "ep 7"])
@pytest.mark.parametrize("name", SCHEMES)
def test_experts_are_quantized_while_they_are_loaded(name: str, ranks: str) -> None:
    """Packed or not, all numbers keep the scheme's bound, an expert at a time is read."""
    (size, parallel), scheme = RANKS[ranks], SCHEMES[name]
    weights, (x, logits) = stored(), tokens()
    bounds = {
        name: QuantizeOnline(scheme, torch.float32, False).error_bound(weight)
        for name, weight in weights.items()
    }
    expected = loop(weights, x, logits)

    def rank_fn(rank: int) -> list[torch.Tensor]:
        outputs = []
        with parallel():
            full, bound = experts(), experts()
            full.load_weights(weights)
            bound.load_weights(bounds)
            for checkpoint in (weights, packed(weights)):
                layer = quantized(scheme)
                reads = layer.plan_weights(list(checkpoint.items())).reads()
                assert all(each.source.shape.numel() <= HIDDEN * INNER for each in reads)
                layer.load_weights(checkpoint)
                for attr in ("w13", "w2"):
                    linear = layer.get_submodule(attr)
                    error = linear.conversions["weight"].restored(linear)
                    error -= full.get_submodule(attr).weight
                    assert (error.abs() <= bound.get_submodule(attr).weight).all()
                outputs.append(layer(x, logits))
        return outputs

    for one, other in run_ranks(size, rank_fn):
        assert torch.equal(one, other)
        assert (one - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("parallel", [nullcontext, expert_parallel])
@pytest.mark.parametrize("store", [lambda weights: weights, packed])
def test_experts_stored_in_fp8_blocks(
    parallel: Parallel, store: Callable[[Tensors], Tensors]
) -> None:
    """Blocks of FP8, as in DeepSeek-V3, are multiplied by the scales of their expert."""
    full, eight = {}, {}
    for name, weight in stored().items():
        numbers = (weight * 8).to(torch.float8_e4m3fn)
        scales = torch.rand(weight.shape[0] // 4, weight.shape[1] // 4)
        eight |= {name: numbers, f"{name}_scale_inv": scales}
        full[name] = numbers.float() * scales.repeat_interleave(4, 0).repeat_interleave(4, 1)
    x, logits = tokens()

    def rank_fn(rank: int) -> torch.Tensor:
        with parallel():
            layer = quantized(Scheme("block", block=(4, 4), scale_name="weight_scale_inv"))
        layer.load_weights(store(eight))
        return layer(x, logits)

    for computed in run_ranks(3, rank_fn):
        torch.testing.assert_close(computed, loop(full, x, logits), **CLOSE)


EIGHT = Scheme("tensor")


@pytest.mark.parametrize(
    ("target", "matched"),
    [
        ("experts", True),
        ("experts.w13", True),
        (r"re:experts\.[0-9]+\.(gate|up)_proj", True),
        ("re:.*w13", False),  # patterns see the checkpoint's names
        ("=experts.w13", True),
    ],
)
def test_rules_name_experts_as_a_checkpoint_does(target: str, matched: bool) -> None:
    """A rule for the experts' names decides for the layer that fuses them; routers have none."""
    block = Block()
    quantize(block, Rules(((target, None), ("Linear", EIGHT))))
    assert block.experts.w13.is_quantized is not matched
    assert block.gate.weight.dtype == torch.float32


def test_rules_name_packed_experts_as_a_checkpoint_does() -> None:
    """Experts that are only stored as one tensor have the name of that tensor."""
    block = Block(shard_names=None)
    quantize(block, Rules((("=experts.down_proj", None), ("Linear", EIGHT))))
    assert (block.experts.w13.is_quantized, block.experts.w2.is_quantized) == (True, False)


@pytest.mark.parametrize("target", ["experts.3.up_proj", "=experts.3.up_proj", "re:.*3.up"])
def test_experts_that_are_not_quantized_alike_are_refused(target: str) -> None:
    """A rule for one expert of a layer is refused, and the message names it and one other."""
    with pytest.raises(UnsupportedModelError, match=r"0\.gate_proj: float8.*3\.up_proj: not"):
        quantize(Block(), Rules(((target, None), ("Linear", EIGHT))))


def test_a_cast_leaves_a_router_that_chooses_in_float32() -> None:
    """As transformers keeps DeepSeek-V3's bias; an ordinary router is cast as PyTorch casts."""
    scores = {"weight": torch.randn(4, 6), "e_score_correction_bias": torch.randn(4)}
    router = Router(6, 4, params_dtype=torch.float32, e_score_correction_bias=True)
    router.load_weights(scores)
    x = torch.randn(5, 6).half()
    torch.testing.assert_close(router.half()(x), F.linear(x.float(), scores["weight"]))
    assert {each.dtype for each in router.parameters()} == {torch.float32}
    assert router.to("meta").weight.is_meta
    assert Router(6, 4).half().weight.dtype == torch.float16


def test_a_cast_leaves_the_bias_that_router_and_experts_share() -> None:
    """The experts are cast, and are chosen and weighted as before."""
    block = vLLMModule()
    block.gate = Router(HIDDEN, EXPERTS, e_score_correction_bias=True)
    bias = block.gate.e_score_correction_bias
    block.experts = experts(e_score_correction_bias=bias, scoring_func="sigmoid")
    block.load_weights(random_weights(block.expected_weights(), seed=0))
    x, logits = tokens()
    expected = block.experts(x, logits)
    block.half()
    assert block.experts.e_score_correction_bias is block.gate.e_score_correction_bias
    computed = block.experts(x.half(), logits)
    torch.testing.assert_close(computed.float(), expected, rtol=1e-2, atol=1e-2)
