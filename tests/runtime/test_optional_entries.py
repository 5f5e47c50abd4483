"""Optional entries of foreign files: absent, null and empty ones mean what their library takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.generation_config import _NAMES, default_sampling_params, stop_tokens
from vllm_module.runtime.pooling.sentence_config import SentenceConfig
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.runtime.text.tokenizer import Tokenizer

VALUES = [None, 0, 0.0, [], "", False]
ZEROS = {"temperature": (int, float), "min_p": (int, float), "top_k": (int,)}  # as in vLLM


def entries(name: str) -> list[dict[str, Any]]:
    return [{}, *({name: value} for value in VALUES)]


@pytest.mark.parametrize("name", _NAMES)
def test_generation_config(name: str, tmp_path: Path) -> None:
    """A zero counts, null and absence do not, and anything else is refused by name."""
    for given in entries(name):
        (tmp_path / "generation_config.json").write_text(json.dumps(given))
        value = given.get(name)
        if value is None or type(value) in ZEROS.get(name, ()):
            params = default_sampling_params(tmp_path)
            theirs = getattr(GenerationConfig(**given), name)
            assert params.model_fields_set == (set() if theirs is None else {_NAMES[name]})
            default = getattr(SamplingParams(), _NAMES[name])
            assert getattr(params, _NAMES[name]) == (default if theirs is None else theirs)
        else:
            with pytest.raises(CheckpointFormatError, match=f"generation_config.json: {name}"):
                default_sampling_params(tmp_path)


NAMES = {  # as in vLLM's ModelConfig.get_diff_sampling_param
    "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "repetition_penalty": 1.5,
    "max_new_tokens": 7,
}  # fmt: skip


def test_every_entry_of_generation_config_and_what_replaces_it(tmp_path: Path) -> None:
    """Each has its own parameter; other entries have none; an override goes before the file."""
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**NAMES, "do_sample": False, "num_beams": 4, "eos_token_id": 2}))
    renamed = {{"max_new_tokens": "max_tokens"}.get(k, k): value for k, value in NAMES.items()}
    assert default_sampling_params(tmp_path) == SamplingParams(**renamed)
    assert default_sampling_params(None) == SamplingParams()
    assert default_sampling_params(tmp_path / "none") == SamplingParams()
    for name, value in NAMES.items():
        over = {name: value / 2 if isinstance(value, float) and value <= 1 else value + 1}
        ours = {"max_new_tokens": "max_tokens"}.get(name, name)
        expected = {**renamed, ours: over[name]}
        assert default_sampling_params(tmp_path, over) == SamplingParams(**expected)
        assert default_sampling_params(None, over) == SamplingParams(**{ours: over[name]})
        del expected[ours]  # None takes the file's entry away
        assert default_sampling_params(tmp_path, {name: None}) == SamplingParams(**expected)
        with pytest.raises(ValueError, match=f"^override_generation_config: {name} ") as error:
            default_sampling_params(tmp_path, {name: "x"})
        assert not isinstance(error.value, CheckpointFormatError)


@pytest.mark.parametrize(
    ("generation", "config", "override", "expected"),
    [
        (None, None, None, set()),
        ({"eos_token_id": 2}, None, None, {2}),
        ({"eos_token_id": 0}, {"eos_token_id": [0, 1]}, None, {0, 1}),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 4}, None, {2, 3, 4}),
        ({"eos_token_id": None}, {"eos_token_id": 4}, None, {4}),
        ({"eos_token_id": []}, {}, None, set()),
        ({"eos_token_id": 2}, {"eos_token_id": 4}, {"eos_token_id": [5]}, {4, 5}),
        ({"eos_token_id": 2}, None, {"eos_token_id": None}, set()),
        ({"eos_token_id": 2}, None, {"temperature": 1}, {2}),
        (None, {"eos_token_id": 4}, {"eos_token_id": 5}, {4, 5}),
        ({"eos_token_id": True}, None, None, None),
        ({"eos_token_id": "2"}, None, None, None),
        ({"eos_token_id": [2, None]}, None, None, None),
        ({"eos_token_id": 2.0}, None, None, None),
    ],
)
def test_end_tokens_are_those_of_both_files(
    tmp_path: Path, generation: Any, config: Any, override: Any, expected: set[int] | None
) -> None:
    """generation_config.json may be in another folder; config.json is the model's."""
    other = tmp_path / "other"
    other.mkdir()
    for folder in (tmp_path, other):
        for name, entries in (("generation_config.json", generation), ("config.json", config)):
            (folder / name).unlink(missing_ok=True)
            if entries is not None:
                (folder / name).write_text(json.dumps(entries))
    if expected is None:
        with pytest.raises(CheckpointFormatError, match=r"generation_config\.json: eos_token_id"):
            stop_tokens(tmp_path, None, override)
        return
    assert stop_tokens(tmp_path, None, override) == expected
    for argument in ("override_generation_config", "hf_overrides"):
        given = {"override" if argument.startswith("o") else argument: {"eos_token_id": "2"}}
        with pytest.raises(CheckpointFormatError, match=f"^{argument}: eos_token_id"):
            stop_tokens(tmp_path, **given)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 77}')
    (other / "config.json").write_text('{"eos_token_id": 88}')
    assert stop_tokens(tmp_path, other, override) == expected
    assert stop_tokens(tmp_path) >= {77}


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token"])
def test_tokenizer_config(name: str, tmp_path: Path) -> None:
    """The ids of special tokens are transformers'; what it refuses names no token."""
    words = WordLevel({"": 0, "</s>": 1, "[UNK]": 2}, unk_token="[UNK]")
    RustTokenizer(words).save(str(tmp_path / "tokenizer.json"))
    added = {"__type": "AddedToken", "content": "</s>"}
    for given in [*entries(name), {name: "</s>"}, {name: added}, {name: "none such"}]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
        try:
            theirs = getattr(PreTrainedTokenizerFast.from_pretrained(tmp_path), f"{name}_id")
        except TypeError:
            theirs = None
        if given != {name: "none such"}:  # which transformers adds to the vocabulary
            assert getattr(Tokenizer(tmp_path), f"{name}_id") == theirs, given


def test_sentence_bert_config(tmp_path: Path) -> None:
    """As in sentence-transformers, null and absence leave the model's length; 0 is no length."""
    path = tmp_path / "sentence_bert_config.json"
    for given in entries("max_seq_length"):
        path.write_text(json.dumps(given))
        if given.get("max_seq_length") is None:
            assert SentenceConfig.read(tmp_path).max_length is None
        else:
            with pytest.raises(CheckpointFormatError, match="max_seq_length"):
                SentenceConfig.read(tmp_path)
    for given in entries("do_lower_case"):
        path.write_text(json.dumps(given))
        assert SentenceConfig.read(tmp_path).lower_case is False
