"""What an executor does where its engine shares experts with others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vllm_module.base.process_groups import private_group
from vllm_module.base.waiting import WaitLimitError, interruptibly
from vllm_module.build.consistency import demand_alike
from vllm_module.build.model_source import ModelSource
from vllm_module.config import EngineConfig, ModelConfig
from vllm_module.distributed import OwnTokens, data_parallel, together
from vllm_module.errors import RankError, UnsupportedModelError
from vllm_module.runtime.devices import current
from vllm_module.runtime.ranks.connections import meeting_place
from vllm_module.runtime.ranks.group import Ranks, is_of_others
from vllm_module.runtime.ranks.rounds import Rounds
from vllm_module.runtime.ranks.worker import Worker
from vllm_module.runtime.step_inputs import StepInputs

_log = logging.getLogger(__name__)
_TIMEOUT = timedelta(minutes=30)  # of a collective, as torch has it


class SharedExperts:
    """The methods of an executor whose engine is one of several that share their experts.

    Attributes:
        engines: the number of these engines; 1 for one that has all experts.
        rounds: the steps that all compute together, on the first rank; else ``None``.

    """

    worker: Worker
    engines: int
    rounds: Rounds | None = None
    rank: int
    size: int
    _ranks: Ranks
    _closed: str | None
    _timeout: float

    def _meet_engines(
        self, model: ModelConfig | ModelSource, config: EngineConfig, digests: bool
    ) -> tuple[str, int]:
        """Meet the other engines, and return the address where all of their ranks meet."""
        if isinstance(model, ModelSource):
            spread = model.spread_experts
        else:
            spread = model.enable_expert_parallel
        if not spread:
            raise ValueError(
                "data_parallel_size is the number of engines that share their experts: give "
                "enable_expert_parallel as well, or leave it out and start several engines"
            )
        if digests:
            self.alone("LoadConfig(digests=True)")
        self.rounds = Rounds(config, self._timeout)
        return self.rounds.address

    @contextmanager
    def _among(
        self, config: EngineConfig, address: tuple[str, int] | None
    ) -> Iterator[OwnTokens | None]:
        """Connect this rank to those of other engines, over which experts are then spread."""
        if address is None:
            yield None
            return
        ranks, group = connect_engines(config, address, self.rank, self._ranks.device)
        self._ranks.others = [ranks] if group is ranks else [ranks, group]
        with data_parallel(ranks=ranks, group=group) as own_tokens:
            yield own_tokens

    def _load_one_of(self, rounds: Rounds, make: Callable[[], Worker]) -> None:
        """Load this engine; all engines load, of one model that has experts, or none does."""
        failure: Exception | None = None
        try:  # not inside of together, which this engine's other ranks do not call
            self.worker = worker = make()
            if getattr(worker.source.source, "load_format", "") == "sharded_state":
                self.alone("a sharded state")
            if worker.is_encoder or not worker.placed_experts():
                raise UnsupportedModelError(
                    f"{worker.source.config.architectures[0]} has no experts that engines could "
                    "share: leave data_parallel_size out, and start several engines, or leave "
                    "--enable-expert-parallel out of vllm-module serve"
                )
        except Exception as error:
            failure = error

        def described() -> dict[str, str]:
            if failure is not None:
                raise failure
            return worker.described

        try:
            demand_alike(together(described, timeout=self._timeout, group=rounds.group))
        except RankError as error:
            raise RankError(f"the engines of data_parallel_size: {error}", error.ranks) from error

    def _begin_round(self, rounds: Rounds, inputs: Any) -> None:
        """Begin a step together with the other engines, and note what all have to know."""
        assert isinstance(inputs, StepInputs), "an encoder shares no experts"
        inputs.engines_step = rounds.agree(len(inputs.input_ids), inputs.max_query_len == 1)

    def _say_who_hangs(self) -> None:
        """Log for whom this rank waits."""
        if self.rounds is not None and self.rounds.awaited is not None:
            _log.warning("waiting for %s", self.rounds.name(self.rounds.awaited))
        else:
            self._ranks.say_who_hangs()

    def _explained(self, error: BaseException) -> BaseException:
        """Return an error that names the engine whose end has caused ``error``, if one has."""
        if self.rounds is None or isinstance(error, RankError) or not is_of_others(error):
            return error
        if (ended := self.rounds.end_of_others()) is not None:
            return ended
        if self.size == 1 and isinstance(error, WaitLimitError):
            return self.rounds.hung(error)
        return error

    def _has_reached(self, event: Any) -> bool:
        """Return whether the device has; raise if its collectives wait for an engine that ended."""
        if event.query():
            return True
        if self.rounds is not None:
            self.rounds.check()
        return False

    def alone(self, what: str) -> None:
        """Raise ``UnsupportedModelError`` if other engines have experts that ``what`` concerns."""
        if self.engines > 1:
            raise UnsupportedModelError(
                f"{what} concerns all experts, and {self.engines} engines share them "
                "(data_parallel_size): make an engine that has all"
            )

    def leave(self) -> None:
        """Take part in the steps of engines that share experts, until they are closed, too."""
        if self.rounds is not None and self._closed is None:
            self.rounds.leave()


def connect_engines(
    config: EngineConfig, address: tuple[str, int], rank: int, device: torch.device
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Connect a rank of an engine to those of the others.

    Args:
        config: of the engine.
        address: where all ranks meet.
        rank: this one's number in its engine.
        device: this rank's.

    Returns the group of all ranks of all engines, and that of those with this rank's number.

    """
    stores: Any = dist  # torch.distributed has the stores; its type hints lack them
    own, engines = config.data_parallel_rank, config.data_parallel_size
    ranks = config.tensor_parallel_size
    assert own is not None

    def join(name: str, rank: int, size: int) -> dist.ProcessGroup:
        return private_group(stores.PrefixStore(name, store), rank, size, device, _TIMEOUT)

    def create() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        with current(device):
            everyone = join("ranks", own * ranks + rank, engines * ranks)
            return everyone, everyone if ranks == 1 else join(f"tokens {rank}", own, engines)

    store = meeting_place(engines * ranks, address)
    return interruptibly(create)
