"""Ranks that Ray places on the nodes of its cluster: it starts and ends them, and no more."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import torch

from vllm_module.base.messages import describe_error, install, printable
from vllm_module.base.waiting import until
from vllm_module.errors import RankError
from vllm_module.runtime.ranks.processes import waited_for

_ANSWER = 1.0  # seconds in which an actor that is not stopped answers
_GRACE = 0.3  # seconds in which Ray tells of other actors that end for the same reason
_PLACING = 60.0  # seconds in which others have to free resources that the cluster has
_KILLED = 10.0  # seconds to wait until Ray has killed actors; a host may have been lost
# A host's own settings come first. Ray shows nobody these, which it would if they were settings of
# its own ("runtime_env"): one is a token.
_PASSED_ON = "HF_", "VLLM_MODULE_REPLICA_TOKEN", "OMP_NUM_THREADS"


class RayActors:
    """Ranks 1 to ``size - 1``, each an actor of Ray; this process is rank 0. See ``Processes``.

    They are in a placement group with a bundle for each rank, the first of them on this host. If
    this process is an actor in a placement group, it is that group, and this process has bundle 0.

    Args:
        size: number of ranks, this process included.
        device: ``cpu``, or ``cuda`` for a GPU for each rank.
        release: function called in another thread when all have ended, unless :meth:`end` ended
            them.

    Attributes:
        ended: event that is set when all actors have ended.
        codes: exit codes, by rank, of those that ended by themselves; negative for those that died.
        host: address of this host in the cluster.
        device: this process's device.
        most_on_a_host: largest number of ranks on a host.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: its cluster cannot be reached.
        ValueError: the cluster is too small, or this host is no part of it.
        TimeoutError: others did not free their resources in time.

    """

    def __init__(self, size: int, device: torch.device, release: Callable[[], None]) -> None:
        self.ended = threading.Event()
        self.codes: dict[int, int] = {}
        self._release = release
        self._asked = False
        self._noted = threading.Event()  # that an actor has ended, or that all shall
        self._actors: dict[int, Any] = {}
        self._work: dict[int, Future[int]] = {}  # of actors that were given their work
        self._places: dict[int, str] = {}
        self._group: Any = None
        self._ray = _connect()
        try:
            self._place(size, device)
        except BaseException:
            self._kill()
            raise
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def start(self, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Let each actor call ``work(rank, *arguments)``.

        Raises ``RankError`` if one of them ends before that.
        """
        passed = {name: os.environ[name] for name in os.environ if name.startswith(_PASSED_ON)}
        kind = self._ray.remote(_actor_class())
        for rank, bundle in enumerate(self._bundles, 1):
            options = {**self._in(bundle), "max_concurrency": 2}  # it answers while it works
            self._actors[rank] = kind.options(**options).remote(passed)
        refs = [actor.begin.remote(work) for actor in self._actors.values()]
        until(lambda: not self._ray.wait(refs, num_returns=len(refs), timeout=0.1)[1])
        for rank, ref in enumerate(refs, 1):
            try:
                pid, host = self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                raise RankError(
                    f"rank {rank} ended before it began: {_reason(error)}", [rank]
                ) from None
            self._places[rank] = f" (pid {pid} on {host})"
        for rank, actor in self._actors.items():
            self._work[rank] = actor.run.remote(work, (rank, *arguments)).future()
            self._work[rank].add_done_callback(lambda _: self._noted.set())

    def name(self, rank: int) -> str:
        """Return a rank's number with its process id and host."""
        return f"rank {rank}{self._places.get(rank, '')}"

    def hanging(self) -> dict[int, str]:
        """Return the ranks that others wait for, with a description of their state."""
        asked = {actor.position.remote(): rank for rank, actor in self._actors.items()}
        answers: dict[int, tuple[bool, str]] = {}
        for ref in self._ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER)[0]:
            with suppress(self._ray.exceptions.RayError):
                answers[asked[ref]] = self._ray.get(ref)
        return waited_for(self._actors, answers)

    def describe(self, rank: int) -> str:
        """Return a description of how ``rank``, one of ``codes``, ended."""
        error = self._work[rank].exception()
        how = f"died: {_reason(error)}" if error else f"ended with exit code {self.codes[rank]}"
        return f"{self.name(rank)} {how}"

    def end(self) -> None:
        """Kill all actors and free what was reserved for them."""
        self._asked = True
        self._noted.set()
        self.ended.wait(2 * _KILLED)

    def _place(self, size: int, device: torch.device) -> None:
        """Reserve what the ranks need, and choose a bundle for each."""
        from ray.util import get_current_placement_group, get_node_ip_address
        from ray.util.placement_group import placement_group, placement_group_table

        context = self._ray.get_runtime_context()
        self.host = get_node_ip_address()
        key = "GPU" if device.type == "cuda" else "CPU"
        needs = dict.fromkeys(("CPU", key), 1)
        wanted = f"{size} ranks need " + " and ".join(f"{size} {name}" for name in needs)
        have, mine = self._ray.cluster_resources(), {}
        if context.worker.mode == self._ray.WORKER_MODE:  # this process is an actor or a task
            mine = context.get_assigned_resources()
        at_host = f"node:{self.host}"
        if at_host not in have:
            raise ValueError(
                f"this process, at {self.host}, is rank 0, and Ray's cluster has no such node: run "
                "it on a node, for example by `ray job submit`"
            )
        group = get_current_placement_group()
        if group is None:
            if any(have.get(name, 0) < size for name in needs):
                raise ValueError(
                    f"{wanted}, and Ray's cluster has {_listed(needs, have)} (nodes: "
                    f"{len(self._ray.nodes())}): add nodes by `ray start`, or use fewer ranks"
                )
            own = {name: 1 - mine.get(name, 0) for name in needs if mine.get(name, 0) < 1}
            bundles = [{**own, at_host: 0.001}, *[needs] * (size - 1)]
            group = self._group = placement_group(bundles, strategy="PACK")
            end = time.monotonic() + _PLACING
            while not group.wait(1):
                if time.monotonic() > end:
                    free = _listed(needs, self._ray.available_resources())
                    raise TimeoutError(
                        f"{wanted}, and for {_PLACING:g} s Ray did not find them, one of them at "
                        f"{self.host}: {free} are free of {_listed(needs, have)}"
                    )
        self._placed_in = group
        # A CPU beside a GPU is the bundle's.
        self._needs = {"num_cpus": int(key == "CPU"), "num_gpus": int(key == "GPU")}
        nodes = placement_group_table(group)["bundles_to_node_id"]
        fit = [at for at, each in enumerate(group.bundle_specs) if at and each.get(key, 0) >= 1]
        if len(fit) < size - 1:
            raise ValueError(
                f"{wanted}: the placement group that this process is in has {len(fit)} bundles "
                f"with 1 {key} beside bundle 0, which is this process's; {size - 1} are needed"
            )
        # Ranks of a host are neighbours, because neighbours send each other most.
        fit.sort(key=lambda at: (nodes[at] != nodes[0], nodes[at], at))
        self._bundles = fit[: size - 1]
        self.most_on_a_host = max(Counter(nodes[at] for at in (0, *self._bundles)).values())
        self.device = device
        if device.type == "cuda":
            reserved = self._group is not None and not mine.get("GPU")
            self.device = torch.device("cuda", self._reserved_gpu() if reserved else 0)

    def _reserved_gpu(self) -> int:
        """Return the number, here, of the GPU that is reserved for this process."""
        task = self._ray.remote(self._ray.get_gpu_ids).options(**self._in(0))
        (gpu,) = self._ray.get(task.remote())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return int(gpu)
        if str(gpu) not in visible.split(","):
            raise ValueError(
                f"Ray gives this process GPU {gpu}, and its CUDA_VISIBLE_DEVICES is {visible}: "
                "leave that unset, or as it was for `ray start`"
            )
        return visible.split(",").index(str(gpu))

    def _in(self, bundle: int) -> dict[str, Any]:
        """Return the options of an actor in a bundle. Ray shows it only GPUs that are its own."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._placed_in, bundle)
        return {**self._needs, "scheduling_strategy": place}

    def _watch(self) -> None:
        """Wait for the first actor that ends, then end the others."""
        self._noted.wait()
        if not self._asked:
            time.sleep(_GRACE)
            for rank, work in list(self._work.items()):
                if work.done():  # Ray does not tell the signal that killed an actor
                    self.codes[rank] = -signal.SIGKILL if work.exception() else work.result()
        self._kill()
        if not self._asked:
            self._release()
        self.ended.set()

    def _kill(self) -> None:
        if not self._ray.is_initialized():  # at exit, Ray ends first, and its actors with it
            return
        for actor in self._actors.values():
            self._ray.kill(actor)
        wait(self._work.values(), _KILLED)
        if self._group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self._group)


def _connect() -> Any:
    """Return the module of Ray, connected to a cluster."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            f"distributed_executor_backend is 'ray', and Ray is not installed: {install('ray')}"
        ) from error
    if not ray.is_initialized():
        host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
        try:
            if port.isdigit():  # else Ray would try for minutes
                where = host.rpartition("/")[2].strip("[]"), int(port)
                socket.create_connection(where, 5).close()
            ray.init()  # of RAY_ADDRESS, or started on this host, else of this host alone
        except (OSError, ValueError, RuntimeError) as error:
            raise ConnectionError(
                f"Ray's cluster cannot be reached (RAY_ADDRESS: {os.environ.get('RAY_ADDRESS')!r}; "
                f"{describe_error(error)}): start it by `ray start --head`, or name another. "
                "Without RAY_ADDRESS, a cluster of this host alone is made"
            ) from error
    return ray


def _actor_class() -> type:
    """Return the class of a rank's actor.

    It is made in a function, so that Ray sends its code. So the environment is set before the actor
    imports torch or this package, which read it then.
    """

    class _Rank:
        def __init__(self, environment: dict[str, str]) -> None:
            for name, value in environment.items():
                if name == "OMP_NUM_THREADS" or name not in os.environ:  # Ray sets that itself
                    os.environ[name] = value
            self.thread = 0

        def begin(self, work: Callable[..., None]) -> tuple[int, str]:
            from ray.util import get_node_ip_address

            del work  # its module has been imported now
            return os.getpid(), get_node_ip_address()

        def run(self, work: Callable[..., None], arguments: tuple[Any, ...]) -> int:
            self.thread = threading.get_ident()
            try:
                work(*arguments)
            except BaseException:
                traceback.print_exc()  # Ray shows it where the driver runs
                return 1
            return 0

        def position(self) -> tuple[bool, str]:
            from vllm_module.runtime.ranks.processes import position  # not with the class

            return position(self.thread)

    return _Rank


def _listed(names: Any, resources: dict[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in names)


def _reason(error: BaseException) -> str:
    """Return an actor's own error, or what Ray says of its end, without ids and advice."""
    if isinstance(cause := getattr(error, "cause", None), BaseException):
        return describe_error(cause)
    lines = [line for line in str(error).splitlines() if line.strip() and line[0] != "\t"]
    return printable(" ".join(lines).partition(" Some common causes")[0])[:600]
