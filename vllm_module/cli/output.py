"""What commands print: plain lines that no pipe cuts, tables, sizes and JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar

import torch
from rich.console import Console

from vllm_module.errors import ModelNotReadyError, WeightLoadError

T = TypeVar("T")


class CommandError(Exception):
    """What a command found wrong; the message is shown as it is and the exit code is 1."""


# What the user or the machine has to mend; anything else is a bug, and shows its traceback.
REFUSALS = (CommandError, WeightLoadError, ModelNotReadyError, OSError, torch.OutOfMemoryError)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would end the process as if the command had failed


def console(*, stderr: bool = False) -> Console:
    """Return a console that colours only terminals and never cuts or wraps a line."""
    return _Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def printable(text: str) -> str:
    """Show control characters as their escapes: names come from files that others wrote."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def print_table(
    out: Console, header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()
) -> None:
    """Print columns two spaces apart, those of the indices in ``right`` flush right."""
    cells = [list(header), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for index, row in enumerate(cells):
        line = "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        out.print(line.rstrip(), style="bold" if index == 0 else None)


def print_json(value: object) -> None:
    """Print one JSON object to standard output."""
    print(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    return vars(value) if is_dataclass(value) else str(value).removeprefix("torch.")


def size(nbytes: float) -> str:
    """Write bytes for people, in decimal units."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
    return f"{nbytes / 1000:.3g} TB"


def shape(sizes: Sequence[int]) -> str:
    """Write a shape."""
    return f"[{', '.join(map(str, sizes))}]"


def plural(count: int, noun: str) -> str:
    """Write a count with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sorting key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def grouped(
    items: Iterable[T], name: Callable[[T], str], alike: Callable[[T], Hashable]
) -> list[list[T]]:
    """Group items whose names differ in numbers only (layers, experts) and that are ``alike``."""
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        pattern = tuple("#" if part.isdecimal() else part for part in name(item).split("."))
        groups[pattern, alike(item)].append(item)
    return list(groups.values())
