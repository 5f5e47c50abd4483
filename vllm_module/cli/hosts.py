"""A command on several hosts: each starts its ranks by torch's launcher, once all hosts are there.

The hosts meet in torch's store, which the launcher then uses as well. Before it starts anything,
each host says there who it is, and looks whether the others were started alike.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from vllm_module.base.messages import describe_error, printable
from vllm_module.cli.host_watch import LINGER, HostWatch, beat_of
from vllm_module.cli.interfaces import interface_to
from vllm_module.cli.options import Options, RankOptions
from vllm_module.cli.output import CommandError, announce, plural
from vllm_module.cli.ranks import under_torchrun

_log = logging.getLogger("torch.distributed.elastic")
_LAUNCHER = "VLLM_MODULE_LAUNCHER"  # in the environment of ranks: the process that started them
_POLL = 0.1  # seconds
_LATER = 60.0  # seconds
_TELL = 2.0  # seconds in which the others read what is wrong
_PROBLEM = "problem"
_NAMES = "names"
# Without the current folder among those that modules are imported from, as "-m" would have it.
START = """
import sys
sys.path[:] = [each for each in sys.path if each]
from vllm_module.cli import main
sys.exit(main())
"""


@dataclass(frozen=True)
class HostOptions(Options):
    """The hosts that the ranks are spread over, by vLLM's names."""

    nnodes: Annotated[
        int,
        typer.Option(
            min=1,
            max=4096,
            metavar="N",
            help="Hosts, on each of which the same command is started; each has as many ranks.",
        ),
    ] = 1
    node_rank: Annotated[
        int, typer.Option(min=0, metavar="K", help="This host's number; host 0 prints or answers.")
    ] = 0
    master_addr: Annotated[
        str, typer.Option(metavar="HOST", help="The address or name of host 0.")
    ] = "127.0.0.1"
    master_port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="P", help="A free port of host 0.")
    ] = 29501

    def start(
        self, arguments: Sequence[str], ranks: RankOptions, timeout: float, stages: int = 1
    ) -> None:
        """Run the command with these ``arguments`` on this host's ranks, and exit with its code.

        Does nothing on one host, and on the ranks themselves. Raises a usage error for numbers that
        do not fit, and ``CommandError`` if the hosts do not meet within ``timeout`` seconds, or
        were not started alike.
        """
        if _LAUNCHER in os.environ:
            _end_with_launcher()
            return
        if self.node_rank >= self.nnodes:
            raise typer.BadParameter(
                f"there are {plural(self.nnodes, 'host')} (--nnodes), so it is at most "
                f"{self.nnodes - 1}, got {self.node_rank}",
                param_hint="--node-rank",
            )
        if self.nnodes == 1:
            return
        if under_torchrun():
            raise typer.BadParameter(
                "torchrun has started this process, and knows the hosts: leave it out",
                param_hint="--nnodes",
            )
        world = (ranks.tp or 1) * stages
        if world % self.nnodes:
            raise typer.BadParameter(
                f"{plural(world, 'rank')} (--tp times --pp) cannot be spread evenly over "
                f"{self.nnodes} hosts",
                param_hint="--nnodes",
            )
        facts = {"--nnodes": self.nnodes, "ranks": world, "command": arguments[0]}
        store = self._store(timeout)
        others = _meet(store, self, facts | _versions(), timeout)
        watch, code = HostWatch(store, self.node_rank, others), 1
        try:
            code = _launch(self, arguments, world // self.nnodes, timeout, watch)
        finally:
            watch.end(code)
        raise typer.Exit(1 if watch.found else code)

    @property
    def address(self) -> str:
        """Where the hosts meet."""
        return f"{printable(self.master_addr)}:{self.master_port}"

    def _store(self, timeout: float) -> Any:
        """Return the store of host 0, which is opened there."""
        from datetime import timedelta

        import torch.distributed as dist

        from vllm_module.base.waiting import at_most, interruptibly

        first = self.node_rank == 0
        if not first:
            announce(f"host {self.node_rank} of {self.nnodes} asks for host 0 at {self.address}")
        stores: Any = dist
        call = partial(
            stores.TCPStore,
            self.master_addr,
            self.master_port,
            is_master=first,
            # With a limit of its own, it prints stacks, and may try for twice as long.
            timeout=timedelta(seconds=timeout + _LATER),
            wait_for_workers=False,
            multi_tenant=True,  # the launcher's store is the same
        )
        try:
            with at_most(timeout):
                return interruptibly(call)
        except (RuntimeError, ValueError) as error:
            advice = (
                "is it free, has another host --node-rank 0, and does --master-addr lead here?"
                if first
                else "has the command been started there with --node-rank 0, is --master-addr its "
                "address, and does a firewall let the port through?"
            )
            what = "cannot be opened" if first else f"did not answer within {timeout:g} s"
            raise CommandError(
                f"{self.address}, where the hosts meet (--master-addr, --master-port), {what}: "
                f"{advice} ({describe_error(error)})"
            ) from error


def _versions() -> dict[str, str]:
    import torch

    from vllm_module.base.version import __version__

    return {"vllm-module": __version__, "torch": torch.__version__.partition("+")[0]}


def _meet(store: Any, hosts: HostOptions, facts: dict[str, Any], timeout: float) -> dict[int, str]:
    """Return the names of the other hosts when all are in the store, and alike.

    Raises ``CommandError`` on each host that has come.
    """
    # Containers may share names, and numbers of processes.
    me = json.dumps([f"{platform.node()}, process {os.getpid()}", facts, secrets.token_hex(8)])
    number, end = hosts.node_rank, time.monotonic() + timeout
    try:
        if (other := store.compare_set(f"host {number}", "", me).decode()) != me:
            _refuse(store, f"two hosts have --node-rank {number}: {_named(me)}; {_named(other)}")
        _wait_for(store, hosts, ["host 0"], end)
        theirs = store.get("host 0").decode()
        for name, there in json.loads(theirs)[1].items():
            if facts.get(name) != there:
                _refuse(
                    store,
                    f"host {number} ({_named(me)}) has {name} {facts.get(name)}, and host 0 "
                    f"({_named(theirs)}) has {there}: start the same on all hosts",
                )
        store.set(beat_of(number), "0")
        # Host 0 alone looks at the keys of all: what each host asks for does not grow with them.
        _wait_for(store, hosts, [beat_of(each) for each in range(hosts.nnodes)], end, _NAMES)
        if number == 0:
            texts = store.multi_get([f"host {each}" for each in range(hosts.nnodes)])
            store.set(_NAMES, json.dumps([_named(text.decode()) for text in texts]))
        names: list[str] = json.loads(store.get(_NAMES).decode())
        return {each: name for each, name in enumerate(names) if each != number}
    except CommandError:
        if number == 0:
            time.sleep(_TELL)  # the store ends with this process
        raise
    except RuntimeError as error:  # of the store
        raise CommandError(
            f"host 0 has ended: see what it printed. torch raised {describe_error(error)}"
        ) from error


def _wait_for(
    store: Any, hosts: HostOptions, keys: Sequence[str], end: float, told: str | None = None
) -> None:
    """Return when the store has the keys of these hosts; name those that are missing.

    Host 0 looks for the keys, and so does each host, unless there is one by which they are
    ``told``.
    """
    tell, first = time.monotonic() + 1, hosts.node_rank == 0 or told is None
    while not store.check([*keys] if first or told is None else [told]):
        if store.check([_PROBLEM]):
            raise CommandError(store.get(_PROBLEM).decode())
        if (now := time.monotonic()) > min(tell, end) and (first or now > end):
            missing = [key.split()[1] for key in _missing(store, keys)]
            if not missing and now > end + _TELL:
                missing = ["0"]  # all have come, and it does not say so
            who = f"host{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            if missing and now > end:
                raise CommandError(
                    f"{who} did not come to {hosts.address} within the limit (--timeout): start "
                    "the same command there, with its --node-rank"
                )
            if missing:
                announce(f"host {hosts.node_rank} of {hosts.nnodes} waits for {who}")
            tell = end
        time.sleep(_POLL)


def _missing(store: Any, keys: Sequence[str]) -> list[str]:
    """Return the keys that the store lacks; few requests find a few of many."""
    if not keys or store.check([*keys]):
        return []
    if len(keys) == 1:
        return [*keys]
    half = len(keys) // 2
    return _missing(store, keys[:half]) + _missing(store, keys[half:])


def _refuse(store: Any, problem: str) -> None:
    store.set(_PROBLEM, problem)
    raise CommandError(problem)


def _named(text: str) -> str:
    return printable(str(json.loads(text)[0]))


def _launch(
    hosts: HostOptions, arguments: Sequence[str], ranks: int, timeout: float, watch: HostWatch
) -> int:
    """Start this host's ranks by torch's launcher, and return the exit code of the command."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    _log.propagate = False  # each end of a rank would be told by its stack
    _log.addHandler(logging.NullHandler())
    # The ranks of a host share its cores, as those do that an engine starts.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ[_LAUNCHER] = str(os.getpid())
    if interface := interface_to(hosts.master_addr, hosts.master_port):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    meeting = RendezvousParameters(
        "static",
        f"{hosts.master_addr}:{hosts.master_port}",
        "vllm-module",
        hosts.nnodes,
        hosts.nnodes,
        rank=hosts.node_rank,
        timeout=max(1, int(timeout)),
    )
    spec = WorkerSpec(
        "rank",
        ranks,
        get_rendezvous_handler(meeting),
        entrypoint=sys.executable,
        args=("-c", START, *arguments),
        max_restarts=0,
        monitor_interval=_POLL,
        master_addr=hosts.master_addr,
        master_port=hosts.master_port,
    )
    agent = LocalElasticAgent(
        spec,
        DefaultLogsSpecs(os.devnull),  # by default it leaves folders behind
        exit_barrier_timeout=LINGER,
    )
    watch.ranks = lambda: agent._pcontext.pids().values() if agent._pcontext else ()
    # The watch knows which hosts will not come any more.
    agent._exit_barrier = lambda: None  # type: ignore[method-assign]
    try:
        failures = agent.run().failures
    except SignalException as error:  # which the ranks have got, too
        return 128 + int(error.sigval)
    for rank, failure in failures.items():
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise CommandError(f"rank {rank} on this host was ended by {name}")
    return max((failure.exitcode for failure in failures.values()), default=0)


def _end_with_launcher() -> None:
    """End this rank when the process that started it has ended, however that happened."""
    launcher = os.environ[_LAUNCHER]

    def watch() -> None:
        while str(os.getppid()) == launcher:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
