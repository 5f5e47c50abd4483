"""Processes of a dry run: forked from one that has imported torch, Triton and transformers."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TextIO

_context = multiprocessing.get_context("forkserver")


def prepare(environment: Mapping[str, str]) -> None:
    """Set the environment of the processes to come, before the first of them."""
    os.environ.update(environment, OMP_NUM_THREADS="1")
    _context.set_forkserver_preload(["gpu.preloaded"])


class Forked:
    """A process that works on a job, with what of ``subprocess.Popen`` is needed here.

    Its environment is that of :func:`prepare`.
    """

    def __init__(self, command: Sequence[str], _: Mapping[str, str] | None) -> None:
        reading, writing = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_work, args=(writing, command[-2:]))
        self._process.start()
        writing.close()
        self.stdout: TextIO = os.fdopen(os.dup(reading.fileno()))
        reading.close()
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(["a forked process"], timeout or 0.0)
        return self._process.exitcode


def _work(writing: Connection, arguments: Sequence[str]) -> None:
    """Work on a job as ``python -m gpu.worker`` does, with a pipe as standard output."""
    os.setsid()
    os.dup2(writing.fileno(), 1)
    writing.close()
    sys.argv = ["gpu.worker", *arguments]
    from gpu.worker import main  # in the new process alone

    main()
