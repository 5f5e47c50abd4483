"""The servers of ranks in other processes, each of which sends what its rank holds."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from vllm_module.runtime.held_file import HeldBoxes
from vllm_module.runtime.ranks.worker import Worker
from vllm_module.runtime.replica import WeightServer


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


def serve_boxes(worker: Worker, name: str, host: str, token: str) -> int:
    """Serve what a rank holds as the file ``name``, on any port; return the port.

    That of rank 0 is served by its engine. Raises ``OSError`` if the host is not this machine's.
    """
    if worker.rank == 0:
        return 0
    weights = RankWeights(worker)
    files = {name: HeldBoxes(worker.model, weights.check)}
    server = worker.servers[name] = WeightServer(files, {}, weights, host, 0, token)
    return server.port


def end_boxes(worker: Worker, name: str) -> None:
    """End the server of :func:`serve_boxes`, if there is one."""
    if (server := worker.servers.pop(name, None)) is not None:
        server.close()
