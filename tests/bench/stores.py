"""Loading from stores: bytes requested over bytes kept, time over one plain stream, libraries.

A server in a process of its own answers each request after 50 ms, and sends 100 MB/s on each
connection, over HTTP and as S3 does. "one stream" downloads the files one after the other, and
keeps nothing. "5 % errors" are 503, resets and answers that are cut off. Each load is compared with
that of the local folder, bit by bit, in the first round. The libraries request the same ranges of
4 MiB, 16 at once, without latency and limit; their bytes are compared too. fsspec is measured where
s3fs is installed, and Run:ai's model streamer where it is, with its part for S3: it gives tensors
of the whole files, which are copied.

    python tests/bench/stores.py [--rounds 5] [--layers 4] [--out tests/bench/results/stores.json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import write_qwen3
from machine import machine, over, rounds, spread, write
from safetensors.torch import load_file

from vllm_module import DeviceConfig, LoadConfig, ModelConfig, get_model
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import run_ranks
from vllm_module.weights import read_all
from vllm_module.weights.stores import spans
from vllm_module.weights.stores.http_client import web_client
from vllm_module.weights.stores.obstore_client import ObstoreClient
from vllm_module.weights.stores.place import parse
from vllm_module.weights.stores.store import UNDER_WAY

ROOT = Path(__file__).parents[1]
support = runpy.run_path(str(ROOT / "support.py"))
importlib.import_module("vllm_module.models.qwen3")  # once, for all forks
CPU = DeviceConfig(device="cpu")
LATENCY, RATE = 0.05, 100e6
RANKS = 8
GAPS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)


class Slow:
    """A connection that sends at RATE."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> None:
        for start in range(0, len(data), 1 << 20):
            begin, part = time.perf_counter(), data[start : start + (1 << 20)]
            self.file.write(part)
            time.sleep(max(0.0, len(part) / RATE - (time.perf_counter() - begin)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def serve(folder: Path) -> None:
    """Serve until standard input ends; /-/SETTING/NUMBER sets, and /-/sent tells, what it sends."""
    module = runpy.run_path(str(ROOT / "weights" / "stores_server.py"))
    settings = {"latency": 0.0, "errors": 0.0, "rate": 0.0}

    def fault(handler: Any) -> bool:
        server = handler.server
        # Run:ai's client names the host in each request, as if the server were a proxy.
        named = re.sub("^http://[^/]*", "", handler.path)
        path, _, query = named.partition("?")
        if path.startswith("/-/"):
            name, *value = path.removeprefix("/-/").split("/")
            if value:
                settings[name], server.sent = float(value[0]), 0
            handler.answer(200, str(server.sent).encode())
            return True
        if settings["rate"] and not isinstance(handler.wfile, Slow):
            handler.wfile = Slow(handler.wfile)
        time.sleep(settings["latency"])
        if settings["errors"] and server.rng.random() < settings["errors"]:
            kind = server.rng.randrange(3)
            if kind == 0:
                handler.answer(503)
            elif kind == 1:
                handler.close_connection = True
            else:
                handler.serve(200, keep=1000)
            return True
        if "list-type=2" in query:
            names = sorted(each.name for each in (folder / "model").iterdir())
            entries = "".join(
                f"<Contents><Key>model/{name}</Key><Size>1</Size><ETag>one</ETag>"
                "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
                for name in names
            )
            listed = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}"
            handler.answer(200, f"{listed}</ListBucketResult>".encode())
            return True
        handler.path = path.removeprefix("/bucket")
        return False

    with module["serving"](folder) as server:
        import random

        server.rng, server.fault = random.Random(0), fault
        print(server.url, flush=True)
        sys.stdin.read()


def ask(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        return bytes(answer.read())


def state(model: str) -> dict[str, torch.Tensor]:
    return get_model(model_config=ModelConfig(model=model), device_config=CPU).state_dict()


def demand_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def one_stream(url: str, folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        with urllib.request.urlopen(f"{url}/model/{path.name}") as answer:
            nbytes = 0
            while chunk := answer.read(1 << 20):
                nbytes += len(chunk)
        assert nbytes == path.stat().st_size


def by_runai(folder: Path) -> Callable[[], dict[str, torch.Tensor]] | None:
    """Return a load of all tensors by Run:ai's streamer; ``None`` where it is not installed."""
    parts = ("runai_model_streamer", "runai_model_streamer_s3")
    if not all(map(importlib.util.find_spec, parts)):
        print("Run:ai's streamer: not measured, because it is not installed with its S3 part")
        return None
    from runai_model_streamer import SafetensorsStreamer

    os.environ["RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"] = "0"
    files = [f"s3://bucket/model/{path.name}" for path in sorted(folder.glob("*.safetensors"))]

    def load() -> dict[str, torch.Tensor]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(files)
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}

    return load


def times(url: str, folder: Path, n: int) -> dict[str, Any]:
    local = state(str(folder))
    for name, value in (("latency", LATENCY), ("rate", RATE)):
        ask(f"{url}/-/{name}/{value}")

    def with_errors() -> dict[str, torch.Tensor]:
        ask(f"{url}/-/errors/0.05")
        try:
            return state(f"{url}/model")
        finally:
            ask(f"{url}/-/errors/0")

    works: dict[str, Callable[[], Any]] = {
        "one stream": lambda: one_stream(url, folder),
        "https": lambda: state(f"{url}/model"),
        "s3": lambda: state("s3://bucket/model"),
        "https, 5 % errors": with_errors,
    }
    if (streamed := by_runai(folder)) is not None:
        works["Run:ai streamer, s3"] = streamed
    for name, work in works.items():
        found = work()
        if name == "Run:ai streamer, s3":
            stored = {}
            for path in folder.glob("*.safetensors"):
                stored |= load_file(path)
            demand_same(found, stored)
        elif name != "one stream":
            demand_same(found, local)
    seconds = rounds(works, n)
    result: dict[str, Any] = {name: {"seconds": spread(each)} for name, each in seconds.items()}
    for name in list(works)[1:]:
        result[name]["over one stream"] = spread(over(seconds, name, "one stream"))
    for name, each in result.items():
        ratio = each.get("over one stream")
        more = f"  {ratio['median']:.2f} of one stream" if ratio else ""
        print(f"{name:24} {each['seconds']['median']:6.2f} s{more}")
    return result


def requested(url: str) -> dict[str, Any]:
    """Return, for each rank, bytes requested over bytes kept: of rows, of columns, and of all."""
    source = ModelSource.find(ModelConfig(model=f"{url}/model"))

    def of_rank(rank: int) -> dict[str, float]:
        ratios = {}
        with source.open() as checkpoint:
            model = source.build(torch.device("cpu"), len(checkpoint))
            reads = [each.source for each in model.plan_weights(checkpoint).reads()]
            for kind, wanted in (("rows", True), ("columns", False)):
                jobs = [
                    (each, torch.empty(each.shape, dtype=each.dtype))
                    for each in reads
                    if each.contiguous == wanted
                ]
                before, kept = checkpoint.bytes_requested, checkpoint.bytes_read
                read_all(jobs)
                kept = checkpoint.bytes_read - kept
                ratios[kind] = (checkpoint.bytes_requested - before) / kept
        with source.open() as checkpoint:
            model.load_weights(checkpoint.items())
            ratios["all, headers too"] = checkpoint.bytes_requested / checkpoint.bytes_read
            ratios["requests"] = checkpoint.requests
        return ratios

    ranks = run_ranks(RANKS, of_rank)
    result = {kind: spread([each[kind] for each in ranks]) for kind in ranks[0]}
    print(f"requested over kept, each of {RANKS} ranks by itself: " + ", ".join(
        f"{kind} {each['median']:.3f} (to {each['greatest']:.3f})" for kind, each in result.items()
    ))  # fmt: skip
    return result


def gaps(url: str, n: int) -> dict[str, Any]:
    """Return seconds and bytes of one rank's rows of 8 by the largest gap that is read."""
    source = ModelSource.find(ModelConfig(model=f"{url}/model"))

    def load(gap: int) -> float:
        spans.GAP_BYTES = gap

        def of_rank(rank: int) -> float:
            if rank != 3:
                return 0.0
            with source.open() as checkpoint:
                model = source.build(torch.device("cpu"), len(checkpoint))
                model.load_weights(checkpoint.items())
                return checkpoint.bytes_requested / checkpoint.bytes_read

        return run_ranks(RANKS, of_rank)[3]

    default = spans.GAP_BYTES
    ratios = {gap: load(gap) for gap in GAPS}
    seconds = rounds({str(gap): lambda gap=gap: load(gap) for gap in GAPS}, n)
    spans.GAP_BYTES = default
    result = {}
    for gap in GAPS:
        result[f"{gap >> 10} KiB"] = {
            "seconds": spread(seconds[str(gap)]), "requested over kept": ratios[gap],
        }  # fmt: skip
        median = spread(seconds[str(gap)])["median"]
        print(f"gap {gap >> 10:5} KiB: {median:6.3f} s, {ratios[gap]:.3f} requested over kept")
    return result


def together(url: str, nbytes: int) -> float:
    """Return the bytes that ranks in processes request together, over those of the model."""
    ask(f"{url}/-/latency/0")  # which also starts the count again

    def load(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        config = ModelConfig(model=f"{url}/model")
        get_model(model_config=config, load_config=LoadConfig(), device_config=CPU)
        dist.barrier()
        dist.destroy_process_group()

    codes = support["exit_codes"](support["fork_ranks"](RANKS, load, port=support["free_port"]()))
    assert codes == [0] * RANKS
    ratio = int(ask(f"{url}/-/sent")) / nbytes
    print(f"requested by {RANKS} ranks together, over the model: {ratio:.3f}")
    return ratio


def libraries(url: str, folder: Path, n: int) -> dict[str, Any]:
    """Return seconds and seconds of the CPU for the same ranges, by library."""
    for name in ("latency", "rate"):
        ask(f"{url}/-/{name}/0")
    ranges = [
        (path.name, begin, min(begin + spans.REQUEST_BYTES, path.stat().st_size))
        for path in sorted(folder.glob("*.safetensors"))
        for begin in range(0, path.stat().st_size, spans.REQUEST_BYTES)
    ]
    into = {path.name: torch.empty(path.stat().st_size, dtype=torch.uint8)
            for path in folder.glob("*.safetensors")}  # fmt: skip
    views = {name: memoryview(tensor.numpy()) for name, tensor in into.items()}
    pool = ThreadPoolExecutor(UNDER_WAY)

    def by(client: Any) -> Callable[[], None]:
        def read() -> None:
            list(pool.map(lambda r: client.read(r[0], r[1], views[r[0]][r[1] : r[2]]), ranges))

        return read

    works: dict[str, Callable[[], None]] = {
        "obstore": by(ObstoreClient(parse("s3://bucket/model"))),
        "http.client": by(web_client(parse(f"{url}/model"))),
    }
    try:
        import s3fs
    except ImportError:
        print("fsspec: not measured, because s3fs is not installed")
    else:
        options = {"endpoint_url": url}
        files = s3fs.S3FileSystem(
            client_kwargs=options, default_cache_type="none", use_listings_cache=False
        )
        names = [f"bucket/model/{name}" for name, _, _ in ranges]
        begins, ends = [each[1] for each in ranges], [each[2] for each in ranges]

        def fsspec() -> None:
            # It keeps every answer until the last one has come.
            found = files.cat_ranges(names, begins, ends, batch_size=UNDER_WAY)
            for (name, begin, end), data in zip(ranges, found, strict=True):
                views[name][begin:end] = data

        works["fsspec"] = fsspec
    for work in works.values():
        for tensor in into.values():
            tensor.zero_()
        work()
        for name, view in views.items():
            assert view == (folder / name).read_bytes()
    cpu: dict[str, list[float]] = {name: [] for name in works}

    def timed(name: str) -> None:
        begin = time.process_time()
        works[name]()
        cpu[name].append(time.process_time() - begin)

    seconds = rounds({name: lambda name=name: timed(name) for name in works}, n)
    result = {}
    for name in works:
        result[name] = {"seconds": spread(seconds[name]), "seconds of the CPU": spread(cpu[name])}
        if name != "obstore":
            result[name]["over obstore"] = spread(over(seconds, name, "obstore"))
        print(f"{name:24} {spread(seconds[name])['median']:6.3f} s, "
              f"{spread(cpu[name])['median']:.3f} s of the CPU")  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    torch.set_num_threads(1)
    print(machine()["processor"])
    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        folder = write_qwen3(
            Path(temporary) / "model", num_hidden_layers=options.layers, vocab_size=8000
        )
        nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        command = [sys.executable, __file__, "--serve", temporary]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            os.environ |= {
                "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
            }  # fmt: skip
            try:
                results = {
                    "model bytes": nbytes,
                    "ranges by library": libraries(url, folder, options.rounds),
                    "load": times(url, folder, options.rounds),
                    f"each of {RANKS} ranks by itself": requested(url),
                    f"rank 3 of {RANKS} by gap": gaps(url, options.rounds),
                    f"{RANKS} ranks together, requested over model": together(url, nbytes),
                }
            finally:
                server.stdin.close()
                server.wait()
        print(json.dumps(results["model bytes"]))
    if options.out:
        write(options.out, results)


if __name__ == "__main__":
    main()
