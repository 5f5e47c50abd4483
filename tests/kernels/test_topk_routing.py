"""Routing tokens to experts, against float64 and the routers of transformers."""

from __future__ import annotations

import importlib
import mmap
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.kernels.experts.topk_routing import (
    topk_routing,
    topk_routing_reference,
    topk_routing_triton,
)

in_loops: Any = runpy.run_path(str(Path(__file__).with_name("in_loops.py")))["in_loops"]
RUNS = pytest.mark.parametrize(
    "run", [topk_routing_reference, topk_routing_triton, in_loops(topk_routing_reference)]
)
# Experts, top_k, groups and those kept, scoring, renormalized, biased.
CASES = [
    (8, 2, 1, 1, "softmax", True, False),
    (60, 4, 1, 1, "sigmoid", False, False),
    (160, 6, 8, 3, "softmax", False, False),
    (256, 8, 8, 4, "sigmoid", True, True),
    (20, 3, 4, 2, "softmax", True, True),
    (6, 2, 6, 3, "sigmoid", True, True),
    (7, 7, 1, 1, "softmax", True, False),
    (1, 1, 1, 1, "sigmoid", True, True),
]


def by_definition(logits, top_k, scoring, renormalize, bias, groups, kept, factor):
    """Choose and weigh experts token by token in float64, by sorting lists."""
    all_weights, all_experts = [], []
    for row in logits.double():
        scores = row.softmax(0) if scoring == "softmax" else row.sigmoid()
        choice = (scores if bias is None else scores + bias.double()).tolist()
        size = len(choice) // groups

        def worth(group: int, choice=choice, size=size) -> float:
            inside = sorted(choice[group * size : (group + 1) * size], reverse=True)
            return sum(inside[: 1 if bias is None else 2])

        best = sorted(range(groups), key=worth, reverse=True)[:kept]
        experts = [e for e in range(len(choice)) if e // size in best]
        experts = sorted(experts, key=choice.__getitem__, reverse=True)[:top_k]
        weights = scores[experts]
        all_weights.append(weights / (weights.sum() if renormalize else 1) * factor)
        all_experts.append(experts)
    return torch.stack(all_weights), torch.tensor(all_experts, dtype=torch.int32)


@RUNS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_experts_and_weights_of_the_definition(run, case, dtype: torch.dtype) -> None:
    """Experts are exactly those of float64, and weights are right to float32's last bits."""
    experts, top_k, groups, kept, scoring, renormalize, biased = case
    # In bfloat16 as well, all logits differ; they are columns of a larger tensor.
    logits = torch.stack([torch.randperm(256)[:experts] for _ in range(3)]) / 64 - 2
    logits = torch.stack((logits, logits), -1).to(dtype)[..., 0]
    bias = torch.stack((torch.randn(experts), torch.zeros(experts)), 1)[:, 0] if biased else None
    arguments = (top_k, scoring, renormalize, bias, groups, kept, 2.5)
    weights, chosen = run(logits, *arguments)
    exact, expected = by_definition(logits, *arguments)
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int32)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=1e-9)


GROUPS = {"num_expert_group": 4, "topk_group": 2}
ROUTERS = {  # module and class in transformers, entries of the configuration, our options
    "Mixtral": ("mixtral", "Mixtral", {}, {"renormalize": True}),
    "Qwen2-MoE": ("qwen2_moe", "Qwen2Moe", {}, {"renormalize": False}),
    "Qwen3-MoE": ("qwen3_moe", "Qwen3Moe", {"norm_topk_prob": True}, {"renormalize": True}),
    "OLMoE": ("olmoe", "Olmoe", {}, {"renormalize": False}),
    "gpt-oss": ("gpt_oss", "GptOss", {}, {"renormalize": True}),
    "DeepSeek-V2, greedy": (
        "deepseek_v2",
        "DeepseekV2",
        {"topk_method": "greedy", "routed_scaling_factor": 2.0},
        {"renormalize": False, "routed_scaling_factor": 2.0},
    ),
    "DeepSeek-V2": (
        "deepseek_v2",
        "DeepseekV2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        {"renormalize": False, **GROUPS},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        "DeepseekV3",
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0, "norm_topk_prob": True},
        {
            "renormalize": True,
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.0,
            "correction_bias": torch.linspace(-0.3, 0.4, 12),
            **GROUPS,
        },
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_the_routers_of_transformers(name: str) -> None:
    """Experts and weights are those of each model's router."""
    module, prefix, entries, options = ROUTERS[name]
    module = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    router = next(
        getattr(module, f"{prefix}{end}")
        for end in ("TopKRouter", "TopkRouter")
        if hasattr(module, f"{prefix}{end}")
    )
    experts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 12)
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_experts_per_tok": 3, **experts}
    theirs = router(getattr(module, f"{prefix}Config")(**config, **entries))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if "correction_bias" in options:
        theirs.e_score_correction_bias.copy_(options["correction_bias"])
    with torch.no_grad():
        logits, expected, experts = theirs(torch.randn(20, 64))
        weights, chosen = topk_routing(logits, 3, **options)
    ours, order = chosen.long().sort(-1)
    experts, by_number = experts.sort(-1)
    assert torch.equal(ours, experts)
    torch.testing.assert_close(weights.gather(1, order), expected.gather(1, by_number))


@RUNS
@pytest.mark.parametrize("biased", [False, True])
def test_of_equals_the_lower_number_comes_first(run, biased: bool) -> None:
    """Equal experts, and equal groups, are chosen in the order of their numbers."""
    logits = torch.zeros(2, 12)
    logits[1, 7] = logits[1, 2] = 1
    bias = torch.zeros(12) if biased else None
    weights, experts = run(logits, 4, "softmax", True, bias, 1, 1, 1.0)
    assert experts.tolist() == [[0, 1, 2, 3], [2, 7, 0, 1]]
    assert torch.equal(weights[0], torch.full((4,), 0.25))
    _, experts = run(logits, 4, "softmax", True, bias, 4, 2, 1.0)
    assert experts.tolist() == [[0, 1, 2, 3], [2, 7, 0, 1]]


@RUNS
def test_zeros_of_both_signs_are_equal(run) -> None:
    """-0 is no less than 0, of experts and of groups, as in torch's sort."""
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0], [0.0, -0.0, 0.0, -0.0]])
    order = logits.sort(descending=True, stable=True).indices.int()
    assert torch.equal(run(logits, 3, "softmax", True, None, 1, 1, 1.0)[1], order[:, :3])
    assert torch.equal(run(logits, 2, "softmax", True, None, 4, 2, 1.0)[1], order[:, :2])


@pytest.mark.parametrize(
    ("scoring", "groups", "biased"),
    [("softmax", 1, False), ("sigmoid", 1, False), ("softmax", 4, False), ("sigmoid", 4, True)],
)
def test_what_is_not_finite_stays_in_its_token(scoring, groups, biased) -> None:
    """With NaN or infinities, experts exist and differ, NaN shows, and other tokens do not change.

    NaN of either sign, as processors differ in the one they make.
    """
    bias = torch.randn(12) if biased else None
    arguments = (3, scoring, True, bias, groups, min(groups, 2), 1.0)
    clean = torch.randn(9, 12)
    logits = clean.clone()
    logits[1, 5] = torch.nan
    logits[2, 5] = -torch.tensor(torch.nan)
    logits[3] = torch.nan
    logits[4, 3], logits[5, :] = torch.inf, torch.inf
    logits[6, 1:], logits[7, :] = -torch.inf, -torch.inf
    weights, experts = both = topk_routing_triton(logits, *arguments)
    assert ((experts >= 0) & (experts < 12)).all()
    assert all(len(set(row)) == 3 for row in experts.tolist())
    assert weights[1:4].isnan().any(1).all()
    for got, expected in zip(both, topk_routing_triton(clean[[0, 8]], *arguments), strict=True):
        assert torch.equal(got[[0, 8]], expected)
    reference = topk_routing_reference(logits, *arguments)
    torch.testing.assert_close(both, reference, equal_nan=True)
    (looped,) = in_loops(topk_routing_reference).values
    torch.testing.assert_close(looped(logits, *arguments), reference, equal_nan=True)


@RUNS
def test_an_expert_of_no_other_group(run) -> None:
    """Biases below zero, even infinite ones, let in no expert of a group that is not chosen."""
    bias = torch.tensor([-torch.inf, -2, 5, -torch.inf, -3, 0, 1, 0])
    _, experts = run(torch.zeros(1, 8), 4, "sigmoid", True, bias, 4, 2, 1.0)
    assert sorted(experts[0].tolist()) == [4, 5, 6, 7]
    _, experts = run(torch.zeros(1, 8), 2, "sigmoid", True, bias - torch.inf, 4, 1, 1.0)
    assert experts.tolist() == [[0, 1]]


def test_tokens_that_are_far_apart() -> None:
    """Tokens are found if their offsets exceed 32 bits."""
    apart = 2**30 + 64
    memory = mmap.mmap(-1, 4 * (2 * apart + 64))
    logits = torch.frombuffer(memory, dtype=torch.float32).as_strided((3, 8), (apart, 1))
    logits.copy_(torch.randn(3, 8))
    arguments = (2, "softmax", True, None, 1, 1, 1.0)
    both = topk_routing_triton(logits, *arguments), topk_routing_reference(logits, *arguments)
    torch.testing.assert_close(*both)


def test_no_tokens() -> None:
    """Without tokens, weights and experts are empty."""
    for run in (topk_routing_reference, topk_routing_triton):
        weights, experts = run(torch.empty(0, 8), 2, "softmax", True, None, 2, 1, 1.0)
        assert weights.shape == experts.shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, r"top_k must be from 1 to 8 \(experts\), got 9"),
        ({"top_k": 0}, "top_k must be from 1 to 8 .*, got 0"),
        ({"num_expert_group": 3, "topk_group": 1}, "8 experts do not divide into .*=3 groups"),
        ({"num_expert_group": 4, "topk_group": 5}, r"topk_group must be from 1 to 4 .*, got 5"),
        (
            {"num_expert_group": 4, "topk_group": 1, "top_k": 3},
            r"from 1 to 2 \(in 1 of 4 groups of 8 experts\), got 3",
        ),
        ({"num_expert_group": 4}, "num_expert_group=4 and topk_group=None"),
        ({"scoring_func": "tanh"}, "'softmax' or 'sigmoid', got 'tanh'"),
        ({"correction_bias": torch.zeros(7)}, r"correction_bias .* \[8\], got \[7\]"),
        ({"correction_bias": torch.zeros(8).half()}, "correction_bias must be torch.float32"),
        ({"logits": torch.zeros(8)}, r"logits must have the shape \[any, any\], got \[8\]"),
        ({"logits": torch.zeros(2, 8).double()}, "logits must be .*, got torch.float64"),
    ],
)
def test_bad_input(change, message: str) -> None:
    """What cannot be chosen is refused with the numbers."""
    arguments = {"logits": torch.zeros(2, 8), "top_k": 2, "renormalize": True, **change}
    with pytest.raises(ValueError, match=message):
        topk_routing(**arguments)


def test_the_operator_is_one() -> None:
    """It has a schema and a fake, and works with meta tensors and torch.compile."""
    logits, bias = torch.randn(5, 8), torch.randn(8)
    options = {"renormalize": True, "correction_bias": bias}
    for one, other in zip(
        topk_routing(logits, 2, **options),
        topk_routing(logits.to("meta"), 2, renormalize=True),
        strict=True,
    ):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    for one in (logits, torch.randn(8, 5).t()):
        torch.library.opcheck(
            torch.ops.vllm_module.topk_routing.default,
            (one, 2, "sigmoid", True, bias, 4, 2, 1.0),
        )
    compiled = torch.compile(topk_routing, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(logits, 2, **options), topk_routing(logits, 2, **options), rtol=0, atol=0
    )
