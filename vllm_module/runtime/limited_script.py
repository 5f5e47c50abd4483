"""The loop of a process with limits, which answers requests by the functions of another script.

It runs in a separate process and imports nothing of this package. The first line is for the
script's ``prepare``, if it has one. The others are requests, and each gets an answer, in JSON.
"""

import json
import resource
import runpy
import signal
import sys
from contextlib import suppress
from pathlib import Path


def address_space() -> int:
    """Return the size of this process in bytes; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except OSError:  # macOS, which has no such limit either
        return 0
    return int(pages) * resource.getpagesize()


def main(script: str, seconds: float, nbytes: int) -> None:
    """Answer requests, each within ``seconds``, in ``nbytes`` more than the process has before."""
    functions = runpy.run_path(script)
    first = sys.stdin.readline()
    if "prepare" in functions:
        functions["prepare"](first.rstrip("\n"))
    answer = functions["answer"]
    most = address_space() + nbytes
    limits = (resource.RLIMIT_AS, most), (resource.RLIMIT_DATA, most), (resource.RLIMIT_CORE, 0)
    for limit, value in limits:
        with suppress(OSError, ValueError):  # macOS lacks some limits
            resource.setrlimit(limit, (value, value))
    for line in sys.stdin:
        # The signal's default action ends this process even inside one long operation.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            text = json.dumps(answer(json.loads(line)))
        except MemoryError:
            text = '{"memory": true}'
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
