"""Structured output: the tokens that a grammar allows next, by llguidance.

A mask is computed from the tokens that were read before, while the device may still compute the
logits that it is for. Grammars are checked in another process and compiled in a thread, both within
limits, so that a stranger's description neither delays a step nor ends the process.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from vllm_module.base.messages import describe_error, install
from vllm_module.runtime.limited_process import LimitedProcess, LimitError
from vllm_module.runtime.sampling_params import StructuredOutputsParams
from vllm_module.runtime.text.tokenizer import Tokenizer

SECONDS = 5.0  # limit for one check; the largest schemas of a program take a tenth of a second
NBYTES = 512 << 20
# Seconds of work for one token, after which a grammar is given up; most take a millisecond.
_SLOW_IN_CHECK, _SLOW = 0.1, 0.25
_END = "<|the end of the output|>"
# Less than llguidance's own: work for one expression, and states of 1 to 2 kB each.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
_MOST_CACHED = 32  # grammars, of 30 MB at most, as far as was measured
_MOST_TEXT = 1 << 20  # characters of their descriptions together


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
        begin = time.thread_time()
        self._take(output)
        bits = bytearray(self._matcher.compute_bitmask())
        if self.error is None and self._matcher.is_error():
            self._fail(self._matcher.get_error())
        if self.error is None and time.thread_time() - begin > _SLOW:
            self._fail(f"one token takes more than {_SLOW:g} s of work")
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
            self._fail(self._matcher.get_error())

    def _fail(self, reason: str) -> None:
        self.error = f"structured_outputs: {reason.partition(chr(10))[0]}"


class Grammars:
    """Compiles what requests ask for, for the tokens of one tokenizer; threads may share it.

    A grammar that was asked for before is not compiled again.

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
        self._tokens: Any = None
        self._first = b""  # the tokenizer, for the process
        self._lock = threading.Lock()  # held while a grammar is compiled
        self._cached: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._changing = threading.Lock()  # held while it is read or changed
        script = Path(__file__).with_name("grammar_script.py")
        self._process = LimitedProcess(script, SECONDS, NBYTES, lambda: self._first)
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    def prepare(self) -> None:
        """Read the tokenizer, if there is one that can be used.

        llguidance takes a second for 150,000 tokens, in which no other thread runs.
        """
        with suppress(ImportError, ValueError), self._lock:
            self._read_tokens()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar that ``params`` describe, at its beginning.

        Raises ``ValueError`` if it cannot be followed, or without a tokenizer, ``ImportError``
        without llguidance, and ``RuntimeError`` once this is closed.
        """
        description = _description(params)
        found = self._find(description)
        if found is None:
            with self._lock:
                found = self._find(description)
                if found is None:
                    found = self._compile(*description)
                    self._keep(description, found)
        return found

    def submit(self, params: StructuredOutputsParams) -> Future[Grammar]:
        """Return the future result of :meth:`compile` in a thread; a known grammar is there."""
        found = self._find(_description(params))
        if found is not None:
            future: Future[Grammar] = Future()
            future.set_result(found)
            return future
        with self._changing:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(1, "grammars")
        return self._threads.submit(self.compile, params)

    def close(self) -> None:
        """End the process and the thread; what they compile is refused."""
        self._closed = True
        self._process.close()
        with self._changing:
            if self._threads is not None:
                self._threads.shutdown(wait=False)

    def _find(self, description: tuple[str, str]) -> Grammar | None:
        with self._changing:
            if description in self._cached:
                self._cached.move_to_end(description)
            return self._cached.get(description)

    def _keep(self, description: tuple[str, str], grammar: Grammar) -> None:
        with self._changing:
            self._cached[description] = grammar
            while len(self._cached) > _MOST_CACHED or (
                sum(len(text) for _, text in self._cached) > _MOST_TEXT
            ):
                self._cached.popitem(last=False)

    def _compile(self, kind: str, text: str) -> Grammar:
        self._read_tokens()
        import llguidance

        request = {"kind": kind, "text": text, "limits": _LIMITS, "slow": _SLOW_IN_CHECK}
        try:
            if self._closed:
                raise LimitError
            answer = self._process.ask(json.dumps(request))
        except LimitError as error:
            if self._closed:
                raise RuntimeError("the engine was closed") from None
            answer = {"error": f"compiling it {error}"}
        if "error" not in answer:
            limits = llguidance.LLParserLimits(**_LIMITS)
            matcher = llguidance.LLMatcher(
                self._tokens, answer["grammar"], log_level=0, limits=limits
            )
            matcher.compute_bitmask()  # copies have what this finds
            if not matcher.is_error():
                return Grammar(matcher)
            answer = {"error": matcher.get_error()}
        raise ValueError(f"structured_outputs cannot be followed: {answer['error']}")

    def _read_tokens(self) -> None:
        """Read the tokenizer once, for this process and the other one."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise ImportError(
                f"structured_outputs needs llguidance: {install('structured-outputs')}"
            ) from None
        if self._tokens is None:
            text, size, ends = self._tokenizer_of_process()
            try:
                self._tokens = LLTokenizer(text, n_vocab=size, eos_token=ends)
            except ValueError as error:
                raise ValueError(
                    f"structured_outputs do not work with this tokenizer: {describe_error(error)}"
                ) from None
            numbers = " ".join(map(str, (size, *ends)))
            self._first = f"{numbers}\t{text}".encode()

    def _tokenizer_of_process(self) -> tuple[str, int, list[int]]:
        """Return the tokenizer as JSON in one line, its size and its end tokens, one at least."""
        from tokenizers import Tokenizer as FastTokenizer

        if self._tokenizer is None:
            raise ValueError("structured_outputs need a tokenizer, and the checkpoint has none")
        text, size, ends = self._tokenizer.to_str(), self._vocab_size, self._stop_token_ids
        if not ends:  # the library needs one: it gets a token that no text has
            extended = FastTokenizer.from_str(text)
            extended.add_special_tokens([_END])
            text, end = extended.to_str(), int(extended.token_to_id(_END) or 0)
            ends, size = [end], max(size, end + 1)
        return text, size, ends


def _description(params: StructuredOutputsParams) -> tuple[str, str]:
    """Return the kind of a grammar and its text. Raises ``ValueError`` if it is no text."""
    schema = params.json_schema
    if params.json_object:
        return "json", '{"type": "object"}'
    if isinstance(schema, str):
        return "json", schema
    if schema is not None:
        try:
            return "json", json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            reason = describe_error(error)
            raise ValueError(f"structured_outputs cannot be followed: {reason}") from None
    if params.regex is not None:
        return "regex", params.regex
    if params.choice is not None:
        choices = (json.dumps(each, ensure_ascii=False) for each in params.choice)
        return "lark", f"start: {' | '.join(choices)}"
    return "grammar", params.grammar or ""
