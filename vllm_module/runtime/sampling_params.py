from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from vllm_module.config import Settings
from vllm_module.messages import shorten
from vllm_module.runtime.arguments import SAMPLING_ARGUMENTS, known_arguments

_Natural = Annotated[int, Field(ge=0)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Text = Annotated[str, Field(min_length=1)]


class SamplingParams(Settings):
    """How to choose the tokens of a request, and when to stop; names and defaults are vLLM's.

    The next token is chosen in this order: ``logit_bias``, the penalties, ``min_tokens``; then the
    most probable token if ``temperature`` is 0, otherwise ``temperature``, ``min_p``, ``top_k``,
    ``top_p`` and a random draw.

    Attributes:
        n: samples of each prompt.
        temperature: divides the logits; 0 takes the most probable token, whatever ``min_p``,
            ``top_k`` and ``top_p`` are.
        top_p: in (0, 1]; draw from the fewest most probable tokens whose probabilities add up to
            this.
        top_k: draw from this many of the most probable tokens; 0 or -1 for all.
        min_p: in [0, 1]; draw from tokens with at least this fraction of the most probable token's
            probability.
        repetition_penalty: above 0; divides the positive logits of tokens in the prompt or the
            output, and multiplies the others (CTRL, arXiv 1909.05858).
        presence_penalty: in [-2, 2]; subtracted from the logits of tokens in the output.
        frequency_penalty: in [-2, 2]; the same, once for each occurrence.
        seed: of the random draws, from -2**63 to 2**64 - 1. The same seed and logits give the
            same tokens, whatever else is in the batch. None for a random seed.
        stop: a string, or several, none of them empty; the output ends at the first that occurs.
        stop_token_ids: tokens that end the output, besides the checkpoint's own; None for none.
        ignore_eos: do not end at the checkpoint's own end tokens.
        max_tokens: most tokens of the output, at least 1; None for as many as the context holds.
        min_tokens: nothing but the context's length ends the output before it has this many.
        logprobs: return, for each token of the output, the logprobs of it and of this many of the
            most probable ones, from the model's logits before any parameter changes them.
        prompt_logprobs: the same for the tokens of the prompt.
        logit_bias: added to the logits of these tokens; in [-100, 100].
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.

    Other arguments of vLLM are accepted with the values that change nothing.

    Raises:
        ValueError: a value is outside of its range, NaN or infinite, or of another type; or
            ``min_tokens`` is above ``max_tokens``.

    """

    # Strict: True is not a temperature and "5" is not a seed; integers are accepted as floats.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    n: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: _Text | Annotated[list[_Text], Field(strict=False)] | None = None  # or a tuple
    stop_token_ids: Annotated[
        list[_Token], Field(strict=False), BeforeValidator(lambda ids: [] if ids is None else ids)
    ] = Field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = Field(default=16, ge=1)
    min_tokens: _Natural = 0
    logprobs: _Natural | None = None
    prompt_logprobs: _Natural | None = None
    logit_bias: dict[_Token, Annotated[float, Field(ge=-100, le=100)]] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

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
    def _check_lengths(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens should be at most max_tokens, which is {self.max_tokens}, and is "
                f"{self.min_tokens}"
            )
        return self

    def clone(self) -> SamplingParams:
        """Return a copy that shares no list with this one."""
        return self.model_copy(deep=True)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    @property
    def stops(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
