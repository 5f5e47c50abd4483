"""The ranks of an engine: joining a process group, exchanging messages, and ending."""

from __future__ import annotations

import logging
import os
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vllm_module.base import waiting
from vllm_module.base.messages import describe_error
from vllm_module.base.process_groups import rank_and_size, sends_between_cpus
from vllm_module.base.waiting import WaitLimitError, at_most, finish, uninterrupted
from vllm_module.config import EngineConfig
from vllm_module.distributed import ProcessGroup, StagePipe, surrounding_group
from vllm_module.errors import RankError
from vllm_module.runtime.devices import own_device
from vllm_module.runtime.ranks.beats import SILENCE, Beats
from vllm_module.runtime.ranks.connections import (
    Connections,
    connect,
    cut_off,
    meeting_place,
    processes_of_world,
    store_of_world,
    under_torchrun,
    world,
)
from vllm_module.runtime.ranks.processes import Processes, end_sharing, share_cores
from vllm_module.runtime.ranks.ray_actors import RayActors

_log = logging.getLogger(__name__)

_FRAME = 1 << 15  # bytes of a message's first frame, enough for most steps
_LAST_WORDS = 1 << 12  # bytes of a failing rank's message
_TAG = 1 << 18  # tag of a failing rank's message
_EVIDENCE = 2.0  # seconds to wait for a failing rank's message
_GRACE = 1.0  # seconds to wait for the exit code of a process that has ended
_RANKS_PER_CPU = 8  # limit on ranks per CPU core; tests start many
_LEAST_LIMIT = 64  # number of ranks always allowed on a CPU, however few cores it has
_END = 10.0  # seconds in which the other started processes end after one of them has


class Ranks:
    """The processes of an engine: rank 0 sends messages, and the others carry them out.

    With ``connections`` this process is one of the ranks. Otherwise they are those of a surrounding
    ``tensor_parallel(group=...)``, or processes of the world (:func:`processes_of_world`), or this
    process is rank 0 and starts the others: they call ``work(rank, size, address, threads,
    *arguments())``, which calls :func:`connect`. No engine uses torch's default group.

    Attributes:
        rank, size, stages: this rank, the number of ranks of all stages, and that of stages.
        group: the tensor-parallel group of torch.distributed; ``None`` for one rank.
        control: a group of all ranks that carries messages between CPUs and has no timeout.
        pipe: the ranks with this rank's number in each pipeline stage; ``None`` without stages.
        others: groups with ranks of other engines, which end with these groups.
        device: this rank's device; for CUDA, with its index.
        parted: True if this rank has failed, and has told the others.
        aborted: True if collectives on devices were aborted, so that their results are wrong.
        is_led: True if rank 0 sends messages; False if every rank is called alike.
        beats: whether ranks that a launcher has started are there; else ``None``.
        processes: those that this process started, itself or by Ray; ``None`` if it started none.

    Raises:
        ValueError: there are fewer devices than ranks, far more ranks than CPUs, or the number of
            ranks is not that of the group or the world.
        RankError: a rank that this process started has ended.

    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        work: Callable[..., None],
        arguments: Callable[[], tuple[Any, ...]],
        connections: Connections | None = None,
    ) -> None:
        self.rank, self.size, self.device = 0, 1, device
        self.aborted = False
        self.is_led = True
        self.group: dist.ProcessGroup | None = None
        self.control: dist.ProcessGroup | None = None
        self.pipe: dist.ProcessGroup | None = None
        self.stages = config.pipeline_parallel_size
        self.processes: Processes | RayActors | None = None
        self.beats: Beats | None = None
        self._words: dict[int, tuple[bytearray, dist.Work]] = {}
        self._owns_groups = self.parted = False
        self.others: list[dist.ProcessGroup] = []
        self._shares_cores = 0  # number of ranks that this process has started, while they run
        try:
            if connections is None:
                self._meet(config, work, arguments)
            else:
                self._join(*connections)
        except BaseException as error:
            raised = self._hung(error) if isinstance(error, WaitLimitError) else error
            self.close()
            if raised is error:
                raise
            raise raised from error

    def _meet(
        self,
        config: EngineConfig,
        work: Callable[..., None],
        arguments: Callable[[], tuple[Any, ...]],
    ) -> None:
        """Join the ranks that are processes already, or start them."""
        backend, size = config.distributed_executor_backend, config.tensor_parallel_size
        stages = config.pipeline_parallel_size
        asked = "tensor_parallel_size" in config.model_fields_set
        present = surrounding_group() if backend is None else None
        local = int(os.environ.get("LOCAL_RANK", str(world()[0])))
        if present is not None and present.size > 1:
            if not isinstance(present, ProcessGroup) or present.group is None:
                raise ValueError(
                    f"an engine's ranks are processes, but rank {present.rank} of {present.size} "
                    "is simulated: leave tensor_parallel(rank=..., size=...) out"
                )
            if config.data_parallel_size > 1:
                raise ValueError(
                    "an engine of data_parallel_size starts its ranks itself: make it outside of "
                    "the block of tensor_parallel"
                )
            if stages > 1:
                raise ValueError(
                    f"pipeline_parallel_size is {stages}, and the engine is made in a group of "
                    "tensor_parallel, which is one stage: make it outside of the block"
                )
            if asked and size != present.size:
                raise ValueError(
                    f"tensor_parallel_size is {size}, and the process group has {present.size} "
                    f"ranks: leave it out, or start {size}"
                )
            if not sends_between_cpus(present.group):
                raise ValueError(
                    f"the process group ({dist.get_backend_config(present.group)}) cannot carry "
                    "messages between CPUs: make it with "
                    "torch.distributed.new_group(backend='cpu:gloo,cuda:nccl')"
                )
            self.device = own_device(self.device, local)
            # Creating another group would need all processes of the world.
            self._join(present.group, present.group)
        elif present is None and (ranks := processes_of_world(config)) is not None:
            if backend is None:
                exits = (
                    ", and exit then, because they have no process group of torch.distributed. "
                    "Rank 0 cannot make one as long as they do: call init_process_group before"
                )
                _log.log(
                    logging.WARNING if not asked and local == 0 else logging.INFO,
                    "the %d processes that were launched are the ranks of this engine, and this is "
                    "rank %d: rank 0 returns from the constructor, and the others run the model in "
                    "theirs until rank 0 closes the engine%s. tensor_parallel_size=1 or "
                    "distributed_executor_backend asks for other engines",
                    len(ranks),
                    world()[0] - ranks.start,
                    "" if dist.is_initialized() else exits,
                )
            self.device = own_device(self.device, local)
            self.is_led, self._owns_groups = backend is None, True
            store, place = store_of_world(ranks), (world()[0] - ranks.start, len(ranks))
            self._join(*connect(store, *place, self.device, stages))
            if self.is_led:
                self.beats = Beats(store, *place, min(SILENCE, config.step_timeout))
        elif size * stages > 1:
            self._start(size * stages, work, arguments, on_ray=backend == "ray")
        else:
            engines = config.data_parallel_size > 1
            launched = backend == "external_launcher" or (engines and under_torchrun())
            self.device = own_device(self.device, local if launched else None)

    def tell(self, message: object) -> None:
        """Pickle ``message`` and send it to all other ranks, which receive it by :meth:`hear`."""
        data = pickle.dumps(message)
        self._bytes[:8] = len(data).to_bytes(8, "little")
        head = data[: _FRAME - 8]
        self._bytes[8 : 8 + len(head)] = head
        self._broadcast(self._frame)
        if len(head) < len(data):
            self._broadcast(torch.frombuffer(bytearray(data[len(head) :]), dtype=torch.uint8))

    def hear(self) -> Any:
        """Return rank 0's next message, after waiting for it."""
        self._broadcast(self._frame)
        nbytes = int.from_bytes(self._bytes[:8], "little")
        data = self._bytes[8 : 8 + nbytes]
        if len(data) < nbytes:
            rest = bytearray(nbytes - len(data))
            self._broadcast(torch.frombuffer(rest, dtype=torch.uint8))
            data += rest
        return pickle.loads(data)

    def _broadcast(self, memory: torch.Tensor) -> None:
        finish(dist.broadcast(memory, group=self.control, group_src=0, async_op=True))

    @property
    def ended(self) -> bool:
        """True if processes that were started here have ended."""
        return self.processes is not None and self.processes.ended.is_set()

    def part(self, error: BaseException) -> BaseException:
        """Send ``error`` to rank 0 and return the error to raise in its place.

        If another rank failed, it is a ``RankError`` that names that rank.
        """
        self.parted = True
        if self.rank:
            self._send_last_words(error)
        if isinstance(error, WaitLimitError) or isinstance(error.__cause__, WaitLimitError):
            return self._hung(error)
        if not is_of_others(error):
            return error
        codes: list[str] = []
        named = isinstance(error, RankError) and bool(error.ranks)
        if self.processes is not None and self.processes.ended.wait(_GRACE if named else _END):
            killed = [rank for rank, code in self.processes.codes.items() if code < 0]
            if killed:
                return RankError("; ".join(map(self.processes.describe, killed)), killed)
            codes = [*map(self.processes.describe, self.processes.codes)]
        messages = {} if self.rank or self.size == 1 else self._last_words()
        for sign in "!?":
            if words := {rank: text[1:] for rank, text in messages.items() if text[0] == sign}:
                lines = (f"rank {rank}: {text}" for rank, text in words.items())
                return RankError("\n".join(lines), words)
            if isinstance(error, RankError):
                return error
        others = [1 - self.rank] if self.size == 2 else self.beats.suspects() if self.beats else []
        name = f"rank {' or '.join(map(str, others))}" if others else "another rank"
        how = "; ".join(codes) or f"{name} ended, or hangs"
        how += f": see what it printed. torch raised {describe_error(error)}"
        return RankError(how, others)

    def _hung(self, error: BaseException) -> RankError:
        """Return an error that names the ranks that did not answer in time."""
        if self.processes is None:
            others = [rank for rank in range(self.size) if rank != self.rank]
            if self.beats is not None:
                others = self.beats.suspects() or others
            names = ", ".join(map(str, others))
            one = "rank" if len(others) == 1 else "one of the ranks"
            return RankError(f"{one} {names} hangs, or has been stopped: {error}", others)
        hanging = self.processes.hanging()
        lines = (f"{self.processes.name(rank)} hangs: {how}" for rank, how in hanging.items())
        return RankError("\n".join((*lines, str(error))), hanging)

    def say_who_hangs(self) -> None:
        """Log the ranks that this one waits for without an answer, and their state."""
        if self.processes is None:
            _log.warning("waiting for another rank, without an answer for %g s", waiting.SILENCE)
            return
        for rank, how in self.processes.hanging().items():
            _log.warning("waiting for %s: %s", self.processes.name(rank), how)

    def close(self) -> None:
        """End the processes that were started here, or tell joined ranks to stop following."""
        with uninterrupted():
            self._close()

    def _close(self) -> None:
        if self.parted or self.processes is not None:
            self._abort()  # else shutting the group down would wait for the others
        if self.parted:
            cut_off(*self.others)
        if self.processes is not None:
            self.processes.end()
        elif self.control is not None and self.is_led and not self.rank and not self.parted:
            try:
                with at_most(_EVIDENCE):
                    self.tell(("close", ()))
            except RuntimeError:
                cut_off(self.control, self.group, self.pipe)
        elif self.parted:
            cut_off(self.control, self.group, self.pipe)
        self._words = {}
        if self.beats is not None:
            self.beats.end()
        if self._shares_cores:
            end_sharing(self._shares_cores)
        owned = (self.control, self.group, self.pipe) if self._owns_groups else ()
        for group in (*owned, *self.others):
            if group is not None:
                group.shutdown()
        self.processes, self.control, self.others = None, None, []
        self._owns_groups, self._shares_cores = False, 0

    def _abort(self) -> None:
        """Abort collectives on devices, which would wait for a rank that has ended or hangs.

        On the host, gloo has timeouts.
        """
        owned = (self.group, self.pipe) if self._owns_groups else ()
        for group in (*owned, *self.others):
            if group is not None and self.device.type == "cuda":
                self.aborted = True  # set before any thread sees that a collective is over
                group.abort()

    def _start(
        self,
        size: int,
        work: Callable[..., None],
        arguments: Callable[[], tuple[Any, ...]],
        on_ray: bool,
    ) -> None:
        if on_ray:
            self.processes = RayActors(size, self.device, self._abort)
        elif self.device.type == "cuda":
            if str(self.device) != "cuda":
                raise ValueError(
                    f"{_sizes(size, self.stages)}, and {self.device} is one device: use 'cuda'"
                )
            own_device(self.device, size - 1)
        elif size > (most := max(_LEAST_LIMIT, _RANKS_PER_CPU * (os.cpu_count() or 1))):
            raise ValueError(
                f"{_sizes(size, self.stages)}, and each rank is a process: with "
                f"{os.cpu_count()} CPUs, this machine starts at most {most}. Lower "
                "tensor_parallel_size"
            )
        actors, host, here = self.processes, "127.0.0.1", size
        if isinstance(actors, RayActors):
            self.device, host, here = actors.device, actors.host, actors.most_on_a_host
        self.device = own_device(self.device, 0)
        values = arguments()
        store = meeting_place(size, (host, 0))
        threads = share_cores(here)
        self._owns_groups, self._shares_cores = True, here
        given = size, (host, store.port), threads, *values
        if isinstance(actors, RayActors):
            actors.start(work, given)
        else:
            self.processes = Processes(size - 1, work, given, self._abort)
        self._join(*connect(store, 0, size, self.device, self.stages))

    def _join(
        self,
        group: dist.ProcessGroup | None,
        control: dist.ProcessGroup,
        pipe: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.size = rank_and_size(control)
        self.group, self.control, self.pipe = group, control, pipe
        self._bytes = bytearray(_FRAME)
        self._frame = torch.frombuffer(self._bytes, dtype=torch.uint8)
        for rank in range(1, self.size) if self.rank == 0 else ():
            # The receive is posted now: gloo loses unexpected messages when a connection closes.
            buffer = bytearray(_LAST_WORDS)
            memory = torch.frombuffer(buffer, dtype=torch.uint8)
            arrival = dist.irecv(memory, group=self.control, group_src=rank, tag=_TAG)
            assert arrival is not None
            self._words[rank] = buffer, arrival

    def _send_last_words(self, error: BaseException) -> None:
        """Send rank 0 this rank's error: "!" for its own, "?" for one caused by another."""
        sign = "?" if is_of_others(error) else "!"
        words = (sign + describe_error(error)).encode(errors="replace")[:_LAST_WORDS]
        memory = torch.frombuffer(bytearray(words.ljust(_LAST_WORDS, b"\0")), dtype=torch.uint8)
        with suppress(RuntimeError, ValueError):
            departure = dist.isend(memory, group=self.control, group_dst=0, tag=_TAG)
            assert departure is not None
            departure.wait(timedelta(seconds=_EVIDENCE))

    def _last_words(self) -> dict[int, str]:
        """Return failing ranks' messages; a gloo wait for the others would close connections."""
        end = time.monotonic() + _EVIDENCE / (1 if self.processes is None else 10)
        while time.monotonic() < end and not any(buffer[0] for buffer, _ in self._words.values()):
            time.sleep(0.01)
        messages = {}
        for rank, (buffer, arrival) in self._words.items():
            if buffer[0]:
                with suppress(RuntimeError):
                    arrival.wait(timedelta(seconds=_EVIDENCE))
                messages[rank] = buffer.rstrip(b"\0").decode(errors="replace")
        return messages


def _sizes(ranks: int, stages: int) -> str:
    """Return the settings that ask for so many ranks, for a message."""
    of_stages = f" and pipeline_parallel_size is {stages}" if stages > 1 else ""
    return f"tensor_parallel_size is {ranks // stages}{of_stages}"


def is_of_others(error: BaseException) -> bool:
    """Return whether ``error`` was probably caused by the failure of another rank."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = frames[-1].f_globals.get("__name__", "") if frames else ""
    ours = finish.__module__, StagePipe.__module__  # which wait
    collective = where.startswith("torch.distributed") or where in ours
    of_torch = isinstance(error, RuntimeError) and collective
    return of_torch or isinstance(error, RankError | dist.DistError)
