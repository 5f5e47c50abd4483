"""Formatting names, values and errors for messages.

Names and values are shortened and escaped, so that text from a file cannot rewrite a terminal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from importlib import metadata
from os import PathLike, fspath, sep
from reprlib import Repr

_MOST = 200

_repr = Repr()
_repr.maxlevel = 3
_repr.maxstring = _repr.maxother = _MOST
_repr.maxlong = 40
_repr.maxdict = _repr.maxlist = 8


def shorten(value: object) -> str:
    """Return the ``repr`` of a value, shortened to about 200 characters."""
    return _cut(_repr.repr(value))


_written: dict[str, str] = {}  # folders of temporary files, with the origin of their files


def show_written(folder: PathLike[str], what: str | None) -> None:
    """Make :func:`printable` show ``what`` in place of a folder that was written for it.

    ``what`` is printable, such as a model's name; ``None`` removes the entry.
    """
    if what is None:
        _written.pop(fspath(folder), None)
    else:
        _written[fspath(folder)] = what


def printable(text: str | PathLike[str]) -> str:
    """Return a name or path with control characters and lone surrogates escaped.

    A file in a folder of :func:`show_written` is shown as the file "of" the folder's origin.
    """
    text = fspath(text)
    for folder, what in [*_written.items()]:
        if text == folder:
            return what
        if text.startswith(folder + sep):
            return f"{printable(text[len(folder) + 1 :])} of {what}"
    return text if text.isprintable() else repr(text)[1:-1]


# Parts of a library's message that may be secret: the query of a signed URL, keys, and tokens.
_SECRET = re.compile(
    r"\?\S+|(?<=//)[^/\s@]+@|(?i:signature|credential|token|key)=\S+|(?i:bearer|basic) [^\s']+"
)


def without_secrets(text: str) -> str:
    """Return a library's message without the queries of URLs, user names in them, and keys."""
    return _SECRET.sub("***", text)


def printable_name(name: str) -> str:
    """Return a name as :func:`printable` does, cut to about 200 characters."""
    return _cut(printable(name[: _MOST + 1]))


def unknown_name(name: str, known: Collection[str]) -> str:
    """Return the text for an unknown argument, with the closest known name."""
    close = difflib.get_close_matches(name[:_MOST], known, 1)
    return f"has no argument {shorten(name)}" + (f": did you mean {close[0]!r}?" if close else "")


def describe_error(error: BaseException) -> str:
    """Return an error's kind and message, cut to 12 lines and about 2000 characters."""
    try:
        text = str(error)
    except Exception as broken:
        text = f"(its message is broken: {type(broken).__name__})"
    lines = text[:2000].splitlines()
    message = "\n".join(map(printable, lines[:12]))
    if len(text) > 2000 or len(lines) > 12:
        message += " ..."
    return type(error).__name__ + (f": {message}" if message else "")


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra, and the extra's name.

    The command names those packages, because this package is in no index.
    """
    try:
        declared = metadata.requires("vllm-module") or []
    except metadata.PackageNotFoundError:  # a checkout on the path has no metadata
        declared = []
    parts = [text.partition(";") for text in declared]
    ours = (f'extra == "{extra}"', f"extra == '{extra}'")
    needed = [f"'{what.strip()}'" for what, _, when in parts if when.strip() in ours]
    packages = " ".join(needed) or f"'PATH-OF-THE-CLONE[{extra}]'"
    return f"pip install {packages} (the extra vllm-module[{extra}])"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."
