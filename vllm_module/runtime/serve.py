"""The one loop that steps an engine until requests have ended, and yields their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from vllm_module.runtime.engine import Engine
from vllm_module.runtime.metrics import StepStats
from vllm_module.runtime.outputs import RequestOutput
from vllm_module.runtime.sequence import Request

Indexed = Iterator[tuple[int, RequestOutput]]


def serve(
    engine: Engine,
    requests: Iterable[Request | RequestOutput],
    output: Callable[[Request], RequestOutput],
    concurrency: int | None = None,
    every_token: bool = False,
    on_step: Callable[[StepStats], object] | None = None,
) -> Indexed:
    """Step until all requests have ended; yield the index and the output of each that ends.

    Args:
        engine: to which the requests are added.
        requests: read while fewer than ``concurrency`` of them run. An output among them, of a
            prompt that is refused, is yielded as it is.
        output: returns a request's output so far.
        concurrency: most requests that run at the same time; by default all.
        every_token: whether the output so far is yielded after each new token, too.
        on_step: as in :meth:`Engine.step`.

    Requests that run when the iterator is closed, or when a step fails, are aborted.

    """
    running: dict[Request, tuple[int, int]] = {}  # to its index, and its tokens that were yielded
    coming: Iterator[tuple[int, Request | RequestOutput]] | None = enumerate(requests)
    try:
        while running or coming:
            while coming and len(running) != concurrency:
                index, request = next(coming, (-1, None))
                if request is None:
                    coming = None
                elif isinstance(request, RequestOutput):
                    yield index, request
                else:
                    running[request] = index, 0
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
