"""Methods of a caller's own class on the ranks of an engine."""

from __future__ import annotations

import importlib
from typing import Any

from vllm_module.base.messages import describe_error, shorten
from vllm_module.runtime.ranks.worker import Worker


def worker_class(base: type[Worker], extension: type | str | None) -> type[Worker]:
    """Return a class of workers: ``base``, with the methods of ``extension``.

    Args:
        extension: a class, or its qualified name: ``"package.module.Class"``. Its ``__init__`` is
            not called. ``None`` or ``""`` for none.

    Raises ``ValueError`` for a name that leads to no class, or a class with a name that workers
    have themselves.

    """
    if extension is None or extension == "":
        return base
    cls = _class_at(extension) if isinstance(extension, str) else extension
    own = {name for each in cls.__mro__[:-1] for name in vars(each)}
    own = {name for name in own if not (name.startswith("__") and name.endswith("__"))}

    def refuse(taken: set[str]) -> None:
        if taken:
            raise ValueError(
                f"worker_extension_cls {cls.__module__}.{cls.__qualname__} has "
                f"{', '.join(sorted(taken))}, which workers have themselves: choose other names"
            )

    refuse({name for name in own if hasattr(base, name)})

    def init(self: Worker, *arguments: Any) -> None:
        base.__init__(self, *arguments)
        refuse(own & vars(self).keys())

    return type("Worker", (base, cls), {"__init__": init})


def _class_at(name: str) -> type:
    """Import the class with a qualified name."""
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"worker_extension_cls {shorten(name)} leads to no class, expected "
            f"'package.module.Class': {describe_error(error)}"
        ) from None
    if not isinstance(found, type):
        raise ValueError(f"worker_extension_cls {shorten(name)} should be a class, got {found!r}")
    return found
