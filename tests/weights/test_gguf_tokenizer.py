"""Tokenizers made of a GGUF file's metadata: they encode and decode as transformers' do."""

from __future__ import annotations

import json
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

from vllm_module import LLM, SamplingParams
from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.generation_config import stop_tokens
from vllm_module.runtime.text.chat import ChatTemplate
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.weights.gguf import file as gguf_file
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
    "default": ("qwen2", byte_level("default")),
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
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
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


# https://github.com/openai/tiktoken, tiktoken_ext/openai_public.py; transformers reads no gpt-oss.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip


# https://github.com/zai-org/GLM-4, tokenization_chatglm.py.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# https://huggingface.co/deepseek-ai/DeepSeek-V3, tokenizer.json: each cuts what the last left.
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def cut(pieces: list[str], pattern: str) -> list[str]:
    """Return pieces of pieces: each match of the pattern, and what is between matches."""
    found = (part for piece in pieces for part in regex.split(f"({pattern})", piece))
    return [part for part in found if part]


@pytest.mark.parametrize(
    ("architecture", "pre", "patterns"),
    [
        ("gpt-oss", "gpt-4o", (O200K,)),
        ("glm4", "glm4", (CL100K,)),
        ("deepseek3", "deepseek-v3", DEEPSEEK3),
    ],
)
def test_text_is_split_by_the_models_own_expressions(
    write: Callable[..., Path], architecture: str, pre: str, patterns: tuple[str, ...]
) -> None:
    """The pieces are those of the published expressions, by another library; text comes back."""
    folder = find_source(str(write(architecture, byte_level(pre)))).folder
    tokenizer, ours = FastTokenizer.from_file(str(folder / "tokenizer.json")), Tokenizer(folder)
    for text in TEXTS:
        split = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        found = [text[begin:end] for _, (begin, end) in split]
        expected = [text]
        for pattern in patterns:
            expected = cut(expected, pattern)
        assert found == [piece for piece in expected if piece]
        assert ours.decode(ours.encode(text, False), skip_special_tokens=False) == text


def test_a_chat_template_and_the_end_of_turns_are_taken(write: Callable[..., Path]) -> None:
    """The template has the special tokens; generation stops at both ends that the file names."""
    path = write(*KINDS["qwen2"], lambda writer: writer.add_eot_token_id(7))
    folder = find_source(str(path)).folder
    text = ChatTemplate(folder).render([{"role": "user", "content": "Hi"}])
    assert text == "<s>Hi<|end|>"
    assert stop_tokens(folder) == {401, 7}


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
