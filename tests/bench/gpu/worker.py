"""The process of one job: ``python -m gpu.worker JOB ARGUMENTS``, the arguments as JSON.

Results go to standard output, a line of JSON each, and whatever libraries print to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

Emit = Callable[..., None]

JOBS = {
    "kernel checks": "gpu.kernel_checks",
    "engine checks": "gpu.engine_checks",
    "engine": "gpu.engine",
    "transformers": "gpu.transformers_peer",
    "loading": "gpu.loading",
    "kernels": "gpu.kernels",
    "candidates": "gpu.candidates",
}


def results_only() -> Emit:
    """Return what prints a result, and send everything else to standard error."""
    out = os.fdopen(os.dup(1), "w")  # not inherited: processes of this one cannot hold it open
    os.dup2(2, 1)

    def emit(**result: Any) -> None:
        out.write(json.dumps(result) + "\n")
        out.flush()

    return emit


def main() -> None:
    emit = results_only()
    job, given = sys.argv[1], json.loads(sys.argv[2])
    signal.alarm(int(given.pop("seconds")) + 5)  # ends this process if its parent was killed
    dry = given.pop("dry")
    if not dry:
        from gpu.device import Gpu as Device
    else:
        from gpu.device import Cpu as Device  # type: ignore[assignment] # one of two classes
    importlib.import_module(JOBS[job]).main(emit, Device(), **given)


if __name__ == "__main__":
    main()
