"""Python's garbage collector, paused where many objects are made and none are garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc(pauses: bool = True) -> Iterator[None]:
    """Collect no garbage in the block: each pass would walk all objects of it and free nothing."""
    was_enabled = pauses and gc.isenabled()
    if not was_enabled:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            gc.freeze()  # enabling begins with a pass over all new objects, but for this
            gc.unfreeze()
        gc.enable()
