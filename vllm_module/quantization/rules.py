"""Rules that give layers a scheme, by the names that a checkpoint has for them."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from vllm_module.base.messages import shorten
from vllm_module.errors import CheckpointFormatError, UnsupportedModelError
from vllm_module.quantization.method import QuantizeMethod
from vllm_module.quantization.scheme import EVERY_LAYER, Scheme

Rule = tuple[str, Scheme | QuantizeMethod | None]

_LONGEST = 1000  # characters of a pattern
# Four repetitions in a name of about 70 characters can be placed in a million ways.
_WAYS_TO_REPEAT = 32
_MOST_WAYS = 8 * _WAYS_TO_REPEAT**4
# A character, a set of characters, or what is not one; {} and {x} are characters.
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", re.DOTALL)
_REPEATS = ("*", "+", "{")


@dataclass(frozen=True)
class Rules:
    """Pairs of target and scheme (``None``: not quantized); the first that matches a layer counts.

    A method stands for a format that has only one scheme.

    A target is one of:

    - a name, or consecutive components of one: it matches that module and everything below it;
    - ``=`` and a name: it matches that layer alone;
    - ``re:`` and a regular expression, which has to match the beginning of a name;
    - ``Linear``: it matches every layer that can be quantized.

    Attributes:
        demanded: the targets that the user wrote; each must have an effect.
        kv_scales: what the checkpoint calls the scales for keys and for values, relative to the
            module that has the attention layer; ``None`` if it has none.

    """

    rules: tuple[Rule, ...]
    demanded: tuple[str, ...] = ()
    kv_scales: tuple[str, str] | None = None

    def rule_of(self, name: str, fused: str = "", spellings: Iterable[str] = ()) -> Rule:
        """Return the rule for the layer that a checkpoint calls ``name``.

        By its aliases it may also call it one of ``spellings``. ``fused`` is the path of the layer
        that has it as a slot, if there is one. A target may name that layer instead, but a pattern
        may not: patterns are written for the checkpoint's names, and ``.*v_proj`` would match
        ``qkv_proj``.
        """
        for target, scheme in self.rules:
            by_path = fused and not target.startswith(("re:", "="))
            if matches(target, name) or (by_path and matches(target, fused)):
                return target, scheme
            if any(matches(target, each) for each in spellings):
                return target, scheme
        return "", None

    def joined(self, slots: Mapping[str, Scheme | QuantizeMethod | None]) -> QuantizeMethod | None:
        """Return the method of a fused layer whose slots have different ones, if there is one."""
        return None

    def about(self, names: Sequence[str], fused: str) -> Rules:
        """Return the rules without those that match none of the layer's ``names``, nor ``fused``.

        A layer of many experts has many names, and a checkpoint may have a rule for each layer.
        """
        known = {*names, fused}
        joined = "\n".join(f".{name}." for name in known)

        def may_match(target: str) -> bool:
            if target.startswith("="):
                return target[1:] in known
            return target == EVERY_LAYER or target.startswith("re:") or f".{target}." in joined

        return replace(self, rules=tuple(rule for rule in self.rules if may_match(rule[0])))


def matches(target: str, name: str) -> bool:
    """Tell whether ``target`` matches the layer ``name``."""
    if target.startswith("="):
        return target[1:] == name
    if target.startswith("re:"):
        return _compiled(target.removeprefix("re:")).match(name) is not None
    return target == EVERY_LAYER or f".{target}." in f".{name}."


@cache  # re keeps 512 patterns, and a checkpoint may have one for each layer
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def checked_target(target: str) -> str:
    """Return ``target``, or raise if it is a pattern that is invalid or slow to match.

    Patterns come from files, and Python's matcher can take exponential time.
    """
    if target.startswith("re:"):
        pattern = target.removeprefix("re:")
        if len(pattern) > _LONGEST:
            raise UnsupportedModelError(
                f"{shorten(target)} has {len(pattern)} characters: expected a pattern of at most "
                f"{_LONGEST}"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                compiled = re.compile(pattern)
        except (re.error, RecursionError, OverflowError, Warning) as error:
            raise CheckpointFormatError(
                f"{shorten(target)} is not a valid regular expression: {error}"
            ) from None
        # A comment, or a space where spaces do not count, may be between a group and its * or +.
        hidden = compiled.flags & re.VERBOSE or re.search(r"(?<!\\)\(\?(#|[a-zA-Z-]*x)", pattern)
        if hidden or _most_ways(pattern) > _MOST_WAYS:
            raise UnsupportedModelError(
                f"{shorten(target)} could take forever to match: expected at most 4 of * + {{, few "
                "alternatives and optional parts beside them, and no repeated group, comment or "
                "verbose mode"
            )
    return target


def _most_ways(pattern: str) -> float:
    """Return in how many ways a valid pattern may match a name, at most.

    Parts that follow each other multiply; alternatives add up. A repeated group has no limit.
    """
    groups: list[tuple[float, float]] = []  # that are open: ways so far, of the last alternative
    ways, last = 0.0, 1.0
    previous = ""
    for token in _TOKEN.findall(pattern):
        if token == "(":
            groups.append((ways, last))
            ways, last = 0.0, 1.0
        elif token == ")":
            inner = ways + last
            ways, last = groups.pop()
            last *= inner
        elif token == "|":
            ways, last = ways + last, 1.0
        elif token == "?" and previous != "(":
            last *= 1 if previous[:1] in _REPEATS else 2
        elif token[:1] in _REPEATS:
            last *= math.inf if previous == ")" else _WAYS_TO_REPEAT
        previous = token
    return ways + last
