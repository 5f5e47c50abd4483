"""A web server of a folder's files by ranges, with faults that a test plans.

Run it with ``runpy.run_path``, or import it in a benchmark.
"""

from __future__ import annotations

import http.server
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET and HEAD; what ``server.fault`` returns True for is answered already."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: RangeServer

    def log_message(self, format: str, *args: Any) -> None:  # what it would print
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers)))
            self.server.counts[self.path] += 1
        if self.server.latency:
            time.sleep(self.server.latency)
        if self.server.fault is not None and self.server.fault(self):
            return
        self.serve(200)

    def data(self) -> bytes | None:
        path = self.server.folder / self.path.split("?")[0].lstrip("/")
        with self.server.lock:
            kept = self.server.kept.get(path)
            if kept is None and path.is_file():
                kept = self.server.kept[path] = path.read_bytes()
        return kept

    def answer(self, status: int, body: bytes | memoryview = b"", **headers: str) -> None:
        """Send an answer; names of headers have _ for -."""
        self.send_response(status)
        then = "Mon, 01 Jan 2024 00:00:00 GMT"
        headers = {"Content_Length": str(len(body)), "Last_Modified": then} | headers
        for name, value in headers.items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def serve(self, status: int, keep: int | None = None, **headers: str) -> None:
        """Answer with the file or the range, at most ``keep`` bytes of it sent."""
        data = self.data()
        if data is None:
            self.answer(404)
            return
        headers = {"ETag": '"one"', "Content_Type": "application/octet-stream"} | headers
        asked = self.headers["Range"]
        begin, end = 0, len(data)
        if asked and status == 200:
            first, last = asked.removeprefix("bytes=").split("-")
            begin, end, status = int(first), min(int(last) + 1, len(data)), 206
            if begin >= len(data):
                self.answer(416, Content_Range=f"bytes */{len(data)}")
                return
            headers = {"Content_Range": f"bytes {begin}-{end - 1}/{len(data)}"} | headers
        body = memoryview(data)[begin:end]
        self.server.sent += len(body)
        headers = {"Content_Length": str(len(body))} | headers
        if keep is not None:
            body, self.close_connection = body[:keep], True
        self.answer(status, body, **headers)


class RangeServer(http.server.ThreadingHTTPServer):
    """Serves ``folder``; ``requests`` has the path and headers of each request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.fault: Callable[[Handler], bool] | None = None
        self.latency = 0.0
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.counts: Counter[str] = Counter()
        self.kept: dict[Path, bytes] = {}
        self.sent = 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing where a client has closed its connection."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(folder: Path) -> Iterator[RangeServer]:
    """Serve ``folder`` while the block lasts."""
    with RangeServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
