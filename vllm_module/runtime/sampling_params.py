from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_Natural = Annotated[int, Field(ge=0)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Text = Annotated[str, Field(min_length=1)]


class SamplingParams(BaseModel):
    """How the tokens of one request are chosen, and where they end; names and defaults are vLLM's.

    A token is chosen in this order: ``logit_bias``, the penalties, ``min_tokens``, and then the
    most probable token where ``temperature`` is 0; otherwise ``temperature``, ``min_p``,
    ``top_k``, ``top_p`` and a draw.

    Attributes:
        n: sequences made of each prompt.
        temperature: what logits are divided by; 0 takes the most probable token, and then
            ``min_p``, ``top_k`` and ``top_p`` change nothing.
        top_p: in (0, 1]; draw from the fewest most probable tokens that together have this much
            of the probability.
        top_k: draw from this many of the most probable tokens; 0 or -1 for all.
        min_p: in [0, 1]; draw from tokens with at least this part of the most probable one's
            probability.
        repetition_penalty: above 0; what logits of tokens of the prompt or the output are divided
            by, if positive, or else multiplied with (CTRL, arXiv 1909.05858).
        presence_penalty: in [-2, 2]; subtracted from the logit of a token of the output.
        frequency_penalty: in [-2, 2]; subtracted once for each time that the token is there.
        seed: of the draws, from -2**63 up to 2**64 - 1; the same seed draws the same tokens,
            whatever else is in the batch. None for one that nobody knows.
        stop: text, or several, none of them empty, at which the output ends.
        stop_token_ids: tokens at which the output ends, besides the checkpoint's own; None is none.
        ignore_eos: go on at the checkpoint's own end.
        max_tokens: most tokens of the output, at least 1; None for as many as the context holds.
        min_tokens: no stop token is chosen before the output has this many.
        logprobs: with each token of the output, log-probabilities of it and of this many of the
            most probable ones, as the model has them before anything above changes them.
        prompt_logprobs: the same for the tokens of the prompt.
        logit_bias: added to the logits of these tokens; in [-100, 100].
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string that ended the output in its text.

    Raises:
        ValueError: a value outside of what is said above, NaN and infinities included, of
            another type, or ``min_tokens`` above ``max_tokens``.

    """

    # Strict, because True is no temperature and "5" no seed; an integer is a float all the same.
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
    stop: _Text | Annotated[list[_Text], Field(strict=False)] | None = None  # a tuple will do too
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

    @model_validator(mode="after")
    def _check_lengths(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens should be at most max_tokens, which is {self.max_tokens}, and is "
                f"{self.min_tokens}"
            )
        return self

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken and nothing drawn."""
        return self.temperature == 0

    @property
    def stops(self) -> tuple[str, ...]:
        """``stop`` as a tuple, however it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
