"""Regular expressions for names of modules, matched in a bounded number of steps.

``re`` tries one choice after another, so a short expression can take years: ``.?`` twenty-six times
and ``!``. Here it is only asked whether an expression fits a name. So all positions that a part can
end at are found at once, as the bits of a number, from all positions that it may start at; whether
a repeat is greedy is of no matter then. Each part is as often computed as the repeats around it go
on, and the sum is limited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from vllm_module.base.messages import printable, shorten
from vllm_module.errors import UnsupportedModelError

_MAX_LENGTH, _MAX_DEPTH, _MAX_STEPS = 10_000, 40, 20_000
_SAFE = re.compile(r"[^*+?{(]*")  # re has nothing to repeat, or to choose again, within these
_ATOM = re.compile(
    r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\(?:x..|u.{4}|U.{8}|N\{[^}]*\}|0[0-7]{0,2}|.)|.", re.DOTALL
)
_REPEAT = re.compile(r"(?:([*+?])|\{(?!\})([0-9]*)(?:(,)([0-9]*))?\})(\??)(\+?)")
_GROUP = re.compile(r"\((?:\?(?::|P<\w+>|([=!]))|(?!\?))")
_EDGES = frozenset(("^", "$", r"\b", r"\B", r"\A", r"\Z"))


class ModuleName:
    """A name that expressions are tried on, with the steps that are left for all of them.

    Attributes:
        text: the name.
        end: the bit of the position behind its last character.

    """

    def __init__(self, text: str) -> None:
        self.text, self.end = text, 1 << len(text)
        self._left = _MAX_STEPS
        self._places: dict[str | re.Pattern[str], int] = {}

    def spend(self) -> None:
        """Count a step; raise ``UnsupportedModelError`` if there were too many."""
        self._left -= 1
        if self._left < 0:
            raise UnsupportedModelError(
                f"the regular expressions of the adapter take more than {_MAX_STEPS:,} steps for "
                f"the module {printable(self.text)}: write fewer repeats within repeats, or list "
                "the modules' names"
            )

    def places(self, part: str | re.Pattern[str]) -> int:
        """Return where a word begins, or what one character or an edge fits, as bits."""
        found = self._places.get(part)
        if found is None:
            found, at = 0, -1
            if isinstance(part, str):
                while (at := self.text.find(part, at + 1)) >= 0:
                    found |= 1 << at
            else:
                for each in part.finditer(self.text):
                    found |= 1 << each.start()
            self._places[part] = found
        return found


class _Part(Protocol):
    def ends(self, name: ModuleName, starts: int) -> int:
        """Return the positions where the part can end, from any of these starts."""


class _Word(NamedTuple):
    text: str

    def ends(self, name: ModuleName, starts: int) -> int:
        return (starts & name.places(self.text)) << len(self.text)


class _Character(NamedTuple):
    fits: re.Pattern[str]

    def ends(self, name: ModuleName, starts: int) -> int:
        return (starts & name.places(self.fits)) << 1


class _Edge(NamedTuple):
    fits: re.Pattern[str]

    def ends(self, name: ModuleName, starts: int) -> int:
        return starts & name.places(self.fits)


class _Sequence(NamedTuple):
    parts: Sequence[_Part]

    def ends(self, name: ModuleName, starts: int) -> int:
        for part in self.parts:
            name.spend()
            starts = part.ends(name, starts)
            if not starts:
                break
        return starts


class _Either(NamedTuple):
    parts: Sequence[_Part]

    def ends(self, name: ModuleName, starts: int) -> int:
        found = 0
        for part in self.parts:
            found |= part.ends(name, starts)
        return found


class _Ahead(NamedTuple):
    part: _Part
    wanted: bool

    def ends(self, name: ModuleName, starts: int) -> int:
        found = 0
        for start in _bits(starts):
            found |= start if bool(self.part.ends(name, start)) == self.wanted else 0
        return found


class _Repeat(NamedTuple):
    part: _Part
    least: int
    most: int | None

    def ends(self, name: ModuleName, starts: int) -> int:
        for _ in range(self.least):
            before, starts = starts, self._once(name, starts)
            if starts in (0, before):  # so it stays
                break
        if self.most is None and isinstance(self.part, _Character):
            run = name.places(self.part.fits)  # a carry goes through to the end of each run
            return starts | (((starts & run) + run) ^ run)
        found = new = starts
        for _ in range(len(name.text) if self.most is None else self.most - self.least):
            new = self._once(name, new) & ~found
            if not new:
                break
            found |= new
        return found

    def _once(self, name: ModuleName, starts: int) -> int:
        name.spend()
        return self.part.ends(name, starts)


def _bits(number: int) -> Iterator[int]:
    while number:
        yield number & -number
        number &= number - 1


class Expression:
    """A regular expression that fits whole names, as ``re.fullmatch`` does.

    Args:
        pattern: the expression.
        behind_a_dot: it may fit the end of a name alone, behind a dot.

    Raises ``ValueError`` if it is none, is too long, or has what has no bound: references to
    groups, conditions, flags, atomic groups, and expressions that look behind.

    """

    def __init__(self, pattern: str, *, behind_a_dot: bool = False) -> None:
        if len(pattern) > _MAX_LENGTH:
            raise ValueError(f"should have at most {_MAX_LENGTH} characters, got {len(pattern)}")
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"should be a regular expression, got {shorten(pattern)}: {error}"
            ) from None
        whole = rf"(?:.*\.)?(?:{pattern})" if behind_a_dot else pattern
        self._part: _Part | None = None
        if _SAFE.fullmatch(pattern):
            self._compiled = re.compile(whole)
        else:
            self._part = _Parser(whole).either(0)

    def fits(self, name: ModuleName) -> bool:
        """Tell whether the expression fits a whole name."""
        name.spend()
        if self._part is None:
            return self._compiled.fullmatch(name.text) is not None
        return bool(self._part.ends(name, 1) & name.end)


class _Parser:
    """Reads an expression that ``re`` accepts."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def either(self, depth: int) -> _Part:
        """Read up to the end of a group, or of all."""
        if depth > _MAX_DEPTH:
            raise self._refused(f"with at most {_MAX_DEPTH} groups within each other")
        ways = [self._sequence(depth)]
        while self._pattern.startswith("|", self._at):
            self._at += 1
            ways.append(self._sequence(depth))
        return _Either(ways) if len(ways) > 1 else ways[0]

    def _sequence(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            part = self._repeated(self._one(depth))
            if parts and isinstance(part, _Word) and isinstance(parts[-1], _Word):
                parts[-1] = _Word(parts[-1].text + part.text)
            else:
                parts.append(part)
        return _Sequence(parts)

    def _one(self, depth: int) -> _Part:
        if self._pattern[self._at] == "(":
            group = _GROUP.match(self._pattern, self._at)
            if group is None:
                raise self._refused("without flags, conditions, and groups that look behind")
            self._at = group.end()
            inner = self.either(depth + 1)
            self._at += 1  # the end of the group
            return _Ahead(inner, group[1] == "=") if group[1] else inner
        found = _ATOM.match(self._pattern, self._at)
        assert found is not None, "re has accepted it"
        self._at, atom = found.end(), found[0]
        if atom in _EDGES:
            return _Edge(re.compile(atom))
        if re.fullmatch(r"\\[1-9]", atom):
            raise self._refused("without references to groups")
        if len(atom) == 1 and atom != ".":
            return _Word(atom)
        if re.fullmatch(r"\\[^a-zA-Z0-9]", atom):
            return _Word(atom[1])
        return _Character(re.compile(atom))

    def _repeated(self, part: _Part) -> _Part:
        found = _REPEAT.match(self._pattern, self._at)
        if found is None:
            return part
        sign, least, comma, most, _, possessive = found.groups()
        if possessive:
            raise self._refused("without possessive repeats")
        self._at = found.end()
        if sign:
            bounds: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        else:
            fewest = int(least or 0)
            bounds = fewest, (int(most) if most else None) if comma else fewest
        if isinstance(part, _Word) and bounds[1] is None:
            part = _Character(re.compile(re.escape(part.text)))
        return _Repeat(part, *bounds)

    def _refused(self, what: str) -> ValueError:
        return ValueError(
            f"should be a regular expression that ends soon, {what}, got {shorten(self._pattern)}"
        )
