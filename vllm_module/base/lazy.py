"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a ``__getattr__`` and a ``__dir__`` for a package (PEP 562).

    ``homes`` maps the package's names to the modules they are imported from at first use. The
    package declares the same names for type checkers.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - a package's, as PEP 562 names it
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*vars(sys.modules[package]), *homes})

    return __getattr__, __dir__
