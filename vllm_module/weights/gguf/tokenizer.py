"""Writing a tokenizer's files from the metadata of a GGUF file.

Keys: section Tokenizer of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. How each kind
of tokenizer splits and decodes text was taken from the models' own ``tokenizer.json``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_module.base.messages import describe_error, shorten
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
# Limit for a token whose merges are computed, one merge for each position in it.
_MOST_CHARACTERS = 1024
_SPACE = "\u2581"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ADVICE = "Put the model's own tokenizer.json beside the GGUF file, or give token ids"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (  # pattern of tiktoken's o200k_base
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORMS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORMS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (  # one after the other: numbers, Chinese and Japanese, the rest
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LIKE_LLAMA3 = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"
)  # fmt: skip
# Patterns that split text before it is encoded, one after the other, by tokenizer.ggml.pre.
_SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*_LIKE_LLAMA3, "glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN2,)),
    "deepseek-v3": _DEEPSEEK3,
    "deepseek-coder": _DEEPSEEK_CODER,
    "tekken": (_TEKKEN,),
    "gpt-4o": (_O200K,),
    # llama.cpp's, also where it warns that the key is missing: no published model's.
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
}
# With these, a word in the vocabulary is used whole, without merges, and texts begin with the token
# "bos" unless a key says otherwise: ``llama_vocab::impl::load`` of llama.cpp.
_WHOLE_FIRST = {*_LIKE_LLAMA3, "tekken"}
# Tokens that end an answer, whatever their type: most files that have one name the end of a text
# only. Those of llama.cpp (``llama_vocab::impl::load``) that models of known architectures have.
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>",
    "<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|return|>", "<|call|>",
    "<end_of_utterance>",
}  # fmt: skip
# Added tokens of Phi-3 take the spaces behind them, without these. No key says so.
_KEEP_SPACES = {"<unk>", "<s>", "<|endoftext|>"}
_OF_HARMONY = {"<|return|>", "<|call|>"}  # beside these, <|end|> ends only a part of an answer


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end an answer, by keys of their own or by their text."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []  # another value is refused later
    number = {each: at for at, each in enumerate(tokens) if isinstance(each, str)}
    named = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    found = [each for each in named if each is not None]
    found += sorted(number[each] for each in _ends(number))
    return [each for at, each in enumerate(found) if each not in found[:at]]


def _ends(tokens: Iterable[str]) -> set[str]:
    ends = _ENDS.intersection(tokens)
    return ends - {"<|end|>"} if ends >= _OF_HARMONY else ends


def tokenizer_files(
    metadata: Mapping[str, Any], where: str, taken: Collection[str]
) -> dict[str, bytes]:
    """Return the contents of tokenizer.json and tokenizer_config.json, except those in ``taken``.

    The result is empty for a file without a tokenizer. ``where`` is the file's path, for messages.

    Raises ``UnsupportedModelError`` for an unknown kind of tokenizer, and
    ``CheckpointFormatError`` for metadata from which no tokenizer can be made.
    """
    keys = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    if "model" not in keys:
        return {}
    tokens = _strings(keys, "tokens", where)
    special: dict[str, str] = {}
    for name, key in _SPECIAL.items():
        token = keys.get(f"{key}_token_id")
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < len(tokens):
            _refuse(where, f"{key}_token_id", f"one of {len(tokens)} tokens", token)
        special[f"{name}_token"] = tokens[token]
    # Many files lack this key, such as those of Llama 3.
    begins = keys["model"] == "llama" or str(keys.get("pre")) in _WHOLE_FIRST
    adds = {
        name: keys.get(f"add_{name}_token", name == "bos" and begins) for name in ("bos", "eos")
    }
    files = {}
    if "tokenizer.json" not in taken:
        architecture = str(metadata.get("general.architecture"))
        tokenizer = _tokenizer(keys, tokens, special, adds, architecture, where)
        files["tokenizer.json"] = tokenizer.encode()
    if "tokenizer_config.json" not in taken:
        entries: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{f"add_{name}_token": value for name, value in adds.items()},
            **special,
        }
        template = metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            entries["chat_template"] = template
        files["tokenizer_config.json"] = json.dumps(entries).encode()
    return files


def _refuse(where: str, key: str, expected: str, got: object) -> NoReturn:
    raise CheckpointFormatError(
        f"{where}: tokenizer.ggml.{key} should be {expected}, and is {shorten(got)}. {_ADVICE}"
    )


def _strings(keys: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = keys.get(key)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        _refuse(where, key, "a list of strings", value)
    return value


def _tokenizer(
    keys: Mapping[str, Any],
    tokens: list[str],
    special: Mapping[str, str],
    adds: Mapping[str, Any],
    architecture: str,
    where: str,
) -> str:
    """Return the contents of tokenizer.json."""
    from tokenizers import AddedToken

    kind = keys["model"]
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{where}: tokenizer.ggml.model is {shorten(kind)}, of which no tokenizer is made: "
            f"expected gpt2 or llama. {_ADVICE}"
        )
    types = keys.get("token_type", [])
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        _refuse(where, "token_type", f"a list of {len(tokens)} numbers", types)
    of_type: dict[int, list[str]] = {_CONTROL: [], _USER_DEFINED: []}
    ends = _ends(tokens)
    for token, number in zip(tokens, types, strict=False):
        if token in ends:
            of_type[_CONTROL].append(token)
        elif number in of_type:
            of_type[number].append(token)
    named = list(special.values())
    try:
        if kind == "gpt2":
            added = {*of_type[_CONTROL], *of_type[_USER_DEFINED], *named}
            tokenizer = _byte_level(keys, tokens, added, where)
        else:
            tokenizer = _sentencepiece(keys, tokens, architecture, where)
            vocabulary = tokenizer.get_vocab()  # Gemma's runs of spaces are other tokens there
            of_type = {
                number: [token for token in added if token in vocabulary]
                for number, added in of_type.items()
            }
        # llama.cpp looks for "phi-3", but files are called "Phi 3 Mini 4k Instruct" since mid-2024.
        strips = architecture == "phi3" and kind == "llama"
        control, user_defined = (
            [
                AddedToken(each, normalized=False, rstrip=strips and each not in _KEEP_SPACES)
                for each in added
            ]
            for added in ([*of_type[_CONTROL], *named], of_type[_USER_DEFINED])
        )
        tokenizer.add_tokens(user_defined)
        tokenizer.add_special_tokens(control)
        _add_template(tokenizer, special, adds)
        text: str = tokenizer.to_str()
    except (CheckpointFormatError, UnsupportedModelError):
        raise
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointFormatError(
            f"{where}: no tokenizer can be made of its metadata: {describe_error(error)}. {_ADVICE}"
        ) from None
    return text


def _add_template(
    tokenizer: Tokenizer, special: Mapping[str, str], adds: Mapping[str, Any]
) -> None:
    """Set the tokenizer's post-processor: it adds the tokens that begin and end a text."""
    from tokenizers.processors import TemplateProcessing

    begin, end = (
        special.get(f"{name}_token") if adds[name] is True else None for name in ("bos", "eos")
    )
    added = [token for token in (begin, end) if token is not None]
    if added:
        before, after = [begin] if begin else [], [end] if end else []
        single = [*before, "$A", *after]
        pair = [*single, *(f"{token}:1" for token in (*before, "$B", *after))]
        ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(added)]
        tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _byte_level(
    keys: Mapping[str, Any], tokens: list[str], added: Collection[str], where: str
) -> Tokenizer:
    """Return a byte-level BPE tokenizer, in which a character stands for each byte.

    The tokens in ``added`` are plain text, whatever its characters are.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre: Any = keys.get("pre")
    if pre not in _SPLITS:
        named = "missing" if pre is None else shorten(pre)
        raise UnsupportedModelError(
            f"{where}: tokenizer.ggml.pre is {named}, and how it splits text is not known: "
            f"expected one of {', '.join(_SPLITS)}. {_ADVICE}"
        )
    spelled = _byte_characters()
    alphabet = set(spelled)
    vocabulary = {
        token
        if token in added or set(token) <= alphabet
        else "".join(spelled[byte] for byte in token.encode()): at
        for at, token in enumerate(tokens)
    }
    merges = _pairs(_strings(keys, "merges", where), where)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_FIRST)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), behavior="isolated") for each in _SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    """Return GPT-2's character for each byte.

    Printable ones of Latin-1 stand for themselves; the others are the characters from 256 on.
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return [chr(byte if byte in printed else 256 + others.index(byte)) for byte in range(256)]


def _pairs(merges: Sequence[str], where: str) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            _refuse(where, "merges", "pairs of tokens with a space between them", merge)
        pairs.append((left, right))
    return pairs


def _sentencepiece(
    keys: Mapping[str, Any], tokens: list[str], architecture: str, where: str
) -> Tokenizer:
    """Return a BPE tokenizer of characters; a character without a token becomes its bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    gemma = architecture.startswith("gemma")
    scores = keys.get("scores")
    if gemma:
        # Runs of spaces are stored as spaces, and tokens are in the order of merges.
        tokens = [_SPACE * len(token) if token.strip(" ") == "" else token for token in tokens]
        scores = [-at for at in range(len(tokens))]
    if "merges" in keys:
        merges = _pairs(_strings(keys, "merges", where), where)
    elif isinstance(scores, list) and len(scores) == len(tokens):
        if (longest := max(map(len, tokens), default=0)) > _MOST_CHARACTERS:
            expected = f"tokens of at most {_MOST_CHARACTERS} characters, as there are no merges"
            _refuse(where, "tokens", expected, longest)
        merges = _merges(tokens, scores)
    else:
        _refuse(where, "scores", f"a list of {len(tokens)} numbers", scores)
    vocabulary = {token: at for at, token in enumerate(tokens)}
    unknown = keys.get("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            fuse_unk=True,
            byte_fallback=True,
            unk_token=tokens[unknown] if gemma and unknown is not None else None,
        )
    )
    prefix = keys.get("add_space_prefix", True) and not gemma
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    elif architecture == "phi3":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        )
    else:
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme, split=False)
    return tokenizer


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary; those into the token of the highest score come first."""
    number = {token: at for at, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        known = [
            (token[:at], token[at:])
            for at in range(1, len(token))
            if token[:at] in number and token[at:] in number
        ]
        known.sort(key=lambda pair: (number[pair[0]], number[pair[1]]))
        found += [(score, pair) for pair in known]
    found.sort(key=lambda each: (each[0], len(each[1][0]), len(each[1][1])), reverse=True)
    return [pair for _, pair in found]
