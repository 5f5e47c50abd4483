"""What the processes of pipeline stages send each other: tensors, from each stage to the next."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from vllm_module.base.process_groups import rank_and_size
from vllm_module.base.waiting import interruptibly, taken

_FOREVER = timedelta(days=365)  # timeout of a thread's wait: only the caller's limit counts
_DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64
_MOST = 4  # tensors that a stage passes on


class StagePipe:
    """Sends what this process's stage has computed to the next one, and receives the same.

    A stage passes on tensors ``[tokens, columns]``. Their number, dtypes and columns are described
    once, with the first ones: they are the same in every step.

    Args:
        group: the processes that have one number in their stages, by stage.
        device: where this stage's tensors lie.

    Attributes:
        is_first, is_last: True for the stage that takes token ids, and for the one with the head.

    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank, self._size = rank_and_size(group)
        self.is_first, self.is_last = self._rank == 0, self._rank == self._size - 1
        self._sent_kind: list[int] | None = None
        self._received_kind: list[int] | None = None
        self._expected = self._returned = 0  # steps
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Tensors on their way, which have to stay in memory, by step.
        self._sent: deque[list[tuple[torch.Tensor, Any]]] = deque()

    def send(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Send the next stage what it goes on with, without waiting until it takes that."""
        kind = [len(tensors)]
        for each in tensors:
            kind += [_DTYPES.index(each.dtype), each.shape[1]]
        sent = []
        if self._sent_kind is None:
            self._sent_kind = kind
            padded = kind + [0] * (1 + 2 * _MOST - len(kind))
            sent.append(self._isend(torch.tensor(padded, device="cpu")))
        assert kind == self._sent_kind, "a model passes on the same in every step"
        self._sent.append(sent + [self._isend(each.contiguous()) for each in tensors])
        # The next stage has taken those of as many steps before, as no more are under way.
        while len(self._sent) > self._size:
            interruptibly(partial(_wait, self._sent.popleft()))

    def expect(self, tokens: int) -> None:
        """Begin to receive what the stage before computes of so many tokens, in a thread.

        So it is here when this stage is done with the steps before. On a GPU, its stream receives.
        """
        if self.is_first or self._device.type == "cuda":
            return
        if not self._expected:
            weakref.finalize(self, self._asked.put, None)
            given = weakref.WeakMethod(self._receive), self._asked, self._received
            threading.Thread(
                target=_receive_expected, args=given, name="stages", daemon=True
            ).start()
        self._expected += 1
        self._asked.put(tokens)

    def receive(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Return what the stage before has computed of so many tokens, after waiting for it."""
        if self._device.type == "cuda":
            return self._receive(tokens)
        if self._expected == self._returned:
            self.expect(tokens)
        self._returned += 1
        received: tuple[torch.Tensor, ...] = taken(self._received)
        return received

    def _receive(self, tokens: int) -> tuple[torch.Tensor, ...]:
        if self._received_kind is None:
            described = torch.empty(1 + 2 * _MOST, dtype=torch.int64, device="cpu")
            _wait([self._irecv(described)])
            self._received_kind = described.tolist()
        count, *kinds = self._received_kind
        tensors = [
            torch.empty(tokens, columns, dtype=_DTYPES[dtype], device=self._device)
            for dtype, columns in zip(kinds[::2], kinds[1::2], strict=True)
        ][:count]
        _wait([self._irecv(each) for each in tensors])
        return tuple(tensors)

    def _isend(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, dist.isend(tensor, group=self._group, group_dst=self._rank + 1)

    def _irecv(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, dist.irecv(tensor, group=self._group, group_src=self._rank - 1)


def _receive_expected(
    receive: weakref.WeakMethod[Any],
    asked: queue.SimpleQueue[int | None],
    received: queue.SimpleQueue[Any],
) -> None:
    """Receive what is asked for until the pipe is gone, which this thread does not keep alive."""
    while (tokens := asked.get()) is not None and (method := receive()) is not None:
        try:
            received.put(method(tokens))
        except Exception as error:
            received.put(error)
            return
        del method


def _wait(transfers: list[tuple[torch.Tensor, Any]]) -> None:
    """Wait for transfers; on a GPU, have its stream wait.

    A wait of gloo's cannot be cut into slices, as one that times out closes all connections. So it
    is another thread that waits.
    """
    for tensor, work in transfers:
        if tensor.is_cuda:
            work.wait()
        else:
            work.wait(_FOREVER)
