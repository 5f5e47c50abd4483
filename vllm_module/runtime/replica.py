"""An engine's weights as a checkpoint that another engine loads: ``replica://host:port``.

What an engine holds is served as one safetensors file that exists nowhere: its header says the
tensors under the names of the model's tree, and the bytes of a range are taken from the ranks'
parameters when they are asked for. So the reader is that of any web server, and each of its ranks
asks for what it keeps.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import re
import socket
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vllm_module.base.messages import describe_error, printable_name
from vllm_module.core.digests import rank_in, region_of
from vllm_module.core.layout_of import layout_of_module
from vllm_module.errors import UnsupportedModelError
from vllm_module.layout import Layout
from vllm_module.weights.hub import is_small
from vllm_module.weights.region import Region

_log = logging.getLogger(__name__)

PIECE = 4 << 20  # bytes that are taken between two steps
_CLIENTS = 64  # at once; the connections of others are closed
_IDLE = 30.0  # seconds that a client may take for a request or for a part of an answer
_FILE = "model.safetensors"
_OF_FILES = (".index.json", "digests.json")  # of the folder's weights, which may be others by now
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")

CallRanks = Callable[[Callable[[nn.Module], Any]], list[Any]]


class ServedTensor(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    by_rows: bool  # False if the ranks hold boxes of another view of it
    begin: int  # byte in the file

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class HeldFile:
    """The safetensors file of what the ranks of an engine hold.

    Args:
        call: calls a function with each rank's model, and returns the results by rank.

    Attributes:
        size: bytes of the file.

    Raises ``UnsupportedModelError`` if a parameter has other values than a checkpoint stores, as
    one that is quantized.

    """

    def __init__(self, call: CallRanks) -> None:
        self._call = call
        listed: list[tuple[str, tuple[int, ...], torch.dtype, bool]] = []
        # By name, the ranks of one pipeline stage, which hold the tensor whole.
        self._holders: dict[str, range] = {}
        of_ranks = call(_list_tensors)
        for rank, (size, tensors) in enumerate(of_ranks):
            listed += [each for each in tensors if each[0] not in self._holders]
            for name, *_ in tensors:
                self._holders.setdefault(name, range(rank, rank + size))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begins, end = [], 0
        for name, shape, dtype, _ in listed:
            begins.append(end)
            end += math.prod(shape) * dtype.itemsize
            offsets = [begins[-1], end]
            header[name] = {"dtype": _DTYPES[dtype], "shape": [*shape], "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        first = len(self._header)
        self.size = first + end
        self._begins = [first + begin for begin in begins]
        self._tensors = [
            ServedTensor(*each, begin) for each, begin in zip(listed, self._begins, strict=True)
        ]
        self._whole: tuple[str, torch.Tensor] | None = None  # the last that is not taken by rows

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` to ``end``; call it between two steps."""
        parts = [self._header[begin:end]]
        at = max(0, bisect_right(self._begins, begin) - 1)
        for tensor in self._tensors[at:]:
            if tensor.begin >= end:
                break
            first = max(begin, tensor.begin) - tensor.begin
            last = min(end, tensor.begin + tensor.nbytes) - tensor.begin
            if first < last:
                parts.append(self._bytes(tensor, first, last))
        return b"".join(parts)

    def regions(self) -> dict[str, Region]:
        """Return name, shape and dtype of each tensor, to plan with."""
        return {
            each.name: Region.of(
                each.name, torch.empty(each.shape, dtype=each.dtype, device="meta")
            )
            for each in self._tensors
        }

    def take(self, name: str) -> torch.Tensor:
        """Return a copy of a tensor, in host memory; call it between two steps."""
        tensor = next(each for each in self._tensors if each.name == name)
        return self._take(tensor, 0, tensor.shape[0] if tensor.shape else 1).view(tensor.shape)

    def forget(self) -> None:
        """Take all bytes from the parameters again."""
        self._whole = None

    def _bytes(self, tensor: ServedTensor, first: int, last: int) -> bytes:
        """Return some bytes of a tensor, out of the rows that have them."""
        count = tensor.shape[0] if tensor.shape else 1
        row = tensor.nbytes // count
        rows = (first // row, -(-last // row)) if tensor.by_rows else (0, count)
        if self._whole is not None and self._whole[0] == tensor.name:
            taken = self._whole[1]
        else:
            taken = self._take(tensor, *rows)
            if not tensor.by_rows:
                self._whole = tensor.name, taken
        data = taken.view(-1).view(torch.uint8)
        return data[first - rows[0] * row : last - rows[0] * row].numpy().tobytes()

    def _take(self, tensor: ServedTensor, first: int, last: int) -> torch.Tensor:
        shape = (last - first, *tensor.shape[1:])
        taken, held = torch.empty(shape, dtype=tensor.dtype), 0
        found = self._call(partial(_take, name=tensor.name, first=first, last=last))
        for rank in self._holders[tensor.name]:
            for start, view, values in found[rank]:
                ends = (at + n for at, n in zip(start, values.shape, strict=True))
                where = tuple(slice(*each) for each in zip(start, ends, strict=True))
                taken.view(view or shape)[where] = values
                held += values.numel()
        if held != taken.numel():
            raise RuntimeError(f"ranks hold {held} of {taken.numel()} elements of {tensor.name}")
        return taken


def _list_tensors(
    model: nn.Module,
) -> tuple[int, list[tuple[str, tuple[int, ...], torch.dtype, bool]]]:
    """Return the ranks of this stage, and of each tensor name, shape, dtype and if by rows."""
    layout, _ = _layout(model)
    converted = [path for path, each in model.named_modules() if getattr(each, "conversions", None)]
    found = []
    for name, entry, _ in layout.names():
        partition = layout.partitions[entry.partition]
        boxes = [box for of_ranks in partition.held for box in of_ranks.boxes]
        dtype = _tensor(model, entry.parameter).dtype
        quantized = partition.conversion is not None or any(box.held.packed > 1 for box in boxes)
        if quantized or converted or dtype not in _DTYPES:
            what = converted[0] if converted else entry.parameter
            raise UnsupportedModelError(
                f"{printable_name(what)} is quantized, and an engine serves weights that it holds "
                "as a checkpoint stores them: serve those of one without quantization"
            )
        if entry.tied_to is None:
            views = {box.view for box in boxes} - {None, entry.shape}
            found.append((name, tuple(entry.shape), dtype, not views))
    return layout.ranks, found


def _take(
    model: nn.Module, name: str, first: int, last: int
) -> list[tuple[tuple[int, ...], tuple[int, ...] | None, torch.Tensor]]:
    """Return the boxes of some rows of a tensor that this rank holds before others.

    Each with its start, counted from the first row, and the view in which it counts.
    """
    layout, rank = _layout(model)
    try:
        entry, expert = layout.find(name)
    except KeyError:  # another pipeline stage has it
        return []
    tensor = _tensor(model, entry.parameter).detach()
    found: list[tuple[tuple[int, ...], tuple[int, ...] | None, torch.Tensor]] = []
    for ranks, box in layout.held_by(entry, expert):
        if rank != min(ranks):
            continue
        region = region_of(tensor, box)
        if not entry.shape:
            found.append(((0,), (1,), region.cpu().reshape(1)))
            continue
        if box.view not in (None, entry.shape):
            found.append((box.start, box.view, region.cpu().contiguous()))
            continue
        low, high = max(box.start[0], first), min(box.start[0] + box.size[0], last)
        if low < high:
            part = region.narrow(0, low - box.start[0], high - low)
            found.append(((low - first, *box.start[1:]), None, part.cpu().contiguous()))
    return found


_layouts: WeakKeyDictionary[nn.Module, tuple[Layout, int]] = WeakKeyDictionary()


def _layout(model: nn.Module) -> tuple[Layout, int]:
    """Return the layout of a model, and the rank that it is of: they never change."""
    if model not in _layouts:
        layout = layout_of_module(model)
        _layouts[model] = layout, rank_in(model, layout)
    return _layouts[model]


def _tensor(model: nn.Module, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(owner), name)
    return tensor


class WeightServer:
    """Serves the weights of an engine until :meth:`close`; made by ``LLM.serve_weights``.

    Args:
        file: what is served.
        folder: of config.json and the tokenizer's files, which are served beside it.
        alone: holds the engine between two steps.
        version: returns the name of the weights.
        host, port: to listen on; port 0 for any.
        token: what clients have to know.

    Attributes:
        url: what a model is loaded from: ``replica://host:port``.
        token: as above.

    """

    def __init__(
        self,
        file: HeldFile,
        folder: Path,
        alone: Callable[[], AbstractContextManager[None]],
        version: Callable[[], str],
        host: str,
        port: int,
        token: str,
    ) -> None:
        self.token = token
        self._file, self._alone, self._version = file, alone, version
        self._small = {
            path.name: path.read_bytes()
            for path in sorted(folder.iterdir())
            if is_small(path.name) and path.is_file() and not path.name.endswith(_OF_FILES)
        }
        self._served, self._closed = version(), False
        handler = type("Handler", (_Handler,), {"weights": self})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("Server", (_Server,), {"address_family": family})
        self._server: _Server = server((host, port), handler)
        port = self._server.server_address[1]
        self.url = f"replica://[{host}]:{port}" if ":" in host else f"replica://{host}:{port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server and the answers under way."""
        self._closed = True
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> WeightServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def size_of(self, name: str) -> int | None:
        """Return the bytes of a file; ``None`` if there is none."""
        if name == _FILE:
            return self._file.size
        data = self._small.get(name)
        return None if data is None else len(data)

    def tag(self) -> str:
        """Return the version, as an entity tag."""
        return '"' + hashlib.sha256(self._version().encode()).hexdigest()[:32] + '"'

    def pieces(self, name: str, begin: int, end: int, tag: str) -> Iterator[bytes]:
        """Yield bytes of a file, each piece between two steps.

        Raises ``ConnectionError`` if the weights are others than at the beginning, or the server
        was closed.
        """
        if name != _FILE:
            yield self._small[name][begin:end]
            return
        for first in range(begin, end, PIECE):
            with self._alone():
                if self._closed or self.tag() != tag:
                    raise ConnectionError("the server was closed, or the weights have changed")
                if self._served != self._version():
                    self._file.forget()
                    self._served = self._version()
                data = self._file.read(first, min(first + PIECE, end))
            yield data


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = _CLIENTS

    def __init__(self, *arguments: Any) -> None:
        self._room = threading.BoundedSemaphore(_CLIENTS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            _log.error("serving weights failed: %s", describe_error(error))


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for whole files and single ranges (RFC 9110, section 14)."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = _IDLE
    weights: WeightServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def version_string(self) -> str:
        return "vllm-module"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        sent = self.headers.get("Authorization", "")
        if not hmac.compare_digest(sent.encode(), f"Bearer {self.weights.token}".encode()):
            self._answer(401, WWW_Authenticate="Bearer")
            return
        name = self.path.removeprefix("/")
        size = self.weights.size_of(name)
        if size is None:
            self._answer(404)
            return
        begin, end, status = 0, size, 200
        if (asked := self.headers.get("Range")) is not None:
            found = _RANGE.fullmatch(asked)
            if found is None or int(found[1]) >= size or int(found[2]) < int(found[1]):
                self._answer(416, Content_Range=f"bytes */{size}")
                return
            begin, end, status = int(found[1]), min(size, int(found[2]) + 1), 206
        tag = self.weights.tag()
        about = {"ETag": tag, "Content_Type": "application/octet-stream"}
        if status == 206:
            about["Content_Range"] = f"bytes {begin}-{end - 1}/{size}"
        pieces = self.weights.pieces(name, begin, end, tag) if self.command != "HEAD" else iter(())
        try:
            first = next(pieces, b"")  # before the answer begins
        except RuntimeError as error:  # the engine sleeps, or was closed
            _log.warning("weights are not served: %s", describe_error(error))
            self._answer(409)
            return
        self._answer(status, end - begin, **about)
        for data in chain((first,), pieces):
            self.wfile.write(data)

    def _answer(self, status: int, nbytes: int = 0, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(nbytes))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
