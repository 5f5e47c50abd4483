"""Ranks that wait for each other in work that they do together."""

from __future__ import annotations

import torch.distributed as dist

from vllm_module.distributed.exchange import call_with


class Waiting:
    """Tells other ranks for which one of them this rank waits, in the work of :func:`together`.

    So ranks that wait for each other name the one that waits for none. It is about the call with
    ``group`` whose work this thread does. Without one, nothing is told, and nothing is known.

    Attributes:
        together: whether there is such a call.

    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._exchange = call_with(group)
        self.together = self._exchange is not None

    def say(self, rank: int = -1, what: str = "") -> None:
        """Tell that this rank waits for ``what`` of another one, or for none any more."""
        if self._exchange is not None:
            self._exchange.say_waits(rank, what)

    def failure(self, seconds: float = 0.0) -> str:
        """Name the ranks that have failed, and how; ``""`` if none is known to for ``seconds``."""
        return "" if self._exchange is None else self._exchange.failure(seconds=seconds)

    def hanging(self, rank: int, what: str, how: str) -> tuple[int, str]:
        """Return which rank hangs, where this one has waited too long for ``what`` of ``rank``.

        With it comes what is awaited of it. Others are told of it and ``how`` that shows, in which
        ``{what}`` stands for that.
        """
        if self._exchange is None:
            return rank, what
        return self._exchange.hanging(rank, what, how)
