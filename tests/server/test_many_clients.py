"""Many slow clients at once, and many requests one after another: right texts, and nothing grows.

With ``AT_LENGTH=1`` 1,000 clients and 10,000 requests, else fewer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_module import AsyncLLM

AT_LENGTH = bool(os.environ.get("AT_LENGTH"))
CLIENTS, REQUESTS = (1000, 10_000) if AT_LENGTH else (60, 400)
PROMPTS = ["hello", "a b c", "The sky is", "0123456789", "x", "zz top"]


@pytest.fixture(scope="module")
def server(start: Callable[..., Any], engine: Callable[..., Any]) -> Iterator[Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    llm = AsyncLLM(engine(max_num_seqs=64), max_waiting=2 * CLIENTS)
    with start(llm) as served:
        yield served
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def request(prompt: str, tokens: int, **options: Any) -> bytes:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **options}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Authorization: Bearer sk-two\r\nContent-Length: {len(data)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + data


def streamed_text(answer: bytes) -> str:
    """Return the text of the events of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head.split(b"\r\n")[0], answer
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    assert b"data: [DONE]" in body
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def tasks() -> int:
    # By type: isinstance would ask proxies of objects that are gone.
    return sum(issubclass(type(each), asyncio.Task) for each in gc.get_objects())


def resident() -> int:
    """Return the bytes of this process in memory."""
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def test_slow_clients(server: Any, until: Callable[[Callable[[], object]], None]) -> None:
    """Clients that read a few bytes at a time get their whole streams, all at once."""
    wanted = {}
    for prompt in PROMPTS:
        status, body = server.send(request(prompt, 24))
        assert status == 200
        wanted[prompt] = json.loads(body)["choices"][0]["text"]
    connected = asyncio.Event()
    waiting = 0

    async def client(number: int) -> bool:
        nonlocal waiting
        prompt = PROMPTS[number % len(PROMPTS)]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=256)
        try:
            writer.write(request(prompt, 24, stream=True))
            await writer.drain()
            waiting += 1
            if waiting == CLIENTS:
                connected.set()
            await connected.wait()  # none reads before all have asked
            received = b""
            while more := await reader.read(128):
                received += more
                await asyncio.sleep(0.001)
            return streamed_text(received) == wanted[prompt]
        finally:
            writer.close()

    async def all_clients() -> list[bool]:
        return await asyncio.gather(*(client(number) for number in range(CLIENTS)))

    before = descriptors()
    assert all(asyncio.run(all_clients()))
    until(lambda: descriptors() <= before)
    until(lambda: not server.llm.llm.engine.requests)


def test_nothing_grows(server: Any, until: Callable[[Callable[[], object]], None]) -> None:
    """Requests of all kinds leave no descriptor, task, request or page behind."""
    draw = random.Random(0)
    engine = server.llm.llm.engine

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        kind = draw.choice(["whole", "stream", "leaves", "wrong", "several"])
        options: dict[str, Any] = {"stream": kind in ("stream", "leaves")}
        if kind == "several":
            options |= {"n": 3, "temperature": 1.0, "logprobs": 2}
        tokens = 400 if kind == "leaves" else draw.randrange(1, 6)
        if kind == "wrong":
            options["no_such_field"] = number
        writer.write(request(draw.choice(PROMPTS), tokens, **options))
        if kind == "leaves":
            await reader.read(300)
        else:
            answer = await reader.read()
            assert (b" 400 " if kind == "wrong" else b" 200 ") in answer[:20]
        writer.close()

    async def some(count: int) -> None:
        for begin in range(0, count, 20):
            await asyncio.gather(*(one(begin + number) for number in range(20)))

    asyncio.run(some(REQUESTS // 4))
    until(lambda: not engine.requests)
    opened, running, memory = descriptors(), tasks(), resident()
    asyncio.run(some(REQUESTS))
    until(lambda: descriptors() <= opened and tasks() <= running and not engine.requests)
    pool = engine.scheduler.pool
    assert pool.free_pages == pool.num_pages
    if AT_LENGTH:
        assert resident() - memory < 8 << 20
