"""What an engine has of its ranks: the scheduler of their caches, and their memory for adapters."""

from __future__ import annotations

import logging

from vllm_module.base.messages import describe_error
from vllm_module.build.model_source import ModelSource
from vllm_module.errors import RankError
from vllm_module.runtime.cache.page_pool import PagePool
from vllm_module.runtime.engine import Engine
from vllm_module.runtime.ranks.executor import Executor
from vllm_module.runtime.routed_experts import RoutedExperts
from vllm_module.runtime.scheduler import Scheduler
from vllm_module.runtime.served_adapter import AdapterMemory
from vllm_module.runtime.step_inputs import StepInputs

_log = logging.getLogger(__name__)

MAX_MODEL_LEN = 8192  # tokens of a sequence, if neither the model nor the caller sets a limit


def length_of(source: ModelSource) -> int:
    """Return the most tokens of a sequence, if the cache has room for them."""
    return source.config.max_model_len or MAX_MODEL_LEN


def start(executor: Executor) -> Scheduler:
    """Allocate the cache on every rank, and return its scheduler; an encoder has no cache.

    Raises ``ValueError`` if not a single page fits, and ``UnsupportedModelError`` if experts are to
    be returned of a model that has none.
    """
    worker, config = executor.worker, executor.worker.config
    unused = worker.is_encoder or not executor.leads
    routed: RoutedExperts | None = None
    if config.enable_return_routed_experts:
        most = max(config.max_num_batched_tokens, config.max_num_seqs)
        routed = RoutedExperts(worker.model, most, executor.wait)
    pages, host_pages = (0, 0) if unused else executor.start(length_of(worker.source))
    if routed is not None:
        routed.allocate(pages, config.block_size)
    return Scheduler(
        PagePool(pages, config.block_size),
        PagePool(host_pages, config.block_size),
        config.max_num_seqs,
        config.max_num_batched_tokens,
        worker.caches_prefixes,
        worker.window,
        has_states=worker.has_states,
        host_states=worker.host_states,
        max_loras=config.max_loras,
        batches=executor.stages,
        routed=routed,
    )


def take_part(executor: Executor, engine: Engine) -> None:
    """Take part in the steps of engines that share experts, whenever this one has no step.

    The others need it until it is closed, so it is kept in memory until then.
    """
    if (rounds := executor.rounds) is None:
        return

    def step(number: int) -> bool:
        try:
            with engine.alone():
                if rounds.number == number and executor.can_run:
                    engine.keep_logits()
                    executor.run(StepInputs.nothing())
        except Exception as error:
            reason, is_fault = describe_error(error), not isinstance(error, RankError)
            _log.error("no more part in steps of other engines: %s", reason, exc_info=is_fault)
            return False
        return True

    rounds.attend(step, lambda: executor.can_run, lambda: bool(engine.requests))


def adapter_memory(executor: Executor) -> AdapterMemory:
    """Return the adapters that the ranks have in memory: none yet."""
    most = executor.worker.config.max_cpu_loras
    load, drop, check = executor.load_adapter, executor.drop_adapter, executor.check_adapter_used
    return AdapterMemory(load, drop, check, most)
