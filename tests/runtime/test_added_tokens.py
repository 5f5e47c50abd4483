"""Tokens that files beside tokenizer.json declare are added as transformers adds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # 256, which are the first ids
END, START, TOOL = "<|im_end|>", "<|im_start|>", "<tool>"
TEXTS = [f"a{START}b{END} c", "x </s> y", "[PAD]q", f" {TOOL}\n z", f"{TOOL}</s>\n{END}"]


def entry(content: str, **flags: Any) -> dict[str, Any]:
    """Return an entry of added_tokens_decoder, as transformers writes it."""
    off = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **off, "special": True, **flags}


# By name: tokens in the vocabulary, added ones of tokenizer.json, entries of tokenizer_config.json,
# and other files.
CASES: dict[str, tuple[list[str], list[str], dict[str, Any], dict[str, Any]]] = {
    "in the configuration alone": (
        [], ["</s>"],
        {"added_tokens_decoder": {"258": entry(END), "256": entry("</s>"), "257": entry(START)}},
        {},
    ),
    "in added_tokens.json alone": (
        [], ["</s>"], {}, {"added_tokens.json": {END: 258, START: 257}},
    ),
    "in added_tokens.json and special": (
        [], ["</s>"], {},
        {
            "added_tokens.json": {START: 257, END: 258},
            "special_tokens_map.json": {"eos_token": END},
        },
    ),
    "added_tokens.json beside a list": (
        [], ["</s>"], {"added_tokens_decoder": {"257": entry(START)}},
        {"added_tokens.json": {END: 257, START: 258}},
    ),
    "in the vocabulary and not added": (["</s>", START], [], {"bos_token": START}, {}),
    "further special tokens": (
        [END], ["</s>"], {"additional_special_tokens": [START, END, START]}, {},
    ),
    "a new padding token": ([], ["</s>"], {"pad_token": "[PAD]", "unk_token": None}, {}),
    "spaces behind": (
        [], ["</s>", TOOL],
        {"added_tokens_decoder": {"257": entry(TOOL, rstrip=True, lstrip=True)}}, {},
    ),
    "not special": (
        [], ["</s>"], {"added_tokens_decoder": {"257": entry(TOOL, special=False)}}, {},
    ),
    "not special there, and an end": (
        [], ["</s>"],
        {"eos_token": END, "added_tokens_decoder": {"257": entry(END, special=False)}}, {},
    ),
    "not special in added_tokens.json, and named": (
        [], ["</s>"], {"extra_special_tokens": {"tool_token": TOOL}},
        {"added_tokens.json": {START: 257, TOOL: 258}},
    ),
    "the same": (
        [], ["</s>", TOOL],
        {"added_tokens_decoder": {"256": entry("</s>"), "257": entry(TOOL)}}, {},
    ),
}  # fmt: skip


def write(
    folder: Path, words: list[str], added: list[str], config: Any, files: dict[str, Any]
) -> None:
    vocabulary = {token: at for at, token in enumerate([*ALPHABET, *words])}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in {"tokenizer_config.json": config, **files}.items():
        (folder / name).write_text(json.dumps(value))


@pytest.mark.parametrize("case", CASES)
def test_tokens_beside_are_added_as_by_transformers(tmp_path: Path, case: str) -> None:
    """Texts have the ids, and ids the texts, of AutoTokenizer for the same files."""
    words, added, config, files = CASES[case]
    common = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    write(tmp_path, words, added, common | config, files)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize(
    ("config", "files", "named"),
    [
        ({"added_tokens_decoder": {"x": entry(END)}}, {}, "tokenizer_config.json: .* got 'x'"),
        ({"added_tokens_decoder": [1]}, {}, r"tokenizer_config.json: .* got \[1\]"),
        ({"added_tokens_decoder": {"256": {"content": 1}}}, {}, "tokenizer_config.json: an added"),
        ({"added_tokens_decoder": {"256": entry(END, rstrip=1)}}, {}, "flags that are true or"),
        ({"extra_special_tokens": END}, {}, "extra_special_tokens of .* should be a list"),
        ({"additional_special_tokens": 5}, {}, "additional_special_tokens of .* got 5"),
        ({}, {"added_tokens.json": {END: "256"}}, "added_tokens.json should map .* got '256'"),
        ({}, {"added_tokens.json": []}, "added_tokens.json"),
    ],
)
def test_entries_that_describe_no_token_are_refused(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], named: str
) -> None:
    """The message names the file and the entry."""
    write(tmp_path, [], [], config, files)
    with pytest.raises(CheckpointFormatError, match=named):
        Tokenizer(tmp_path)
