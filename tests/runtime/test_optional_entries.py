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
from vllm_module.runtime.generation_config import _NAMES, default_sampling_params
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
