"""Models of transformers in the wrapper: a part of ``make sweep``, tokens, and what is refused."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from vllm_module import LLM, ModelConfig, SamplingParams
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import run_ranks, tensor_parallel
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError, WeightLoadError
from vllm_module.wrapped.mask import MaskRule, rule_of

_sweep = runpy.run_path(str(Path(__file__).with_name("sweep.py")))
try_type: Callable[..., dict[str, Any]] = _sweep["try_type"]
TOKEN_IDS: torch.Tensor = _sweep["TOKEN_IDS"]
tiny_model: Callable[..., Any] = _sweep["tiny_model"]
INSTALLED = transformers.__version__
MAJOR, MINOR = map(int, INSTALLED.split(".")[:2])

# Dense, windows and soft caps, experts stored apart and packed, shared K/V, sinks, a tied head,
# experts that return what they are given.
RIGHT = (
    "smollm3", "gemma2", "mixtral", "granitemoe", "gpt_oss", "deepseek_v3", "gpt_neox",
    "longcat_flash",
)  # fmt: skip
# Attention in a method of its own, windows; a bias by distance in the forward pass. They have no
# plan, so they run on one rank.
ALONE = ("gpt_neo", "bloom")
REFUSED = {
    "bert": "is_causal is false",
    "mamba": "recurrent state",
    "roformer": "takes no position_ids",
    "bart": "encoder-decoder",
    "doge": "a mask of its own",
    "megatron-bert": "0 times",
}


# tests/laws/test_wrapped.py and others have these, too.
ELSEWHERE = "smollm3", "mixtral", "granitemoe"


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.at_length] if kind in ELSEWHERE else [])
        for kind in RIGHT + ALONE
    ],
)
def test_logits_and_tokens_are_those_of_transformers(kind: str) -> None:
    """A wrapped model loads what transformers saves, and gives its logits on 1 and 2 ranks.

    Its engine gives the greedy tokens of transformers, with chunks and preemption.
    """
    result = try_type(kind, (1, 2))
    assert result["outcome"] == result["engine"] == "right", result
    assert result["sizes"]["2"]["outcome"] == ("refused" if kind in ALONE else "right"), result


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_be_wrong_is_refused(kind: str) -> None:
    """What cannot be computed right is refused, with its reason."""
    result = try_type(kind, (1,))
    assert result["outcome"] == "refused", result
    assert REFUSED[kind] in result["reason"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with windows, saved by transformers."""
    folder = tmp_path_factory.mktemp("mistral")
    tiny_model("mistral").save_pretrained(folder)
    return folder


def test_tokens_are_those_of_transformers(llama: Path) -> None:
    """Greedy tokens of prompts of mixed lengths, in chunks, are those of the full forward."""
    library = tiny_model("mistral")
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41], [99]]
    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    with LLM(
        str(llama),
        model_impl="transformers",
        max_model_len=64,
        max_num_batched_tokens=8,
        **options,
    ) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(max_tokens=32, temperature=0, ignore_eos=True),
            use_tqdm=False,
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(prompt)
        for _ in range(32):
            with torch.no_grad():
                tokens.append(int(library(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert [*output.outputs[0].token_ids] == tokens[len(prompt) :]


def _changed(folder: Path, tmp_path: Path, **entries: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | entries
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"model_type": "of_next_year"}, "knows no model_type of_next_year"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}, "code of the checkpoint"),
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "t5"}, "no causal language model"),
        ({"architectures": ["RwkvForCausalLM"]}, "names the architecture RwkvForCausalLM"),
        ({"num_attention_heads": "four"}, "refuses config.json"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers of config.json is 1099511627776"),
        ({"transformers_version": "99.1", "twice": 2}, "99.1.* knows no twice: it would be"),
        ({"transformers_version": f"{MAJOR}.{MINOR + 1}.0.dev0", "twice": 2}, "knows no twice"),
        ({"transformers_version": f"{MAJOR + 1}.0.0", "twice": 2}, "knows no twice"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 16,
                }
            },
            "rope scaling of type longrope.* max_model_len of at most 16",
        ),
        (
            {"rope_parameters": {"rope_type": "hyper", "rope_theta": 1e4}},
            "rope_parameters.rope_type 'hyper' is not known",
        ),
        ({"sliding_window": -3}, "a window of -3 tokens"),
        ({"num_key_value_heads": 3}, "4 query heads that share 3 key-value heads unevenly"),
        (
            {"architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v"},
            "no causal language model for Glm4v",
        ),
        (
            # Its configuration has no tie_word_embeddings.
            {"architectures": ["NemotronH_Omni_Reasoning_V3"], "model_type": "nemotron_h_omni"},
            "keeps recurrent state",
        ),
        (
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "model_type": "llava",
                "transformers_version": "99.1",
                "eos_token_id": 1,
                "text_config": {"twice": 2},
            },
            r"knows no .*text_config\.twice",
        ),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(
    llama: Path, tmp_path: Path, entries: dict[str, Any], expected: str
) -> None:
    """A type, an entry or a rope that the wrapper cannot serve is named."""
    with pytest.raises(UnsupportedModelError, match=expected):
        _source(_changed(llama, tmp_path, **entries)).build(torch.device("cpu"))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"hidden_size": -64}, "hidden_size should be greater than 0, got -64"),
        ({"num_attention_heads": 0}, "num_attention_heads should be greater than 0"),
        ({"quantization_config": "fp8"}, "quantization_config of config.json must be an object"),
    ],
)
def test_an_entry_out_of_its_range_is_named(
    llama: Path, tmp_path: Path, entries: dict[str, Any], expected: str
) -> None:
    """What our layers read of the configuration is checked as in a model of ours."""
    with pytest.raises(CheckpointFormatError, match=expected):
        _source(_changed(llama, tmp_path, **entries))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_by_the_longest_sequence_runs_up_to_where_it_changes(
    llama: Path, tmp_path: Path, rope: dict[str, Any]
) -> None:
    """With a max_model_len up to which frequencies are the same, logits are transformers'."""
    entries = {"rope_parameters": rope | {"rope_theta": 1e4}, "max_position_embeddings": 16}
    folder = _changed(llama, tmp_path, **entries)
    (folder / "model.safetensors").unlink()
    shutil.copy(llama / "model.safetensors", folder)
    model, _ = _loaded(folder, max_model_len=16)
    library = tiny_model("mistral", rope_parameters=entries["rope_parameters"],
                         max_position_embeddings=16)  # fmt: skip
    with torch.no_grad():
        expected = library(input_ids=TOKEN_IDS[None]).logits[0]
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "entries",
    [
        {"transformers_version": "99.1"},
        {"transformers_version": "99.1", "twice": None, "auto_map": {}, "torch_dtype": "float32"},
        {"transformers_version": "4.1", "notes_of_a_trainer": 2},
        {"transformers_version": INSTALLED, "notes_of_a_trainer": 2},
        {"transformers_version": f"{MAJOR}.{MINOR}.99", "notes_of_a_trainer": 2},
        {"transformers_version": "next", "notes_of_a_trainer": 2},
    ],
    ids=str,
)
def test_entries_that_change_nothing_are_ignored(
    llama: Path, tmp_path: Path, entries: dict[str, Any]
) -> None:
    """A newer file without entries of its own is read, and so is an older one with notes."""
    _source(_changed(llama, tmp_path, **entries)).build(torch.device("cpu"))


def test_heads_that_do_not_divide_are_refused(llama: Path) -> None:
    """Four heads on three ranks are refused with the numbers."""
    with (
        tensor_parallel(rank=0, size=3),
        pytest.raises(WeightLoadError, match=r"4 attention heads cannot be shared evenly by 3"),
    ):
        _source(llama).build(torch.device("cpu"))


def _loaded(folder: Path, rank: int = 0, **settings: Any) -> tuple[Any, int]:
    """Return this rank's model, loaded, and the bytes that were read."""
    source = _source(folder, **settings)
    model = source.build(torch.device("cpu"))
    with source.open() as checkpoint:
        model.load_weights(checkpoint)
        return model, checkpoint.bytes_read


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.compute_logits(model(TOKEN_IDS, torch.arange(len(TOKEN_IDS))))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral, saved by transformers: each expert apart, under other names."""
    folder = tmp_path_factory.mktemp("mixtral")
    tiny_model("mixtral").save_pretrained(folder)
    return folder


def test_experts_are_read_by_the_rank_that_keeps_them(experts: Path) -> None:
    """Cut or whole, a rank of two reads half of the experts, and logits are those of one rank."""
    alone, all_bytes = _loaded(experts)
    for settings in ({}, {"enable_expert_parallel": True}):

        def run(rank: int, settings: dict[str, Any] = settings) -> tuple[torch.Tensor, int]:
            model, read = _loaded(experts, rank, **settings)
            return _logits(model), read

        for logits, read in run_ranks(2, run):
            torch.testing.assert_close(logits, _logits(alone), rtol=0, atol=1e-4)
            assert read < 0.51 * all_bytes


def test_updates_stay_in_place(experts: Path, tmp_path: Path) -> None:
    """An update under transformers' names changes the values and keeps the memory."""
    model, _ = _loaded(experts)
    changed = tiny_model("mixtral")
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.5)
        expected = changed(input_ids=TOKEN_IDS[None], use_cache=False).logits[0]
    changed.save_pretrained(tmp_path)
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    with _source(tmp_path).open() as checkpoint:
        model.update_weights(iter(checkpoint.items()))
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-4)
    assert memory == [parameter.data_ptr() for parameter in model.parameters()]


def test_layers_and_experts_are_quantized_online(experts: Path) -> None:
    """Linear layers and experts of a wrapped model take FP8, and logits stay near."""
    model, _ = _loaded(experts, quantization="fp8_per_channel")
    kinds = {name for name, each in model.named_parameters() if each.dtype == torch.float8_e4m3fn}
    assert {"model.layers.0.mlp.experts.w13.weight", "model.layers.1.self_attn.q_proj.weight"} <= (
        kinds
    )
    exact = _logits(_loaded(experts)[0])
    assert (_logits(model) - exact).norm() < 0.15 * exact.norm()


def test_what_is_missing_is_named(experts: Path) -> None:
    """A checkpoint without one projection of one expert is refused by its name, on meta."""
    source = _source(experts)
    model = source.build(torch.device("cpu"))
    with source.open() as checkpoint:
        pairs = {k: v for k, v in checkpoint.items() if "layers.1" not in k or "3.w1" not in k}
        assert len(pairs) == len(checkpoint) - 1
        with pytest.raises(WeightLoadError, match=r"model\.layers\.1\.mlp\.experts\.3\.w1\.weight"):
            model.load_weights(pairs)


def test_the_text_part_of_a_multimodal_checkpoint_is_loaded(tmp_path: Path) -> None:
    """The text model is loaded from the whole checkpoint; the rest is skipped and reported."""
    library = tiny_model("gemma3")
    library.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = library(input_ids=TOKEN_IDS[None]).logits[0]
    model, _ = _loaded(tmp_path)
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-4)
    assert any("vision_tower" in name for name in str(model.load_report).split())


def test_a_batch_that_differs_from_its_sequences_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that ignores its positions is refused by the check of the loaded model."""
    model, _ = _loaded(llama)
    model.check()
    rotary = model.model.rotary_emb
    forward = rotary.forward
    monkeypatch.setattr(
        rotary,
        "forward",
        lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None]),
    )
    with pytest.raises(UnsupportedModelError, match="differently than alone"):
        model.check()


def test_logits_that_are_not_finite_are_refused(llama: Path) -> None:
    """A model with a NaN in a weight is refused by the check, and so is one of a wrong entry."""
    model, _ = _loaded(llama)
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(UnsupportedModelError, match="that are not finite"):
        model.check()


def test_native_is_not_replaced(llama: Path) -> None:
    """With auto, a model of ours is taken where there is one; with native no other is."""
    source = ModelSource.find(ModelConfig(model=str(llama)))
    assert type(source.build(torch.device("cpu"))).__module__ == "vllm_module.models.llama"


def test_native_alone_refuses_what_is_not_ours(llama: Path, tmp_path: Path) -> None:
    """model_impl native refuses an architecture that only transformers has."""
    folder = _changed(llama, tmp_path, architectures=["SmolLM3ForCausalLM"], model_type="smollm3")
    with pytest.raises(UnsupportedModelError, match="model_impl is 'native'"):
        ModelSource.find(ModelConfig(model=str(folder), model_impl="native"))


def test_masks_are_recognized_by_their_values() -> None:
    """A window, a chunk and all tokens before are told apart; another mask is none of them."""
    assert rule_of(lambda b, h, q, k: k <= q, None) == MaskRule()
    assert rule_of(lambda b, h, q, k: (k <= q) & (k > q - 9), 9) == MaskRule(window=9)
    assert rule_of(lambda b, h, q, k: (k <= q) & (k // 9 == q // 9), 9) == MaskRule(chunk=9)
    assert rule_of(lambda b, h, q, k: (k <= q) & (k > q - 10), 9) is None
    assert rule_of(lambda b, h, q, k: k >= 0, None) is None


def _source(folder: Path, **settings: Any) -> ModelSource:
    config = ModelConfig(model=str(folder), model_impl="transformers", dtype="float32", **settings)
    return ModelSource.find(config)
