"""Running an engine's model on every rank."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from vllm_module.base.messages import describe_error
from vllm_module.base.waiting import at_most, left_to_launcher, until
from vllm_module.build.model_source import ModelSource
from vllm_module.config import DeviceConfig, EngineConfig, LoadConfig, ModelConfig
from vllm_module.distributed import StagePipe, pipeline_parallel, tensor_parallel, together
from vllm_module.errors import ModelNotReadyError, RankError, WeightLoadError
from vllm_module.kernels.matmul.products import Products, products
from vllm_module.runtime.devices import current, own_device
from vllm_module.runtime.pooling.embedding import EmbeddingInputs
from vllm_module.runtime.ranks.changing import WeightChanges
from vllm_module.runtime.ranks.connections import (
    Connections,
    connect,
    meeting_place,
    stage_of,
)
from vllm_module.runtime.ranks.extension import OwnCalls, worker_class
from vllm_module.runtime.ranks.fastest import fastest_for
from vllm_module.runtime.ranks.group import Ranks
from vllm_module.runtime.ranks.in_flight import PipelineSteps, heard_ahead
from vllm_module.runtime.ranks.rounds import Rounds, ending
from vllm_module.runtime.ranks.sharing import SharedExperts
from vllm_module.runtime.ranks.worker import Worker, check_ranks
from vllm_module.runtime.step_inputs import StepInputs
from vllm_module.weights import receive_weights


class Executor(OwnCalls, WeightChanges, PipelineSteps, SharedExperts):
    """Loads a model on every rank and runs each method on every rank.

    With more than one rank, it starts the others as processes, which end with this one. Under
    torchrun, or in a group of ``tensor_parallel``, every rank makes an executor: rank 0 calls the
    methods, and the others :meth:`follow`. With the backend ``external_launcher`` every rank makes
    the same calls. Rank 0 is of the last pipeline stage.

    If another rank fails or ends, any method closes the executor and raises ``RankError``, which
    names the rank and the failure.

    Args:
        model: the model to load, or its source if that was already found.
        load_config, device_config: as for :func:`~vllm_module.build.loader.get_model`.
        config: settings of the engine.
        connections: those to the other ranks, if they exist.
        engines: where they meet the ranks of other engines, if these share their experts.

    Attributes:
        rank, size: this process's rank, and the number of ranks of all stages.
        stages: the number of pipeline stages.
        leads: False on a rank that has to :meth:`follow`.
        worker: this rank's part of the work.
        products: what multiplies on a CPU (torch, oneDNN, loops over codes), by number of rows;
            rank 0 chooses for all ranks.

    Raises what loading raises, and ``ValueError`` if there are fewer devices than ranks, far more
    ranks than CPUs, or ``tensor_parallel_size`` is not the size of the process group.

    """

    def __init__(
        self,
        model: ModelConfig | ModelSource,
        load_config: LoadConfig,
        device_config: DeviceConfig,
        config: EngineConfig,
        connections: Connections | None = None,
        engines: tuple[str, int] | None = None,
    ) -> None:
        WeightChanges.__init__(self)
        PipelineSteps.__init__(self)
        self._timeout = load_config.timeout
        self._step_timeout = config.step_timeout
        self._closed: str | None = None
        self._lost: tuple[int, ...] | None = None  # ranks whose failure has ended the engine

        def arguments() -> tuple[Any, ...]:
            """Find the model here, so that the ranks on this host read from the same folder.

            Ranks of Ray find it themselves, and have one device each, because hosts differ.
            """
            nonlocal model
            asked, model = model, ModelSource.find(model, load_config.load_format)
            check_ranks(model, size, self.stages)
            if config.distributed_executor_backend == "ray":
                own = DeviceConfig(device=str(own_device(device, 0)))
                return asked, load_config, own, config
            return model, load_config, device_config, config, engines

        worker = worker_class(Worker, config.worker_extension_cls)
        size, device = config.tensor_parallel_size, device_config.torch_device
        self.stages = config.pipeline_parallel_size
        if device.type == "meta":
            raise ValueError(
                f"device {device_config.device!r} has no memory for a model: give cpu, cuda, auto"
            )
        self.engines = config.data_parallel_size
        if self.engines > 1 and engines is None:
            engines = self._meet_engines(model, config, load_config.digests)
        with at_most(self._timeout), ending(self.rounds):
            self._ranks = Ranks(config, device, _serve, arguments, connections)
        self.rank, self.size = self._ranks.rank, self._ranks.size
        self.leads = self.rank == 0 or not self._ranks.is_led
        self._end = weakref.finalize(self, _close, os.getpid(), self._ranks, self.rounds)
        device_config = DeviceConfig(device=str(self._ranks.device))
        if self.rank:
            load_config = load_config.model_copy(update={"show_progress": False})
        group, pipe = self._ranks.group, self._ranks.pipe
        place: Any = {"rank": 0, "size": 1} if group is None else {"group": group}
        stage, _ = stage_of(self.rank, self.size, self.stages)
        with (
            self._or_end(),
            self._among(config, engines) as own_tokens,
            tensor_parallel(**place),
            pipeline_parallel(rank=stage.rank, size=stage.size),
            current(self._ranks.device),
        ):
            settings = model, load_config, device_config, config
            if pipe is not None:
                self._load_stage(partial(worker, *settings, StagePipe(pipe, self._ranks.device)))
            elif self.rounds is not None:
                self._load_one_of(self.rounds, partial(worker, *settings))
            else:
                self.worker = worker(*settings)
            self.worker.own_tokens = own_tokens
        # Chosen by rank 0 for all, because replicated layers must round equally on every rank.
        self.products = Products()
        if self.rank == 0 and self._ranks.device.type == "cpu":
            dtype, decodes = self.worker.source.dtype, not self.worker.is_encoder
            self.products = fastest_for(self.worker.model, dtype, decodes=decodes)
        self.products = self.of_first(self.products)

    def start(self, max_model_len: int) -> tuple[int, int]:
        """Allocate the cache: on every rank as many pages as fit on the rank with the least memory.

        Returns the numbers of pages on the device and in host memory. Raises ``ValueError`` if not
        a single page fits.
        """
        worker = self.worker
        most = worker.config.max_num_seqs * -(-max_model_len // worker.config.block_size)
        pages = min(most, *self._everywhere("pages", max_model_len))
        if pages < 1:
            raise ValueError(worker.no_page())
        host_pages = min(most, worker.host_pages)
        self._everywhere("start", pages, host_pages, max_model_len)
        return pages, host_pages

    def run(
        self, inputs: StepInputs | EmbeddingInputs, sampled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute a step on every rank and return the logits ``[rows, vocab]``.

        A GPU may still compute them: call :meth:`wait` before reading results computed from them.

        Args:
            inputs: the numbers of the step, or of a batch of an encoder, which gives embeddings.
            sampled: the tokens that ``inputs.input_ids`` index, if they are indices. Other ranks
                receive them inside the step.

        Raises ``ModelNotReadyError`` after a failed update of the weights.

        """
        if self._closed is not None:  # since the call that needs this step began
            self.check()
        if self.stages > 1:
            assert isinstance(inputs, StepInputs), "an encoder has no stages"
            return self.launch(inputs)()
        if self.refusal is not None:
            raise ModelNotReadyError(self.refusal)
        with self._or_end(self._step_timeout), products(self.products):
            if self.rounds is not None:
                self._begin_round(self.rounds, inputs)
            self._tell("run", inputs, self.products)
            if self.rank:  # the ranks' tokens are added up
                sampled = None
            result: torch.Tensor = self._do("run", inputs, sampled)
        return result

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait until the device has reached ``event``, or another rank fails or hangs."""
        if self.size == 1 and self.rounds is None:
            event.synchronize()
            return
        with self._or_end(self._step_timeout):
            # event.synchronize would wait outside of Python.
            until(lambda: self._has_reached(event))
            if self._ranks.aborted:  # collectives were aborted, so the results are wrong
                self.check()
                raise RankError("another rank ended")

    def embed(self, inputs: EmbeddingInputs) -> torch.Tensor:
        """Return the embeddings of a batch, float32 ``[sequences, hidden_size]``.

        Raises what :meth:`run` raises.
        """
        embeddings = self.run(inputs)
        if self.size > 1 and embeddings.is_cuda:
            self.wait(torch.cuda.current_stream(embeddings.device).record_event())
        return embeddings

    def check(self) -> None:
        """Raise if the engine has ended, as every method does, or if a rank's process has."""
        if self.size > 1 and self._closed is None and self._ranks.ended:
            with self._or_end():
                raise RankError("another rank ended")
        if self._lost is not None:
            raise RankError(f"the engine has ended: {self._closed}", self._lost)
        if self._closed is not None:
            raise RuntimeError(f"the engine has ended: {self._closed}")

    @property
    def end(self) -> str | None:
        """Reason why the engine has ended; ``None`` before."""
        return self._closed

    @property
    def can_run(self) -> bool:
        """True if steps can run: the engine is awake, has not ended, and weights are whole."""
        return self._closed is None and self.refusal is None and not self.asleep

    def follow(self) -> None:
        """Carry out rank 0's messages until it closes its executor, then close this one."""
        if self.leads:
            raise RuntimeError("rank 0 leads: only the other ranks follow")
        hear, beats = self._ranks.hear, self._ranks.beats
        lost = None if beats is None else beats.lost
        with self._or_end(), at_most(math.inf, lost=lost), left_to_launcher():
            ahead = self.stages > 1
            for message in heard_ahead(hear, self._expect) if ahead else iter(hear, None):
                if message[0] == "close":
                    break
                self._obey(*message)
        self._closed = (
            "rank 0 closed it, until when this rank ran the model in the constructor. For an "
            "engine that each process calls, give distributed_executor_backend='external_launcher'"
        )
        self.close()

    def of_first(self, value: Any) -> Any:
        """Return rank 0's ``value``, if every rank makes this call; else this rank's."""
        if self.size == 1 or self._ranks.is_led:
            return value
        with self._or_end(self._timeout):
            return together(lambda: value, timeout=self._timeout, group=self._ranks.control)[0]

    def close(self) -> None:
        """Free the cache, and end the other ranks' processes, or their :meth:`follow`."""
        self._closed = self._closed or "it was closed"
        self._end()
        if hasattr(self, "worker"):  # missing if loading failed
            self._do("close")

    def _do(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of this rank's worker, with its device current, in any thread."""
        with current(self._ranks.device):
            if name != "run":
                self.worker.forget_steps()  # weights or caches may lie elsewhere after it
            return getattr(self.worker, name)(*arguments, **options)

    def _everywhere(self, name: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of every rank's worker and return all results, by rank.

        ``timeout`` are the seconds that this rank waits for the others, instead of the engine's.
        """
        with self._or_end(self._timeout):
            self._tell(name, *arguments)
        if self.size == 1:
            return [self._do(name, *arguments)]
        with self._or_end(unless_refused=True):
            return self._together(name, arguments, timeout)

    def _each(self, name: str, *arguments: Any) -> None:
        """Call a method of this rank's worker; of every rank's, if every rank makes this call."""
        if self._ranks.is_led:
            self._do(name, *arguments)
            return
        with self._or_end(unless_refused=True):
            self._together(name, arguments)

    def _together(
        self, name: str, arguments: tuple[Any, ...], timeout: float | None = None
    ) -> list[Any]:
        """Run this rank's part of :meth:`_everywhere`; a worker's error does not end its rank."""
        work = partial(self._do, name, *arguments)
        group, refusals = self._ranks.control, (Exception,)
        limit = self._timeout if timeout is None else timeout
        return together(work, timeout=limit, group=group, refusals=refusals)

    def _obey(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Run this rank's part of a method that rank 0 runs."""
        if name == "run":
            inputs, chosen = arguments
            with products(chosen):
                self._do(name, inputs)
            return
        try:
            if name in ("update_weights", "take_adapter"):
                with receive_weights(src=0, group=self._ranks.control) as weights:
                    self._do(name, weights, *arguments)
            else:
                self._together(name, arguments)
        except Exception as error:
            if not _is_refusal(error):  # rank 0 gets refusals as results
                raise

    def _tell(self, name: str, *arguments: Any) -> None:
        self.check()
        if not self.leads:
            raise RuntimeError(f"rank {self.rank} follows: call this method on rank 0")
        if name != "run":
            self._in_flight.compute()
        if self.size > 1 and self._ranks.is_led:
            self._ranks.tell((name, arguments))

    @contextmanager
    def _or_end(
        self, limit: float | None = None, *, unless_refused: bool = False
    ) -> Iterator[None]:
        """If this rank raises, end the engine on all ranks, because they are out of step then.

        With ``unless_refused``, a refusal does not, because ranks exchange refusals inside the
        block. ``limit`` is the most seconds that one wait for other ranks may take.
        """
        alone = self.size == 1 and self.rounds is None
        waits = None if alone else limit
        try:
            with nullcontext() if waits is None else at_most(waits, self._say_who_hangs):
                yield
        except BaseException as error:
            if alone or self._closed is not None:
                raise
            if unless_refused and _is_refusal(error):
                raise
            raised = self._ranks.part(self._explained(error))
            self._closed = describe_error(raised)
            if isinstance(raised, RankError):
                self._closed, self._lost = str(raised), raised.ranks
            self.close()
            if raised is error:
                raise
            raise raised from error


def _is_refusal(error: BaseException) -> bool:
    """Return whether every rank knows of this error and waits for the next message."""
    if isinstance(error, RankError):
        return error.recoverable
    return isinstance(error, Exception)  # an interrupt is no refusal


def _serve(
    rank: int,
    size: int,
    address: tuple[str, int],
    threads: int,
    source: ModelConfig | ModelSource,
    load_config: LoadConfig,
    device_config: DeviceConfig,
    config: EngineConfig,
    engines: tuple[str, int] | None = None,
) -> None:
    """Run a rank that an executor started."""
    device = own_device(device_config.torch_device, rank)
    torch.set_num_threads(threads)
    stages = config.pipeline_parallel_size
    connections = connect(meeting_place(size, address), rank, size, device, stages)
    device_config = DeviceConfig(device=str(device))
    # Rank 0 raises these errors too; printing them here would repeat them.
    with suppress(WeightLoadError, RankError), current(device):
        Executor(source, load_config, device_config, config, connections, engines).follow()


def _close(pid: int, ranks: Ranks, rounds: Rounds | None) -> None:
    if os.getpid() != pid:
        return  # processes and connections belong to the parent of a fork
    if rounds is not None and not ranks.parted:
        rounds.leave()
    with ending(rounds, always=True):
        ranks.close()
