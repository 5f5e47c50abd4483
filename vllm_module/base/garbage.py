"""Pausing Python's garbage collector while many objects are made and none are garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 100_000  # objects; a pass over so many takes a few milliseconds


@contextmanager
def paused_gc(pauses: bool = True) -> Iterator[None]:
    """Pause garbage collection in the block, where a pass would visit all objects and free none."""
    was_enabled = pauses and gc.isenabled()
    if not was_enabled:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # Enabling begins with a pass over all new objects, unless they are moved to the old ones.
        # Counting frozen objects looks at each of them, so few new ones are not worth it.
        if gc.get_count()[0] > _MANY and gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()
        gc.enable()
