"""The bytes of one file in a store."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from vllm_module.base.messages import printable
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights.cut_rows import ByteRun, copy_segments, memory
from vllm_module.weights.stores.client import Version
from vllm_module.weights.stores.spans import Span, spans
from vllm_module.weights.stores.store import Store, wait_for

# Of the first request. Most headers are shorter.
_FIRST_BYTES = 128 << 10
# Of a request for less of a header than this. Archives are read in pieces of a few bytes.
_LEAST_BYTES = 4 << 10
_AHEAD = 8  # requests for parts of one header under way


class StoredBytes:
    """The bytes of a file in a store, which many threads may read into memory at once.

    It offers what ``FileBytes`` does. The first request also tells the size and the version; a
    later answer with another one is refused. What the store's cache has of this version is not
    requested.
    """

    remote = True

    def __init__(self, store: Store, name: str) -> None:
        self.path = store.place.file(name)
        self._store, self._name = store, name
        self._closed = False
        self._lock = threading.Lock()
        self._bytes_read = 0
        self.requests = 1
        self.bytes_requested = 0
        cache, url = store.cache, str(self.path)
        # One byte tells the version, where the header may be in the cache.
        first = bytearray(1 if cache is not None and cache.knows(url) else _FIRST_BYTES)
        answer = store.read(name, 0, memoryview(first))
        self.version: Version = answer.version
        # What was read of the header: where it begins in the file, and its bytes.
        self._known = [(0, bytes(first[: answer.nbytes]))]
        self.bytes_requested = answer.nbytes
        if not self.version.tag:
            store.warn_of_changes()
        self._cached = cache.open(url, self.version) if cache is not None else None
        if self._cached is not None:
            self._cached.keep(0, self._known[0][1])

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        return self.version.size

    @property
    def bytes_read(self) -> int:
        """Bytes that ``read_runs`` has put in their places so far."""
        return self._bytes_read

    def close(self) -> None:
        """Refuse reading from now on."""
        self._closed = True

    def interrupt(self) -> None:
        """Close the store, which ends what is under way."""
        self._store.close()

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes that are not counted as weights (the header)."""
        near = (data[offset - at :] for at, data in self._known if at <= offset)
        known = max(near, key=len, default=b"")[:length]
        if len(known) == length:
            return known
        begin = offset + len(known)
        most = max(0, self.size - begin)  # the caller has checked that it asks for no more
        rest = bytearray(min(most, max(length - len(known), 0 if known else _LEAST_BYTES)))
        self._request(begin, memoryview(rest))
        self._known.append((begin, bytes(rest)))
        return known + bytes(rest[: length - len(known)])

    def read_ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Request, several at once, what ``read_bytes`` will be asked for one by one."""
        # In threads of its own: this file may be opened by one of the store's, which would wait
        # for each other.
        executor = ThreadPoolExecutor(_AHEAD, thread_name_prefix="store-header")
        try:
            futures = [executor.submit(self.read_bytes, *each) for each in ranges]
            wait_for(futures, until_failure=True)
            for future in futures:
                if future.done():
                    future.result()
        except BaseException as error:
            if not isinstance(error, Exception):
                self.interrupt()
            raise
        finally:
            executor.shutdown(cancel_futures=True)

    def forget_header(self) -> None:
        """Free what was read of the header."""
        self._known = []

    def check_unchanged(self) -> None:
        """Raise WeightReadError if the file was closed; each answer is compared by itself."""
        if self._closed:
            raise WeightReadError(f"{printable(self.path)} was closed; open the checkpoint again")

    def read_runs(self, runs: Iterable[tuple[ByteRun, int]]) -> None:
        """Read each run to its address in memory, its segments one after the other without gaps."""
        self.check_unchanged()
        placed = list(runs)
        self._store.together(partial(self._read_span, span) for span in spans(placed))
        with self._lock:
            self._bytes_read += sum(run.nbytes for run, _ in placed)

    def _read_span(self, span: Span) -> None:
        nbytes = span.end - span.begin
        if span.direct:
            self._request(span.begin, memory(span.parts[0].address, nbytes))
            return
        import torch

        scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._request(span.begin, memory(scratch.data_ptr(), nbytes))
        for run, address in span.parts:
            begin = run.offset - span.begin
            copy_segments(scratch[begin : begin + run.span], run, address)

    def _request(self, begin: int, view: memoryview) -> None:
        """Fill ``view`` with the file's bytes from ``begin`` on, which lie inside of it."""
        self.check_unchanged()
        if self._cached is not None:
            self._cached.read(begin, view, self._fetch)
        else:
            self._fetch(begin, view)

    def _fetch(self, begin: int, view: memoryview) -> None:
        with self._lock:
            self.requests += 1
            self.bytes_requested += len(view)
        try:
            answer = self._store.read(self._name, begin, view)
        except CheckpointFormatError as error:  # it was there, and could be read
            raise WeightReadError(f"{error} It could be read when it was opened.") from error
        if answer.version[:2] != self.version[:2]:  # one server calls the same tag weak, or not
            raise WeightReadError(
                f"{printable(self.path)} was changed since it was opened (it had {self.size} bytes "
                f"and the tag {self.version.tag or 'none'}, and now has {answer.version.size} and "
                f"{answer.version.tag or 'none'}); open the checkpoint again when nobody writes to "
                "it"
            )
        if answer.nbytes != len(view):
            raise WeightReadError(
                f"{printable(self.path)}: {answer.nbytes} bytes came from byte {begin} on, where "
                f"{len(view)} were asked for; load again"
            )
