"""Which layer gets which scheme: names, patterns, order, and requests against config.json."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from transformers.quantizers.quantizers_utils import should_convert_module

from vllm_module import QuantizationConfig, vLLMModule
from vllm_module.errors import (
    DuplicateWeightError,
    UnsupportedModelError,
)
from vllm_module.layers import FusedMoE, QKVParallelLinear, ReplicatedLinear
from vllm_module.models.llama import LlamaConfig, LlamaForCausalLM
from vllm_module.quantization import (
    ONLINE,
    EightBitMethod,
    QuantizableLayer,
    Rules,
    Scheme,
    online_rules,
    quantize,
    requested_rules,
    rules_for,
)
from vllm_module.quantization import rules as rules_module
from vllm_module.quantization.rules import EVERY_LAYER, matches


def model(**changes: Any) -> vLLMModule:
    entries = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**entries | changes))


def schemes(model: vLLMModule) -> dict[str, str | None]:
    """Return the scheme's name for every layer with products, by the layer's short name."""
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizableLayer) and not layer.is_embedding:
            method = layer.quant_method
            name = path.removeprefix("model.layers.")
            eight = isinstance(method, EightBitMethod)
            known = {scheme: name for name, scheme in ONLINE.items()}
            found[name] = known[method.scheme] if eight else None
    return found


LAYERS = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
TENSOR, CHANNEL, INT8 = "fp8_per_tensor", "fp8_per_channel", "int8_per_channel_weight_only"


@pytest.mark.parametrize("asked", [TENSOR, CHANNEL, INT8, "fp8"])
def test_every_linear_layer_but_the_head(asked: str) -> None:
    """A scheme's name quantizes all linear layers, and the head only on request."""
    built = model()
    quantize(built, online_rules(asked))
    expected = dict.fromkeys((f"{i}.{name}" for i in (0, 1) for name in LAYERS), asked)
    if asked == "fp8":
        expected = dict.fromkeys(expected, TENSOR)
    assert schemes(built) == expected | {"lm_head": None}
    built = model()
    quantize(built, online_rules(QuantizationConfig(scheme=CHANNEL, ignore=())))
    assert schemes(built)["lm_head"] == CHANNEL


def test_a_tied_head_stays_as_the_embedding_is() -> None:
    """A head that shares the embedding's weight is not quantized by a rule for every layer."""
    built = model(tie_word_embeddings=True)
    quantize(built, online_rules(QuantizationConfig(scheme=CHANNEL, ignore=())))
    assert schemes(built)["lm_head"] is None
    assert built.lm_head.weight is built.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (["model.layers.0"], [f"0.{name}" for name in LAYERS]),
        (["model.layers.1.mlp"], ["1.mlp.gate_up_proj", "1.mlp.down_proj"]),
        (["down_proj"], ["0.mlp.down_proj", "1.mlp.down_proj"]),
        (["mlp.down_proj"], ["0.mlp.down_proj", "1.mlp.down_proj"]),
        (["mlp"], [f"{layer}.{name}" for layer in (0, 1) for name in LAYERS[2:]]),
        (["embed_tokens", "norm", "layers.0"], [f"0.{name}" for name in LAYERS]),
        (["model.layers.0.self_attn.qkv_proj"], ["0.self_attn.qkv_proj"]),
        (["q_proj", "k_proj", "v_proj"], ["0.self_attn.qkv_proj", "1.self_attn.qkv_proj"]),
        (
            [r"re:.*\.[oq]_proj$", "re:.*[kv]_proj"],
            [f"{i}.{n}" for i in (0, 1) for n in LAYERS[:2]],
        ),
        (["re:model.layers.1"], [f"1.{name}" for name in LAYERS]),
    ],
)
def test_exclusions(ignore: list[str], left: list[str]) -> None:
    """Layers are ignored by consecutive components of their names, or by a pattern."""
    built = model()
    quantize(built, online_rules(QuantizationConfig(scheme=CHANNEL, ignore=(*ignore, "lm_head"))))
    assert [name for name, scheme in schemes(built).items() if scheme is None] == [*left, "lm_head"]


@pytest.mark.parametrize(
    ("target", "name", "fits"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "lm_head_2", False),
        ("head", "lm_head", False),
        ("layers.1", "model.layers.1.mlp", True),
        ("layers.1", "model.layers.11.mlp", False),
        ("model.layers.1", "model.layers.10.mlp", False),
        ("mlp", "model.layers.1.mlp.down_proj", True),
        ("lp", "model.layers.1.mlp.down_proj", False),
        ("model.layers.1", "model.layers.1.mlp", True),
        ("re:layers", "model.layers.1", False),
        ("re:.*layers", "model.layers.1", True),
        ("Linear", "anything", True),
    ],
)
def test_matching(target: str, name: str, fits: bool) -> None:
    """A target matches whole components of a name, or by ``re:`` the beginning of a name."""
    assert matches(target, name) is fits


def test_overrides() -> None:
    """Overrides go before ``ignore``, the first match counts, and layers have different schemes."""
    built = model()
    asked = QuantizationConfig(
        scheme=TENSOR,
        ignore=("model.layers.1", "lm_head"),
        overrides={
            "model.layers.1.mlp.down_proj": INT8,
            "model.layers.0.self_attn": "none",
            "down_proj": CHANNEL,
        },
    )
    quantize(built, online_rules(asked))
    assert schemes(built) == {
        "0.self_attn.qkv_proj": None,
        "0.self_attn.o_proj": None,
        "0.mlp.gate_up_proj": TENSOR,
        "0.mlp.down_proj": CHANNEL,
        "1.self_attn.qkv_proj": None,
        "1.self_attn.o_proj": None,
        "1.mlp.gate_up_proj": None,
        "1.mlp.down_proj": INT8,
        "lm_head": None,
    }


@pytest.mark.parametrize("target", ["k_proj", "model.layers.1.mlp.gate_proj", "re:.*0.*v_proj"])
def test_slots_of_a_fused_layer_have_one_scheme(target: str) -> None:
    """Ignoring only one slot of a fused layer is refused, and the error lists all slots."""
    slot = {"k_proj": "k_proj", "re:.*0.*v_proj": "v_proj"}.get(target, "gate_proj")
    with pytest.raises(UnsupportedModelError, match=rf"{slot}: not quantized"):
        quantize(model(), online_rules(QuantizationConfig(scheme=CHANNEL, ignore=(target,))))


@pytest.mark.parametrize(
    "target", ["lm_haed", "model.layers.2", "re:.*q_porj", "layers.1.mlp_proj"]
)
def test_a_target_that_is_nowhere_is_refused(target: str) -> None:
    """A target that matches nothing, such as a typing error, is refused."""
    for entries in ({"ignore": (target,)}, {"overrides": {target: "none"}}):
        with pytest.raises(UnsupportedModelError, match=r"has no effect on LlamaForCausalLM"):
            quantize(model(), online_rules(QuantizationConfig(scheme=CHANNEL, **entries)))


@pytest.mark.parametrize(
    "entries",
    [
        {"overrides": {"embed_token": CHANNEL}},
        {"overrides": {"model.norm": CHANNEL}},
        {"overrides": {"re:.*embed_tokens": CHANNEL}},
        {"ignore": ("re:.*qkv_proj",)},
        {"ignore": ("lm_head", "")},
        {"overrides": {"down_proj": CHANNEL}, "ignore": ("layers.0.mlp.down_proj",)},
        {"ignore": (), "overrides": {"re:lm_head": CHANNEL}},
    ],
)
def test_a_target_without_effect_is_refused(entries: dict[str, Any]) -> None:
    """A target is refused if its layers cannot be quantized so or match an earlier rule."""
    built = model(tie_word_embeddings=True)
    with pytest.raises(UnsupportedModelError, match=r"has no effect on LlamaForCausalLM"):
        quantize(built, online_rules(QuantizationConfig(scheme=TENSOR, **entries)))


def test_a_layer_under_two_names_is_quantized_once() -> None:
    """A module with two names is quantized once and loaded under either name."""

    class Twice(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = ReplicatedLinear(4, 4, bias=False)

    built = Twice()
    quantize(built, online_rules(CHANNEL))
    built.load_weights({"b.weight": torch.ones(4, 4)})
    built.check_ready()
    assert built.a.weight.dtype == torch.float8_e4m3fn
    built.load_weights({"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4)})
    with pytest.raises(DuplicateWeightError, match="but their values differ"):
        built.load_weights({"a.weight": torch.ones(4, 4), "b.weight": torch.zeros(4, 4)})


def test_a_partly_loaded_model_is_not_quantized() -> None:
    """A model of which one layer is loaded is refused: its weights would be lost."""
    built = model()
    layer = built.model.layers[0].mlp.down_proj
    layer.load_weights({"weight": layer.weight.new_zeros(16, 32, device="cpu")})
    with pytest.raises(RuntimeError, match="LlamaForCausalLM is loaded: quantize it before"):
        quantize(built, online_rules(CHANNEL))


def test_a_layer_can_be_given_another_scheme_before_it_is_loaded() -> None:
    """The last scheme counts, and no parameter of the first is left."""
    built = model()
    quantize(built, online_rules("fp8_per_tensor"))
    quantize(built, online_rules(INT8))
    layer = built.model.layers[0].mlp.down_proj
    assert [tuple(p.shape) for p in layer.parameters()] == [(16, 32), (16, 1)]


FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize("asked", [None, "fp8"])
def test_a_stored_scheme(asked: str | None) -> None:
    """config.json has the scheme of a checkpoint; requesting it by name changes nothing."""
    rules = rules_for(asked, FP8)
    assert isinstance(rules, Rules)
    scheme = rules.rule_of("model.layers.0.mlp.up_proj")[1]
    assert scheme is not None
    assert (scheme.online, scheme.strategy, scheme.or_tensor) == (False, "channel", True)
    assert rules.rule_of("lm_head")[1] is None


@pytest.mark.parametrize(
    "asked", [TENSOR, "compressed-tensors", QuantizationConfig(scheme=CHANNEL)]
)
def test_the_request_and_config_json_must_agree(asked: Any) -> None:
    """Another scheme for a quantized checkpoint is refused."""
    with pytest.raises(UnsupportedModelError, match="is quantized already, by 'fp8'"):
        rules_for(asked, FP8)


def test_full_precision_is_not_taken_for_stored() -> None:
    """compressed-tensors is a layout and is refused for a full-precision checkpoint."""
    assert rules_for(None, None) is None
    with pytest.raises(UnsupportedModelError, match="fp8_per_channel"):
        rules_for("compressed-tensors", None)


def test_the_configuration_is_closed() -> None:
    """Unknown settings and schemes are refused."""
    with pytest.raises(ValueError, match=r"^scheme should be .*, got 'fp4'$"):
        QuantizationConfig(scheme="fp4")
    with pytest.raises(ValueError, match=r"^QuantizationConfig has no argument 'skip'$"):
        QuantizationConfig(scheme=TENSOR, skip=["lm_head"])
    with pytest.raises(ValueError, match=r"^weight_block_size\[0\] should be .*, got 0$"):
        QuantizationConfig(scheme=TENSOR, weight_block_size=(0, 128))


def test_rules_about_a_layer_decide_like_all_rules() -> None:
    """Leaving out the rules that match none of a layer's names changes no decision."""
    names = [f"model.layers.1.mlp.experts.{expert}.up_proj" for expert in range(3)]
    path = "model.layers.1.mlp.experts.w13"
    targets = [
        "model.layers.1", "layers.11", "experts.1", "experts.w13", "up_proj", "1.up", "Linear",
        "re:.*experts.1", "re:.*w13", "re:model.layers.2", f"={names[2]}", f"={path}", "=up_proj",
    ]  # fmt: skip
    for first in targets:
        for second in targets:
            rules = Rules(((first, None), (second, ONLINE[TENSOR])))
            for name in names:
                assert rules.about(names, path).rule_of(name, path) == rules.rule_of(name, path)


def test_the_first_rule_of_a_layer_counts() -> None:
    """Of all orders of rules that name one layer, alone or with others, the first one decides."""
    name = "model.layers.1.mlp.up_proj"
    targets = [f"={name}", f"={name}", "mlp", "re:.*up_proj", "=model.layers.2.mlp.up_proj"]
    schemes = [*ONLINE.values(), None]
    for order in itertools.permutations(range(len(targets))):
        rules = Rules(tuple((targets[at], schemes[at]) for at in order))
        first = next(at for at in order if at < 4)  # the last one is of another layer
        assert rules.rule_of(name) == (targets[first], schemes[first]), order


def test_rules_for_other_layers_cost_nothing_for_each_expert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name of an expert is compared with the few targets that can match it."""
    compared = 0

    def counted(target: str, name: str) -> bool:
        nonlocal compared
        compared += 1
        return matches(target, name)

    monkeypatch.setattr(rules_module, "matches", counted)
    layer = vLLMModule()
    layer.experts = FusedMoE(32, 2, 8, 8)
    others = tuple((f"layers.{index}.mlp.gate", None) for index in range(100))
    quantize(
        layer,
        Rules(
            (*others, *((f"={name}", None) for name, _ in others), (EVERY_LAYER, Scheme("tensor")))
        ),
    )
    assert layer.experts.w13.is_quantized
    assert compared <= 2 * 3 * 32


def test_a_rule_may_name_a_layer_by_an_alias() -> None:
    """Names of a larger model, which an alias leads here, select the layers that they are."""
    part = model()
    part.weight_aliases = {"language_model.model": "model", "language_model.lm_head": "lm_head"}
    asked = QuantizationConfig(
        scheme="fp8_per_tensor", ignore=("language_model.lm_head", "language_model.model.layers.1")
    )
    quantize(part, online_rules(asked))
    found = schemes(part)
    quantized = {name for name, scheme in found.items() if scheme is not None}
    assert quantized == {f"0.{layer}" for layer in LAYERS}


class Packed(vLLMModule):
    """Experts that are stored as ``moe.input`` and ``moe.output``, and a layer ``moe.qkv``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = vLLMModule()
        self.inner.block = vLLMModule()
        self.inner.block.experts = FusedMoE(2, 1, 8, 8, shard_names=None)
        self.inner.block.qkv_proj = QKVParallelLinear(8, 4, 2)
        self.inner.block.weight_aliases = {
            "input": "experts.w13",
            "output": "experts.w2",
            "qkv": "qkv_proj",
        }
        self.weight_aliases = {"moe": "inner.block"}


@pytest.mark.parametrize("prefix", ["", "re:"])
@pytest.mark.parametrize(
    ("name", "path"),
    [("moe.input", "experts.w13"), ("moe.output", "experts.w2"), ("moe.qkv", "qkv_proj")],
)
def test_a_rule_may_name_what_stores_a_layer_by_its_own_alias(
    prefix: str, name: str, path: str
) -> None:
    """The alias of the layer comes after an alias of what is above it; patterns find it, too."""
    packed = Packed()
    asked = QuantizationConfig(scheme="fp8_per_tensor", ignore=(f"{prefix}{name}",))
    quantize(packed, online_rules(asked))
    left = {each for each, scheme in schemes(packed).items() if scheme is None}
    assert left == {f"inner.block.{path}"}


_WORDS = {"bits": 4, "group_size": 32}
STORED: dict[str, dict[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic"},
    "compressed-tensors": {
        "format": "int-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
        },
    },
    "gguf": {"types": {"a": "Q8_0", "b": "Q4_K"}},
    "modelopt": {"quant_algo": "FP8"},
    "mxfp4": {},
    "gptq": {**_WORDS, "desc_act": True},
    "awq": {**_WORDS, "zero_point": True, "version": "gemm"},
    "auto-round": {**_WORDS, "sym": True, "packing_format": "auto_round:auto_gptq"},
    "intel/auto-round": {"bits": 4, "group_size": 64, "sym": True, "backend": "auto_round:gptq"},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fbgemm_fp8": {"activation_scale_ub": 1200.0},
}


def test_ranks_find_the_same_words_for_rules() -> None:
    """Ranks in processes compare rules by ``repr``, which has no address of an object in it."""
    assert STORED.keys() == requested_rules.STORED.keys()
    every = [rules_for(None, {"quant_method": name} | each) for name, each in STORED.items()]
    every.append(rules_for(None, {"quant_method": "bitsandbytes", "load_in_8bit": True}))
    schemes = (*ONLINE, *requested_rules._ONLINE_METHODS)
    every += [online_rules(QuantizationConfig(scheme=name)) for name in schemes]
    words = [repr(each) for each in every]
    assert not [each for each in words if re.search(r" at 0x|object", each)]
    assert len({*words}) == len(words)  # and they tell the formats apart


_ENTRIES: dict[str, dict[str, Any]] = {
    "fp8": {"weight_block_size": [128, 128]},
    "awq": {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fbgemm_fp8": {},
    "bitsandbytes": {"load_in_8bit": True},
}


@pytest.mark.parametrize("method", _ENTRIES)
@pytest.mark.parametrize(
    "skipped",
    [
        "model.layers.1", "model.layers.*.mlp.down_proj", r"model\.layers\.(0|1)\.self_attn.*",
        r".*\.mlp\..*", "model.layers.1.mlp.gate", "down_proj",
    ],
)  # fmt: skip
def test_what_is_not_converted_is_what_transformers_leaves_out(method: str, skipped: str) -> None:
    """An entry is the beginning of a name, its end, or a pattern of a beginning."""
    entries = {"quant_method": method, **_ENTRIES[method], "modules_to_not_convert": [skipped]}
    rules = rules_for(None, entries)
    assert rules is not None
    for layer, name in itertools.product(
        (0, 1, 10), ("mlp.down_proj", "mlp.gate_proj", "self_attn.o_proj")
    ):
        path = f"model.layers.{layer}.{name}"
        assert (rules.rule_of(path)[1] is not None) == should_convert_module(path, [skipped]), path


@pytest.mark.parametrize("method", _ENTRIES)
def test_a_dot_says_where_a_name_that_is_not_converted_ends(method: str) -> None:
    """Published AWQ files have ``model.layers.1.``, which vLLM looks for as text in a name."""
    entries = {"quant_method": method, **_ENTRIES[method]}
    rules = rules_for(None, entries | {"modules_to_not_convert": ["model.layers.1.", "mlp.gate."]})
    assert rules is not None
    for layer in (0, 1, 10):
        path = f"model.layers.{layer}.mlp.gate_proj"
        assert (rules.rule_of(path)[1] is None) == ("model.layers.1." in path), path
