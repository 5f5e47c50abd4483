"""Finding, building and loading a model, on all ranks of a process group together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from vllm_module.base.messages import printable_name
from vllm_module.build.consistency import (
    demand_alike,
    demand_digests,
    demand_same_tensors,
    describe,
    digests,
)
from vllm_module.build.held import load_from
from vllm_module.build.model_source import ModelSource, number_of_tensors
from vllm_module.build.registry import implementation
from vllm_module.config import DeviceConfig, LoadConfig, ModelConfig
from vllm_module.cooperative import Cooperation, chosen
from vllm_module.core.digests import ModelDigest
from vllm_module.core.module import vLLMModule
from vllm_module.core.plan import LoadPlan
from vllm_module.distributed import (
    ProcessGroup,
    message_group,
    tensor_parallel_group,
    together,
)
from vllm_module.weights.pairs import OpenWeights
from vllm_module.weights.sharded_state import ShardedState

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger(__name__)

T = TypeVar("T")
D = TypeVar("D")


class Loaded(NamedTuple):
    """A model, with the source and fingerprint that it was loaded from.

    Attributes:
        source: the folder or store, and the configuration.
        model: the model.
        fingerprint: fingerprint of the weights, as in ``Checkpoint.fingerprint``.

    """

    source: ModelSource
    model: vLLMModule
    fingerprint: str


def get_model(
    *,
    model_config: ModelConfig,
    load_config: LoadConfig | None = None,
    device_config: DeviceConfig | None = None,
) -> vLLMModule:
    """Build the model that a checkpoint describes, load it, and return it in evaluation mode.

    The rank and size are those of the surrounding :func:`tensor_parallel` or process group. The
    ranks of a process group load together: all of them get their model, or none does.

    Raises:
        WeightLoadError: the checkpoint, its configuration or its architecture is refused.
        RankError: another rank refused, ended, hangs, or has another checkpoint.

    """
    return find_and_load(model_config, load_config, device_config).model


def find_and_load(
    config: ModelConfig | ModelSource,
    load_config: LoadConfig | None,
    device_config: DeviceConfig | None,
) -> Loaded:
    """Load a model as :func:`get_model` does; return it with its source.

    A ``config`` that is a source is used without resolving it again.
    """
    load_config = load_config or LoadConfig()
    timeout = load_config.timeout

    def find() -> tuple[ModelSource, OpenWeights]:
        source = ModelSource.find(config, load_config.load_format)
        checkpoint = source.open()
        opened.callback(checkpoint.close)
        return source, checkpoint

    def describe_found(found: tuple[ModelSource, OpenWeights]) -> dict[str, str]:
        source, checkpoint = found
        settings = {"LoadConfig(cooperative=...)": str(load_config.cooperative)}
        return settings | describe(
            source.config, source.dtype, source.rules, checkpoint.fingerprint
        )

    def build() -> vLLMModule:
        device = (device_config or DeviceConfig()).torch_device
        model = source.build(device, number_of_tensors(checkpoint))
        if load_config.allow_nan:
            model.allow_nan = True
        if load_config.digests:
            model.keep_digests = True
        return model

    def load() -> vLLMModule:
        with ExitStack() as reading:
            planned: Callable[[LoadPlan], None] | None = None
            if load_config.show_progress:
                planned = reading.enter_context(progress(cooperation or checkpoint))
            if cooperation is None:
                load_from(model, checkpoint, planned=planned)
            else:
                load_from(model, checkpoint, cooperation.pairs, planned, cooperation.open_reader)
        return model

    with ExitStack() as opened, message_group(timeout) as group:
        source, checkpoint = _in_step(find, describe_found, timeout, group, demand_alike)
        taken = checkpoint.load_format or "a registered source"
        _log.info("weights in %s: %s", source.name, taken)
        model = _in_step(build, lambda _: {}, timeout, group, demand_alike)
        impl, architecture = implementation(type(model)), source.config.architectures[0]
        _log.info("model_impl of %s: %s", printable_name(architecture), impl)
        cooperation = None
        # Of a sharded state each rank has files of its own, and dummy values it makes itself.
        shared = not isinstance(checkpoint, ShardedState) and checkpoint.load_format != "dummy"
        if group is not None and shared:
            gather = partial(together, timeout=timeout, group=group.group)
            if chosen(load_config.cooperative, checkpoint, gather):
                place = group.rank, group.size, timeout, group.group
                cooperation = Cooperation(checkpoint, gather, *place)
        fingerprint = checkpoint.fingerprint  # before it can change
        if not load_config.digests:
            model = _in_step(load, digests, timeout, group, demand_same_tensors)
        else:
            compare = partial(demand_digests, source.folder, tensor_parallel_group().size)
            model = _in_step(load, _kept, timeout, group, compare)
            if group is None:
                compare([_kept(model)])
        return Loaded(source, model, fingerprint)


def _kept(model: vLLMModule) -> ModelDigest:
    assert model.load_report is not None
    digests: ModelDigest = model.load_report.digests
    return digests


def _in_step(
    work: Callable[[], T],
    describe: Callable[[T], D],
    timeout: float,
    group: ProcessGroup | None,
    compare: Callable[[Sequence[D]], object],
) -> T:
    """Return the result of ``work``; with a ``group``, run it on every rank of the group.

    ``compare`` gets each rank's description of its result. If any rank fails, every rank raises.
    """
    if group is None:
        return work()
    results: list[T] = []

    def work_and_describe() -> D:
        results.append(work())
        return describe(results[0])

    compare(together(work_and_describe, timeout=timeout, group=group.group))
    return results[0]


@contextmanager
def progress(
    checkpoint: OpenWeights | Cooperation,
    label: str = "loading",
    console: Console | None = None,
) -> Iterator[Callable[[LoadPlan], None]]:
    """Draw a progress bar with bytes and rate while the block loads from ``checkpoint``.

    The bar is drawn on ``console``, or on standard error. The block gets a function to call with
    the plan, which has the number of bytes.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    done = threading.Event()
    console = console or Console(stderr=True)
    with Progress(*columns, TransferSpeedColumn(), console=console) as bar:
        task = bar.add_task(label, total=None, visible=False)  # hidden until there is a plan

        def follow() -> None:
            while not done.wait(0.1):
                bar.update(task, completed=checkpoint.bytes_read)

        def planned(plan: LoadPlan) -> None:
            total = sum(read.nbytes for read in plan.reads())
            bar.update(task, total=total, visible=True)

        follower = threading.Thread(target=follow, name="progress", daemon=True)
        follower.start()
        try:
            yield planned
        finally:
            done.set()
            follower.join()
            bar.update(task, completed=checkpoint.bytes_read)
