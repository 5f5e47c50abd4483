"""The one loop that steps an engine until requests have ended, and yields their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from vllm_module.runtime.engine import Engine
from vllm_module.runtime.metrics import StepStats
from vllm_module.runtime.outputs import RequestOutput
from vllm_module.runtime.sequence import Request

_Output = TypeVar("_Output")
Indexed = Iterator[tuple[int, RequestOutput]]


def serve(
    engine: Engine,
    requests: Iterable[Request | _Output | None],
    output: Callable[[Request], _Output],
    concurrency: int | None = None,
    every_token: bool = False,
    on_step: Callable[[StepStats], object] | None = None,
) -> Iterator[tuple[int, _Output]]:
    """Step until all requests have ended; yield the index and the output of each that ends.

    Args:
        engine: to which the requests are added.
        requests: read while fewer than ``concurrency`` of them run. An output among them, of a
            prompt that is refused, is yielded as it is. After ``None``, which is for no request
            now, the running ones go on.
        output: returns a request's output so far.
        concurrency: most requests that run at the same time; by default all.
        every_token: whether the output so far is yielded after each new token, too.
        on_step: as in :meth:`Engine.step`.

    Requests that run when the iterator is closed, or when a step fails, are aborted.

    """
    running: dict[Request, tuple[int, int]] = {}  # to its index, and its tokens that were yielded
    coming: Iterator[Request | _Output | None] | None = iter(requests)
    taken = 0
    try:
        while running or coming:
            while coming and len(running) != concurrency:
                try:
                    request = next(coming)
                except StopIteration:
                    coming = None
                    break
                if request is None:
                    break
                if isinstance(request, Request):
                    running[request] = taken, 0
                else:
                    yield taken, request
                taken += 1
            changed = []
            # A step for another caller may have computed tokens of these requests, or ended some.
            # With the lock, no other thread's step adds a token between the count and the output.
            with engine.reading():
                for request, (index, seen) in list(running.items()):
                    count = request.metrics.num_generation_tokens
                    if request.request_id not in engine.requests:
                        del running[request]
                    elif every_token and count > seen:
                        running[request] = index, count
                    else:
                        continue
                    changed.append((index, output(request)))
            if running and not changed:
                engine.step(on_step)
            yield from changed
    finally:
        for request in running:
            engine.abort(request.request_id)
