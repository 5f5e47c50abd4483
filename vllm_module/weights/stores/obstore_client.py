"""Requests to buckets: Amazon S3, Google Cloud Storage and Azure, and what speaks as they do.

The library obstore signs requests and finds credentials where each service's own tools do.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vllm_module.base.messages import install, printable_name, without_secrets
from vllm_module.base.waiting import WaitLimitError, interruptibly
from vllm_module.errors import CheckpointFormatError, MissingPackageError
from vllm_module.weights.stores.client import (
    Answer,
    BusyError,
    ForbiddenError,
    MissingError,
    RefusedError,
    ends_before,
    version_of,
)
from vllm_module.weights.stores.place import Place

T = TypeVar("T")
_log = logging.getLogger(__name__)

# Plain HTTP only where the environment names such an endpoint, as those of test servers are.
_CLIENT = {
    "allow_http": True,
    "connect_timeout": timedelta(seconds=10),
    "timeout": timedelta(seconds=300),
}
# Of an upload. Several parts are in memory at once, and S3 has 10,000 of a file at most.
_PART, _PARTS = 8 << 20, 9_000
_RETRY = {"max_retries": 0}  # the requests are tried again in one place
_STATUS = re.compile(r"status code: (\d{3})((?: [A-Za-z]+)*)")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_REQUEST = re.compile(r"Error performing .*? in \S+ - ")
_NO_PATH = "Encountered object with invalid path"
_UNREACHABLE = ("ConnectionRefused", "dns error")
_BUSY = {408, 425, 429}


class ObstoreClient:
    """The files of a folder of a bucket."""

    def __init__(self, place: Place) -> None:
        try:
            import obstore
            from obstore import exceptions, store
        except ImportError as error:
            raise MissingPackageError(
                f"{place.scheme}:// needs obstore; install it with: {install('stores')}"
            ) from error
        self._obstore, self._errors = obstore, exceptions
        self._place = place
        self._answered = False
        self._ended = threading.Event()
        kind = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[place.scheme]
        options: dict[str, Any] = {"client_options": _CLIENT, "retry_config": _RETRY}
        try:
            self._store = kind(place.host, **options)
        except exceptions.BaseError as error:
            raise CheckpointFormatError(
                f"{place}: {_reason(error)}; set {place.credentials}"
            ) from None

    def names(self) -> list[str] | None:
        """List the files of the folder, without those below.

        ``None`` where a key is no path, such as ``folder//name``: the library then lists nothing.
        Files are asked for by their names instead.
        """
        prefix = f"{self._place.folder}/" if self._place.folder else None

        def found_files() -> Any:
            try:
                return self._obstore.list_with_delimiter(self._store, prefix)
            except self._errors.BaseError as error:
                if _NO_PATH in str(error):
                    return None
                raise

        with self._failures():
            found = self._call(found_files)
        if found is None:
            _log.warning("%s has a key that is no path: its files are not listed", self._place)
            return None
        return [each["path"].rpartition("/")[2] for each in found["objects"]]

    def fetch(self, name: str, most: int) -> bytes:
        """Return a whole file."""
        with self._failures():
            answer = self._call(lambda: self._obstore.get(self._store, self._key(name)))
            if answer.meta["size"] > most:
                raise RefusedError(
                    f"it has {answer.meta['size']} bytes, and at most {most} are accepted"
                )
            return bytes(self._call(answer.bytes))

    def read(self, name: str, begin: int, view: memoryview) -> Answer:
        """Read bytes from ``begin`` on into ``view``, fewer where the file ends before."""
        with self._failures(begin):
            asked: Any = {"range": (begin, begin + len(view))}
            key = self._key(name)
            answer = self._call(lambda: self._obstore.get(self._store, key, options=asked))
            first, end = answer.range
            data = memoryview(self._call(answer.bytes))
        meta = answer.meta
        if first != begin or end != min(begin + len(view), meta["size"]):
            raise RefusedError(
                f"the store answers with bytes {first} to {end - 1} of {meta['size']}, where "
                f"{begin} to {begin + len(view) - 1} were asked for"
            )
        if len(data) != end - begin:
            raise BusyError(f"the answer ends after {len(data)} of {end - begin} bytes")
        view[: len(data)] = data
        version = version_of(meta["size"], meta["e_tag"], str(meta["last_modified"]))
        return Answer(len(data), version)

    def write(self, name: str, path: Path) -> None:
        """Upload a file of this machine, in parts if it is large; it is there when it is whole."""
        part = max(_PART, -(-path.stat().st_size // _PARTS))
        with self._failures(access="write"):
            put = partial(self._obstore.put, self._store, self._key(name), path, chunk_size=part)
            self._call(put)

    def close(self) -> None:
        """End requests under way; the library closes its connections."""
        self._ended.set()

    def _call(self, call: Callable[[], T]) -> T:
        """Return ``call()``, a call of the library, which hears of no interrupt while it waits."""
        try:
            return interruptibly(call, self._ended)
        except WaitLimitError:
            raise BusyError("the store was closed") from None

    def _key(self, name: str) -> str:
        return f"{self._place.folder}/{name}".lstrip("/")

    @contextmanager
    def _failures(self, begin: int = 0, access: str = "list and read") -> Iterator[None]:
        """Raise the library's errors as ours; ``begin`` is where the range begins."""
        errors = self._errors
        try:
            yield
        except (errors.BaseError, FileNotFoundError) as error:
            reason, found = _reason(error), _STATUS.search(str(error))
            status = int(found.group(1)) if found else 0
            unreachable = not self._answered and any(each in str(error) for each in _UNREACHABLE)
            if status in _BUSY or status >= 500 or (_passes(reason) and not unreachable):
                raise BusyError(reason) from None
            missing = isinstance(error, (errors.NotFoundError, FileNotFoundError))
            if missing or status == 404:
                raise MissingError(f"{reason}: no such file or bucket; check the URL") from None
            if status == 416:
                raise RefusedError(f"{reason}: {ends_before(begin)}") from None
            if status in (401, 403):
                raise ForbiddenError(
                    f"{reason}: no access to {access} it; set {self._place.credentials}"
                ) from None
            raise RefusedError(
                f"{reason}; check the region and the endpoint, and set {self._place.credentials}"
            ) from None
        self._answered = True


def _reason(error: Exception) -> str:
    """Return what an error of the library says, without the body of an answer and secrets."""
    text = str(error)
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        said = "the store answers " + "".join(status.groups())
        return f"{said} ({code.group(1)})" if code else said
    first = _REQUEST.sub("", text.partition("\n")[0])
    return printable_name(without_secrets(first))


def _passes(reason: str) -> bool:
    """Whether a failure without a status is one of the connection, and not of the settings."""
    return "HTTP error" in reason and "builder error" not in reason
