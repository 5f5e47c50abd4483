"""What commands print: text, tables, sizes, errors and JSON.

On a terminal, text and tables are folded to its width, between words. In a pipe, a line is never
cut or folded.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.cells import cell_len
from rich.console import Console

from vllm_module.base.messages import describe_error, printable
from vllm_module.cli.streams import complain
from vllm_module.errors import ModelNotReadyError, WeightLoadError

T = TypeVar("T")


class CommandError(Exception):
    """A command failed; the message is printed without a traceback and the exit code is 1."""


_OWN_ERRORS = (CommandError, WeightLoadError, ModelNotReadyError)
# Errors that the user can correct. Any other error is a bug here, and keeps its traceback.
REFUSALS = (*_OWN_ERRORS, OSError, MemoryError)
# What torch says, in a RuntimeError, where the host or a GPU has no memory left; and the dynamic
# linker, where a library does not fit.
_NO_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "can't start new thread",
    "failed to map segment",
    "annot allocate memory",
)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with the code of a command that failed


def console(*, stderr: bool = False) -> Console:
    """Return a console that uses colours on terminals only, and does not fold lines by itself."""
    return _Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that the host or a GPU has too little memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | ImportError | OSError)
        and any(text in str(error) for text in _NO_MEMORY)
    )


def is_refusal(error: BaseException) -> bool:
    """Tell whether the user can correct an error; any other is a bug here."""
    return isinstance(error, REFUSALS) or is_out_of_memory(error)


def describe_refusal(error: BaseException) -> str:
    """Return the message of an error of ours in full, or the kind and message of another."""
    if is_out_of_memory(error) and not isinstance(error, _OWN_ERRORS):
        first_line = describe_error(error).split("\n", 1)[0]
        return f"out of memory ({first_line}); free memory, or use a smaller model or more ranks"
    return str(error) if isinstance(error, _OWN_ERRORS) else describe_error(error)


def printable_lines(text: str) -> str:
    """Escape control characters except line breaks: names in files could hold any."""
    return "\n".join(map(printable, text.split("\n")))


def folded(text: str, width: int, indent: str = "  ") -> str:
    """Break the lines of ``text`` to ``width`` columns.

    Lines are broken at spaces. A word that is longer than a line is broken after dots, commas and
    slashes, and then at underscores and hyphens. A continued line begins as far to the right as its
    first line did, and ``indent`` further.
    """
    return "\n".join(row for line in text.split("\n") for row in _fold_line(line, width, indent))


def _fold_line(line: str, width: int, indent: str) -> list[str]:
    margin = line[: len(line) - len(line.lstrip(" "))] + indent
    if len(margin) > width // 2:
        margin = ""
    rows, row = [], ""
    for piece in _pieces(line, width - len(margin)):
        if row.strip() and cell_len(row + piece.rstrip(" ")) > width:
            rows.append(row.rstrip(" "))
            row = margin
        row += piece
    return [*rows, row.rstrip(" ")]


# Where a line may be broken: after each match. What is in brackets stays together.
_BREAKS = (
    re.compile(r" *(?:\[[^\]]*\]|[^ ])* *"),
    re.compile(r" *(?:\{[^ }]*\}|(?<=\d)[./](?=\d)|[^ ./,])*[./,]* *"),
    re.compile(r" *[^_-]*[_-]* *"),
    re.compile(r"."),
)


_LAST = len(_BREAKS) - 1
_SHORT = 12  # columns: a shorter cell is folded only where there is no other way


def _pieces(text: str, width: int, last: int = _LAST, level: int = 0) -> Iterator[str]:
    """Yield the pieces of ``text`` between which a line may be broken.

    A piece that is longer than ``width`` is broken by the next of ``_BREAKS``, up to the ``last``.
    """
    for piece in filter(None, _BREAKS[level].findall(text)):
        if cell_len(piece.strip(" ")) > width and level < last:
            yield from _pieces(piece, width, last, level + 1)
        else:
            yield piece


def print_text(out: Console, text: str, style: str | None = None, indent: str = "  ") -> None:
    """Print text whose names could hold control characters; see :func:`folded` for terminals."""
    text = printable_lines(text)
    out.print(folded(text, out.width, indent) if out.is_terminal else text, style=style)


def error_text(message: str) -> str:
    """Return the text that standard error shows for an error."""
    return _for_stderr(f"error: {message}")


def announce(text: str) -> None:
    """Print a line on standard error that says what a command does next."""
    complain(_for_stderr(text))


def _for_stderr(text: str) -> str:
    err, text = console(stderr=True), printable_lines(text)
    return folded(text, err.width) if err.is_terminal else text


def print_table(
    out: Console,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Collection[int] = (),
    indent: str = "",
) -> None:
    """Print columns two spaces apart; ``right`` has the indices of those with numbers.

    On a terminal that is too narrow, titles and names are folded, and numbers stay whole.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if not out.is_terminal:
        _print_lines(out, [list(header), *cells], right, indent)
        return
    room = out.width - len(indent) - 2 * (len(header) - 1)
    widths = _widths(header, cells, right, room)
    if widths is not None:
        _print_grid(out, [header], widths, right, indent, "bold")
        _print_grid(out, cells, widths, right, indent)
        return
    # The names in the first column get lines of their own.
    right = [index - 1 for index in right]
    widths = _widths(header[1:], [row[1:] for row in cells], right, room, _LAST) or []
    for row in (header, *cells):
        style = "bold" if row is header else ""
        print_text(out, f"{indent}{row[0]}", style)
        _print_grid(out, [row[1:]], widths, right, f"{indent}  ", style)


def _print_grid(
    out: Console,
    rows: Iterable[Sequence[str]],
    widths: Sequence[int],
    right: Collection[int],
    indent: str,
    style: str = "",
) -> None:
    """Print rows of cells, folded to the widths of their columns."""
    # Imported here because help and usage errors print no table.
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for index, width in enumerate(widths):
        justify: Literal["left", "right"] = "right" if index in right else "left"
        table.add_column(width=width, justify=justify, vertical="bottom" if style else "top")
    for row in rows:
        cells = zip(row, widths, table.columns, strict=True)
        table.add_row(
            *(Text(folded(c, w, "" if col.justify == "right" else "  ")) for c, w, col in cells),
            style=style,
        )
    out.print(Padding(table, (0, 0, 0, len(indent))), soft_wrap=False)


def _print_lines(
    out: Console, rows: Sequence[Sequence[str]], right: Collection[int], indent: str
) -> None:
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = indent
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_len(cell))
            line += (space + cell if index in right else cell + space) + "  "
        out.print(line.rstrip(" "))


def _widths(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int],
    room: int,
    last: int = 1,
) -> list[int] | None:
    """Return the widths of columns: what their cells take, or less if there is no room for that.

    ``None`` if names would have to be folded by more than ``_BREAKS[last]``.
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    if sum(widths) <= room:
        return widths
    for level in range(last + 1):
        least = [
            max(_longest_piece(title, 0), *map(cell_len, cells), 0)
            if index in right
            else min(width, 2 + max(_longest_piece(cell, level) for cell in (title, *cells)))
            for index, (width, (title, *cells)) in enumerate(zip(widths, columns, strict=True))
        ]
        if sum(least) <= room:
            break
    else:
        if last < _LAST:
            return None
    widths = [least[i] if i in right else width for i, width in enumerate(widths)]
    while sum(widths) > room:
        wide = [index for index, width in enumerate(widths) if width > least[index]]
        if not wide:
            break
        widths[max(wide, key=lambda index: widths[index])] -= 1
    return widths


def _longest_piece(text: str, last: int) -> int:
    if last < _LAST - 1 and cell_len(text) <= _SHORT:
        return cell_len(text)
    return max((cell_len(piece.strip(" ")) for piece in _pieces(text, 0, last)), default=0)


def print_json(value: object) -> None:
    """Print one JSON object to standard output; arrays that are iterators are never held whole."""
    for part in _json(value):
        print(part, end="")
    print()


def _json(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        separator = "{"
        for key, each in value.items():
            yield f"{separator}{_encode(key)}: "
            yield from _json(each)
            separator = ", "
        yield "}" if value else "{}"
    elif isinstance(value, list):
        separator = "["
        for each in value:
            yield separator
            yield from _json(each)
            separator = ", "
        yield "]" if value else "[]"
    elif isinstance(value, Iterator):
        separator = "["
        while batch := list(islice(value, _BATCH)):
            yield separator + _encode(batch)[1:-1]
            separator = ", "
        yield "]" if separator == ", " else "[]"
    else:
        yield _encode(value)


def _plain(value: Any) -> Any:
    return vars(value) if is_dataclass(value) else str(value).removeprefix("torch.")


_encode = json.JSONEncoder(default=_plain).encode
_BATCH = 1000  # values of an iterator that are encoded at once


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say that ``path`` was written, or name it in an error of the system's (a full disk)."""
    try:
        yield
        announce(f"wrote {path}")
    except OSError as error:
        if isinstance(error, FileExistsError) and error.strerror is None:  # ours, with advice
            raise CommandError(str(error)) from error
        # A folder is written under another name beside it, until it is whole.
        place = os.path.abspath(os.path.expanduser(path))
        beside = os.path.join(os.path.dirname(place), f".{os.path.basename(place)}.")
        is_its = error.filename in (None, str(path)) or str(error.filename).startswith(beside)
        if error.strerror is None or not is_its:
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; free space, or name a place on another disk" if full else ""
        raise CommandError(
            f"{printable(path)} cannot be written: {error.strerror}{advice}"
        ) from error


def size(nbytes: float) -> str:
    """Write a number of bytes in decimal units, with three digits."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
    return f"{nbytes / 1000:.3g} TB"


def shape(sizes: Sequence[int]) -> str:
    """Write a shape as ``[2, 3]``."""
    return f"[{', '.join(map(str, sizes))}]"


def plural(count: int, noun: str) -> str:
    """Write a count and its noun, with an s unless there is one."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # between two dots


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def grouped(
    items: Iterable[T], name: Callable[[T], str], key: Callable[[T], Hashable]
) -> list[list[T]]:
    """Group items of equal ``key`` whose names differ only in numbers (layers, experts)."""
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        groups[_NUMBER.sub("#", name(item)), key(item)].append(item)
    return list(groups.values())


@contextmanager
def working(text: str, *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Show on standard error what the block does, by a live line on a terminal.

    The block gets a function that changes the text. Where standard error is no terminal, nothing
    is shown, or with ``lines`` the first text.
    """
    err = console(stderr=True)
    if err.is_terminal:
        from rich.live import Live
        from rich.spinner import Spinner

        spinner = Spinner("dots", text)
        # More refreshes would slow the block. Output to the same terminal goes above the line.
        with Live(
            spinner,
            console=err,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        ):
            yield lambda text: spinner.update(text=text)
        return
    if lines:
        announce(text)
    yield lambda _: None
