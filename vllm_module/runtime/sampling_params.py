"""Sampling parameters of a request, under vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from vllm_module.base.messages import shorten
from vllm_module.config import Settings
from vllm_module.runtime.arguments import SAMPLING_ARGUMENTS, known_arguments

_T = TypeVar("_T")
_Natural = Annotated[int, Field(ge=0, lt=2**63)]
_Count = Annotated[int, Field(ge=-1, lt=2**63)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Text = Annotated[str, Field(min_length=1)]
# A tuple is accepted too. Of a million wrong items, the first is told.
_List = Annotated[list[_T], Field(strict=False, fail_fast=True)]
_WITHOUT_PARTS = (str, int, float, type(None))
_MOST_BIAS = 100.0  # the largest bias of a token in from_optional
_POSITIONAL = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature")


def _listed(value: Any) -> Any:
    """Return a list without repetitions; a single text becomes a list, and None an empty list."""
    if value is None or isinstance(value, str):
        return [] if value is None else [value]
    hashable = isinstance(value, (list, tuple)) and all(isinstance(v, (str, int)) for v in value)
    # Keys contain the type, because True equals 1 and is no token.
    return [each for _, each in dict.fromkeys((type(v), v) for v in value)] if hashable else value


_Listed = BeforeValidator(_listed)
_Seed = BeforeValidator(lambda given: None if type(given) is int and given == -1 else given)


class StructuredOutputsParams(Settings):
    """What the text of an output must be, under vLLM's names: exactly one of the five is given.

    Where only one text may follow, its tokens are those of the tokenizer, and no other tokens of
    the same text are chosen. So a request that bans one of them, by ``bad_words`` or
    ``allowed_token_ids``, ends with an error there.

    Attributes:
        json: a JSON schema, as a mapping or as text.
        regex: a regular expression that the whole text matches, in the syntax of Rust's regex.
        choice: texts, of which the output is one.
        grammar: a context-free grammar in Lark's syntax or in llama.cpp's GBNF.
        json_object: ``True`` for any JSON object.

    Raises:
        ValueError: none of them is given or several are, or one is empty or of another type.

    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    json_schema: _Text | dict[str, Any] | None = Field(default=None, alias="json")
    regex: _Text | None = None
    choice: Annotated[_List[_Text], Field(min_length=1)] | None = None
    grammar: _Text | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputsParams:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise ValueError(
                "structured_outputs should be one of json, regex, choice, grammar and json_object, "
                f"and is {' and '.join(given) or 'none of them'}"
            )
        return self


class SamplingParams(Settings):
    """Parameters for choosing the tokens of a request and for stopping, under vLLM's names.

    The next token is chosen in this order: ``logit_bias``, the penalties, ``min_tokens``; then the
    most probable token if ``temperature`` is 0, otherwise ``temperature``, ``min_p``, ``top_k``,
    ``top_p`` and a random draw.

    Attributes:
        n: number of samples of each prompt.
        temperature: divisor of the logits; 0 takes the most probable token, whatever ``min_p``,
            ``top_k`` and ``top_p`` are.
        top_p: number in (0, 1]; draw from the fewest most probable tokens whose probabilities add
            up to this.
        top_k: number of most probable tokens to draw from; 0 or -1 for all.
        min_p: number in [0, 1]; draw from tokens with at least this fraction of the most probable
            token's probability.
        repetition_penalty: number above 0 that divides the positive logits of tokens in the prompt
            or the output, and multiplies the others (CTRL, arXiv 1909.05858).
        presence_penalty: number in [-2, 2], subtracted from the logits of tokens in the output.
        frequency_penalty: number in [-2, 2], subtracted once for each occurrence in the output.
        seed: seed of the random draws, from -2**63 to 2**64 - 1. The same seed and logits give the
            same tokens, whatever else is in the batch. None or -1 for a random seed.
        stop: strings, none of them empty; the output ends at the one that ends first in its text,
            and where several do, at the longest. One string becomes a list, and None an empty one.
        stop_token_ids: tokens that end the output, besides the checkpoint's own; None for none.
        ignore_eos: True if the checkpoint's own end tokens do not end the output.
        max_tokens: largest number of tokens of the output, at least 1; None for as many as the
            context holds.
        min_tokens: number of tokens before which only the context's length ends the output.
        logprobs: number of most probable tokens whose logprobs are returned for each token of the
            output, besides its own, from the model's logits before any parameter changes them; -1
            for all tokens.
        prompt_logprobs: the same number for the tokens of the prompt.
        logit_bias: numbers added to the logits of these tokens.
        allowed_token_ids: the only tokens that may be chosen; None for all.
        bad_words: texts that may not be generated: where the output ends with all tokens of one but
            the last, that one is not chosen. Each counts with and without a space before it.
        detokenize: True to return text; otherwise token ids only.
        skip_special_tokens: True to leave special tokens out of the text.
        spaces_between_special_tokens: no effect, as in vLLM with tokenizers of this kind.
        include_stop_str_in_output: True to keep the stop string at the end of the text.
        structured_outputs: what the text must be: a :class:`StructuredOutputsParams`, or a mapping
            of one of its attributes. The output ends when nothing may follow.
        extra_args: a caller's own values; nothing here reads them.

    The first five of vLLM's may be given by position: ``n``, ``presence_penalty``,
    ``frequency_penalty``, ``repetition_penalty``, ``temperature``. Later assignments are checked as
    well; a request keeps the parameters that it was added with. Other arguments of vLLM are
    accepted with the values that change nothing, and can be read.

    Raises:
        ValueError: a value is outside of its range, NaN or infinite, or of another type; or
            ``min_tokens`` is above ``max_tokens``; or there are stop strings without
            ``detokenize``.

    """

    # Strict: True is not a temperature and "5" is not a seed; integers are accepted as floats.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    n: int = Field(default=1, ge=1)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: float = Field(default=1.0, gt=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: _Count = 0
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: Annotated[int | None, _Seed] = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[_List[_Text], _Listed] = Field(default_factory=list)
    stop_token_ids: Annotated[_List[_Token], _Listed] = Field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = Field(default=16, ge=1)
    min_tokens: _Natural = 0
    logprobs: _Count | None = None
    prompt_logprobs: _Count | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[_Token, float] | None = None
    allowed_token_ids: Annotated[_List[_Token], Field(min_length=1)] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: Annotated[_List[_Text], _Listed] = Field(default_factory=list)

    _others: dict[str, Any] = PrivateAttr(default_factory=dict)

    if not TYPE_CHECKING:  # type checkers know the arguments from the fields

        def __init__(self, /, *positional: Any, **given: Any) -> None:
            super().__init__(**_named(positional, given))
            self._others = {name: given[name] for name in given.keys() & SAMPLING_ARGUMENTS.keys()}

        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                super().__setattr__(name, value)
                return
            given = {each: getattr(self, each) for each in self.model_fields_set}
            # All fields together, because values that fit alone may not fit the others.
            checked = type(self)(**{**given, **self._others, name: value})
            self.__dict__.update(checked.__dict__)
            self.__pydantic_fields_set__ = checked.model_fields_set
            self._others = checked._others

        def __getattr__(self, name: str) -> Any:
            if name in SAMPLING_ARGUMENTS:
                return self._others.get(name, SAMPLING_ARGUMENTS[name][0])
            return super().__getattr__(name)

    @classmethod
    def from_optional(cls, *positional: Any, **given: Any) -> SamplingParams:
        """Return parameters from a server's arguments; ``None`` means the default.

        For ``max_tokens``, ``None`` means no limit. Keys of ``logit_bias`` may be text, and its
        values are clamped to [-100, 100].
        """
        given = _named(positional, given)
        with_default = cls.model_fields.keys() - {"max_tokens"}
        given = {k: v for k, v in given.items() if v is not None or k not in with_default}
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = {_token(key): _bounded(each) for key, each in bias.items()}
        return cls(**given)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"SamplingParams should be a mapping, got {shorten(given)}")
        fields = cls.model_fields.keys()
        return known_arguments("SamplingParams", given, fields, SAMPLING_ARGUMENTS)

    @model_validator(mode="after")
    def _check_together(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens should be at most max_tokens, which is {self.max_tokens}, and is "
                f"{self.min_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are found in text: leave out detokenize=False")
        return self

    def clone(self) -> SamplingParams:
        """Return a copy that shares no list with this one."""
        other = self.model_copy()  # a deep copy takes longer than to tokenize a short prompt
        for name, value in other.__dict__.items():
            if not isinstance(value, _WITHOUT_PARTS):
                is_flat = isinstance(value, list) or name == "logit_bias"
                other.__dict__[name] = value.copy() if is_flat else deepcopy(value)
        other._others = deepcopy(self._others)
        return other

    @property
    def greedy(self) -> bool:
        """True if the most probable token is always taken."""
        return self.temperature == 0


def _named(positional: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by name, also those given by position."""
    if len(positional) > len(_POSITIONAL):
        raise ValueError(
            f"SamplingParams takes at most {', '.join(_POSITIONAL)} by position: name the others, "
            "whose order differs between versions of vLLM"
        )
    placed = dict(zip(_POSITIONAL, positional, strict=False))
    if twice := placed.keys() & given.keys():
        raise ValueError(f"SamplingParams got {', '.join(twice)} by position and by name")
    return {**placed, **given}


def _token(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.removeprefix("-").isdecimal() else key


def _bounded(bias: Any) -> Any:
    is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool) and bias == bias
    return min(_MOST_BIAS, max(-_MOST_BIAS, bias)) if is_number else bias  # NaN is refused later
