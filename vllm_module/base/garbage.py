"""Pausing Python's garbage collector while many objects are made and none are garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
        if gc.get_freeze_count() == 0:
            gc.freeze()  # else enabling would begin with a pass over all new objects
            gc.unfreeze()
        gc.enable()
