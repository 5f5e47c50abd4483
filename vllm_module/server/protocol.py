"""The bodies of requests: names, types, and the fields that are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, model_validator

from vllm_module.base.messages import shorten, unknown_name
from vllm_module.config import Settings
from vllm_module.server.errors import ApiError, field_error

_Body = TypeVar("_Body", bound="Body")
_T = TypeVar("_T")
Listed = Annotated[list[_T], Field(fail_fast=True)]  # else a million wrong items are as many errors
ANY = (...,)

# Fields that become those of SamplingParams, which checks their values.
SAMPLING = (
    "n", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    "logit_bias",
    # vLLM's own
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens",
    "skip_special_tokens", "include_stop_str_in_output", "allowed_token_ids", "bad_words",
    "structured_outputs",
)  # fmt: skip
# Most entries of those of which each step reads all, or of which each may be wrong.
_MOST_ENTRIES = {
    "stop": 1024, "bad_words": 1024, "stop_token_ids": 1024, "logit_bias": 1 << 16,
    "allowed_token_ids": 1 << 18,
}  # fmt: skip
_MOST_BAD = 1 << 15


def refused(*names: str) -> dict[str, tuple[Any, ...]]:
    """Return known fields of clients of which no value asks for nothing."""
    return dict.fromkeys(names, ())


# Known fields of clients that change nothing here, with the values that ask for nothing.
COMMON: Mapping[str, tuple[Any, ...]] = {
    "user": ANY,
    "metadata": ANY,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ("in_memory",),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "priority": (0,),
    "spaces_between_special_tokens": ANY,
    "use_beam_search": (False,),
    **refused(
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "truncate_prompt_tokens",
        "moderation",
    ),
}  # fmt: skip

# Those of protocols in which a request has one answer, whose tokens are not shown.
ONE_ANSWER: Mapping[str, tuple[Any, ...]] = {
    **COMMON, "n": (1,), "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
}  # fmt: skip


class Body(Settings):
    """A checked body. Every ``null`` is a field that is left out.

    A name that is not known is refused. So is a known field that is not supported, unless its
    value asks for nothing: those of ``unsupported``.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    sampled: ClassVar[Collection[str]] = ()  # fields that become those of SamplingParams
    model: str | None = None

    @classmethod
    def of(cls: type[_Body], given: Any) -> _Body:
        """Check a JSON value. Raises ``ApiError`` with the name of the field at fault."""
        if not isinstance(given, dict):
            raise ApiError(400, f"the body should be a JSON object, got {shorten(given)}")
        known = {name: value for name, value in given.items() if value is not None}
        for name in [*known]:
            if name in cls.unsupported:
                values, value = cls.unsupported[name], known.pop(name)
                if ... not in values and value not in values:
                    message = f"{name} is not supported here: leave it out"
                    raise ApiError(400, message, name, "unsupported")
            elif name in cls.sampled:
                _check_size(name, known[name])
            elif name not in cls.model_fields:
                names = [*cls.model_fields, *cls.unsupported, *SAMPLING]
                message = f"the request {unknown_name(name, names)}"
                raise ApiError(400, message, name[:200], "unknown_parameter")
        for name, field in cls.model_fields.items():
            if field.is_required() and name not in known:
                raise ApiError(400, f"{name} is missing: the request needs it", name)
        try:
            return cls(**known)
        except ValueError as error:
            raise field_error(error) from None

    @classmethod
    def told(cls, error: ApiError) -> dict[str, Any]:
        """Return an error in the shape of the protocol."""
        return error.body

    @classmethod
    def told_within(cls, error: ApiError, number: int) -> dict[str, Any]:
        """Return an error as the last event of a stream, after ``number`` others."""
        return cls.told(error)


def _check_size(name: str, value: Any) -> None:
    most = _MOST_ENTRIES.get(name, 0)
    if most and isinstance(value, (list, dict)) and len(value) > most:
        raise ApiError(400, f"{name} has {len(value)} entries, and may have {most}", name)
    if name == "bad_words":  # which are tokenized between two steps
        listed = value if isinstance(value, list) else [value]
        if sum(len(each) for each in listed if isinstance(each, str)) > _MOST_BAD:
            raise ApiError(400, f"{name} may have {_MOST_BAD} characters in all", name)


class Entries(Settings):
    """Entries of a field that is a mapping; others are refused. A null is one that is left out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, entries: Any) -> Any:
        """Return the entries that are given."""
        if not isinstance(entries, Mapping):
            return entries
        return {name: value for name, value in entries.items() if value is not None}


class StreamOptions(Entries):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # of vLLM: the counts so far, in each chunk
    include_obfuscation: Literal[False] = False  # of OpenAI: random characters in each chunk


class GenerationBody(Body):
    """What requests for text have in common."""

    model_config = ConfigDict(extra="allow")  # the fields of ``sampled``
    sampled = SAMPLING
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields that become those of ``SamplingParams``."""
        return self.model_extra or {}


class ConversationBody(GenerationBody):
    """What requests for the next message of a conversation have in common."""

    model: str  # as OpenAI requires it
    tools: Listed[dict[str, Any]] = []

    def as_chat(self, wanted: Mapping[str, Any] | None, **entries: Any) -> ChatBody:
        """Return the request in the words of chat completions, with these entries.

        ``wanted`` is the form of the text; a schema is beside its type there.
        """
        if wanted is not None and wanted.get("type") == "json_schema":
            wanted = {"type": "json_schema", "json_schema": wanted}
        given = {**self.sampling, "response_format": wanted, **entries}
        return ChatBody(model=self.model, stream=self.stream, cache_salt=self.cache_salt, **given)


class TemplateOptions(Settings):
    """How the messages of a request become a prompt."""

    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class ChatBody(ConversationBody, TemplateOptions):
    """The body of /v1/chat/completions."""

    unsupported = {
        **COMMON,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "reasoning": ({}, {"summary": "auto"}),  # all of it is shown, where there is some
        "verbosity": ("medium",),
        "modalities": (["text"],),
        **refused("audio", "prediction", "web_search_options", "prompt_logprobs", "chat_template"),
        "add_special_tokens": (False,),
        "echo": (False,),
    }
    messages: Listed[dict[str, Any]] = Field(min_length=1)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: Any = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)
