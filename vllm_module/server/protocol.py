"""The bodies of requests: names, types, and the fields that are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field

from vllm_module.base.messages import shorten
from vllm_module.config import Settings, unknown_name
from vllm_module.server.errors import ApiError, field_error

_Body = TypeVar("_Body", bound="Body")
_T = TypeVar("_T")
_List = Annotated[list[_T], Field(fail_fast=True)]  # else a million wrong items are as many errors
_ANY = (...,)

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
# Known fields of clients that change nothing here, with the values that ask for nothing.
_COMMON: Mapping[str, tuple[Any, ...]] = {
    "user": _ANY,
    "metadata": _ANY,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "safety_identifier": _ANY,
    "prompt_cache_key": _ANY,
    "priority": (0,),
    "spaces_between_special_tokens": _ANY,
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
}  # fmt: skip

# Those of protocols in which a request has one answer, whose tokens are not shown.
_ONE: Mapping[str, tuple[Any, ...]] = {
    **_COMMON, "n": (1,), "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
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
    model: str | None = None

    @classmethod
    def of(cls: type[_Body], given: Any) -> _Body:
        """Check a JSON value. Raises ``ApiError`` with the name of the field at fault."""
        if not isinstance(given, dict):
            raise ApiError(400, f"the body should be a JSON object, got {shorten(given)}")
        known: dict[str, Any] = {}
        sampling: dict[str, Any] = {}
        for name, value in given.items():
            if value is None:
                continue
            if name in cls.unsupported:
                values = cls.unsupported[name]
                if ... not in values and value not in values:
                    raise ApiError(
                        400, f"{name} is not supported here: leave it out", name, "unsupported"
                    )
            elif name in SAMPLING and "sampling" in cls.model_fields:
                _check_size(name, value)
                sampling[name] = value
            elif name in cls.model_fields and name != "sampling":
                known[name] = value
            else:
                names = [*cls.model_fields, *cls.unsupported, *SAMPLING]
                raise ApiError(
                    400, f"the request {unknown_name(name, names)}", name[:200], "unknown_parameter"
                )
        if sampling:
            known["sampling"] = sampling
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


class StreamOptions(Settings):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False  # of vLLM: the counts so far, in each chunk

    @property
    def in_each(self) -> bool:
        """Whether each chunk has the counts of tokens so far."""
        return self.include_usage and self.continuous_usage_stats


class GenerationBody(Body):
    """What requests for text have in common."""

    sampling: dict[str, Any] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    unsupported = {**_COMMON, "suffix": ("",), "best_of": (1,)}
    prompt: Any
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool = False
    add_special_tokens: bool | None = None
    logprobs: int | None = Field(default=None, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0)


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    unsupported = {
        **_COMMON,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "reasoning": _ANY,
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "prompt_logprobs": (),
        "chat_template": (),
        "add_special_tokens": (False,),
        "echo": (False,),
    }
    model: str  # as OpenAI requires it
    messages: _List[dict[str, Any]] = Field(min_length=1)
    tools: _List[dict[str, Any]] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: Any = None
    reasoning_effort: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class MessagesBody(GenerationBody):
    """The body of /v1/messages."""

    unsupported = {
        **_ONE,
        "thinking": _ANY,
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "output_config": _ANY,
        "service_tier": ("auto", "standard_only"),
    }
    model: str
    messages: _List[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: Any = None
    stop_sequences: _List[str] = []
    tools: _List[dict[str, Any]] = []
    tool_choice: dict[str, Any] | None = None

    @classmethod
    def told(cls, error: ApiError) -> dict[str, Any]:
        """Return an error as Anthropic's clients know it."""
        kinds = {
            401: "authentication_error", 403: "permission_error", 404: "not_found_error",
            413: "request_too_large", 503: "overloaded_error",
        }  # fmt: skip
        other = "api_error" if error.status >= 500 else "invalid_request_error"
        kind = kinds.get(error.status, other)
        return {"type": "error", "error": {"type": kind, "message": error.message}}


class ResponsesBody(GenerationBody):
    """The body of /v1/responses."""

    unsupported = {
        **{name: values for name, values in _ONE.items() if name not in ("metadata", "store")},
        "store": (True, False),  # nothing is stored, and the answer says so
        "background": (False,),
        "include": ([],),
        "max_tool_calls": (),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled", "auto"),
    }
    model: str
    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: _List[dict[str, Any]] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    metadata: dict[str, Any] = {}

    @classmethod
    def told_within(cls, error: ApiError, number: int) -> dict[str, Any]:
        """Return an error as Open Responses has it in a stream."""
        return {"type": "error", "sequence_number": number, **cls.told(error)}


class EmbeddingBody(Body):
    """The body of /v1/embeddings."""

    unsupported = {"user": _ANY}
    input: Any
    encoding_format: str = Field(default="float", pattern="^(float|base64)$")
    dimensions: int | None = Field(default=None, ge=1)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)  # vLLM's; -1: as many as fit


class TokenizeBody(Body):
    """The body of /tokenize: a prompt, or messages."""

    prompt: str | None = None
    messages: _List[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """The body of /detokenize."""

    tokens: _List[int]


class PauseBody(Body):
    """The body of /pause."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True


class UpdateBody(Body):
    """The body of /update_weights: a file, folder, hub id or URL with weights, all or some."""

    path: str
    weight_version: str | None = None


class LoadAdapterBody(Body):
    """The body of /v1/load_lora_adapter: a name, and a folder in PEFT's layout.

    With ``load_inplace``, one that has this name is updated; without one, it is loaded.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    """The body of /v1/unload_lora_adapter; the number is vLLM's."""

    lora_name: str
    lora_int_id: int | None = None


class AbortBody(Body):
    """The body of /abort."""

    request_id: str


class EmptyBody(Body):
    """The body of a request that has no fields."""
