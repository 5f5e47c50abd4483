"""One piece of a job: said when it begins, and its result or how it failed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from gpu.worker import Emit


def attempt(emit: Emit, what: Mapping[str, Any], work: Callable[[], Mapping[str, Any]]) -> bool:
    """Emit what ``work`` returns beside ``what``; return whether it did not raise."""
    emit(begin=what)
    try:
        emit(**what, **work())
    except Exception as problem:  # whatever it is, the other pieces are done
        emit(**what, failed=f"{type(problem).__name__}: {problem}"[:500])
        if "CUDA error" in str(problem):
            sys.exit(3)  # this process cannot use the device any more: another one goes on
        return False
    return True
