"""What jobs import, for the process that those of a dry run are forked from."""

from __future__ import annotations

import importlib

from gpu.parts import missing
from gpu.worker import JOBS

_lacking = missing()
for _name in JOBS.values():
    if not _lacking or _name in ("gpu.kernel_checks", "gpu.kernels", "gpu.candidates"):
        importlib.import_module(_name)

for _name in ("torch._dynamo", "pytest"):  # torch and the interpreter's casts import them later
    importlib.import_module(_name)
