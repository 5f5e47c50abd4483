"""Peak memory of this process and of a CUDA device."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


def reset_peaks(device: torch.device) -> int:
    """Begin to measure anew and return the resident bytes now.

    Where the system cannot forget a peak (not Linux), the process's whole life counts.
    """
    with suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return _status("VmRSS") or peak_resident()


def peak_resident() -> int:
    """Return the most bytes resident since peaks were reset."""
    if peak := _status("VmHWM"):
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_cuda(device: torch.device) -> int | None:
    """Return the most bytes allocated on ``device`` since peaks were reset; None if not CUDA."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _status(field: str) -> int:
    with suppress(OSError):
        for line in (_PROCESS / "status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0
