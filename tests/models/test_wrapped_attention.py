"""Attention that modules of transformers compute themselves: understood right, or refused."""

from __future__ import annotations

import copy
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import masking_utils

from vllm_module import ModelConfig
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import run_ranks
from vllm_module.errors import UnsupportedModelError
from vllm_module.wrapped.constants import Constants
from vllm_module.wrapped.experts import is_experts
from vllm_module.wrapped.inline_attention import Understood, understood
from vllm_module.wrapped.mask import Mask, MaskRule, rule_of
from vllm_module.wrapped.scores import ScoreProducts, Scores

_sweep = runpy.run_path(str(Path(__file__).with_name("sweep.py")))
tiny_model: Callable[..., Any] = _sweep["tiny_model"]

TOKENS, HEADS, SIZE = 96, 3, 8
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _understood(attend: Attend) -> Understood:
    """Return what ``attend`` is understood as, from a run on meta."""
    found: list[Understood] = []

    def finish(scores: Scores, value: torch.Tensor) -> torch.Tensor:
        found.append(understood(scores, constants))
        return value.new_empty(1, HEADS, TOKENS, SIZE)

    constants = Constants({}, TOKENS)
    given = (torch.empty(1, HEADS, TOKENS, SIZE, device="meta") for _ in range(3))
    begin: Any = lambda query, key, notes: Scores.of(query, key, finish, notes)  # noqa: E731
    with torch.device("meta"), constants, ScoreProducts(begin):
        output = attend(*given)
    assert output.shape == (1, HEADS, TOKENS, SIZE)
    (call,) = found
    return call


def _formula(
    call: Understood, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Return attention with the scale, window and slopes of ``call``, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * call.scale
    positions = torch.arange(TOKENS)
    distance = positions - positions[:, None]
    if call.slopes is not None:
        scores = scores + torch.tensor(call.slopes, dtype=torch.float64)[:, None, None] * distance
    hidden = (distance > 0) | (distance <= -(call.window or TOKENS))
    return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(hidden, -math.inf).softmax(-1), value)


def _tril() -> torch.Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def _plain(query: Any, key: Any, value: Any) -> Any:
    """A mask that replaces scores; the softmax by a method, and scores as a function."""
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(SIZE)
    scores = scores.masked_fill(~_tril(), torch.finfo(scores.dtype).min)
    return torch.dropout(scores.softmax(-1), 0.5, False) @ value


def _of_openai(query: Any, key: Any, value: Any) -> Any:
    """A mask of factors and summands, after the scale."""
    kept = _tril().float()
    scores = (query @ key.transpose(2, 3)) / torch.tensor(2.0)
    scores = scores * kept + -1e4 * (1 - kept)
    return F.softmax(scores, dim=3) @ value


def _window(query: Any, key: Any, value: Any) -> Any:
    """A window, in heads that are flattened, whose scores are in float64."""
    query, key, value = (x.reshape(HEADS, TOKENS, SIZE) for x in (query, key, value))
    scores = torch.bmm(query, key.transpose(1, 2)).mul(0.5).to(torch.float64)
    kept = _tril() & ~torch.ones(TOKENS, TOKENS).tril(-7).bool()
    scores = torch.where(kept, scores, torch.tensor(-1e30, dtype=torch.float64))
    weights = F.dropout(F.softmax(scores, dim=-1).to(value.dtype), 0.5, training=False)
    return torch.bmm(weights, value).view(1, HEADS, TOKENS, SIZE)


def _of_bloom(query: Any, key: Any, value: Any) -> Any:
    """A bias by the position of the key, which is in the product; changed in place after it."""
    slopes = torch.tensor([0.5, 0.25, 0.3])
    bias = slopes[:, None, None] * torch.arange(TOKENS)
    q, k = (x.reshape(HEADS, TOKENS, SIZE) for x in (query, key))
    scores = bias.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=0.5, alpha=0.7)
    scores = scores.view(1, HEADS, TOKENS, -1)
    scores *= 1.5
    scores += torch.full((TOKENS, TOKENS), -1e38).triu(1)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32), value)


def _of_mpt(query: Any, key: Any, value: Any) -> Any:
    """A bias by the distance to the key, and a bound of scores that changes none."""
    positions = torch.arange(TOKENS)
    distance = -(positions[:, None] - positions).abs()
    scores = query @ key.mT + distance * torch.tensor([1.0, 0.1, 0.0])[:, None, None]
    scores = torch.max(scores.masked_fill(distance.new_ones(TOKENS, TOKENS).triu(1) > 0, -1e5),
                       torch.tensor(-1e38))  # fmt: skip
    return torch.softmax(scores, -1) @ value


@pytest.mark.parametrize(
    ("attend", "window", "has_slopes"),
    [
        (_plain, None, False),
        (_of_openai, None, False),
        (_window, 7, False),
        (_of_bloom, None, True),
        (_of_mpt, None, True),
    ],
)
def test_attention_is_what_it_is_understood_as(
    attend: Attend, window: int | None, has_slopes: bool
) -> None:
    """Attention that a function computes is that of the scale, window and slopes found in it."""
    call = _understood(attend)
    assert call.window == window
    assert (call.slopes is not None) == has_slopes
    torch.manual_seed(0)
    given = torch.randn(3, 1, HEADS, TOKENS, SIZE)
    expected = _formula(call, *given)
    torch.testing.assert_close(attend(*given).double(), expected, rtol=0, atol=1e-5)


def _masked(scores: Any) -> Any:
    return scores.masked_fill(~_tril(), -1e9)


def _first_tokens() -> torch.Tensor:
    kept = _tril()
    kept[:, :4] = True
    return kept


def _causal_mask() -> Mask:
    mask = torch.empty(1, 1, TOKENS, TOKENS).as_subclass(Mask)
    mask.rule = MaskRule()
    return mask


# By the reason why it is refused: what is done to scores.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "others than a number of those before": lambda s: s,  # to all tokens
    "lets tokens attend to others": lambda s: s.masked_fill(~_first_tokens(), -1e9),
    "no multiple of the distance": lambda s: _masked(s + (torch.arange(TOKENS) + 1).log()),
    "a bias": lambda s: _masked(s + torch.arange(TOKENS).clamp(max=TOKENS - 12) * 0.5),
    "factors that differ": lambda s: _masked(s * (torch.arange(TOKENS) + 1)[:, None]),
    "given to tanh": lambda s: _masked(torch.tanh(s) * 30),
    "divided by a tensor": lambda s: _masked(s / (torch.arange(TOKENS) + 1)),
    "computed from tokens": lambda s: _masked(s + s.query.sum(-1, keepdim=True)),
    "used twice": lambda s: _masked(s) + 0 * s,
    "other numbers than a mask's": lambda s: _masked(s.masked_fill(_tril().T, 0.5)),
    "multiplied by -1": lambda s: _masked(-1 * s),
    "not known: subtract": lambda s: _masked(torch.ones(()) - s),
    "not known: divide": lambda s: _masked(torch.ones(()) / s),
    "reshaped": lambda s: _masked(s).reshape(HEADS, -1),
    "are given to transpose": lambda s: _masked(s).transpose(-1, -2),
    "clamp": lambda s: _masked(s.clamp(max=5)),
    "meet a tensor": lambda s: _masked(s - _causal_mask()),  # lets the masked ones be larger
    "no window": lambda s: s + torch.empty(1, 1, TOKENS, TOKENS).as_subclass(Mask),
    "softmax of scores": lambda s: _masked(s).softmax(-1) * 2,
    "attention has dropout": lambda s: torch.dropout(_masked(s).softmax(-1), 0.5, True),
    "of attention has dropout": lambda s: F.dropout(_masked(s).softmax(-1), 0.5, training=True),
    "over dimension": lambda s: _masked(s).softmax(-2),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_attention_that_is_not_ours_is_refused(reason: str) -> None:
    """What no scale, window and slopes describe is refused with its reason."""

    def attend(query: Any, key: Any, value: Any) -> Any:
        changed = CHANGES[reason](query @ key.transpose(-1, -2))
        return (changed if changed.weights else changed.softmax(-1)) @ value

    with pytest.raises(UnsupportedModelError, match=reason):
        _understood(attend)


def test_a_mask_keeps_its_rule_as_another_dtype() -> None:
    """A mask of transformers that becomes boolean is the mask that it was."""
    mask = torch.empty(1, 1, 2, 2, device="meta").as_subclass(Mask)
    mask.rule = MaskRule(window=3)
    moved: Any = mask.to(torch.bool)
    assert moved.rule == MaskRule(window=3)
    assert getattr(~moved, "rule", None) is None


def test_a_mask_keeps_its_rule_where_nothing_is_cut_off() -> None:
    """Code cuts a mask to the number of keys; a part of it, or other rows, have no known rule."""
    mask: Any = torch.empty(1, 1, 3, 3, device="meta").as_subclass(Mask)
    mask.rule = MaskRule(window=2)
    assert mask[:, :, :, :3].rule == mask[..., :9].rule == MaskRule(window=2)
    rows = torch.zeros(3, dtype=torch.int64)
    assert mask[..., :2].rule is mask[..., rows].rule is mask[None, 0].rule is None


@pytest.mark.parametrize("size", [2, 3, 8])
def test_rules_of_masks_are_those_of_transformers(size: int) -> None:
    """A function that differs from them near an edge of a window or chunk has no rule."""
    window = masking_utils.sliding_window_causal_mask_function
    assert rule_of(masking_utils.causal_mask_function, size) == MaskRule()
    assert rule_of(masking_utils.causal_mask_function, None) == MaskRule()
    assert rule_of(window(size), size) == MaskRule(window=size)
    others: list[Any] = [
        window(size + 1),
        window(size - 1),
        window(2 * size),
        lambda b, h, q, k: (k <= q) & (q // size - k // size <= 1),  # the chunk before, too
        lambda b, h, q, k: (k <= q) & (k < 2 * size),
        lambda b, h, q, k: k <= q + 1,
    ]
    assert [rule_of(each, size) for each in others] == [None] * len(others)
    chunks = rule_of(lambda b, h, q, k: (k <= q) & (q // size == k // size), size)
    assert chunks == MaskRule(chunk=size)


def test_scores_are_on_the_device_of_the_queries() -> None:
    """What a module makes on the device of scores is on that of the queries, not on meta."""
    query = torch.randn(1, HEADS, 4, SIZE)
    scores = Scores.of(query, query, None, [])
    assert scores.device == query.device
    assert scores.shape == (1, HEADS, 4, 4)


def test_values_of_constants_follow_changes_in_place() -> None:
    """Values are known after a change by a constant, and not after one by a tensor of tokens."""
    tokens = torch.empty(TOKENS, device="meta")
    with torch.device("meta"), Constants({}, TOKENS) as constants:
        known, forgotten, written = (torch.zeros(TOKENS) for _ in range(3))
        torch.add(tokens, 1, out=written)
        view = forgotten[1:]
        known[1:] += 2.0
        view += tokens[1:]
        shaped, empty = torch.ones_like(tokens), torch.empty(3)
    assert torch.equal(constants.value(known), torch.cat([torch.zeros(1), torch.full((95,), 2.0)]))
    assert constants.value(forgotten) is None
    assert constants.value(written) is None
    assert constants.value(empty) is None
    assert torch.equal(constants.value(shaped), torch.ones(TOKENS))
    assert not constants.positions_enter
    with torch.device("meta"), constants:
        F.embedding(torch.arange(TOKENS), torch.empty(TOKENS, 2))
    assert constants.positions_enter


def _built(folder: Path, dtype: str = "float32", **settings: Any) -> Any:
    config = ModelConfig(model=str(folder), model_impl="transformers", dtype=dtype, **settings)
    source = ModelSource.find(config)
    return source, source.build(torch.device("cpu"))


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny BLOOM of six heads, saved by transformers."""
    folder = tmp_path_factory.mktemp("bloom")
    library = tiny_model("bloom", n_head=6, hidden_size=48, n_layer=1)
    library.save_pretrained(folder)
    return folder, library


def test_a_bias_by_distance_holds_at_long_distances(bloom: tuple[Path, Any]) -> None:
    """Logits at positions above 2048 are those of transformers in float32, in 16 bits as well."""
    folder, library = bloom
    ids = (torch.arange(2100) * 37 + 5) % 125 + 3
    with torch.no_grad():
        expected = library(input_ids=ids[None], use_cache=False).logits[0, 2048:]
    for dtype, most in ("float32", 1e-4), ("bfloat16", 0.06):
        source, model = _built(folder, dtype)
        with source.open() as checkpoint:
            model.load_weights(checkpoint)
        with torch.inference_mode():
            logits = model.compute_logits(model(ids, torch.arange(len(ids)))[2048:]).float()
        assert (logits - expected).norm() <= most * expected.norm(), dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slopes_are_those_of_the_formula(bloom: tuple[Path, Any], dtype: str) -> None:
    """Six heads have the slopes of four, and every other one of eight (arXiv:2108.12409)."""
    _, model = _built(bloom[0], dtype)
    (slopes,) = [each for name, each in model.named_buffers() if name.endswith("alibi_slopes")]
    expected = torch.tensor([2.0**-power for power in (2, 4, 6, 8, 1, 3)])
    torch.testing.assert_close(slopes, expected, rtol=2e-3, atol=0)


def test_masks_of_long_sequences_are_read_in_16_bits(tmp_path: Path) -> None:
    """A mask of 512 tokens is read at their positions, which 16 bits would round."""
    tiny_model("openai-gpt", n_positions=512, n_layer=1).save_pretrained(tmp_path)
    _, model = _built(tmp_path, "bfloat16")
    assert model.library_name == "OpenAIGPTLMHeadModel"


def test_positions_that_enter_otherwise_are_refused(
    bloom: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that counts positions itself, and takes none, is refused."""
    block: Any = type(bloom[1].transformer.h[0])
    forward = block.forward

    def counting(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        return forward(self, hidden_states + positions[:, None] * 0.01, **kwargs)

    monkeypatch.setattr(block, "forward", counting)
    with pytest.raises(UnsupportedModelError, match="takes no position_ids"):
        _built(bloom[0])


def test_attention_that_changes_is_noticed(
    bloom: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that does something else to scores than when it was built raises an error."""
    folder, library = bloom
    source, model = _built(folder)
    with source.open() as checkpoint:
        model.load_weights(checkpoint)
    attention: Any = type(library.transformer.h[0].self_attention)
    forward = attention.forward

    def without_mask(self: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, attention_mask=None, **kwargs)

    monkeypatch.setattr(attention, "forward", without_mask)
    with pytest.raises(RuntimeError, match="differently than it did"):
        model(torch.tensor([5, 6]), torch.arange(2))


def test_fewer_chosen_tokens_than_the_length_are_refused(tmp_path: Path) -> None:
    """Attention to 8 chosen tokens is right for 8 tokens on two ranks, and is refused for 9."""
    sizes = {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts": 4}
    library = tiny_model("deepseek_v32", index_topk=8, num_experts_per_tok=2, **sizes)
    library.save_pretrained(tmp_path)
    ids = torch.tensor([5, 90, 17, 33, 64, 21, 8, 77])
    with torch.no_grad():
        expected = library(input_ids=ids[None], use_cache=False).logits[0]

    def run(rank: int) -> torch.Tensor:
        source, model = _built(tmp_path, max_model_len=8)
        with source.open() as checkpoint:
            model.load_weights(checkpoint)
        model.check()
        with torch.inference_mode():
            return model.compute_logits(model(ids, torch.arange(8)))

    for logits in run_ranks(2, run):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    with pytest.raises(UnsupportedModelError, match=r"to 8 chosen tokens.*at most 8, not 9"):
        _built(tmp_path, max_model_len=9)


def test_experts_that_compute_something_else_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LongCat's experts are replaced if they compute what the replacement does, only then."""
    library = tiny_model("longcat_flash", zero_expert_num=2, num_key_value_heads=4)
    experts = library.model.layers[0].mlp.experts
    assert is_experts(experts)
    forward = type(experts).forward
    monkeypatch.setattr(type(experts), "forward", lambda *args: 2 * forward(*args))
    assert not is_experts(experts)


def test_experts_of_half_a_form_are_not_taken() -> None:
    """Modules with some attributes of transformers' interface alone stay as they are."""
    experts = tiny_model("mixtral").model.layers[0].mlp.experts
    assert is_experts(experts)
    for name in ("is_transposed", "has_post_expert_norm"):
        other = copy.copy(experts)
        other.__dict__ = {**vars(experts)}
        del other.__dict__[name]
        assert not is_experts(other)
