"""Run scenarios of the files beside this one: each rank is a process, forked from this one.

``scenarios.py DIRECTORY NAMES...`` runs a few scenarios at once, by default all of them. A name
that ends with ``.py`` is a file of scenarios, taken instead of the four usual ones. Each rank
writes what it returned or raised, and when, to ``DIRECTORY/<scenario>/rank<R>.json``. Prints how
long after what happened to a rank the last of the others named it.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported once, for all forks. (vllm_module.runtime would send what is logged nowhere.)
import vllm_module.cli.app
import vllm_module.cli.commands.load
import vllm_module.models.llama
import vllm_module.runtime.llm  # noqa: F401

support = runpy.run_path(str(Path(__file__).parents[1] / "support.py"))
AT_ONCE = 6  # some of them only wait
LIMIT = 300.0  # seconds after which a rank counts as hanging


def ends_as_program(directory: Path, rank: int) -> bool:
    """Return whether Python ends in this rank, which may neither hang nor abort meanwhile.

    It writes to the pages that forks share, for a quarter of a second in each: other ranks end at
    once. One of the first two is tried where something happened to one of them, and both with
    ``AT_LENGTH``.
    """
    tried = range(2) if "AT_LENGTH" in os.environ else [len(directory.name) % 2]
    return rank in tried and any((directory / f"event.{each}").exists() for each in range(2))


def run_rank(directory: Path, rank: int, scenario: Any) -> None:
    """Run one rank of ``scenario`` and write what it returned or raised."""
    note: dict[str, Any] = {}
    try:
        note["returned"] = scenario(directory, rank)
    except BaseException as error:
        note["raised"] = type(error).__name__
        note["message"] = str(error)
        note["ranks"] = list(getattr(error, "ranks", ()))
        if ends_as_program(directory, rank):
            raise  # and end as a crash would, without destroying the group
        traceback.print_exc()
    finally:
        note["at"] = time.time()
        (directory / f"rank{rank}.json").write_text(json.dumps(note))
    if "raised" in note:
        code = 1
    else:
        code = note["returned"].get("code", 0) if isinstance(note["returned"], dict) else 0
        if dist.is_initialized():
            dist.destroy_process_group()
    if ends_as_program(directory, rank):
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Running:
    """The processes of a scenario."""

    def __init__(self, directory: Path, size: int) -> None:
        directory.mkdir()
        self.directory = directory
        self.size = size
        self.start = time.time()
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int | str] = {}
        self.port = support["free_port"]()

    def fork(self) -> int | None:
        """Start the ranks; return in each of them its number, and ``None`` here."""
        parent = os.getpid()
        for rank in range(self.size):
            pid = os.fork()
            if pid == 0:
                support["end_with"](parent)
                os.environ |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(self.size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(self.port),
                }
                log = os.open(self.directory / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
                os.dup2(log, 1)
                os.dup2(log, 2)
                return rank
            self.pids[rank] = pid
        return None

    def has_ended(self) -> bool:
        """Record the exit codes of ranks that have ended; return whether all have."""
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
                elif time.time() - self.start > LIMIT:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    self.codes[rank] = "hung"
        if len(self.codes) < self.size:
            return False
        (self.directory / "codes.json").write_text(json.dumps(self.codes))
        events = {path.suffix: float(path.read_text()) for path in self.directory.glob("event.*")}
        notes = {
            rank: json.loads(path.read_text())
            for rank in self.pids
            if (path := self.directory / f"rank{rank}.json").exists() and f".{rank}" not in events
        }
        named = [note["at"] for note in notes.values() if note.get("raised") == "RankError"]
        if events and named:
            sys.stdout.write(f"{max(named) - max(events.values()):6.2f} s  {self.directory.name}\n")
        return True


def main(directory: Path, names: list[str]) -> None:
    scenarios: dict[str, tuple[int, Any]] = {}
    files = [name for name in names if name.endswith(".py")]
    usual = ("working", "loading", "commands", "engines")
    for file in files or [f"{name}_together.py" for name in usual]:
        module = runpy.run_path(str(Path(__file__).with_name(file)))
        scenarios |= module["SCENARIOS"]
        module.get("prepare", lambda _: None)(directory)
    gc.collect()
    gc.freeze()  # what is shared by the forks is neither walked nor copied when they end
    # Those of the last files take longest, so they begin first.
    waiting = [name for name in names if name not in files] or list(reversed(scenarios))
    running: list[Running] = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            size, scenario = scenarios[name]
            running.append(Running(directory / name, size))
            rank = running[-1].fork()
            if rank is not None:
                run_rank(directory / name, rank, scenario)
                return
        running = [each for each in running if not each.has_ended()]
        time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
