"""Tokenizers made of a GGUF file's metadata: they encode and decode as transformers' do."""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import regex
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

from vllm_module import LLM, SamplingParams
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.runtime.generation_config import stop_tokens
from vllm_module.runtime.text.chat import ChatTemplate
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.weights.gguf import file as gguf_file
from vllm_module.weights.gguf.tokenizer import tokenizer_files
from vllm_module.weights.source import find_source

written = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gguf_models.py"))))

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it's 2024 already!",
    "Weights are loaded by the module tree. They're loaded once; we'll see them 12345 times.",
    "def load_weights(self, weights):\n    for name, weight in weights:\n        yield name\n",
    "Größe, café, naïve: Ümlaute und 日本語 mit emoji 🙂.",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two spaces, then\n\n\nlines\tand tabs   ",
    "unseen: ÿ ж 漢 🦊 \u200d",
    "<|end|>the module<think> tree</s>",
    "IT'S 1234567 they'Ve UPPERlower",
    "a\u0301 b\u2581c",
]
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
CONTROL, USER, BYTE, NORMAL = 3, 4, 6, 1


def byte_level(split: str) -> Callable[[gguf.GGUFWriter], None]:
    """Return what writes a byte-level BPE, trained on the corpus."""
    trained = FastTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        CORPUS * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    )
    state = json.loads(trained.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    merges = [each if isinstance(each, str) else " ".join(each) for each in state["merges"]]
    types = [NORMAL] * len(tokens) + [CONTROL, CONTROL, USER]
    tokens += ["<s>", "<|end|>", "<think>"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(tokens.index("<s>"))
        writer.add_eos_token_id(tokens.index("<|end|>"))
        writer.add_chat_template(TEMPLATE)

    return add


def sentencepiece(writer: gguf.GGUFWriter) -> None:
    """Write a BPE of characters with bytes for the others, as SentencePiece's models are."""
    pieces: dict[str, None] = {}
    for text in CORPUS:
        for word in f" {text}".replace(" ", " \u2581").split(" "):
            pieces |= dict.fromkeys(word)
            starts = range(len(word))
            pieces |= dict.fromkeys(word[at : at + size] for size in (2, 3, 4) for at in starts)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|end|>"]
    types = [2, CONTROL, CONTROL, *[BYTE] * 256, CONTROL, USER]
    tokens += [
        "<think>",
        "  ",
        "   ",
        *sorted(pieces.keys() - {""}, key=lambda piece: (piece[::-1], piece)),
    ]
    types += [NORMAL] * (len(tokens) - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-at * 7919.0 % len(tokens) for at in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)


KINDS = {
    "llama-bpe": ("llama", byte_level("llama-bpe")),
    "qwen2": ("qwen2", byte_level("qwen2")),
    "tekken": ("llama", byte_level("tekken")),
    "gpt-2": ("qwen2", byte_level("gpt-2")),
    "sentencepiece": ("llama", sentencepiece),
    "phi3": ("phi3", sentencepiece),
    "gemma": ("gemma2", sentencepiece),
}


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a file with a tokenizer and the smallest model."""
    models_of: dict[str, Any] = {}

    def make(architecture: str, add: Callable[[gguf.GGUFWriter], object], *others: Any) -> Path:
        if architecture not in models_of:
            layers = 2 if architecture == "deepseek3" else 1  # one of which is dense
            config = {**written.CONFIGS[architecture], "num_hidden_layers": layers}
            models_of[architecture] = written.new_model(config)

        def change(writer: gguf.GGUFWriter) -> None:
            for each in (add, *others):
                each(writer)

        path = tmp_path_factory.mktemp("tokenizer") / "model.gguf"
        return written.write(path, models_of[architecture], change=change)

    return make


@pytest.mark.parametrize("adds", [None, (True, True), (False, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_encoded_and_decoded_as_by_transformers(
    write: Callable[..., Path], kind: str, adds: tuple[bool, bool] | None
) -> None:
    """The tokenizer's ids and texts are those of AutoTokenizer for the same file."""

    def add(writer: gguf.GGUFWriter) -> None:
        if adds is not None:
            writer.add_add_bos_token(adds[0])
            writer.add_add_eos_token(adds[1])

    path = write(*KINDS[kind], add)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = Tokenizer(find_source(str(path)).folder)
    # Without the key, transformers adds nothing in these two, where llama.cpp adds it.
    first = [theirs.bos_token_id] if adds is None and kind in ("llama-bpe", "tekken") else []
    for text in TEXTS:
        if kind == "phi3":  # behind <think>, which Phi-3 has not, transformers keeps a space
            text = text.replace("> ", ">")
        for special in (True, False):
            ids = first * special + theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special) == ids, text
            for skip in (True, False):
                decoded = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == decoded, text
    assert len(ours.encode(CORPUS[0])) < len(CORPUS[0])


@pytest.mark.parametrize("prefix", [None, True, False])
def test_a_space_before_a_text_is_added_as_the_file_says(
    write: Callable[..., Path], prefix: bool | None
) -> None:
    """One space before a text, added or its own, is taken off again only where one is added."""

    def add(writer: gguf.GGUFWriter) -> None:
        if prefix is not None:
            writer.add_add_space_prefix(prefix)

    tokenizer = Tokenizer(find_source(str(write(*KINDS["sentencepiece"], add))).folder)
    for text in ("the module", " the module", "  the", "a"):
        ids = tokenizer.encode(text, False)
        spelled = "".join(tokenizer.convert_ids_to_tokens(ids)).replace("\u2581", " ")
        added = prefix is not False
        assert spelled == (" " if added and text[0] != " " else "") + text
        assert tokenizer.decode(ids) == (text.removeprefix(" ") if added else text)


# Published expressions: tiktoken's o200k_base; tokenizer.json of Llama 3, Qwen2, Mistral Nemo and
# DeepSeek-V3, of which each cuts what the last left; GPT-2's encoder.py.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp: the names, and of which tokenizers a
# word that is a token is not merged again (ignore_merges).
SPLITS: dict[str, tuple[tuple[str, ...], bool]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), ((LLAMA3,), True)),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), ((LLAMA3,), True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), ((LLAMA3,), False)),  # Phi-4 has dbrx
    **dict.fromkeys(("glm4", "chatglm-bpe"), ((LLAMA3,), False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), ((QWEN2,), False)),
    "tekken": ((TEKKEN,), True),
    "gpt-4o": ((O200K,), False),
    "deepseek-v3": (DEEPSEEK3, False),
    "gpt-2": ((GPT2,), False),
    "deepseek-coder": (("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"), False),
    "default": ((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), False),
}
# Characters of each kind that the expressions tell apart, and both ends of their ranges.
KINDS_OF_CHARACTERS = (
    "aZB\u01c5\u02b0\u6f22\u4e00\u9fa5\u3040\u30ff\u030112034\u2082 "
    "\n\r\t'sSd/\\.!~-+$=|^`\u00a0\U0001f642\uff5c"
)


def cut(pieces: list[str], pattern: str) -> list[str]:
    """Return pieces of pieces: each match of the pattern, and what is between matches."""
    found = (part for piece in pieces for part in regex.split(f"({pattern})", piece))
    return [part for part in found if part]


def made(architecture: str = "qwen2", **keys: Any) -> tuple[FastTokenizer, dict[str, Any]]:
    """Return the tokenizer and the tokenizer_config.json of a file with these keys."""
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    files = tokenizer_files({"general.architecture": architecture, **metadata}, "x.gguf", ())
    tokenizer = FastTokenizer.from_str(files["tokenizer.json"].decode())
    return tokenizer, json.loads(files["tokenizer_config.json"])


BYTES = list(bytes_to_unicode().values())


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_by_the_models_own_expressions(pre: str) -> None:
    """The pieces are those of the published expressions, by another library; text comes back."""
    patterns, whole = SPLITS[pre]
    # "abc" is a token to which no merge leads.
    tokens = [*BYTES, "bc", "abc"]
    tokenizer, _ = made(model="gpt2", pre=pre, tokens=tokens, merges=["b c"])
    rng = random.Random(0)
    drawn = ["".join(rng.choices(KINDS_OF_CHARACTERS, k=9)) for _ in range(300)]
    for text in [*TEXTS, *drawn, "I'll we've it'd I'm they're don't it's 'S'LL'VE'D'M'RE'T"]:
        split = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        found = [text[begin:end] for _, (begin, end) in split]
        expected = [text]
        for pattern in patterns:
            expected = cut(expected, pattern)
        assert found == [piece for piece in expected if piece]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("abc").tokens == (["abc"] if whole else ["a", "bc"])


def test_every_name_of_a_split_is_in_the_table() -> None:
    """The message that refuses another name lists those that are known."""
    with pytest.raises(UnsupportedModelError) as error:
        made(model="gpt2", pre="none such", tokens=BYTES, merges=[])
    listed = str(error.value).partition("expected one of ")[2].partition(". Put")[0]
    assert set(listed.split(", ")) == set(SPLITS)


@pytest.mark.parametrize("typed", [True, False])
def test_tokens_that_are_added_are_text(typed: bool) -> None:
    """DeepSeek's have characters of several bytes; each is one token, and is skipped as one.

    Files without types name the special ones alone. A user's own token is not skipped.
    """
    begin, end, user = (
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\uff5c>",
        "<\uff5cU\uff5c>",
    )
    tokens = [*BYTES, begin, end, user, "<pad>", "<unk>", "\u00e6\u0139"]
    types = {"token_type": [NORMAL] * 256 + [CONTROL, CONTROL, USER, CONTROL, CONTROL, NORMAL]}
    tokenizer, config = made(
        model="gpt2", pre="deepseek-v3", tokens=tokens, merges=["\u00e6 \u0139"],
        bos_token_id=256, eos_token_id=257, padding_token_id=259, unknown_token_id=260,
        **(types if typed else {}),
    )  # fmt: skip
    names = {"bos": begin, "eos": end, "pad": "<pad>", "unk": "<unk>"}
    assert {key: config.get(f"{key}_token") for key in names} == names
    text = f"{begin}Hi{user}\u65e5{end}"
    ids = tokenizer.encode(text).ids
    assert [ids[0], ids[-1]] == [256, 257]
    assert (258 in ids) == typed
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.removeprefix(begin).removesuffix(end)


ADDED = [  # model, keys, what is before and after a text
    ("gpt2", {}, (False, False)),
    ("llama", {}, (True, False)),
    ("gpt2", {"add_bos_token": True}, (True, False)),
    ("llama", {"add_bos_token": False}, (False, False)),
    ("llama", {"add_eos_token": True}, (True, True)),
    ("gpt2", {"add_eos_token": True}, (False, True)),
    ("gpt2", {"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ("gpt2", {"add_bos_token": True, "bos_token_id": None}, (False, False)),
    # As in llama.cpp's llama-vocab.cpp, which sets add_bos for these two kinds of pre-tokenizer.
    ("gpt2", {"pre": "llama-bpe"}, (True, False)),
    ("gpt2", {"pre": "tekken"}, (True, False)),
    ("gpt2", {"pre": "qwen2"}, (False, False)),
    ("gpt2", {"pre": "tekken", "add_bos_token": False}, (False, False)),
]


@pytest.mark.parametrize(("model", "keys", "added"), ADDED)
def test_texts_and_pairs_begin_and_end_as_the_keys_say(
    model: str, keys: dict[str, Any], added: tuple[bool, bool]
) -> None:
    """Token 0 is a token; the second text of a pair has both again, and type 1."""
    tokens = ["<s>", "</s>", *BYTES]
    tokenizer, config = made(
        model=model, tokens=tokens, merges=[],
        token_type=[CONTROL, CONTROL, *[NORMAL] * 256],
        **{"pre": "gpt-2", "bos_token_id": 0, "eos_token_id": 1, "add_space_prefix": False, **keys},
    )  # fmt: skip
    before, after = [0] * added[0], [1] * added[1]
    a, b = tokens.index("a"), tokens.index("b")
    pair = tokenizer.encode("aa", "b")
    assert tokenizer.encode("a").ids == [*before, a, *after]
    assert pair.ids == [*before, a, a, *after, *before, b, *after]
    ends = 2 + sum(added)
    assert pair.type_ids == [0] * ends + [1] * (len(pair.ids) - ends)
    for name, at, known in (("bos", 0, keys.get("bos_token_id", 0) is not None), ("eos", 1, True)):
        assert config.get(f"{name}_token") == (tokens[at] if known else None)
        if known:
            assert config[f"add_{name}_token"] is added[name == "eos"]
    assert config["clean_up_tokenization_spaces"] is False


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_merges_are_those_that_transformers_makes(architecture: str) -> None:
    """Tokens with one score are merged by the lengths, then by the numbers, of their parts."""
    rng = random.Random(0)
    words = ["".join(rng.choices("ab", k=length)) for length in (2, 3, 4, 5) for _ in range(12)]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "b", "a", *dict.fromkeys(words)]
    scores = [float(-rng.randrange(4)) for _ in tokens]
    tokenizer, _ = made(architecture, model="llama", tokens=tokens, scores=scores)
    vocabulary = {token: at for at, token in enumerate(tokens)}
    ranks = scores if architecture == "llama" else [-float(at) for at in range(len(tokens))]
    expected = generate_merges(vocabulary, dict(zip(tokens, ranks, strict=True)))
    found = json.loads(tokenizer.to_str())["model"]["merges"]
    assert [tuple(each) for each in found] == expected
    assert len(expected) > 40


def test_the_first_token_may_be_the_unknown_one() -> None:
    """Gemma writes it for what has neither a token nor tokens for its bytes."""
    tokens = ["<unk>", "a", "b"]
    keys = {"model": "llama", "tokens": tokens, "unknown_token_id": 0}
    tokenizer, _ = made("gemma2", **keys)
    assert tokenizer.encode("aéb").tokens == ["a", "<unk>", "b"]


@pytest.mark.parametrize("kind", [CONTROL, USER])
@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_added_tokens_of_phi_3_take_the_spaces_behind_them(architecture: str, kind: int) -> None:
    """Its tokenizer.json says so (``rstrip``), and no key of the file does."""
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", "a", "<|user|>", "<|end|>"]
    keys = {
        "model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens), "unknown_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "token_type": [2, 3, 3, 6, 1, 1, kind, kind],
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    named = {"general.architecture": architecture, "general.name": "Phi 3.5 Mini Instruct"}
    files = tokenizer_files({**named, **metadata}, "x.gguf", ())
    tokenizer = FastTokenizer.from_str(files["tokenizer.json"].decode())
    strips = architecture == "phi3"
    for text in ("<|user|>\n a<|end|> \n<|user|>", "a</s>\na", "<|end|>  "):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        without = "".join(text.split())
        assert (ids == tokenizer.encode(without, add_special_tokens=False).ids) == strips, text
    for text in ("<s>\na", "<unk> ", "a\n<|end|>"):
        assert tokenizer.encode(text).ids != tokenizer.encode("".join(text.split())).ids, text


def test_a_chat_template_and_the_end_of_turns_are_taken(write: Callable[..., Path]) -> None:
    """The template has the special tokens; generation stops at both ends that the file names."""
    path = write(*KINDS["qwen2"], lambda writer: writer.add_eot_token_id(7))
    folder = find_source(str(path)).folder
    text = ChatTemplate(folder).render([{"role": "user", "content": "Hi"}])
    assert text == "<s>Hi<|end|>"
    assert stop_tokens(folder) == {401, 7}


# What published files name as the end, tokens of their vocabularies, and those of them that end an
# answer by generation_config.json of the same model, and by llama.cpp.
PUBLISHED_ENDS: dict[str, tuple[str, list[str], list[str]]] = {
    "gemma-2-9b-it": ("<eos>", ["<start_of_turn>", "<end_of_turn>"], ["<end_of_turn>"]),
    "Phi-3-mini-4k-instruct": (
        "<|endoftext|>", ["<|assistant|>", "<|end|>", "<|user|>"], ["<|end|>"]
    ),
    "Qwen3-8B": ("<|im_end|>", ["<|endoftext|>", "<|im_start|>"], ["<|endoftext|>"]),
    "Llama-3.1-8B-Instruct": (
        "<|eot_id|>", ["<|end_of_text|>", "<|eom_id|>"], ["<|end_of_text|>", "<|eom_id|>"]
    ),
    "gpt-oss-20b": (
        "<|return|>", ["<|endoftext|>", "<|end|>", "<|call|>", "<|channel|>"],
        ["<|endoftext|>", "<|call|>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED_ENDS)
@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER])
def test_an_answer_ends_where_turns_do(write: Callable[..., Path], model: str, kind: int) -> None:
    """Files of models that chat seldom name the end of a turn; their texts leave it out."""
    end, others, ends = PUBLISHED_ENDS[model]
    tokens = ["a", "b", end, *others, "ab"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([NORMAL, NORMAL, CONTROL, *[kind] * len(others), NORMAL])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(2)

    folder = find_source(str(write("qwen2", add, lambda writer: None))).folder
    expected = {tokens.index(each) for each in (end, *ends)}
    assert stop_tokens(folder) == expected
    tokenizer = Tokenizer(folder)
    for token in expected:
        assert tokenizer.encode(tokens[token]) == [token]
        assert tokenizer.decode([0, token], skip_special_tokens=True) == "a"


def test_an_end_that_is_no_token_is_refused(write: Callable[..., Path]) -> None:
    """Nor is a list of tokens one."""
    key = gguf.Keys.Tokenizer.EOT_ID
    path = write(*KINDS["qwen2"], lambda writer: writer.add_array(key, [7, 8]))
    with pytest.raises(CheckpointFormatError, match="eos_token_id should be a token or a list"):
        stop_tokens(find_source(str(path)).folder)


def test_an_answer_ends_without_the_key_of_an_end(write: Callable[..., Path]) -> None:
    """The vocabulary's own is one, as in llama.cpp."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["a", "b", "<|im_end|>", "ab"])
        writer.add_token_types([NORMAL, NORMAL, CONTROL, NORMAL])
        writer.add_token_merges(["a b"])

    assert stop_tokens(find_source(str(write("qwen2", add, lambda writer: None))).folder) == {2}


def test_a_tokenizer_beside_the_file_goes_before_its_metadata(
    write: Callable[..., Path],
) -> None:
    """tokenizer.json of the folder is taken, and then the file's kind of tokenizer is not read."""
    path = write(*KINDS["qwen2"], lambda writer: None)
    tokenizer = FastTokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.save(str(path.parent / "tokenizer.json"))
    assert Tokenizer(find_source(str(path)).folder).encode("a") == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert', of which no tokenizer"),
        ({"tokenizer.ggml.pre": "poro"}, "pre is 'poro', and how it splits"),
        # llama.cpp takes "default" then, and warns that text will be worse.
        ({"tokenizer.ggml.pre": None}, "pre is missing, and how it splits"),
        ({"tokenizer.ggml.bos_token_id": 4000}, "one of 403 tokens.* 4000"),
        ({"tokenizer.ggml.tokens": [1]}, "tokens should be a list of str"),
        ({"tokenizer.ggml.token_type": [1]}, "a list of 403 numbers"),
        ({"tokenizer.ggml.merges": ["a"]}, "pairs of tokens with a space"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "no tokenizer can be made"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_refuses_text_alone(
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    message: str,
) -> None:
    """The weights load; text is refused with the file's problem and what to do about it."""
    path = write(*KINDS["qwen2"])
    read = gguf_file.read_gguf_header

    def changed(*arguments: Any) -> Any:
        header = read(*arguments)
        header.metadata.update(change)
        return header

    monkeypatch.setattr(gguf_file, "read_gguf_header", changed)
    with pytest.raises(CheckpointFormatError, match=message) as error:
        Tokenizer(find_source(str(path)).folder)
    assert str(error.value).startswith(str(path))
    assert "tokenizer.json beside the GGUF file, or give token ids" in str(error.value)
    llm = LLM(str(path), dtype="float32", device="cpu")
    try:
        params = SamplingParams(temperature=0, max_tokens=2)
        (output,) = llm.generate([{"prompt_token_ids": [1, 2]}], params)
        assert len(output.outputs[0].token_ids) == 2
        with pytest.raises(ValueError, match=message):
            llm.generate(["text"], params)
    finally:
        llm.close()


def test_a_long_token_of_which_merges_are_computed_is_refused(write: Callable[..., Path]) -> None:
    """Without merges, each token has one for each place in it; its length is bounded."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "a" * 1025])
        writer.add_token_scores([0.0, 0.0])

    with pytest.raises(CheckpointFormatError, match=r"at most 1024 characters.* 1025"):
        Tokenizer(find_source(str(write("llama", add))).folder)
