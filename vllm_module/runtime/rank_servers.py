"""The servers of ranks in other processes, each of which sends what its rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from vllm_module.runtime.held_file import HeldBoxes
from vllm_module.runtime.ranks.worker import Worker
from vllm_module.runtime.replica import BOXES, WeightServer


class RankWeights:
    """The weights of one rank, in its process."""

    weight_version = ""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.weights_lock = worker.weights_lock

    @property
    def weight_changes(self) -> int:
        """Number of changes that have begun on this rank."""
        return self._worker.weight_changes

    def alone(self) -> AbstractContextManager[None]:
        """Do nothing: bytes are taken beside the steps."""
        return nullcontext()

    def check(self) -> None:
        """Raise ``RuntimeError`` if the rank has no whole weights."""
        # An update that was refused has changed nothing. If only some ranks took one, the first
        # rank refuses to serve, and readers ask it last.
        why, _ = self._worker.weights_state()
        if why is not None:
            raise RuntimeError(why)


def serve_boxes(worker: Worker, host: str, token: str) -> int:
    """Serve what a rank holds, on any port; return the port. Rank 0's are served by its engine."""
    if worker.rank == 0:
        return 0
    weights = RankWeights(worker)
    files = {BOXES: HeldBoxes(worker.model, weights.check)}
    server = WeightServer(files, {}, weights, host, 0, token)
    worker.servers[server.port] = server
    return server.port


def end_boxes(worker: Worker, ports: Sequence[int]) -> None:
    """End the server of :func:`serve_boxes`, if it goes on; ``ports`` are those of all ranks."""
    if (server := worker.servers.pop(ports[worker.rank], None)) is not None:
        server.close()
