"""Rotary embedding against transformers' own functions, from the same configurations."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, PhimoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply_neighbours
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXRotaryEmbedding,  # with partial rotation, which Llama's lacks
    apply_rotary_pos_emb,
)
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from vllm_module.errors import UnsupportedModelError
from vllm_module.hf_config import HFConfig
from vllm_module.layers import Positions, RotaryEmbedding

SHARE = "partial_rotary_factor"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Of heads of 32 features that are rotated by half: partial_rotary_factor is 0.5.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 2.0 * i for i in range(8)],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear-shrinking": {"rope_type": "linear", "factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3-wider": LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
    "yarn": YARN,
    "yarn-betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn-equal-betas": YARN | {"beta_fast": 1.0, "truncate": False},
    "yarn-not-truncated": YARN | {"truncate": False},
    "yarn-attention-factor": YARN | {"attention_factor": 0.5},
    "yarn-mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.4},
    "yarn-mscale-alone": YARN | {"mscale": 0.707},
    "yarn-shrinking": YARN | {"factor": 1.0},
    "yarn-factor-from-lengths": YARN | {"factor": None},
    "yarn-tiny-original": YARN | {"original_max_position_embeddings": 4},
    "yarn-long-original": YARN | {"original_max_position_embeddings": 2**30},
    "proportional": {"rope_type": "proportional"},
    "proportional-factor": {"rope_type": "proportional", "factor": 2.0},
    "yarn-high-theta": YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 4096},
}
scalings = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
shares = pytest.mark.parametrize("share", [1.0, 0.5, 0.25])


def config_of(scaling: dict[str, Any], share: float = 1.0, **entries: Any) -> LlamaConfig:
    rope = {"rope_theta": 1000.0, "partial_rotary_factor": share} | scaling
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        num_attention_heads=2,
        rope_parameters=copy.deepcopy(rope),
        **{"max_position_embeddings": 96, **entries},
    )


def ours(config: LlamaConfig, **entries: Any) -> RotaryEmbedding:
    return RotaryEmbedding.from_config(HFConfig(**config.to_dict(), **entries))


def expected_cos_sin(
    config: LlamaConfig, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return transformers' cosines and sines, ``[1, tokens, rotary_dim]``."""
    reference = GPTNeoXRotaryEmbedding(config)  # a new one: it remembers the longest sequence
    return reference(torch.empty(1), positions.unsqueeze(0))


def assert_close(got: torch.Tensor, expected: torch.Tensor, positions: torch.Tensor) -> None:
    """Compare with a tolerance of ten roundings of the largest angle, that of the last position."""
    angle = max(1, int(positions.max()))
    torch.testing.assert_close(got, expected, rtol=0, atol=10 * 2**-24 * angle)


def assert_rotates_alike(config: LlamaConfig, positions: torch.Tensor) -> None:
    rotary = ours(config)
    q, k = torch.randn(len(positions), 3, 32), torch.randn(len(positions), 2, 32)
    expected = apply_rotary_pos_emb(
        q[None], k[None], *expected_cos_sin(config, positions), unsqueeze_dim=2
    )
    got = rotary(positions, q, k)
    assert got[0] is q
    assert got[1] is k
    for x, rotated in zip(got, expected, strict=True):
        assert_close(x, rotated[0], positions)


@shares
@scalings
def test_frequencies_of_transformers(scaling: dict[str, Any], share: float) -> None:
    """Frequencies and attention scaling are transformers', up to a few roundings."""
    config = config_of(scaling, share)
    reference, rotary = GPTNeoXRotaryEmbedding(config), ours(config)
    torch.testing.assert_close(rotary.inv_freq, reference.inv_freq, rtol=1e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(reference.attention_scaling, rel=1e-12)
    whole = scaling["rope_type"] == "proportional"
    assert rotary.rotary_dim == (32 if whole else 32 * share)


@shares
def test_yarn_blends_between_the_pairs_of_transformers(share: float) -> None:
    """Whatever the original length: pairs are kept, blended and divided, also the last ones."""
    for power in (4, 10, 16):
        config = config_of(YARN | {"original_max_position_embeddings": 2**power}, share)
        expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config)
        torch.testing.assert_close(ours(config).inv_freq, expected, rtol=1e-6, atol=0)


@shares
@scalings
def test_rotation_of_transformers(scaling: dict[str, Any], share: float) -> None:
    """Queries and keys are rotated as in transformers, and other features are unchanged."""
    assert_rotates_alike(config_of(scaling, share), torch.arange(96))


@pytest.mark.parametrize("max_model_len", [None, 1, 95, 96, 97, 150, 288, 10000])
@shares
def test_dynamic_scaling_is_that_of_the_longest_sequence(
    share: float, max_model_len: int | None
) -> None:
    """Dynamic scaling is transformers' for max_model_len tokens, whatever the positions are."""
    config = config_of(SCALINGS["dynamic"], share)
    rotary = ours(config, max_model_len=max_model_len)
    expected, scaling = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=max_model_len)
    torch.testing.assert_close(rotary.inv_freq, expected, rtol=1e-6, atol=0)
    assert rotary.attention_scaling == scaling
    plain = ours(config_of(SCALINGS["default"], share)).inv_freq
    assert torch.allclose(rotary.inv_freq, plain) is ((max_model_len or 0) <= 96)


def test_attn_factor_multiplies_yarns_own_factor() -> None:
    """DeepSeek-R1-0528-Qwen3-8B takes back YaRN's factor, 0.1 ln 4 + 1, as vLLM computes it."""
    published = YARN | {
        "original_max_position_embeddings": 32768,
        "attn_factor": 0.8782488562869419,
    }
    assert ours(config_of(published)).attention_scaling == pytest.approx(1.0, rel=1e-12)
    for mscale, expected in ((1.0, 0.5), (2.0, 0.5 * (0.2 * math.log(4) + 1) / 1.138629436111989)):
        scaling = YARN | {"attn_factor": 0.5, "mscale": mscale, "mscale_all_dim": 1.0}
        assert ours(config_of(scaling)).attention_scaling == pytest.approx(expected, rel=1e-12)
    final = YARN | {"attn_factor": 0.5, "attention_factor": 2.0}
    assert ours(config_of(final)).attention_scaling == 2.0


LONGROPES: dict[str, dict[str, Any]] = {
    "factor-from-lengths": {},
    "factor": {"factor": 3.0},
    "shrinking": {"factor": 1.0},
    "attention-factor": {"attention_factor": 1.5},
}


@pytest.mark.parametrize("max_model_len", [None, 1, 64, 65, 96, 1000])
@pytest.mark.parametrize("changes", LONGROPES.values(), ids=LONGROPES)
def test_longrope_is_that_of_the_longest_sequence(
    changes: dict[str, Any], max_model_len: int | None
) -> None:
    """The long factors are taken if max_model_len exceeds the original length, as for Phi-3."""
    config = config_of(LONGROPE | changes)
    rotary = ours(config, max_model_len=max_model_len)
    expected, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=max_model_len or 96)
    torch.testing.assert_close(rotary.inv_freq, expected, rtol=1e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(scaling, rel=1e-12)


def test_longrope_of_phi() -> None:
    """Files of Phi-3 ("su", the original length beside) and Phi-3.5-MoE (mscale) are read."""
    scaling = {k: v for k, v in LONGROPE.items() if k.endswith("_factor") and k != SHARE}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 96}
    entries = sizes | {"rope_theta": 1000.0, "original_max_position_embeddings": 64, SHARE: 0.5}
    file = entries | {"rope_scaling": {"type": "su", **scaling}}
    renamed = {"rope_scaling": {"type": "longrope", **copy.deepcopy(scaling)}}
    config = Phi3Config(**entries, **renamed, pad_token_id=0)
    for length in (64, 96):
        rotary = RotaryEmbedding.from_config(SimpleNamespace(**file, max_model_len=length))
        expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
        torch.testing.assert_close(rotary.inv_freq, expected, rtol=1e-6, atol=0)
        assert rotary.attention_scaling == pytest.approx(factor, rel=1e-12)
    mscales = {"short_mscale": 1.25, "long_mscale": 1.5}
    rope = {"rope_theta": 1000.0, **LONGROPE, **mscales}
    moe = PhimoeConfig(**sizes, rope_parameters=copy.deepcopy(rope))
    for length in (64, 96):
        rotary = RotaryEmbedding.from_config(
            SimpleNamespace(**sizes, rope_parameters=rope, max_model_len=length)
        )
        cos, _ = PhimoeRotaryEmbedding(moe)(torch.empty(1), torch.tensor([[0, length - 1]]))
        assert rotary.cos_sin(torch.tensor([0]))[0][0, 0, 0] == cos[0, 0, 0]  # of the angle 0


def test_every_type_of_transformers_is_known() -> None:
    """Every rope_type of transformers is compared above, or with the longest sequence."""
    known = {scaling["rope_type"] for scaling in (*SCALINGS.values(), LONGROPE)}
    assert known == {"default", *ROPE_INIT_FUNCTIONS}


def test_rope_by_layer_type() -> None:
    """One module for each layer type has the frequencies of Gemma 3, from either spelling."""
    types = ["sliding_attention", "full_attention"]
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "layer_types": types}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 96}
    scaling = {"rope_type": "linear", "factor": 8.0}
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling}
    config = Gemma3TextConfig(**sizes, **copy.deepcopy(older))
    reference = Gemma3RotaryEmbedding(config)
    newer = {"rope_parameters": config.rope_parameters}
    for entries in (older, newer):
        file = SimpleNamespace(**sizes, **entries)
        for layer_type in types:
            rotary = RotaryEmbedding.from_config(file, layer_type)
            expected = getattr(reference, f"{layer_type}_inv_freq")
            torch.testing.assert_close(rotary.inv_freq, expected, rtol=1e-6, atol=0)
        with pytest.raises(UnsupportedModelError, match=r"by layer type: .*full_attention"):
            RotaryEmbedding.from_config(file)


class Halved(RotaryEmbedding):
    """What a model author writes for frequencies of one's own."""

    def frequencies(self) -> tuple[torch.Tensor, float]:
        inv_freq, scaling = super().frequencies()
        return inv_freq / 2, scaling * 3


def test_frequencies_of_a_subclass() -> None:
    """A subclass gives its own frequencies and scaling by one method, which every use takes."""
    config = config_of(SCALINGS["llama3"], 0.5)
    base, halved = ours(config), Halved.from_config(config)
    assert torch.equal(halved.inv_freq, base.inv_freq / 2)
    cos, _ = halved.cos_sin(torch.tensor([2, 80]))
    assert torch.equal(cos, base.cos_sin(torch.tensor([1, 40]))[0] * 3)


@pytest.mark.parametrize("bad", [[1.0], [1.0, torch.nan], [[1.0, 1.0]]])
def test_frequencies_that_do_not_fit(bad: list[Any]) -> None:
    """Frequencies of a subclass that are not finite or not one for each pair are refused."""

    class Bad(RotaryEmbedding):
        def frequencies(self) -> tuple[torch.Tensor, float]:
            return torch.tensor(bad), 1.0

    with pytest.raises(UnsupportedModelError, match=r"Bad\.frequencies: expected 2 finite numbers"):
        Bad(4, 96)


@shares
def test_neighbours_rotate_in_pairs(share: float) -> None:
    """GPT-J's style, which rotates neighbours, is that of transformers."""
    config = config_of(SCALINGS["llama3"], share)
    whole = config.rope_parameters
    rotary = RotaryEmbedding(
        32, 96, whole["rope_theta"], whole, rotary_dim=int(32 * share), is_neox_style=False
    )
    positions, width = torch.arange(96), rotary.rotary_dim
    x = torch.randn(96, 3, 32)
    cos, sin = (t[..., : width // 2] for t in expected_cos_sin(config, positions))
    cos, sin = (t.repeat_interleave(2, -1) for t in (cos, sin))
    rotated, _ = apply_neighbours(
        x[None, ..., :width], x[None, ..., :width], cos, sin, unsqueeze_dim=2
    )
    expected = torch.cat((rotated[0], x[..., width:]), -1)
    for got in rotary(positions, x.clone(), x.clone()):
        assert_close(got, expected, positions)
        assert torch.equal(got[..., width:], x[..., width:])


def test_any_positions_in_any_order() -> None:
    """A token is rotated by its own position, in any order and with gaps."""
    rotary = ours(config_of(SCALINGS["yarn"]))
    positions = torch.tensor([95, 0, 3, 3, 40])
    q, k = torch.randn(96, 2, 32), torch.randn(96, 1, 32)
    some = q[positions], k[positions]
    whole = rotary(torch.arange(96), q, k)
    for got, of_whole in zip(rotary(positions, *some), whole, strict=True):
        assert torch.equal(got, of_whole[positions])


def test_a_compiler_rotates_copies() -> None:
    """Inductor of torch 2.13 fails at writes to views of one tensor: copies are rotated."""
    rotary = ours(config_of(SCALINGS["yarn"]))
    positions = Positions(torch.arange(5))
    fused = torch.randn(5, 3, 32)
    before = fused.clone()

    def rotated(fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotary(positions, *fused.split((2, 1), dim=1))

    copies = torch.compile(rotated, backend="eager")(fused)
    assert torch.equal(fused, before)
    for got, of_views in zip(copies, rotated(fused), strict=True):
        assert torch.equal(got, of_views)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rotated_in_float32(dtype: torch.dtype) -> None:
    """16-bit queries and keys are rotated in float32 and rounded once to their dtype."""
    rotary = ours(config_of(SCALINGS["yarn"], 0.5))
    x = torch.randn(2, 96, 2, 32).to(dtype)
    positions = torch.arange(96)
    expected = rotary(positions, *x.float())
    for got, wide in zip(rotary(positions, *x), expected, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, wide.to(dtype))


@scalings
def test_frequencies_are_float32_whatever_the_default(scaling: dict[str, Any]) -> None:
    """The frequencies are float32 under any default dtype."""
    config = config_of(scaling)
    expected = ours(config).inv_freq
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rotary = ours(config)
        cos, _ = rotary.cos_sin(torch.arange(200))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(rotary.inv_freq, expected)
    assert cos.dtype == torch.float32
    assert torch.equal(cos, ours(config).cos_sin(torch.arange(200))[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_frequencies_stay_float32_in_a_model_that_is_cast(dtype: torch.dtype) -> None:
    """A cast of the whole model rounds no frequency, so far positions turn by the right angles."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), RotaryEmbedding(64, 8192)).to(dtype)
    linear, rotary_emb = model
    assert linear.weight.dtype == dtype
    positions = torch.tensor([1, 4000, 8191])
    exact = positions[:, None].double() / 10000.0 ** (torch.arange(0, 64, 2).double() / 64)
    cos, sin = rotary_emb.cos_sin(positions)
    torch.testing.assert_close(cos[:, 0].double(), exact.cos(), rtol=0, atol=2e-3)
    torch.testing.assert_close(sin[:, 0].double(), exact.sin(), rtol=0, atol=2e-3)
    assert model.to("meta")[1].inv_freq.is_meta


def test_a_cast_reaches_what_else_a_rotary_layer_has() -> None:
    """A layer in a class of one's own is multiplied by what comes in the model's dtype."""

    class Mixing(RotaryEmbedding):
        def __init__(self) -> None:
            super().__init__(8, 64)
            self.mix = torch.nn.Linear(8, 8)
            self.register_buffer("shift", torch.zeros(8))

    rotary_emb = Mixing().half()
    dtypes = {name: each.dtype for name, each in rotary_emb.state_dict().items()}
    assert dtypes == dict.fromkeys(("mix.weight", "mix.bias", "shift"), torch.float16)
    assert rotary_emb.inv_freq.dtype == torch.float32


def test_frequencies_are_not_stored_and_are_skipped() -> None:
    """Frequencies are not in the state dict, and are skipped by rule in a checkpoint."""
    rotary = ours(config_of(SCALINGS["default"]))
    expected = rotary.inv_freq.clone()
    assert not rotary.state_dict()
    names = ["inv_freq", "cos_cached", "sin_cached"]
    assert rotary.load_weights({name: torch.zeros(3) for name in names}) == set()
    assert rotary.load_report is not None
    assert set(rotary.load_report.skipped) == set(names)
    assert torch.equal(rotary.inv_freq, expected)


def test_older_spellings() -> None:
    """The keys of transformers 4, rope_theta and rope_scaling, give the same frequencies."""
    for name in ("linear", "dynamic", "yarn", "llama3"):
        new = config_of(SCALINGS[name]).to_dict()
        old = dict(new)
        rope = dict(old.pop("rope_parameters"))
        old["rope_theta"] = rope.pop("rope_theta")
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        old["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
        positions = torch.arange(300)
        first, second = (RotaryEmbedding.from_config(HFConfig(**c)) for c in (new, old))
        assert second.rope.rope_type == name
        for one, other in zip(first.cos_sin(positions), second.cos_sin(positions), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("inside", [None, 32])
@pytest.mark.parametrize("beside", [None, 48])
def test_both_places_of_the_original_length(inside: int | None, beside: int | None) -> None:
    """As in transformers, the original length beside the scaling counts before the one inside."""
    name = "original_max_position_embeddings"
    rope = {"rope_theta": 1000.0, "rope_type": "yarn", "factor": 4.0}
    rope |= {name: inside} if inside else {}
    config = config_of(rope, **({name: beside} if beside else {}))
    # transformers has normalized its configuration; a file need not be.
    entries = config.to_dict() | {"rope_parameters": rope}
    rotary = RotaryEmbedding.from_config(HFConfig(**entries))
    reference = GPTNeoXRotaryEmbedding(config)
    torch.testing.assert_close(rotary.inv_freq, reference.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "rope_type: expected one of .*longrope.*, got 'ntk'"),
        ({"rope_type": "linear"}, "factor is missing: rope_type 'linear'"),
        ({"rope_type": "dynamic", "factor": "2"}, "factor: expected a valid number, got '2'"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1}, "rope_theta: expected .*got 1"),
        ({SHARE: 0.3}, "partial_rotary_factor .*an even number .* head size 32, got 9"),
        ({SHARE: 0.01}, "partial_rotary_factor .* head size 32, got 0"),
        ({"rope_type": "dynamic", "factor": 2.0, SHARE: 0.0625}, "'dynamic' needs more than 2"),
        (LONGROPE | {SHARE: 1.0}, "long_factor: expected 16 numbers, .*, got 8"),
        ({"full_attention": {}, "sliding_attention": {}}, "settings by layer type"),
    ],
)
def test_settings_that_are_refused(scaling: dict[str, Any], message: str) -> None:
    """A setting that is wrong, or does not fit the head size, is refused by name."""
    with pytest.raises(UnsupportedModelError, match=message):
        RotaryEmbedding(32, 96, scaling=scaling)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("extreme", [1e-6, 1e-3, 1e9, 2**31 - 1])
def test_extreme_settings_give_finite_frequencies(scaling: dict[str, Any], extreme: float) -> None:
    """Any settings within the ranges give finite frequencies, or a refusal, and nothing else."""
    for name in (*scaling, "rope_theta", "max_model_len"):
        if name in ("rope_type", "truncate"):
            continue
        value = max(2, int(extreme)) if "max_" in name else extreme
        settings = (
            {"rope_theta": 1e30} | scaling | ({} if name == "max_model_len" else {name: value})
        )
        length = max(2, int(extreme)) if name == "max_model_len" else None
        try:
            rotary = RotaryEmbedding(4, 2, scaling=settings, max_model_len=length)
        except UnsupportedModelError as error:
            assert "expected" in str(error)  # noqa: PT017 - not every case is refused
        else:
            assert all(x.isfinite().all() for x in rotary.cos_sin(torch.arange(3)))


@pytest.mark.parametrize("width", [3, 34, -2])
def test_impossible_widths(width: int) -> None:
    """An odd, negative or too large rotary_dim is refused, with the head size."""
    with pytest.raises(UnsupportedModelError, match=f"head size 32, got {width}"):
        RotaryEmbedding(32, 96, rotary_dim=width)


GEMMA3 = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4}
ONLY_FULL = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}


@pytest.mark.parametrize(
    ("entries", "indices", "bases"),
    [
        ({}, [0, 0, 0, 0], [10000.0]),
        (GEMMA3 | {"sliding_window_pattern": 3}, [0, 0, 1, 0], [1e4, 1e6]),
        (
            GEMMA3
            | {"layer_types": ["full_attention", "sliding_attention"] * 2}
            | {"rope_parameters": ONLY_FULL},
            [0, 1, 0, 1],
            [1e6, 1e4],
        ),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, [0, 0, 0, 0], [10000.0]),
    ],
)
def test_layers_with_the_same_settings_share_an_instance(
    entries: dict[str, Any], indices: list[int], bases: list[float]
) -> None:
    """There is one instance for each kind of settings, by layer type or by the window."""
    config = HFConfig(
        architectures=["Any"], hidden_size=32, num_attention_heads=4, num_hidden_layers=4,
        vocab_size=8, max_position_embeddings=64, **entries,
    )  # fmt: skip
    of_layers = list(RotaryEmbedding.of_layers(config))
    different = list(dict.fromkeys(of_layers))
    assert [different.index(each) for each in of_layers] == indices
    assert [each.rope.rope_theta for each in different] == bases
