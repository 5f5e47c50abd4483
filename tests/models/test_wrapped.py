"""Models of transformers in the wrapper: dtypes, FP8, updates, and what is refused by name."""

from __future__ import annotations

import json
import logging
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from vllm_module import ModelConfig
from vllm_module.build.loader import get_model
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import expert_parallel, run_ranks, tensor_parallel
from vllm_module.errors import (
    MisshapenWeightError,
    MissingWeightError,
    UnsupportedModelError,
    WeightLoadError,
)
from vllm_module.testing.sources import WatchedSource
from vllm_module.wrapped.attention import stepping
from vllm_module.wrapped.own_attention import divert_methods
from vllm_module.wrapped.plan_styles import Plan, linear_of, parameter_of
from vllm_module.wrapped.probe import probe_of

_sweep = runpy.run_path(str(Path(__file__).with_name("sweep.py")))
TOKEN_IDS: torch.Tensor = _sweep["TOKEN_IDS"]
tiny_model: Callable[..., Any] = _sweep["tiny_model"]

FAMILIES = ("smollm3", "mixtral", "deepseek_v3")  # dense, experts, latents


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves a tiny model of a type, once."""
    folders: dict[Any, Path] = {}

    def save(kind: str, factor: float = 1.0) -> Path:
        if (kind, factor) not in folders:
            model = tiny_model(kind, **_sweep["OWN"].get(kind, {}))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(factor)
            folders[kind, factor] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folders[kind, factor])
        return folders[kind, factor]

    return save


def _source(folder: Path, **settings: Any) -> ModelSource:
    settings = {"dtype": "float32", "model_impl": "transformers", "max_model_len": 64} | settings
    return ModelSource.find(ModelConfig(model=str(folder), **settings))


def _loaded(folder: Path, **settings: Any) -> Any:
    source = _source(folder, **settings)
    model: Any = source.build(torch.device("cpu"))
    with source.open() as checkpoint:
        model.load_weights(checkpoint)
    return model


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.compute_logits(model(TOKEN_IDS, torch.arange(len(TOKEN_IDS))))


def _distance(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the median over tokens of the relative distance.

    A few tokens are far off where rounding changes which experts a router chooses: which ones
    depends on the processor's order of sums.
    """
    return float(((logits - exact).norm(dim=-1) / exact.norm(dim=-1)).median())


@pytest.mark.parametrize("kind", FAMILIES)
def test_an_update_quantizes_again_in_place(saved: Callable[..., Path], kind: str) -> None:
    """A model in FP8 that is updated has the bits of one that is loaded anew, where it was."""
    model = _loaded(saved(kind), quantization="fp8_per_channel")
    held = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    kinds = {tensor.dtype for tensor in model.parameters()}
    assert torch.float8_e4m3fn in kinds
    exact = _logits(_loaded(saved(kind)))
    assert _distance(_logits(model), exact) < 0.15
    with _source(saved(kind, 1.5)).open() as checkpoint:
        model.update_weights(dict(checkpoint.items()))
    fresh = _loaded(saved(kind, 1.5), quantization="fp8_per_channel")
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(model.state_dict()[name].view(torch.uint8), tensor.view(torch.uint8))
    assert held == {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("kind", FAMILIES)
def test_ranks_quantize_what_they_keep(saved: Callable[..., Path], kind: str) -> None:
    """In FP8, two ranks give what one gives, up to what a cut changes of the scales."""
    logits = run_ranks(
        2, lambda rank: _logits(_loaded(saved(kind), quantization="fp8_per_channel"))
    )
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0)
    assert _distance(logits[0], _logits(_loaded(saved(kind)))) < 0.15


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("deepseek_v3", "bfloat16"), ("flint", "bfloat16"), ("gpt_oss", "float16")],
)
def test_float32_is_kept_where_transformers_keeps_it(
    saved: Callable[..., Path], kind: str, dtype: str
) -> None:
    """In 16 bits, each tensor has the dtype that transformers' own loader gives it."""
    library = transformers.AutoModelForCausalLM.from_pretrained(saved(kind), dtype=dtype)
    expected = {name: each.dtype for name, each in library.state_dict().items()}
    assert len({*expected.values()}) == 2, "it shows nothing if all dtypes are equal"
    ours = {
        name: each.dtype for name, each in _loaded(saved(kind), dtype=dtype).state_dict().items()
    }
    assert {name: ours[name] for name in ours.keys() & expected.keys()} == {
        name: expected[name] for name in ours.keys() & expected.keys()
    }


PLANS = {
    "an unknown style": ("layers.*.self_attn.q_proj", "diagonal", "the style 'diagonal'"),
    "queries under another name": (
        "layers.*.self_attn.q_prj",
        "colwise",
        "plan does not fit.*q_prj",
    ),
    "values under another name": (
        "layers.*.self_attn.v_prj",
        "colwise",
        "plan does not fit.*v_prj",
    ),
    "an output under another name": (
        "layers.*.mlp.down_prj",
        "rowwise",
        "plan does not fit.*down_prj",
    ),
}


@pytest.mark.parametrize(("path", "style", "expected"), PLANS.values(), ids=PLANS)
def test_a_plan_that_does_not_fit_is_refused(
    saved: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    style: str,
    expected: str,
) -> None:
    """A style that is not known is named; a layer that a plan misses shows in the shapes."""
    plan = dict(transformers.MistralConfig.base_model_tp_plan)
    plan.pop(path.replace("_prj", "_proj"))
    monkeypatch.setattr(transformers.MistralConfig, "base_model_tp_plan", plan | {path: style})
    source = _source(saved("mistral"))
    with tensor_parallel(rank=0, size=2), pytest.raises(WeightLoadError, match=expected):
        source.build(torch.device("cpu"))


@pytest.mark.parametrize(
    ("style", "shape", "kept"),
    [
        ("rowwise", (6,), (6,)), ("rowwise", (4, 6), (4, 3)), ("colwise", (6,), (3,)),
        ("colwise", (4, 6), (2, 6)), ("packed_rowwise", (2, 4, 8), (2, 4, 4)),
        ("packed_colwise", (2, 4, 8), (2, 2, 8)), ("local_params", (6,), (6,)),
    ],
)  # fmt: skip
def test_parameters_are_cut_as_by_transformers(
    style: str, shape: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    """A bias of a layer whose input is cut is whole on every rank."""
    for rank in (0, 1):
        parameter = parameter_of(style, torch.empty(shape, device="meta"), "p", rank, 2)
        assert tuple(parameter.shape) == kept


def test_a_plan_within_a_plan_is_refused() -> None:
    """A style is a word; code of a checkpoint may have anything there."""
    with pytest.raises(UnsupportedModelError, match=r"of Theirs has the style .*for a, which"):
        Plan({"a": {"b": {}}}, "Theirs")  # type: ignore[dict-item]


def test_a_plan_for_other_modules_is_refused(
    saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of which nothing is there would leave the whole model on each rank."""
    monkeypatch.setattr(transformers.MistralConfig, "base_model_tp_plan", {"h.*.q": "colwise"})
    monkeypatch.setattr(transformers.MistralForCausalLM, "_tp_plan", {})
    source = _source(saved("mistral"))
    with (
        tensor_parallel(rank=0, size=2),
        pytest.raises(UnsupportedModelError, match=r"names nothing .*h\.\*\.q"),
    ):
        source.build(torch.device("cpu"))


def test_experts_in_another_form_run_on_one_rank(saved: Callable[..., Path]) -> None:
    """DBRX's plan has its head alone; two ranks are refused for the experts, and one runs them."""
    source = _source(saved("dbrx"))
    with (
        tensor_parallel(rank=0, size=2),
        pytest.raises(
            UnsupportedModelError,
            match=r"ffn\.experts of DbrxForCausalLM .* runs on one rank, not on 2",
        ),
    ):
        source.build(torch.device("cpu"))
    library = transformers.AutoModelForCausalLM.from_pretrained(saved("dbrx"))
    with torch.no_grad():
        expected = library(input_ids=TOKEN_IDS[None], use_cache=False).logits[0]
    torch.testing.assert_close(_logits(_loaded(saved("dbrx"))), expected, rtol=1e-4, atol=1e-4)


def test_names_from_before_a_rename_are_refused_by_name(saved: Callable[..., Path]) -> None:
    """Names that no rule of transformers has are listed, and nothing is read."""
    source = _source(saved("mistral"))
    model = source.build(torch.device("cpu"))
    with source.open() as checkpoint:
        old = {
            name.replace("self_attn.q_proj", "attention.wq"): each
            for name, each in checkpoint.items()
        }
        with pytest.raises(WeightLoadError, match=r"attention\.wq\.weight") as raised:
            model.load_weights(old)
    assert "self_attn.q_proj.weight" in str(raised.value)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_reports_have_the_names_of_the_checkpoint(saved: Callable[..., Path]) -> None:
    """A tensor that transformers renames is called what the checkpoint calls it."""
    source = _source(saved("mixtral"))
    model = source.build(torch.device("cpu"))
    with source.open() as checkpoint:
        tensors = {name: handle.read() for name, handle in checkpoint.items()}
    expert = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    other = "model.layers.0.block_sparse_moe.experts.1.w9.weight"
    bad = tensors | {expert: tensors[expert][:, :-1], other: tensors[expert]}
    with pytest.raises(WeightLoadError) as raised:
        model.load_weights(bad)
    for own in (expert, other):
        renamed = own.replace("block_sparse_moe", "mlp")
        (line,) = [each for each in str(raised.value).splitlines() if f"  {own}: " in each]
        assert line.endswith(f"(renamed: {renamed})")
    lacking = {name: tensor for name, tensor in tensors.items() if name != expert}
    with pytest.raises(WeightLoadError, match=rf"slot 'w2' of .* \(or {expert}\)"):
        model.load_weights(lacking)
    twice = tensors | {expert.replace("block_sparse_moe", "mlp"): tensors[expert]}
    with pytest.raises(WeightLoadError, match=r"is already filled by .*block_sparse_moe"):
        model.load_weights(twice)
    model.load_weights(tensors)
    loaded = {name for names in model.load_report.loaded.values() for name in names}
    assert loaded == tensors.keys()


@pytest.mark.parametrize("kind", ["gemma3", "minimax_m2", "gemma4"])
def test_what_is_missing_has_the_name_of_the_checkpoint(
    saved: Callable[..., Path], kind: str
) -> None:
    """Of the names that transformers renames, it is the one that fits the others."""
    source = _source(saved(kind))
    model = source.build(torch.device("cpu"))
    with source.open() as checkpoint:
        tensors = dict(checkpoint.items())
        model.load_weights(tensors)
        for path, names in model.load_report.loaded.items():
            if len(names) == 1 and names[0] != path:
                break
        lacking = {name: handle for name, handle in tensors.items() if name != names[0]}
        fresh = source.build(torch.device("cpu"))
        with pytest.raises(MissingWeightError) as raised:
            fresh.load_weights(lacking)
    (problem,) = raised.value.report.missing
    assert problem.name == path
    assert problem.detail.endswith(f"(or {names[0]})")


def test_a_whole_model_with_other_logits_is_refused(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    """Gemma 3 for text caps logits, and transformers' class for text and images does not."""
    entries = json.loads((saved("gemma3") / "config.json").read_text())
    entries["text_config"]["final_logit_softcapping"] = 5.0
    (tmp_path / "config.json").write_text(json.dumps(entries))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedModelError, match="ForConditionalGeneration makes other logits"):
        _source(tmp_path).build(torch.device("cpu"))


def test_what_is_no_part_of_the_text_model_is_not_converted(tmp_path: Path) -> None:
    """Kimi's vision tower is permuted by a rule that is no declaration; it is skipped."""
    config = _sweep["tiny_config"](transformers.CONFIG_MAPPING["kimi_k25"])
    entries = config.to_dict() | {"architectures": ["Kimi_K25ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    (tmp_path / "model.safetensors").touch()
    model: Any = _source(tmp_path).build(torch.device("cpu"))
    name = "vision_tower.encoder.blocks.0.wqkv.bias"
    with pytest.raises(MissingWeightError) as raised:
        model.load_weights({name: torch.zeros(192)})
    assert {*raised.value.report.skipped} == {name}


_LAST = "model.layers.1."
OLD: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]]] = {
    "frequencies": (
        "smollm3", lambda old: {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    ),
    "masks": (
        "mistral",
        lambda old: {
            "model.layers.1.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
            "model.layers.1.self_attn.masked_bias": torch.tensor(-1e9),
        },
    ),
    "further layers": (
        "glm4_moe",
        lambda old: {
            name.replace(_LAST, "model.layers.2."): old[name]
            for name in [*old] if name.startswith(_LAST)
        } | {"model.layers.2.eh_proj.weight": torch.ones(2, 2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "added"), OLD.values(), ids=OLD)
def test_what_transformers_does_not_have_is_skipped(
    saved: Callable[..., Path],
    tmp_path: Path,
    kind: str,
    added: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> None:
    """Buffers of older versions, and layers that predict further tokens, are reported."""
    entries = json.loads((saved(kind) / "config.json").read_text())
    entries["num_nextn_predict_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(entries))
    tensors = load_file(saved(kind) / "model.safetensors")
    more = added(tensors)
    model = _source(tmp_path).build(torch.device("cpu"))
    model.load_weights(tensors | more)
    assert {*model.load_report.skipped} == more.keys()
    one, *_ = more
    other = one.replace(".1.", ".7.").replace(".2.", ".7.").replace(".inv_freq", ".weight")
    with pytest.raises(WeightLoadError, match="unexpected 1"):
        model.load_weights(tensors | {other.replace(".bias", ".b"): torch.ones(1, 1, 1, 1)})


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ((1, torch.zeros(1)), "a name is a string, and this is of type int"),
        (("alone",), "expected pairs of name and tensor"),
    ],
)
def test_what_is_no_pair_is_refused(saved: Callable[..., Path], pair: Any, expected: str) -> None:
    """It is refused as in any model, and no rule of transformers is asked about it."""
    model = _source(saved("mistral")).build(torch.device("cpu"))
    with pytest.raises(WeightLoadError, match=expected):
        model.load_weights([pair])


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x[0], lambda x: x[0, 0]])
def test_a_tensor_that_cannot_be_split_is_misshapen(
    saved: Callable[..., Path], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """It is named with its shape, and with the parameters that it is split into."""
    source = _source(saved("hrm_text"))
    model = source.build(torch.device("cpu"))
    with source.open() as checkpoint:
        tensors = {name: handle.read() for name, handle in checkpoint.items()}
    name = "model.H_module.layers.0.mlp.gate_up_proj.weight"
    tensors[name] = change(tensors[name])
    with pytest.raises(MisshapenWeightError, match=r"gate_up_proj\.weight: .*gate_proj.*up_proj"):
        model.load_weights(tensors)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_share_of_what_is_whole_is_that_of_what_is_read_whole(
    saved: Callable[..., Path], kind: str, size: int
) -> None:
    """Counted are the elements of the file's tensors of which a rank reads all."""
    tensors = load_file(saved(kind) / "model.safetensors")
    with tensor_parallel(rank=size - 1, size=size):
        model = _source(saved(kind)).build(torch.device("cpu"))
    buffers = {name for name, _ in model.named_buffers()}
    parameters = {name: each for name, each in tensors.items() if name not in buffers}
    read: Counter[str] = Counter()
    for each in model.plan_weights(WatchedSource(tensors)).reads():
        read[each.name] += each.source.shape.numel()
    whole = sum(each.numel() for name, each in parameters.items() if read[name] == each.numel())
    assert model.replicated == whole / sum(each.numel() for each in parameters.values())
    assert (model.replicated == 1) == (size == 1)


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_the_log_says_whose_model_it_is(
    saved: Callable[..., Path], caplog: pytest.LogCaptureFixture, impl: Any
) -> None:
    """With auto, too, the log names the architecture and the implementation."""
    expected = "native" if impl == "auto" else "transformers"
    config = ModelConfig(model=str(saved("mistral")), model_impl=impl)
    with caplog.at_level(logging.INFO, logger="vllm_module"):
        get_model(model_config=config)
    assert f"model_impl of MistralForCausalLM: {expected}" in caplog.messages


# By the interface, and amid a forward pass.
@pytest.mark.parametrize("kind", [pytest.param("opt", marks=pytest.mark.at_length), "mpt"])
def test_attention_is_not_compiled(saved: Callable[..., Path], kind: str) -> None:
    """Compiled, a model computes the same; the call of attention is in no graph, from its start."""
    model = _loaded(saved(kind))
    expected = _logits(model)
    traces: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        traces.extend(str(node.stack_trace) for node in graph.graph.nodes)
        return graph

    model.compile(backend=backend, dynamic=True)
    assert torch.allclose(_logits(model), expected, atol=1e-5)
    assert any(f"modeling_{kind}.py" in trace for trace in traces)
    ours = "wrapped/attention.py", "wrapped/inline_attention.py", "wrapped/scores.py"
    assert not any(name in trace for trace in traces for name in ours)


class _Own(nn.Module):
    """Computes attention in ``_attn``; ``change`` is done to the scores."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.change = change

    def _attn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.change((query @ key.mT).double())
        weights = scores.softmax(-1)
        return weights @ value.double(), weights


def _window(scores: torch.Tensor) -> torch.Tensor:
    queries, keys = scores.shape[-2:]
    row = torch.arange(keys - queries, keys)[:, None]
    column = torch.arange(keys)
    return scores.masked_fill((column > row) | (column <= row - 5), -torch.inf)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda scores: scores, (1.0, None, False)),
        (lambda scores: scores / 8, (0.125, None, False)),  # as for heads of 64
        (_window, (1.0, 5, True)),
        (lambda scores: scores / 7, (None, None, False)),
        (lambda scores: 2 * (scores / 2).tanh(), None),
        (lambda scores: scores + torch.arange(scores.shape[-1]) / 100, None),
    ],
    ids=["plain", "a scale", "a window", "an odd scale", "capped", "a bias of positions"],
)
def test_attention_of_its_own_is_measured(
    change: Callable[[torch.Tensor], torch.Tensor],
    expected: tuple[float | None, int | None, bool] | None,
) -> None:
    """Scale and window are found from numbers; what is no scaled softmax is left alone."""
    module = _Own(change)
    divert_methods(module, 32)
    own = vars(module).get("_attn")
    if expected is None:
        assert own is None
    else:
        assert own is not None
        assert (own.measured.scale(64), own.measured.window, own.is_causal) == expected


def test_attention_without_a_causal_mask_is_refused() -> None:
    """A method that masks nothing, in a model that makes no mask, attends to later tokens."""
    module = _Own(lambda scores: scores)
    divert_methods(module, 32)
    query = torch.zeros(1, 2, 3, 64, device="meta")
    with (
        stepping(probe_of(module)),
        pytest.raises(UnsupportedModelError, match="is_causal is false"),
    ):
        module._attn(query, query, query)


def test_ranks_share_a_head_of_keys_where_there_are_fewer() -> None:
    """Of 2 heads on 4 ranks, each is on two neighbours, and a head's rows are never cut."""
    linear = torch.nn.Linear(3, 8, bias=False)
    for rank, rows in enumerate([range(4), range(4), range(4, 8), range(4, 8)]):
        with tensor_parallel(rank=rank, size=4):
            layer = linear_of("colwise", linear, "k_proj", 4, kv_heads=2, names=())
            layer.load_weights({"weight": linear.weight.detach()})
        assert torch.equal(layer.weight.data, linear.weight.detach()[rows.start : rows.stop])


def test_experts_of_ranks_with_tokens_of_their_own_are_refused(saved: Callable[..., Path]) -> None:
    """As of engines that share experts: the gather of their tokens is not transformers'."""
    with (
        tensor_parallel(rank=0, size=1),
        expert_parallel(rank=0, size=2),
        pytest.raises(UnsupportedModelError, match="experts: ranks with tokens of their own"),
    ):
        _source(saved("mixtral")).build(torch.device("cpu"))
