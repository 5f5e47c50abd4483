"""Streamed text: the pieces joined are the text of all tokens decoded at once."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.runtime.generation_config import stop_tokens
from vllm_module.runtime.text.code_tokenizer import read_tokenizer
from vllm_module.runtime.text.tokenizer import TextStream, Tokenizer


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


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose words begin with a space, which decoding leaves out at the start."""
    vocab = {"\u2581the": 0, "\u2581tree": 1, "s": 2, "\u2581speak": 3}
    fast = FastTokenizer(models.WordLevel(vocab, unk_token="s"))
    fast.decoder = decoders.Metaspace()
    folder = tmp_path_factory.mktemp("metaspace")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def pairing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """A tokenizer of words with special tokens around a text, or two, and transformers'."""
    names = ["[CLS]", "[SEP]", "[UNK]", *"abcdefghij"]
    fast = FastTokenizer(models.WordLevel({n: at for at, n in enumerate(names)}, "[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 1)],
    )
    folder = tmp_path_factory.mktemp("pairs")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder), PreTrainedTokenizerFast(tokenizer_object=fast)


def test_pairs_are_cut_as_by_the_library(
    pairing: tuple[Tokenizer, PreTrainedTokenizerFast],
) -> None:
    """Of all short pairs, whichever is the longer one, the same tokens are left out."""
    ours, theirs = pairing
    for first, second in product(range(1, 6), repeat=2):
        texts = " ".join("abcde"[:first]), " ".join("fghij"[:second])
        for most in (None, *range(5, 15)):
            cut = {} if most is None else {"truncation": "longest_first", "max_length": most}
            expected = theirs(*texts, return_token_type_ids=True, **cut)
            found = ours.encode_pair(*texts, most)
            assert found == (expected["input_ids"], expected["token_type_ids"]), (texts, most)


@pytest.mark.parametrize("most", [None, 9, 2500])
@pytest.mark.parametrize("length", [1000, 1001, 5000])
def test_a_long_text_has_the_tokens_of_the_library(
    pairing: tuple[Tokenizer, PreTrainedTokenizerFast], most: int | None, length: int
) -> None:
    """The library encodes and decodes long texts in another way, on either side of its limit."""
    ours, theirs = pairing
    text = ("a b c d e f g h i j " * 1000)[: 2 * length].strip()
    cut = {} if most is None else {"truncation": "longest_first", "max_length": most}
    for special in (True, False):
        expected = theirs(text, add_special_tokens=special, **cut)["input_ids"]
        assert ours.encode(text, special, most=most) == expected
        assert ours.decode(expected) == theirs.decode(expected)
    pair = theirs(text, "a b", return_token_type_ids=True, **cut)
    assert ours.encode_pair(text, "a b", most) == (pair["input_ids"], pair["token_type_ids"])


def test_other_threads_run_while_a_long_text_is_encoded_and_decoded(tokenizer: Tokenizer) -> None:
    """One prompt of a server once held up all of its streams for as long as it was encoded."""
    text, found = "the tree loads itself, " * 20_000, list[Any]()

    def work() -> None:
        ids = tokenizer.encode(text)
        found.append(turns)
        found.append(tokenizer.decode(ids) == text)
        found.append(turns)

    thread, turns = Thread(target=work), 0
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0)
    encoded, whole, decoded = found
    assert whole
    assert encoded > 100
    assert decoded > encoded + 10


@given(st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), max_size=8))
def test_pieces_keep_the_spaces_between_words(
    metaspace: Tokenizer, prompt: list[int], output: list[int]
) -> None:
    """The pieces joined have every space that the tokens have when they are decoded at once."""
    stream = TextStream(metaspace, prompt)
    text = "".join(stream.push(token) for token in output) + stream.finish()
    assert metaspace.decode(prompt) + text == metaspace.decode(prompt + output)
    assert text == metaspace.continuation(prompt, output)


@given(
    st.text(st.one_of(st.characters(), st.just("\ufffd")), max_size=8),
    st.text(st.one_of(st.characters(), st.just("\ufffd")), max_size=30),
)
@example("broken file: \ufffd", "hello!")
def test_pieces_are_the_text(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    """For any characters, the pieces joined are the text, and none has half a character."""
    before, after = tokenizer.encode(prompt), tokenizer.encode(text)
    stream = TextStream(tokenizer, before)
    pieces = [stream.push(token) for token in after]
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@given(st.lists(st.integers(1, 256), max_size=30))
def test_bytes_that_are_no_text_are_shown_too(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """Tokens of any bytes lose nothing: at most three characters are held back until the end."""
    stream = TextStream(tokenizer, [])
    shown = "".join(stream.push(token) for token in tokens)
    text = tokenizer.decode(tokens)
    assert text.startswith(shown)
    assert len(text) - len(shown) <= 3
    assert shown + stream.finish() == text


def test_a_character_cut_by_the_prompt_is_completed(tokenizer: Tokenizer) -> None:
    """A prompt may end inside a character; the token with its last byte shows it."""
    tokens = tokenizer.encode("€")
    assert len(tokens) == 3
    stream = TextStream(tokenizer, tokens[:2])
    assert stream.push(tokens[2]) == "€"


@pytest.mark.parametrize("prompt", ["", "the", "€"])
def test_half_a_character_at_the_end_is_no_text(tokenizer: Tokenizer, prompt: str) -> None:
    """An output that is cut inside a character has the text before it, and no U+FFFD."""
    before, tokens = tokenizer.encode(prompt), tokenizer.encode("a€")
    for cut, text in ((1, "a"), (2, "a"), (3, "a"), (4, "a€")):
        assert tokenizer.continuation(before, tokens[:cut]) == text
    assert tokenizer.continuation(before[:-1], before[-1:] + tokens[:2])[-1:] == "a"


def test_special_tokens_show_nothing(tokenizer: Tokenizer) -> None:
    """A stop token adds no text, and the token after it does."""
    stream = TextStream(tokenizer, tokenizer.encode("the"))
    end = 0
    assert stream.push(end) == ""
    assert stream.push(tokenizer.encode(" tree")[0]) == " tree"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The message says that token ids work instead; a damaged file is named."""
    with pytest.raises(CheckpointFormatError, match=r"no tokenizer\.json.*token ids"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointFormatError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {5, 6}),
        ({"eos_token_id": 5}, {"eos_token_id": [6, 5]}, {5, 6}),
        ({"eos_token_id": [5, 7]}, {}, {5, 7}),
        ({}, {"eos_token_id": 6}, {6}),
        (None, {"eos_token_id": 0}, {0}),
        (None, {"eos_token_id": None}, set()),
        (None, {"text_config": {"eos_token_id": 6}}, {6}),
        ({"eos_token_id": 5}, {"eos_token_id": None, "text_config": {"eos_token_id": [6]}}, {5, 6}),
        (None, {"eos_token_id": 7, "text_config": {"eos_token_id": 6}}, {7}),
        (None, {"text_config": None}, set()),
        (None, None, set()),
    ],
)
def test_stop_tokens(
    tmp_path: Path, generation: object, config: object, expected: set[int]
) -> None:
    """What either file has is an end token: a fine-tune may change one of them only.

    config.json's own goes before that of its text model, as in transformers.
    """
    for name, entries in (("generation_config.json", generation), ("config.json", config)):
        if entries is not None:
            (tmp_path / name).write_text(json.dumps(entries))
    assert stop_tokens(tmp_path) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"eos_token_id": 3}, {3}),
        ({"text_config": {"eos_token_id": 3}}, {3}),
        ({"text_config": {"rms_norm_eps": 1e-5}}, {6}),
    ],
)
def test_overrides_of_the_stop_tokens_of_a_text_model(
    tmp_path: Path, overrides: dict[str, object], expected: set[int]
) -> None:
    """One of them replaces that entry alone."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 6}}))
    assert stop_tokens(tmp_path, hf_overrides=overrides) == expected


@pytest.mark.parametrize("eos", ["2", [[2]], 2.5, {}, [None], True])
def test_stop_tokens_that_are_no_tokens_are_refused(tmp_path: Path, eos: object) -> None:
    """Anything but a token or a list of tokens is refused, and the file named."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(CheckpointFormatError, match=r"config\.json: eos_token_id should be"):
        stop_tokens(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_generation_config_is_named(tmp_path: Path, text: str) -> None:
    """A file that is not a JSON object is refused and named."""
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointFormatError, match=r"generation_config\.json is not"):
        stop_tokens(tmp_path)


@pytest.mark.parametrize("decoder", [{}, {"added_tokens_decoder": {}}])
@pytest.mark.parametrize(
    "config", [{}, {"eos_token": "b"}, {"eos_token": {"content": "b", "__type": "AddedToken"}}]
)
def test_special_tokens_are_those_that_transformers_reads(
    tmp_path: Path, config: dict[str, Any], decoder: dict[str, Any]
) -> None:
    """Older checkpoints name them in special_tokens_map.json, and in it alone."""
    tokenizer = FastTokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    entries = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries | config | decoder))
    named = {"eos_token": "a", "bos_token": {"content": "c"}, "extra_special_tokens": ["b"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for name in ("eos_token", "eos_token_id", "bos_token", "bos_token_id", "unk_token"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert sorted(ours.all_special_tokens) == sorted(theirs.all_special_tokens)
    messages = [{"role": "user", "content": "a"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(
        messages, tokenize=False
    )


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer as Llama 2's: what has no token of its own is written in tokens of bytes."""
    names = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "\u2581", "a", "\u2581tree", "b"]
    fast = FastTokenizer(models.BPE({n: at for at, n in enumerate(names)}, [], byte_fallback=True))
    fast.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
    ])  # fmt: skip
    folder = tmp_path_factory.mktemp("fallback")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def in_bytes(text: str) -> list[int]:
    """Return the tokens of a text; those of a byte are one more than the byte."""
    words = {" ": 257, "a": 258, "b": 260}
    return [
        token
        for each in text
        for token in ([words[each]] if each in words else [1 + byte for byte in each.encode()])
    ]


@given(
    text=st.text("ab \u4f60\u597d\u5417\U0001f642\u00e9\ufffd", min_size=1, max_size=9),
    cuts=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
@example("a\ufffd\U0001f642", (4, 8))
@example("\ufffd\u00e9\ufffd\U0001f642b", (6, 13))
def test_bytes_are_shown_as_the_characters_that_they_complete(
    byte_fallback: Tokenizer, text: str, cuts: tuple[int, int]
) -> None:
    """Wherever prompt and output end: Python decodes their bytes, without half a character."""
    tokens = in_bytes(text)
    start, end = sorted(min(cut, len(tokens)) for cut in cuts)
    replacement = in_bytes("\ufffd")
    # The first bytes of U+FFFD look as U+FFFD does, so a prompt that ends there has it already.
    start -= next((n for n in (1, 2) if tokens[start - n :][:3] == replacement), 0)
    values = {257: b" ", 258: b"a", 260: b"b"}

    def whole(ids: list[int]) -> str:
        data = b"".join(values.get(token) or bytes([token - 1]) for token in ids)
        return data.decode(errors="ignore")

    expected = whole(tokens[:end]).removeprefix(whole(tokens[:start]))
    # U+FFFD at the end looks as half a character does.
    expected = expected.rstrip("\ufffd")
    stream = TextStream(byte_fallback, tokens[:start])
    assert "".join(map(stream.push, tokens[start:end])).rstrip("\ufffd") == expected
    whole_text = byte_fallback.continuation(tokens[:start], tokens[start:end])
    assert whole_text.rstrip("\ufffd") == expected


@given(text=st.text("ab \u4f60\u00e9\u00c3\u00a9\ufffd\u0120\n", min_size=1, max_size=9))
def test_bytes_of_tokens_are_the_texts(
    tokenizer: Tokenizer, byte_fallback: Tokenizer, text: str
) -> None:
    """Joined, with both spellings of bytes; also letters that such spellings use."""
    for each, tokens in ((tokenizer, tokenizer.encode(text)), (byte_fallback, in_bytes(text))):
        assert b"".join(map(each.token_bytes, tokens)) == text.encode()


def test_bytes_of_a_word_have_its_space(metaspace: Tokenizer) -> None:
    """A decoder takes it off a token that is alone."""
    tokens = [0, 2, 1]
    assert b"".join(map(metaspace.token_bytes, tokens)) == b" thes tree"
    assert metaspace.decode(tokens) == "thes tree"


@pytest.mark.parametrize("token", ["\u00c3\u00a9", "\u00e9", "<0xZZ>", "<0x41>", "x\u2581y", ""])
def test_bytes_of_a_token_as_it_is_written(token: str, tmp_path: Path) -> None:
    """Where no decoder changes tokens, one that looks like bytes is a text of its own."""
    fast = FastTokenizer(models.WordLevel({token: 0}, unk_token=token))
    fast.save(str(tmp_path / "tokenizer.json"))
    own = Tokenizer(tmp_path)
    assert own.token_bytes(0) == own.decode([0]).encode() == token.encode()
    assert own.token_bytes(9) == b""  # an id of a vocabulary that is padded


@pytest.mark.parametrize("wrong", ["other/repo--tok.Tok", "absent.Tok", 3], ids=str)
@pytest.mark.parametrize("other", [None, "own.Tok"], ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_both_tokenizers_that_are_code_have_to_be_there(
    tmp_path: Path, first: bool, other: str | None, wrong: object
) -> None:
    """Of a slow and a fast one, neither may lead elsewhere, whatever is said of the other one."""
    (tmp_path / "own.py").write_text("raise AssertionError('it was run')")
    pair = [wrong, other] if first else [other, wrong]
    entries = {"auto_map": {"AutoTokenizer": pair}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    with pytest.raises(UnsupportedModelError, match=r"for AutoTokenizer"):
        read_tokenizer(tmp_path, trust_remote_code=True)
