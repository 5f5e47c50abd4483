"""An engine's weights as a checkpoint that another engine loads: ``replica://host:port``.

What an engine holds is served as one safetensors file that exists nowhere: its header says the
tensors under the names of the model's tree, and the bytes of a range are taken from the ranks'
parameters when they are asked for. So the reader is that of any web server, and each of its ranks
asks for what it keeps.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from vllm_module.base.messages import describe_error
from vllm_module.runtime.held_file import PIECE, ServedFile
from vllm_module.weights.digests import DIGESTS
from vllm_module.weights.hub import POOLING, TEMPLATES, is_small
from vllm_module.weights.sharded_state import MANIFEST

_log = logging.getLogger(__name__)

_LAST = 1 << 16  # bytes that are copied when it is known that those before are of one version
_CHANGED = "the server was closed, or the weights have changed"
_CLIENTS = 64  # at once; the connections of others are closed
_NICE = 10  # requests of the engine come first
_IDLE = 30.0  # seconds that a client may take for a request or for a part of an answer
MODEL, RANKS = "model.safetensors", "ranks.json"
# Of the folder's weights, which may be others by now, and are served as one file.
_OF_FILES = (".index.json", DIGESTS, MANIFEST)
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


class ServedWeights(Protocol):
    """Whose weights are served: an engine, or a rank of one."""

    weights_lock: threading.RLock

    @property
    def weight_changes(self) -> int:
        """Number of changes of the weights that have begun."""

    @property
    def weight_version(self) -> str:
        """Name of the weights."""

    def alone(self) -> AbstractContextManager[None]:
        """Hold it between two steps."""


class WeightServer:
    """Serves weights until :meth:`close`; made by ``LLM.serve_weights``.

    Args:
        files: files of weights, by name.
        small: other files.
        weights: whose they are.
        host, port: to listen on; port 0 for any.
        token: what clients have to know.
        close: is called when the server has ended.

    Attributes:
        url: what a model is loaded from: ``replica://host:port``.
        port: as above.
        token: as above.

    """

    def __init__(
        self,
        files: Mapping[str, ServedFile],
        small: Mapping[str, bytes],
        weights: ServedWeights,
        host: str,
        port: int,
        token: str,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.token = token
        self._files, self._small, self._weights, self._close = files, small, weights, close
        self._closed, self._own = False, secrets.token_hex()
        handler = type("Handler", (_Handler,), {"weights": self})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("Server", (_Server,), {"address_family": family})
        self._server: _Server = server((host, port), handler)
        self.port = int(self._server.server_address[1])
        at = f"[{host}]" if ":" in host else host
        self.url = f"replica://{at}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server and the answers under way."""
        if self._closed:
            return
        self._closed = True
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._close()

    def __enter__(self) -> WeightServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def size_of(self, name: str) -> int | None:
        """Return the bytes of a file; ``None`` if there is none."""
        if (file := self._files.get(name)) is not None:
            with self._weights.weights_lock:  # while experts move, no size is true
                return file.current().size
        data = self._small.get(name)
        return None if data is None else len(data)

    def tag(self) -> str:
        """Return the version, as an entity tag. An update may give the name that was there before.

        A server that comes after another on one address may serve other weights of that name, too.
        """
        version = f"{self._own} {self._weights.weight_changes} {self._weights.weight_version}"
        return '"' + hashlib.sha256(version.encode()).hexdigest()[:32] + '"'

    def pieces(self, name: str, begin: int, end: int, tag: str) -> Iterator[bytes | memoryview]:
        """Yield bytes of a file, that of the weights in pieces.

        Raises ``ConnectionError`` if the weights are others than at the beginning, or the server
        was closed.
        """
        if (file := self._files.get(name)) is None:
            yield self._small[name][begin:end]
            return
        file = file.current()
        if not file.beside_steps:
            for first in range(begin, end, PIECE):
                with self._weights.alone():
                    data = self._checked(file, first, min(first + PIECE, end), tag)
                yield data
            return
        # Nobody who reads to the end gets a mixture: the last bytes come after a comparison.
        last = max(begin, end - _LAST)
        with self._weights.weights_lock:
            changes = self._weights.weight_changes
            first = min(begin + _LAST, last)
            data = self._checked(file, begin, first, tag)
        yield data
        for part in file.read(first, last, changes):
            if self._weights.weight_changes != changes:
                break
            yield part
        with self._weights.weights_lock:
            data = self._checked(file, last, end, tag)
        yield data

    def _checked(self, file: ServedFile, begin: int, end: int, tag: str) -> bytes:
        """Return a copy of some bytes. Call it while the weights cannot change."""
        if self._closed or self.tag() != tag or file.current() is not file:
            raise ConnectionError(_CHANGED)
        file.check()
        return b"".join(file.read(begin, end, self._weights.weight_changes))


def small_files(folder: Path) -> dict[str, bytes]:
    """Return config.json, the tokenizer's files, and those of sentence-transformers."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted((*folder.iterdir(), *folder.glob(TEMPLATES), folder / POOLING))
        if is_small(path.name) and path.is_file() and not path.name.endswith(_OF_FILES)
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = _CLIENTS
    turned_away = -_IDLE  # when a connection was closed because there are too many

    def __init__(self, *arguments: Any) -> None:
        self._room = threading.BoundedSemaphore(_CLIENTS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.turned_away = time.monotonic()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        if sys.platform == "linux":  # where priorities are those of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
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
    server: _Server
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
        tag = self.weights.tag()  # before the size: a tag that is refused later does no harm
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
        about = {"ETag": tag, "Content_Type": "application/octet-stream"}
        if status == 206:
            about["Content_Range"] = f"bytes {begin}-{end - 1}/{size}"
        pieces = self.weights.pieces(name, begin, end, tag) if self.command != "HEAD" else iter(())
        try:
            first = next(pieces, b"")  # before the answer begins
        except RuntimeError as error:  # the engine sleeps, or was closed
            why = describe_error(error)
            _log.warning("weights are not served: %s", why)
            self._answer(409, why=why.partition("\n")[0])
            return
        self._answer(status, end - begin, **about)
        for data in chain((first,), pieces):
            self.wfile.write(data)

    def _answer(
        self, status: int, nbytes: int = 0, *, why: str | None = None, **headers: str
    ) -> None:
        """Answer with a status; clients show ``why``, or else what the protocol calls it."""
        self.send_response(status, why and why.encode("ascii", "replace").decode())
        self.send_header("Content-Length", str(nbytes))
        if time.monotonic() - self.server.turned_away < _IDLE:  # then clients take turns
            self.send_header("Connection", "close")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
