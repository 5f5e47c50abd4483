"""What tests of several rooms share.

Pytest's importlib mode has no imports between test files: take it with ``runpy.run_path``.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

LIMIT = 600.0  # seconds after which a wait fails; no test depends on its length


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Return once ``holds()`` is true; fail, naming ``what`` did not happen, after ``LIMIT``."""
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, f"did not happen within {LIMIT:g} s: {what}"
        time.sleep(0.01)


def fill_once(base: Path, name: str, fill: Callable[[Path], object]) -> Path:
    """Return the directory ``name`` that ``fill`` has written to; pytest's workers share it.

    ``base`` is the worker's temporary directory, ``tmp_path_factory.getbasetemp()``.
    """
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    done = directory.with_name(f"{name}.done")
    with directory.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when its holder ends, however that happens
        if not done.exists():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            fill(directory)
            done.touch()
    return directory


def free_port() -> int:
    """Return a port below the system's own range, from which any connection could take it."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def torchrun_options(size: int, host: int, hosts: int, port: int) -> list[str]:
    """Return torchrun's options for those of ``size`` ranks that run on host ``host``."""
    options = {
        "nnodes": hosts,
        "node-rank": host,
        "nproc-per-node": size // hosts,
        "master-addr": "127.0.0.1",
        "master-port": port,
        "monitor-interval": 0.1,
    }
    return [f"--{name}={value}" for name, value in options.items()]


def end_with(parent: int) -> None:
    """End this process when its parent has ended, however that happened."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def fork_ranks(
    size: int,
    work: Callable[[int], object],
    *,
    port: int,
    address: str = "127.0.0.1",
    ranks: Sequence[int] | None = None,
) -> list[int]:
    """Call ``work(rank)`` in a fork of this process for each rank, and return the process ids.

    The forks can initialize a process group of ``size``. ``ranks`` are all of it by default.
    They end when this process does.
    """
    parent, pids = os.getpid(), []
    with warnings.catch_warnings():
        # From 3.12 on Python warns of forks beside threads; torch has some that do nothing yet.
        warnings.filterwarnings("ignore", "This process", DeprecationWarning)
        for rank in range(size) if ranks is None else ranks:
            pid = os.fork()
            if pid:
                pids.append(pid)
                continue
            code = 1
            try:
                end_with(parent)
                os.environ |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(port),
                }
                work(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
    return pids


def exit_codes(pids: Sequence[int]) -> list[int]:
    """Wait until these forks have ended; kill those that have not after ``LIMIT``."""
    codes: dict[int, int] = {}

    def have_ended() -> bool:
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        return len(codes) == len(pids)

    try:
        wait_until(have_ended, "all ranks end")
    finally:
        for pid in set(pids) - codes.keys():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes[pid] for pid in pids]


def as_program(script: str, *arguments: str) -> None:
    """Run ``script`` in this fork as Python would; the fork ends when its parent has ended."""
    end_with(os.getppid())
    # The process that this is a fork of may have been started while an engine blocked the signal.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def torchrun(
    size: int, script: Path, directory: Path, *, hosts: int = 1, log: Path | None = None
) -> list[int]:
    """Run ``script directory`` in ``size`` processes, which are forks of torchrun's agents.

    Each of ``hosts`` is an agent on this machine. Agents are forks of the process that the ranks of
    engines come from: it has imported PyTorch, and has no threads. What they and their ranks print
    is written to ``log``. Returns the agents' exit codes, which are 0 where there is no ``log``.
    """
    context, port = multiprocessing.get_context("forkserver"), free_port()
    agents = []
    for host in range(hosts):
        given = {
            "AGENT": (torchrun_options(size, host, hosts, port), str(script), str(directory)),
            "LOG": log and str(log),
        }
        process = context.Process(target=runpy.run_path, args=(__file__, given, "agent"))
        process.start()
        agents.append(process)
    try:
        for agent in agents:
            agent.join(LIMIT)
        codes = [agent.exitcode for agent in agents]
        assert log or codes == [0] * hosts
        return codes
    finally:
        for agent in agents:
            agent.kill()  # its ranks end with it


def start_program(
    script: Path,
    *arguments: object,
    log: Path,
    out: Path | None = None,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
) -> BaseProcess:
    """Start ``script`` in a fork of the process that ranks of engines come from.

    That process has imported PyTorch, and has no threads. What the script and its own forks print
    is written to ``log``, and standard output to ``out`` if it is given. They end as forks do, and
    not as Python: a script that has to is started by ``subprocess``. ``environment`` is added to
    that of this process.
    """
    context = multiprocessing.get_context("forkserver")
    given = {
        "PROGRAM": (str(script), *map(str, arguments)),
        "LOG": str(log),
        "OUT": out and str(out),
        "ENVIRONMENT": {**os.environ, **(environment or {})},
        "FOLDER": folder or Path.cwd(),
    }
    process = context.Process(target=runpy.run_path, args=(__file__, given, "program"))
    process.start()
    return process


def start_command(*arguments: object, **options: Any) -> BaseProcess:
    """Start ``vllm-module`` with ``arguments`` as ``start_program`` does a script."""
    spec = importlib.util.find_spec("vllm_module.cli.__main__")
    assert spec is not None
    assert spec.origin is not None
    return start_program(Path(spec.origin), *arguments, **options)


def run_program(
    script: Path, *arguments: object, log: Path, limit: float = LIMIT, **options: Any
) -> int:
    """Run ``script`` as ``start_program`` does, and return the exit code."""
    process = start_program(script, *arguments, log=log, **options)
    try:
        process.join(limit)
        assert process.exitcode is not None, f"{script} has not ended within {limit:g} s"
    finally:
        process.kill()
        process.join()
    return process.exitcode


@contextlib.contextmanager
def imported(path: Path, source: str) -> Iterator[ModuleType]:
    """Write a module that processes started in the block can import, too; yield it."""
    path.write_text(source)
    before = list(sys.path)
    sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module(path.stem)
    finally:
        sys.path[:] = before
        sys.modules.pop(path.stem, None)


if __name__ in ("agent", "program") and globals()["LOG"]:
    opened = os.open(globals()["LOG"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(opened, number)
    if globals().get("OUT"):
        os.dup2(os.open(globals()["OUT"], os.O_CREAT | os.O_WRONLY), 1)

if __name__ == "agent":
    from torch.distributed.launcher import api
    from torch.distributed.run import config_from_args, parse_args

    options, script, directory = globals()["AGENT"]  # which torchrun() gives
    end_with(os.getppid())
    config, _, _ = config_from_args(parse_args([*options, script]))
    config.start_method = "fork"
    api.elastic_launch(config, as_program)(script, directory)

if __name__ == "program":
    os.environ.clear()
    os.environ.update(globals()["ENVIRONMENT"])
    os.chdir(globals()["FOLDER"])
    as_program(*globals()["PROGRAM"])
