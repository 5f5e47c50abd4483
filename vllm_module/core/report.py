"""The report of a load: what it did with every name, as an object and as one message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from vllm_module.base.messages import printable, printable_name
from vllm_module.errors import (
    DuplicateWeightError,
    MisshapenWeightError,
    MissingWeightError,
    UnexpectedWeightError,
    WeightLoadError,
)


class Problem(NamedTuple):
    """Why one tensor was refused: its full name, what was expected and what came."""

    name: str
    detail: str


@dataclass
class LoadReport:
    """The result of one load for every name of the checkpoint and of the model.

    Attributes:
        loaded: by parameter or buffer, the checkpoint names that fill it.
        skipped: by checkpoint name, the reason of the skip rule that covers it.
        missing, unexpected, duplicated, misshapen: the problems, for which a load is refused.
        advice: what else the refusal says.
        digests: of what this rank has read, if the load was to keep them.

    """

    loaded: dict[str, list[str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    missing: list[Problem] = field(default_factory=list)
    unexpected: list[Problem] = field(default_factory=list)
    duplicated: list[Problem] = field(default_factory=list)
    misshapen: list[Problem] = field(default_factory=list)
    advice: str = ""
    digests: Any = None  # a ModelDigest, whose module needs this one

    _KINDS = (
        ("missing", MissingWeightError, "the checkpoint lacks them"),
        ("unexpected", UnexpectedWeightError, "the model has no place for them"),
        ("duplicated", DuplicateWeightError, "a slot would be filled twice"),
        ("misshapen", MisshapenWeightError, "shape or dtype differs from what the model expects"),
    )

    @property
    def ok(self) -> bool:
        """Whether nothing is missing, unexpected, duplicated or misshapen."""
        return not any(getattr(self, kind) for kind, _, _ in self._KINDS)

    def raise_if_refused(self, model: str, *, touched: bool, folder: Path | None = None) -> None:
        """Raise one error that names every problem, if there is one.

        It is a ``WeightLoadError``, or its subclass where all problems are of one kind. ``model``,
        ``touched`` (whether anything was written to the model) and the checkpoint's ``folder`` are
        for the message.
        """
        errors = [error for kind, error, _ in self._KINDS if getattr(self, kind)]
        if errors:
            error = errors[0] if len(errors) == 1 else WeightLoadError
            where = (
                "this checkpoint" if folder is None else f"the checkpoint in {printable(folder)}"
            )
            end = f"{outcome(touched=touched)} {_ADVICE}"
            packed = {name.rpartition(".")[2] for name, _ in self.unexpected} & _PACKED
            if packed:
                end += f" {packed.pop()} is packed: does config.json lack its quantization_config?"
            if self.advice:
                end += f" {self.advice}"
            raise error(f"{model} refuses {where}.\n{self}\n{end}", report=self)

    def __str__(self) -> str:
        names = [name for sources in self.loaded.values() for name in sources]
        verb = "loaded" if self.ok else "matched"
        lines = [f"{verb} {len(names)} tensors to {len(self.loaded)} parameters"]
        for kind, _, meaning in self._KINDS:
            problems: list[Problem] = getattr(self, kind)
            if problems:
                lines.append(f"{kind} {len(problems)}: {meaning}")
                lines += _folded_lines(problems)
        by_rule = defaultdict(list)
        for name, rule in self.skipped.items():
            by_rule[rule].append(name)
        for rule, skipped in by_rule.items():  # last: of a pipeline stage they are most names
            lines.append(f"skipped {len(skipped)}: {rule}")
            lines += [f"  {printable_name(name)}" for name in fold(skipped)]
        return "\n".join(lines)


def outcome(*, touched: bool) -> str:
    """Say what a refused or broken load left of the model."""
    if touched:
        return "Part of it was written: the model refuses to run until a load succeeds."
    return "Nothing was written to the model."


_ADVICE = (
    "Check that config.json and the weights belong together and that every file arrived whole."
)
_PACKED = {"qweight", "weight_packed"}  # what formats call quantized weights, and no others
_MOST_LINES = 40  # of one kind in a message; the report object has every name


def _folded_lines(problems: list[Problem]) -> list[str]:
    by_detail = defaultdict(list)
    for name, detail in problems:
        by_detail[detail].append(name)
    lines = [
        f"  {printable_name(folded)}{': ' if detail else ''}{detail}"
        for detail, names in by_detail.items()
        for folded in fold(names)
    ]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  … and {len(lines) - _MOST_LINES} more lines"]
    return lines


_MOST_NUMBERS = 8  # that are folded in a name; a name in a file may have hundreds


def fold(names: Iterable[str]) -> list[str]:
    """Write names that differ in numbers only as one.

    ``layers.0.w``, ``layers.1.w`` and ``layers.3.w`` become ``layers.{0..1,3}.w``.
    """
    rows = {index: name.split(".") for index, name in enumerate(dict.fromkeys(names))}
    with_number: dict[int, list[int]] = defaultdict(list)  # rows, by the place of a number
    for index, row in rows.items():
        places = (place for place, component in enumerate(row) if _is_index(component))
        for place in islice(places, _MOST_NUMBERS):
            with_number[place].append(index)
    for place in sorted(with_number):
        alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for index in with_number[place]:
            if index in rows:
                row = rows[index]
                alike[(*row[:place], *row[place + 1 :])].append(index)
        for first, *others in alike.values():
            numbers = [int(rows[first][place]), *(int(rows.pop(each)[place]) for each in others)]
            rows[first][place] = _span(numbers)
    return [".".join(row) for row in rows.values()]


def _is_index(component: str) -> bool:
    return component.isdecimal() and len(component) < 10 and str(int(component)) == component


def _span(numbers: list[int]) -> str:
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        values = [value for _, value in run]
        runs.append(f"{values[0]}..{values[-1]}" if len(values) > 1 else str(values[0]))
    return runs[0] if len(numbers) == 1 else "{" + ",".join(runs) + "}"
