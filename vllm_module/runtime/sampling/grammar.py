"""Structured output: the tokens that a grammar allows next, by llguidance.

A mask is computed from the tokens that were read before, while the device may still compute the
logits that it is for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch

from vllm_module.base.messages import describe_error, install
from vllm_module.runtime.sampling_params import StructuredOutputsParams
from vllm_module.runtime.text.tokenizer import Tokenizer

_END = "<|the end of the output|>"
# Less than llguidance's own, with which one expression takes half a second of a step.
_FUEL = 200_000  # work for one expression; it takes 0.06 s at most, as far as was measured
_STATES = 50_000  # states of one grammar, of 1 to 2 kB each
# Of rules and references that lead to each other llguidance takes a thousand, and a chain of five
# thousand overflows the stack, which ends the process. 200 patterns of keys take it 0.3 s, and 400
# more than ten times as long.
_MOST_RULES = 1_000
_MOST_PATTERNS = 100


class Grammar:
    """Where one sequence is in its grammar.

    Attributes:
        error: why the grammar cannot go on, for example because it takes too much work; ``None`` as
            long as it can.
        complete: whether :meth:`ended` has said so; then the last token is part of the text.

    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._taken = 0
        self.error: str | None = None
        self.complete = False

    def copy(self) -> Grammar:
        """Return the same grammar at its beginning, for another sequence."""
        assert not self._taken
        return Grammar(self._matcher.deep_copy())

    def mask(self, output: Sequence[int]) -> torch.Tensor:
        """Return which tokens may follow ``output``: a bit each, int32 ``[ceil(vocab / 32)]``.

        ``output`` is what the last call was given, and more tokens. No token may follow an error.
        """
        self._take(output)
        bits = bytearray(self._matcher.compute_bitmask())
        if self.error is not None:
            bits = bytearray(len(bits))
        return torch.frombuffer(bits, dtype=torch.int32)

    def ended(self, output: Sequence[int]) -> bool:
        """Tell whether ``output`` is complete, and nothing may follow but an end token."""
        self._take(output)
        self.complete = self.error is None and self._matcher.is_stopped()
        return self.complete

    def _take(self, output: Sequence[int]) -> None:
        tokens, self._taken = output[self._taken :], len(output)
        if tokens and self.error is None and not self._matcher.consume_tokens(tokens):
            self.error = f"structured_outputs: {self._matcher.get_error().splitlines()[0]}"


class Grammars:
    """Compiles what requests ask for, for the tokens of one tokenizer; threads may share it.

    Args:
        tokenizer: the checkpoint's.
        vocab_size: number of tokens that the model knows.
        stop_token_ids: the model's own end tokens, of which one may follow a complete output.

    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, stop_token_ids: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = sorted(stop_token_ids)
        self._tokens: Any = None  # llguidance's view of the tokenizer, which takes a second to make
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar that ``params`` describe.

        Raises ``ValueError`` if it cannot be understood, or without a tokenizer, and
        ``ImportError`` without llguidance.
        """
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise ImportError(
                f"structured_outputs needs llguidance: {install('structured-outputs')}"
            ) from None
        with self._lock:
            if self._tokens is None:
                self._tokens = self._new_tokens()
        try:
            _check_size(params)
            grammar = _grammar_of(params)
            limits = LLParserLimits(initial_lexer_fuel=_FUEL, max_lexer_states=_STATES)
            error = LLMatcher.validate_grammar(grammar, self._tokens, limits=limits)
        except (ValueError, RecursionError) as failure:
            error = describe_error(failure)
        if error:
            raise ValueError(f"structured_outputs cannot be followed: {error}")
        return Grammar(LLMatcher(self._tokens, grammar, log_level=0, limits=limits))

    def _new_tokens(self) -> Any:
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer as FastTokenizer

        if self._tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer, and the checkpoint has none")
        text, size, ends = self._tokenizer.to_str(), self._vocab_size, self._stop_token_ids
        if not ends:  # the library needs one: it gets a token that no text has
            extended = FastTokenizer.from_str(text)
            extended.add_special_tokens([_END])
            text, end = extended.to_str(), int(extended.token_to_id(_END) or 0)
            ends, size = [end], max(size, end + 1)
        try:
            return LLTokenizer(text, n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise ValueError(
                f"structured_outputs do not work with this tokenizer: {describe_error(error)}"
            ) from None


def _check_size(params: StructuredOutputsParams) -> None:
    """Raise ``ValueError`` for a description that is too large to be compiled safely."""
    rules = (params.grammar or "").count(":")  # each rule has one or more
    patterns = 0
    schema = params.json_schema
    if isinstance(schema, str):
        schema = json.loads(schema)
    waiting: list[Any] = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            rules += "$ref" in value
            keys = value.get("patternProperties")
            patterns += len(keys) if isinstance(keys, dict) else 0
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    if rules > _MOST_RULES:
        raise ValueError(f"it has {rules} rules or references, and may have {_MOST_RULES}")
    if patterns > _MOST_PATTERNS:
        raise ValueError(f"it has {patterns} patternProperties, and may have {_MOST_PATTERNS}")


def _grammar_of(params: StructuredOutputsParams) -> str:
    """Return the grammar as llguidance's own description."""
    from llguidance import LLMatcher, grammar_from

    found: str
    if params.json_object:
        found = LLMatcher.grammar_from_json_schema({"type": "object"})
    elif params.json_schema is not None:
        schema = params.json_schema
        found = LLMatcher.grammar_from_json_schema(schema)
    elif params.regex is not None:
        found = LLMatcher.grammar_from_regex(params.regex)
    elif params.choice is not None:
        choices = (json.dumps(each, ensure_ascii=False) for each in params.choice)
        found = LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
    else:
        found = grammar_from("grammar", params.grammar or "")
    return found
