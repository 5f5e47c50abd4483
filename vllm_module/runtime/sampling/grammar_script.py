"""The script that checks descriptions of grammars, with which strangers may crash llguidance.

It runs in a separate process (``limited_script.py``) and imports nothing of this package.
"""

import random
import threading
import time
from typing import Any

STACK = 1 << 20  # bytes; threads of the server have more, so what fits here fits there
STEPS = 16  # tokens that are tried
TOKENS: list[Any] = []


def prepare(first: str) -> None:
    """Read the tokenizer, after the size of the vocabulary and the end tokens."""
    from llguidance import LLTokenizer

    numbers, _, tokenizer = first.partition("\t")
    size, *ends = map(int, numbers.split())
    TOKENS.append(LLTokenizer(tokenizer, n_vocab=size, eos_token=ends))
    threading.stack_size(STACK)


def grammar_of(kind: str, text: str) -> str:
    """Return a grammar as llguidance's own description."""
    from llguidance import LLMatcher, grammar_from

    found: str
    if kind == "json":
        found = LLMatcher.grammar_from_json_schema(text)
    elif kind == "regex":
        found = LLMatcher.grammar_from_regex(text)
    elif kind == "lark":
        found = LLMatcher.grammar_from_lark(text)
    else:
        found = grammar_from("grammar", text)
    return found


def is_slow(matcher: Any, seconds: float) -> bool:
    """Tell whether one of some tokens, chosen at random, takes more work than ``seconds``."""
    choose = random.Random(0)
    for _ in range(STEPS):
        begin = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if time.thread_time() - begin > seconds:
            return True
        first = choose.randrange(mask.bit_length() or 1)
        rest = mask >> first << first or mask  # the next token from there that is allowed
        if not rest or matcher.is_stopped():
            return False
        begin = time.thread_time()
        matcher.consume_token((rest & -rest).bit_length() - 1)
        if time.thread_time() - begin > seconds:
            return True
    return False


def checked(request: dict[str, Any]) -> dict[str, Any]:
    """Return a grammar that can be compiled and followed, or why it cannot."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = grammar_of(request["kind"], request["text"])
        limits = LLParserLimits(**request["limits"])
        matcher = LLMatcher(TOKENS[0], grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()
        if not matcher.is_error() and is_slow(matcher.deep_copy(), request["slow"]):
            return {"error": "it takes too much work for a token"}
    except MemoryError:
        return {"memory": True}
    except Exception as error:
        return {"error": str(error)[:2000] or type(error).__name__}
    return {"error": matcher.get_error()[:2000]} if matcher.is_error() else {"grammar": grammar}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Check a grammar in a thread, which has a small stack."""
    found: dict[str, Any] = {"error": "its check failed"}
    thread = threading.Thread(target=lambda: found.update(checked(request)))
    thread.start()
    thread.join()
    if "grammar" in found:
        del found["error"]
    return found
