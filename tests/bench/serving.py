"""What HTTP costs beyond the engine: CPU time a token, and seconds to the first token.

    python tests/bench/serving.py --streams 32 --tokens 128 --out tests/bench/results/serving.json

A tiny model generates for all streams at once, or with ``--apart 10`` for one more every 10 ms: the
engine alone (``LLM.generate``), coroutines
(``AsyncLLM``), and clients in another process (``/v1/completions``, streamed). CPU time is that of
all threads of the serving process. The texts of the three are compared, and nothing is printed if
they differ. Rounds alternate. "uvicorn" is a server that answers each of these clients with a
constant at once: what the clients, their connections and HTTP take without us.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_module import LLM, AsyncLLM, SamplingParams
from vllm_module.server.app import application
from vllm_module.server.connection import Limits
from vllm_module.server.endpoint import Keys
from vllm_module.server.listener import Address, Listener
from vllm_module.server.state import State

sys.path.insert(0, str(Path(__file__).parent))
from machine import machine

Texts = list[str]


def write_checkpoint(folder: Path) -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    conftest = runpy.run_path(str(Path(__file__).parents[1] / "server/conftest.py"))
    conftest["write_tokenizer"](folder)


def stream_all(pipe: Connection, port: int, prompts: Texts, tokens: int, apart: float) -> None:
    """Be the clients: in each round, stream all prompts at once; send texts and first seconds."""

    async def one(number: int, prompt: str) -> tuple[str, float]:
        await asyncio.sleep(number * apart)
        body = json.dumps(
            {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        begin = time.perf_counter()
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
        text, first = "", 0.0
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: "):
                first = first or time.perf_counter() - begin
                text += json.loads(line[6:])["choices"][0]["text"]
        writer.close()
        return text, first

    async def all_of_them() -> list[tuple[str, float]]:
        return await asyncio.gather(*map(one, range(len(prompts)), prompts))

    while pipe.recv():
        pipe.send(asyncio.run(all_of_them()))


async def constant(scope: Any, receive: Any, send: Any) -> None:
    """Be an application that does nothing, and streams one event."""
    while (await receive()).get("more_body", False):
        pass
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    event = b'data: {"choices": [{"text": "x"}]}\n\n'
    await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def measured(work: Callable[[], tuple[Texts, list[float]]]) -> tuple[float, float, Texts, float]:
    """Return CPU seconds, seconds, texts, and the median of seconds to a first token."""
    cpu, begin = time.process_time(), time.perf_counter()
    texts, firsts = work()
    seconds = time.perf_counter() - begin
    return time.process_time() - cpu, seconds, texts, statistics.median(firsts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--apart", type=float, default=0.0, help="ms between two beginnings")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    apart = options.apart / 1000
    prompts = [f"client {i}: {'x' * (i % 7)}" for i in range(options.streams)]
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        llm = LLM(folder, dtype="float32", device="cpu", kv_cache_memory_bytes=64 << 20)
    engine = AsyncLLM(llm)
    gc.collect()
    gc.freeze()  # as `vllm-module serve` does
    state = State(["tiny"], 64, engine)
    listener = Listener(application(state, Keys((), ()), Limits()), Address(port=0), Limits())
    listener.start()
    floor = Listener(constant, Address(port=0), Limits())
    floor.start()
    spawning = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, server in {"HTTP": listener, "uvicorn": floor}.items():
        pipes[name], theirs = spawning.Pipe()
        given = theirs, int(server.url.rpartition(":")[2]), prompts, options.tokens, apart
        spawning.Process(target=stream_all, args=given, daemon=True).start()

    def alone() -> tuple[Texts, list[float]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts = [output.outputs[0].text for output in outputs]
        return texts, [output.metrics.first_token_latency for output in outputs]

    def coroutines() -> tuple[Texts, list[float]]:
        async def one(number: int, prompt: str) -> tuple[str, float]:
            await asyncio.sleep(number * apart)
            begin, firsts = time.perf_counter(), list[float]()
            text = ""
            async for output in engine.generate(prompt, params):
                firsts.append(time.perf_counter() - begin)
                text = output.outputs[0].text
            return text, firsts[0]

        async def all_of_them() -> list[tuple[str, float]]:
            return await asyncio.gather(*map(one, range(len(prompts)), prompts))

        found = asyncio.run(all_of_them())
        return [text for text, _ in found], [first for _, first in found]

    def http(name: str) -> tuple[Texts, list[float]]:
        pipes[name].send(True)
        found = pipes[name].recv()
        return [text for text, _ in found], [first for _, first in found]

    ways = {
        "LLM.generate": alone,
        "AsyncLLM": coroutines,
        "HTTP": partial(http, "HTTP"),
        "uvicorn": partial(http, "uvicorn"),
    }
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    expected, _ = alone()
    for count in range(options.rounds + 1):
        for name, way in ways.items():
            cpu, seconds, texts, first = measured(way)
            if texts != expected and name != "uvicorn":
                raise SystemExit(f"{name} gives other texts: no figure")
            if count:  # the first round warms up
                rounds[name].append((cpu, seconds, first))
    for pipe in pipes.values():
        pipe.send(False)
    for server in (listener, floor):
        server.stop()
        server.stop()
        server.join()
    engine.close()
    tokens = options.streams * options.tokens
    results: dict[str, Any] = {"streams": options.streams, "tokens": options.tokens}
    for name, found in rounds.items():
        cpu, seconds, first = (statistics.median(column) for column in zip(*found, strict=True))
        results[name] = {"ms to first token": 1000 * first}
        if name != "uvicorn":
            results[name] |= {
                "cpu ms a token": 1000 * cpu / tokens, "tokens a second": tokens / seconds,
            }  # fmt: skip
    for name in ("AsyncLLM", "HTTP"):
        beyond = [
            1000 * (mine[0] - engines[0]) / tokens
            for mine, engines in zip(rounds[name], rounds["LLM.generate"], strict=True)
        ]
        results[name]["cpu ms a token beyond the engine"] = statistics.median(beyond)
    print(json.dumps(results, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
