"""Checkpoints of stores and web servers: the bits of a local folder, by the bytes needed."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import pickle
import random
import runpy
import threading
import urllib.request
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from safetensors.torch import save_file

from vllm_module import ModelConfig
from vllm_module.build.model_source import ModelSource
from vllm_module.distributed import run_ranks
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights import open_checkpoint, source
from vllm_module.weights.cut_rows import ByteRun
from vllm_module.weights.source import Folder, find_source
from vllm_module.weights.stores import spans, store, stored_bytes
from vllm_module.weights.stores.obstore_client import ObstoreClient
from vllm_module.weights.stores.place import parse

# Pytest's importlib mode has no imports between test files.
STORES: Any = runpy.run_path(str(Path(__file__).with_name("served.py")))
support, CONFIG, FILE, LIST = (STORES[name] for name in ("support", "CONFIG", "FILE", "LIST"))
listing, web, state, same = (STORES[name] for name in ("listing", "web", "state", "same"))
whole, refused, opened = (STORES[name] for name in ("whole", "refused", "opened"))
always, s3 = STORES["always"], STORES["s3"]


def test_ranks_have_the_bits_of_the_local_folder(server: Any, kind: Any, local: Any) -> None:
    """Each rank of 1 and of 4 has what it has from the folder, and leaves no folder behind."""
    url = kind(server)
    for expected in local:
        found = run_ranks(len(expected), lambda rank: state(url))
        assert all(map(same, found, expected))


def test_a_registered_source_goes_before(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user registers for a scheme that is known is what opens it."""
    folder = server.folder / "model"
    monkeypatch.setattr(source, "registered_sources", {"s3": lambda url: Folder(folder)})
    assert find_source("S3://anything").folder == folder


def test_a_store_without_versions_is_named_once(
    server: Any, local: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that changes of files may be missed, and the weights are loaded."""
    with caplog.at_level(logging.WARNING, "vllm_module"):
        url = web(server, lambda handler: handler.serve(200, ETag="", Last_Modified="") or True)
        assert same(state(url), local[0][0])
    (record,) = caplog.records
    assert "sends neither ETag nor Last-Modified" in record.message
    assert url in record.message


@pytest.mark.parametrize(("tag", "is_proof"), [('"one"', True), ('W/"one"', False)])
def test_a_weak_tag_of_a_bucket_proves_nothing(server: Any, tag: str, is_proof: bool) -> None:
    """RFC 9110, section 8.8.1; with the time of change alone, as of a web server."""
    s3(server, always(lambda handler: handler.serve(200, ETag=tag), FILE))
    client = ObstoreClient(parse("s3://bucket/folder"))
    assert client.read(FILE, 0, memoryview(bytearray(8))).version[1:] == ('"one"', is_proof)


def test_a_fork_leaves_the_folder_to_its_parent(server: Any) -> None:
    """The folder stays when a fork of the process drops its source."""
    found = find_source(web(server))
    folder = found.folder
    pid = os.fork()
    if pid == 0:
        del found
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    assert folder.exists()


def test_a_header_takes_one_request_or_two(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that is longer than the first request takes one more; nothing else is read."""
    url = web(server)
    for nbytes, requests in ((1 << 20, 2), (512, 4)):
        monkeypatch.setattr(stored_bytes, "_FIRST_BYTES", nbytes)
        server.requests.clear()
        with opened(url) as checkpoint:
            assert checkpoint.requests == requests
            assert sum("Range" in headers for _, headers in server.requests) == requests
            assert checkpoint.bytes_read == 0
        with pytest.raises(WeightReadError, match="was closed"):
            checkpoint["model.norm.weight"].read()


def test_a_rank_requests_what_it_keeps(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are requested alone, columns with at most the gap between them."""
    monkeypatch.setattr(spans, "REQUEST_BYTES", 1 << 20)
    url = web(server)
    with opened(url) as checkpoint:
        before = checkpoint.bytes_requested
        handle = checkpoint["model.layers.0.mlp.gate_proj.weight"].narrow(0, 16, 16)
        handle.read()
        assert checkpoint.bytes_requested - before == checkpoint.bytes_read == 16 * 32 * 4
        before = checkpoint.bytes_requested
        whole = checkpoint["model.layers.0.mlp.down_proj.weight"]
        whole.narrow(1, 0, 32).read()  # half of each row: a gap of 128 bytes
        assert checkpoint.bytes_requested - before == 32 * 64 * 4 - 128
        before = checkpoint.bytes_requested
        whole.narrow(1, 0, 31).read()  # a gap of 132 bytes
        assert checkpoint.bytes_requested - before == 32 * 31 * 4


@settings(max_examples=60)
@given(st.data())
def test_spans_cover_their_runs(data: st.DataObject) -> None:
    """Each byte of each run lands once at its place; ranges and gaps keep to their limits."""
    content = bytes(random.Random(0).randbytes(4000))
    draw = data.draw
    runs, expected = [], bytearray()
    for _ in range(draw(st.integers(1, 5))):
        length, count = draw(st.integers(1, 90)), draw(st.integers(1, 6))
        stride = length + draw(st.integers(1, 90)) if count > 1 else 0
        offset = draw(st.integers(0, len(content) - (count - 1) * stride - length))
        runs.append((ByteRun(offset, length, stride, count), len(expected)))
        for start in (offset + index * stride for index in range(count)):
            expected += content[start : start + length]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "REQUEST_BYTES", request := draw(st.integers(1, 300)))
        patch.setattr(spans, "GAP_BYTES", gap := draw(st.integers(0, 60)))
        found = spans.spans(runs)
    result, filled = bytearray(len(expected)), 0
    for span in found:
        assert 0 < span.end - span.begin <= request
        touched = set()
        for run, address in span.parts:
            assert span.begin <= run.offset
            assert run.offset + run.span <= span.end
            for index in range(run.count):
                start, target = run.offset + index * run.stride, address + index * run.length
                result[target : target + run.length] = content[start : start + run.length]
                touched |= set(range(start, start + run.length))
                filled += run.length
        ends = sorted(touched)
        assert all(b - a - 1 <= gap for a, b in itertools.pairwise(ends))
        assert (ends[0], ends[-1] + 1) == (span.begin, span.end)
        assert span.direct == (len(span.parts) == 1 and len(touched) == span.end - span.begin)
    assert (result, filled) == (expected, len(expected))


def test_many_requests_are_under_way_at_once(server: Any) -> None:
    """The answers wait for each other: with fewer requests at once, none would come."""
    together = threading.Barrier(store.UNDER_WAY)

    def fault(handler: Any) -> bool:
        together.wait(60)
        return False

    url = web(server)
    with opened(url) as checkpoint:
        embedding = checkpoint["model.embed_tokens.weight"].narrow(0, 0, 64)
        expected = embedding.read()
        server.fault = fault
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spans, "REQUEST_BYTES", expected.nbytes // store.UNDER_WAY)
            assert torch.equal(embedding.read(), expected)


def test_an_update_and_a_plan_take_handles_of_a_store(server: Any, local: Any) -> None:
    """A running model takes the weights of a URL in place; a plan reads nothing."""
    found = ModelSource.find(ModelConfig(model=web(server)))
    with found.open() as checkpoint:
        model = found.build(torch.device("cpu"))
        assert sum(read.source.shape.numel() for read in model.plan_weights(checkpoint).reads())
        assert checkpoint.bytes_read == 0
        model.load_weights(checkpoint.items())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.update_weights(checkpoint.items())
    assert same(model.state_dict(), local[0][0])


def test_a_source_is_opened_again_elsewhere(server: Any) -> None:
    """A pickled source opens the same version, from the same folder while that is there."""
    found = find_source(web(server))
    pickled, folder = pickle.dumps(found), found.folder
    again = pickle.loads(pickled)
    assert again.folder == folder
    prints = []
    for fault in (None, None, lambda handler: bool(handler.serve(200, ETag='"two"')) or True):
        server.fault = fault
        with again.weights() as checkpoint:
            prints.append(checkpoint.fingerprint)
    assert prints[0] == prints[1] != prints[2]
    server.fault = None
    del found
    gc.collect()
    assert not folder.exists()
    again = pickle.loads(pickled)  # as on another machine
    assert again.folder != folder
    assert json.loads((again.folder / "config.json").read_text()) == CONFIG


def of_folder(server: Any, kind: Any, folder: str) -> str:
    """Return the URL of another folder."""
    found: str = kind(server)
    if kind.__name__ == "web":
        return f"{server.url}/{folder}"

    def answer(handler: Any) -> bool:
        if LIST in handler.path:
            return bool(listing(handler, folder))
        handler.path = handler.path.replace("/bucket/folder", f"/{folder}")
        return False

    server.fault = answer
    return found


def write_whole(server: Any, folder: str, name: str) -> Path:
    """Write the model as one file into another folder."""
    written: Path = server.folder / folder
    written.mkdir(exist_ok=True)
    with open_checkpoint(server.folder / "model") as parts:
        save_file({key: handle.read() for key, handle in parts.items()}, written / name)
    (written / "config.json").write_text(json.dumps(CONFIG))
    return written


def test_a_single_file_without_an_index(server: Any, kind: Any, local: Any) -> None:
    """``model.safetensors`` is found by name, and any other name where the store can list."""
    name = "model.safetensors" if kind.__name__ == "web" else "weights.safetensors"
    write_whole(server, "single", name)
    assert same(state(of_folder(server, kind, "single")), local[0][0])


def test_an_index_that_a_later_save_left_over(server: Any, kind: Any, local: Any) -> None:
    """If its files are gone, ``model.safetensors`` is read, as from a local folder."""
    parts, name = server.folder / "model", "model.safetensors.index.json"
    folder = write_whole(server, f"again-{kind.__name__}", "model.safetensors")
    (folder / name).write_text((parts / name).read_text())
    url = of_folder(server, kind, folder.name)
    assert same(state(url), local[0][0])
    (folder / FILE).write_bytes((parts / FILE).read_bytes())
    with pytest.raises(CheckpointFormatError, match=r"of-00002\.safetensors: .* no such file"):
        state(url)


def test_a_real_s3_server(server: Any, local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of obstore and moto's S3: listing, ranges, ETags, what is not there."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        request = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
        urllib.request.urlopen(request).close()
        bucket = obstore.store.S3Store("bucket", client_options={"allow_http": True})
        for path in (server.folder / "model").iterdir():
            obstore.put(bucket, f"a/b c/{path.name}", path.read_bytes())
        assert same(state("s3://bucket/a/b c"), local[0][0])
        for change, message in (
            (lambda: obstore.put(bucket, f"a/b c/{FILE}", bytes(1000)), r"was changed|ends before"),
            (lambda: obstore.delete(bucket, f"a/b c/{FILE}"), "NoSuchKey.* could be read when it"),
        ):
            data = (server.folder / "model" / FILE).read_bytes()
            obstore.put(bucket, f"a/b c/{FILE}", data)
            with opened("s3://bucket/a/b c") as checkpoint:
                change()
                with pytest.raises(WeightReadError, match=message):
                    checkpoint["model.embed_tokens.weight"].read()
        obstore.put(bucket, f"a/b c/{FILE}", b"")
        assert "it is empty: copy it there again" in refused("s3://bucket/a/b c")
        assert "has no config.json; there is nothing" in refused("s3://bucket/a")
        assert "404 Not Found (NoSuchBucket)" in refused("s3://none/a")
    finally:
        moto.stop()


def test_ranks_in_processes_read_a_url_together(server: Any, tmp_path: Path) -> None:
    """Each byte of the weights is requested once by all ranks, also where columns are cut."""
    folder, url = str(server.folder / "model"), web(server)
    expected = run_ranks(2, lambda rank: state(folder))
    server.sent = 0

    def load(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        torch.save(state(url), tmp_path / str(rank))
        dist.barrier()
        dist.destroy_process_group()

    pids = support["fork_ranks"](2, load, port=support["free_port"]())
    assert support["exit_codes"](pids) == [0, 0]
    for rank in range(2):
        assert same(torch.load(tmp_path / str(rank)), expected[rank])
    with open_checkpoint(Path(folder)) as checkpoint:
        nbytes = checkpoint.nbytes
        headers = sum(path.stat().st_size for path in checkpoint.files) - nbytes
    small = sum(path.stat().st_size for path in Path(folder).glob("*.json"))
    first = 2 * 512  # of each file, and what follows it again in the second request
    assert server.sent <= nbytes + 2 * (headers + small + first)
