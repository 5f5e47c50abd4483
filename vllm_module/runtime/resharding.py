"""``LLM.reshard``: a running engine goes on with another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_module.base.messages import shorten
from vllm_module.config import DeviceConfig
from vllm_module.errors import ModelNotReadyError, UnsupportedModelError
from vllm_module.runtime.arguments import check_type
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.outputs import ServedModelConfig
from vllm_module.runtime.ranks.connections import under_torchrun
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.served_adapter import AdapterMemory
from vllm_module.runtime.started import adapter_memory, length_of, start

if TYPE_CHECKING:
    from vllm_module.runtime.replica import WeightServer


class Resharding:
    """The method of :class:`~vllm_module.LLM` that changes the number of ranks."""

    engine: Engine
    executor: Executor
    model_config: ServedModelConfig
    serve_weights: Callable[..., WeightServer]
    _changing: Callable[[], AbstractContextManager[None]]

    def reshard(self, tensor_parallel_size: int) -> None:
        """Go on with another number of ranks, which take the weights from those that run.

        The engine computes steps while the new ranks start and load. Between two steps they then
        take over: requests are kept, and all of their tokens are computed again, as after a
        preemption; cached prefixes are dropped, and adapters are read from their folders. The
        version of the weights and their digests stay. Servers of :meth:`serve_weights` end.

        Memory holds the weights and caches of both until then. If anything fails, the ranks that
        were there go on, with all requests.

        Args:
            tensor_parallel_size: number of ranks. Does nothing if the engine has so many.

        Raises:
            UnsupportedModelError: the weights are quantized, or the model is an encoder.
            ValueError: the engine's ranks are those of a launcher or of a pipeline, an adapter was
                updated, or the new cache is too small for a running request or for one page.
            ShardingError: the model cannot be divided so.
            ModelNotReadyError: the engine sleeps, or an update of its weights had failed.
            WeightReadError, RuntimeError: the weights changed in the meantime.
            RankError: a new rank ended or hangs.

        """
        size = tensor_parallel_size
        check_type("tensor_parallel_size", size, "an integer from 1", int)
        if size < 1:
            raise ValueError(f"tensor_parallel_size should be an integer from 1, got {size}")
        with self.engine.alone():
            self._check_reshard(size)
            before, changes = self.executor, self.engine.weight_changes
            if size == before.size:
                return
        ranks: Executor | None = None
        try:
            with self._serve_to_ranks() as server:
                ranks = _load(before, size, server)
            with self._changing():
                self._check_reshard(size)
                if self.executor is not before or self.engine.weight_changes != changes + 1:
                    raise RuntimeError(
                        "the weights or ranks were changed while new ranks loaded: call reshard "
                        "again"
                    )
                self._switch(ranks)
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise
        before.close()
        before.worker.model.sleep()  # whoever holds the executor does not hold the weights

    def _serve_to_ranks(self) -> WeightServer:
        try:
            return self.serve_weights()
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                "the weights are quantized, and other ranks take them from those that run only as "
                "a checkpoint stores them: make an LLM of the other number of ranks"
            ) from error

    def _check_reshard(self, size: int) -> None:
        """Raise if the engine cannot be given other ranks now."""
        executor, config = self.executor, self.executor.worker.config
        executor.check()
        executor.alone("reshard")
        if self.engine.refusal is not None:
            raise ModelNotReadyError(self.engine.refusal)
        if executor.worker.is_encoder:
            raise UnsupportedModelError(
                "an encoder has no requests to keep: make an LLM of the other number of ranks"
            )
        backend = config.distributed_executor_backend
        if executor.stages > 1:
            raise ValueError(
                f"the engine has {executor.stages} pipeline stages, and only engines of one stage "
                "change their number of ranks"
            )
        joined = executor.size > 1 and not executor.started_ranks
        outside = backend in ("external_launcher", "ray") or (backend is None and under_torchrun())
        if joined or outside:
            raise ValueError(
                "the ranks of this engine are processes that a launcher started, or Ray, and it "
                "does not start others: make the engine with distributed_executor_backend='mp'"
            )
        if backend == "uni" and size > 1:
            raise ValueError(
                "distributed_executor_backend is 'uni', an engine of one process: make it with "
                "'mp', which starts ranks"
            )
        if executor.worker.device.index:  # the first of other ranks has device 0
            raise ValueError(
                f"the engine is on {executor.worker.device}, which its ranks would not be on: make "
                "it with device='cuda' and the devices that it may have in CUDA_VISIBLE_DEVICES"
            )
        for adapter in self.engine.adapters.values():
            if adapter.updates and size != executor.size:
                raise ValueError(
                    f"the adapter {shorten(adapter.name)} was updated, and other ranks would read "
                    "its folder: merge_adapter or unload_adapter it first"
                )

    def _switch(self, ranks: Executor) -> None:
        """Let ``ranks`` compute the requests from now on; if it raises, nothing has changed."""
        engine = self.engine
        scheduler = start(ranks)
        adapters = list(engine.adapters.values())
        before = [(each.loaded, each.used, each.in_memory) for each in adapters]
        try:
            memory = _with_adapters(engine, ranks)
            ranks.continue_for(self.executor)
            engine.continue_with(scheduler, length_of(self.executor.worker.source))
        except BaseException:
            for each, (loaded, used, in_memory) in zip(adapters, before, strict=True):
                each.loaded, each.used, each.in_memory = loaded, used, in_memory
            raise
        engine.drop()
        engine.execute, engine.repeatable, engine.wait = ranks.run, ranks.size == 1, ranks.wait
        engine.first_tokens, engine.adapter_memory = ranks.worker.first_tokens, memory
        self.executor = ranks
        self.model_config = replace(
            self.model_config,
            device=ranks.worker.device,
            tensor_parallel_size=ranks.size,
            num_gpu_blocks=scheduler.pool.num_pages,
            max_model_len=engine.max_model_len,
        )


def _load(before: Executor, size: int, server: WeightServer) -> Executor:
    """Start ``size`` ranks, and load them with what the server has of the ranks before them."""
    from vllm_module.weights.stores.source import StoreSource  # few engines need it

    worker = before.worker
    served = StoreSource(server.url, load_format="safetensors", replica_token=server.token)
    loading = worker.load_config.model_copy(update={"show_progress": False})
    ranks = {"tensor_parallel_size": size, "distributed_executor_backend": "mp"}
    return Executor(
        replace(worker.source, source=served, secondary=(), is_dummy=False),
        loading,
        DeviceConfig(device=worker.device.type),
        worker.config.model_copy(update=ranks),
    )


def _with_adapters(engine: Engine, ranks: Executor) -> AdapterMemory:
    """Read the adapters that are in memory on other ranks, those used last at the end."""
    memory = adapter_memory(ranks)
    held = [each for each in engine.adapters.values() if each.in_memory]
    for adapter in sorted(held, key=lambda each: each.used):
        memory.load(adapter)
    return memory
