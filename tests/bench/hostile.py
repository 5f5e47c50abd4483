"""How long hostile requests hold up the streams of other clients, beside the time of a step.

    python tests/bench/hostile.py [--streams 8] [--rounds 3] [--kinds KIND ...]
        [--out tests/bench/results/hostile.json]

A model of 58 million parameters answers streams of other clients, which are processes of their own.
Meanwhile another process sends requests of one kind, one after the other, until the streams end.
The figure is the longest time between two events of any stream, in milliseconds, beside that of
a round without such requests. Nothing is printed for a kind if a text differs, or if one of its
requests is not answered as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import multiprocessing
import runpy
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_module import LLM, AsyncLLM
from vllm_module.server.app import application
from vllm_module.server.connection import Limits
from vllm_module.server.endpoint import Keys
from vllm_module.server.listener import Address, Listener
from vllm_module.server.state import State

sys.path.insert(0, str(Path(__file__).parent))
from checkpoints import plausible, write_qwen3
from engine import SHAPES
from machine import machine

MIB = 1 << 20
TOKENS = 64


def body(**entries: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "a", "max_tokens": 1} | entries).encode()


def schema(parts: int) -> dict[str, Any]:
    """Return a schema of so many parts, each of which is all of some of the others."""
    every = [{"$ref": f"#/$defs/{part}"} for part in range(parts)]
    defined = {
        str(part): {"type": "object", "properties": {str(n): {"anyOf": every} for n in range(20)}}
        for part in range(parts)
    }
    return {"$defs": defined, "allOf": every}


def asked_for(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": of}}


# The bodies of each kind, and the status that they get. Those of "... to tokenize" are for another
# path.
BODIES: dict[str, tuple[Callable[[], bytes], int]] = {
    "a prompt of 16 MB": (lambda: body(prompt="word " * (3 * MIB)), 400),
    "16 MB to tokenize": (lambda: json.dumps({"prompt": "word " * (3 * MIB)}).encode(), 200),
    "7 million token ids": (lambda: b'{"prompt": [' + b"1," * (7 * MIB) + b"1]}", 413),
    "800,000 objects": (
        lambda: b'{"prompt": [' + b'{"a": "b", "c": 1},' * 800_000 + b"{}]}", 413,
    ),
    "the most token ids": (lambda: b'{"prompt": [' + b"1," * 262_000 + b"1]}", 400),
    "the most objects": (
        lambda: b'{"prompt": [' + b'{"a": "b", "c": 1},' * 87_000 + b"{}]}", 400,
    ),
    "16 MB of quotes": (lambda: b'{"prompt": [' + b'"",' * (5 * MIB) + b'""]}', 413),
    "16 MB of escapes": (lambda: b'{"prompt": "' + b"\\\\" * (7 * MIB) + b'"}', 400),
    "a million brackets": (lambda: b"[" * MIB, 413),
    "a body above the limit": (lambda: b" " * (17 * MIB), 413),
    "300,000 wrong entries": (
        lambda: body(**{f"x{i}": i for i in range(300_000)}), 413,
    ),
    "a schema that grows": (lambda: body(response_format=asked_for(schema(30))), 400),
    "a pattern that grows": (
        lambda: body(structured_outputs={"regex": "(((a{1,99}){1,99}){1,99}){1,99}"}), 200,
    ),
}  # fmt: skip


def stream_all(pipe: Connection, port: int, streams: int) -> None:
    """Be the other clients: stream all prompts at once; send texts and the longest times."""

    async def one(number: int) -> tuple[str, float]:
        entries = {"max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
        data = body(prompt=[number + 1] * 8, **entries)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + data)
        text, last, longest = "", 0.0, 0.0
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                now = time.perf_counter()
                longest, last = max(longest, now - (last or now)), now
                text += json.loads(line[6:])["choices"][0]["text"]
        writer.close()
        return text, longest

    async def all_of_them() -> list[tuple[str, float]]:
        return await asyncio.gather(*map(one, range(streams)))

    while pipe.recv():
        pipe.send(asyncio.run(all_of_them()))


def attack(pipe: Connection, port: int) -> None:
    """Send requests of a kind until told to end; send how many there were, and their statuses."""
    while (kind := pipe.recv()) is not None:
        statuses: set[int] = set()
        count = 0
        data = BODIES[kind][0]() if kind in BODIES else b""
        pipe.send("ready")
        pipe.recv()  # the streams begin
        while not pipe.poll(0.01):
            count += 1
            if kind == "connections that end at once":
                for _ in range(50):
                    with socket.create_connection(("127.0.0.1", port)) as one:
                        one.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le")
                continue
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                headers = {"Content-Type": "application/json"}
                path = "/tokenize" if kind.endswith("to tokenize") else "/v1/completions"
                connection.request("POST", path, data, headers)
                statuses.add(connection.getresponse().status)
            except (ConnectionError, http.client.HTTPException):
                statuses.add(413)  # it is told, and its connection ends while it still sends
            finally:
                connection.close()
        pipe.recv()
        pipe.send((count, statuses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=[*BODIES, "connections that end at once"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_qwen3(Path(folder), values=plausible, **SHAPES["58M"] | {"vocab_size": 256})
        conftest = runpy.run_path(str(Path(__file__).parents[1] / "server/conftest.py"))
        conftest["write_tokenizer"](Path(folder))
        llm = LLM(folder, dtype="float32", device="cpu", max_model_len=512)
    engine = AsyncLLM(llm)
    gc.collect()
    gc.freeze()  # as `vllm-module serve` does
    listener = Listener(
        application(State(["m"], 64, engine), Keys((), ()), Limits()), Address(port=0), Limits()
    )
    listener.start()
    port = int(listener.url.rpartition(":")[2])
    spawning = multiprocessing.get_context("spawn")
    (clients, theirs), (attacker, its) = spawning.Pipe(), spawning.Pipe()
    for target, given in ((stream_all, (theirs, port, options.streams)), (attack, (its, port))):
        spawning.Process(target=target, args=given, daemon=True).start()
        given[0].close()  # so that a process that fails is noticed

    def streamed() -> tuple[list[str], float]:
        clients.send(True)
        found = clients.recv()
        return [text for text, _ in found], 1000 * max(longest for _, longest in found)

    for _ in range(4):
        expected, _ = streamed()  # steps are compiled and recorded
    results: dict[str, Any] = {}
    for kind in options.kinds:
        alone, beside, counts = [], [], []
        for _ in range(options.rounds):
            texts, longest = streamed()
            alone.append(longest)
            attacker.send(kind)
            attacker.recv()
            attacker.send("begin")
            others, longest = streamed()
            beside.append(longest)
            attacker.send("end")
            count, statuses = attacker.recv()
            counts.append(count)
            if texts != expected or others != expected:
                raise SystemExit(f"{kind}: a text differs: no figure")
            if kind in BODIES and statuses - {BODIES[kind][1]}:
                raise SystemExit(f"{kind}: answered with {statuses}: no figure")
        results[kind] = {
            "requests": counts,
            "longest ms between tokens, alone": alone,
            "longest ms between tokens": beside,
        }
        print(
            f"{kind}: {statistics.median(beside):.0f} ms ({min(beside):.0f} to {max(beside):.0f}), "
            f"alone {statistics.median(alone):.0f}; {sum(counts)} requests"
        )
    attacker.send(None)
    clients.send(False)
    listener.stop()
    listener.stop()
    listener.join()
    engine.close()
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
