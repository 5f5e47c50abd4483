"""Text in pieces: together they are the text that all tokens have at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.tokenizer import TextStream, Tokenizer, stop_tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level BPE: most characters outside of ASCII are several tokens."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(["the tree loads itself, and the tree speaks"], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


# A prompt that holds U+FFFD itself cannot be told from one that ends inside a character.
@given(st.text(st.characters(exclude_characters="\ufffd"), max_size=8), st.text(max_size=30))
def test_pieces_are_the_text(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    """Whatever the characters, the pieces joined are the text, and none holds half a character."""
    before, after = tokenizer.encode(prompt), tokenizer.encode(text)
    stream = TextStream(tokenizer, before)
    pieces = [stream.push(token) for token in after]
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@given(st.lists(st.integers(1, 256), max_size=30))
def test_bytes_that_are_no_text_are_shown_too(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """Tokens of any bytes lose nothing: the end holds back three characters at the most."""
    stream = TextStream(tokenizer, [])
    shown = "".join(stream.push(token) for token in tokens)
    text = tokenizer.decode(tokens)
    assert text.startswith(shown)
    assert len(text) - len(shown) <= 3
    assert shown + stream.finish() == text


def test_a_character_cut_by_the_prompt_is_completed(tokenizer: Tokenizer) -> None:
    """A prompt may end inside a character; its last byte brings it out."""
    tokens = tokenizer.encode("€")
    assert len(tokens) == 3
    stream = TextStream(tokenizer, tokens[:2])
    assert stream.push(tokens[2]) == "€"


def test_special_tokens_show_nothing(tokenizer: Tokenizer) -> None:
    """A stop token adds no text, and what follows it does."""
    stream = TextStream(tokenizer, tokenizer.encode("the"))
    end = 0
    assert stream.push(end) == ""
    assert stream.push(tokenizer.encode(" tree")[0]) == " tree"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The message says what to give instead; a damaged file is named."""
    with pytest.raises(CheckpointFormatError, match=r"no tokenizer\.json.*token ids"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointFormatError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {5}),
        ({"eos_token_id": [5, 7]}, {}, {5, 7}),
        ({}, {"eos_token_id": 6}, {6}),
        (None, {"eos_token_id": 0}, {0}),
        (None, {"eos_token_id": None}, set()),
        (None, None, set()),
    ],
)
def test_stop_tokens(
    tmp_path: Path, generation: object, config: object, expected: set[int]
) -> None:
    """generation_config.json goes before config.json, and neither has to be there."""
    for name, entries in (("generation_config.json", generation), ("config.json", config)):
        if entries is not None:
            (tmp_path / name).write_text(json.dumps(entries))
    assert stop_tokens(tmp_path) == expected


@pytest.mark.parametrize("eos", ["2", [[2]], 2.5, {}, [None], True])
def test_stop_tokens_that_are_no_tokens_are_refused(tmp_path: Path, eos: object) -> None:
    """Anything but a token or a list of them is refused with its path."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(CheckpointFormatError, match=r"config\.json: eos_token_id should be"):
        stop_tokens(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_generation_config_is_named(tmp_path: Path, text: str) -> None:
    """What is not a JSON object is refused with its path."""
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointFormatError, match=r"generation_config\.json is not"):
        stop_tokens(tmp_path)
