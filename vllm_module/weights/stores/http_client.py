"""Requests to web servers, over connections that are kept.

Ranges: RFC 9110, section 14.
"""

from __future__ import annotations

import http.client
import netrc
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import NoReturn
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from vllm_module.base.messages import printable_name, shorten
from vllm_module.base.version import __version__
from vllm_module.weights.stores.client import (
    Answer,
    BusyError,
    ForbiddenError,
    MissingError,
    RefusedError,
    ends_before,
    version_of,
)
from vllm_module.weights.stores.http_connection import (
    HttpConnection,
    HttpRequest,
    basic,
    failures_as_busy,
    proxy_asks,
)
from vllm_module.weights.stores.place import REPLICA, TOKEN, Place

_MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_READ_BYTES = 1 << 20  # of a file that is fetched whole, at once
_NO_END = (
    "the server does not say where its answer ends: expected headers with one Content-Length, or "
    "Transfer-Encoding chunked"
)
_SHORT_BODY = 16 << 10  # of an error, which is read rather than the connection given up


class HttpClient:
    """The files of a folder of a web server.

    Args:
        place: for messages.
        url_of: returns the URL of a file by its name.
        authorization: returns the header's value for a URL, or ``None``.
        follows: whether a redirect may lead to another host. The target is kept for later requests.

    """

    def __init__(
        self,
        place: Place,
        url_of: Callable[[str], str],
        authorization: Callable[[SplitResult], str | None],
        *,
        follows: bool = False,
    ) -> None:
        self._place, self._url_of, self._authorization = place, url_of, authorization
        self._follows = follows
        self._targets: dict[str, str] = {}  # of redirects, by name
        self._idle: dict[str, list[HttpConnection]] = {}  # by scheme and host
        self._under_way: set[HttpRequest] = set()
        self._lock = threading.Lock()
        self._answered = False
        self._closed = False
        weakref.finalize(self, _close, self._idle)

    def close(self) -> None:
        """Close connections that are idle, now or later, and end requests under way."""
        with self._lock:
            self._closed = True
            _close(self._idle)
            under_way = list(self._under_way)
        for request in under_way:
            request.end("the store was closed")

    def names(self) -> list[str] | None:
        """Return ``None``: HTTP has no listing."""
        return None

    def fetch(self, name: str, most: int) -> bytes:
        """Return a whole file."""
        with self._answer(name, {}) as answer:
            if answer.status != 200:
                self._refuse_status(answer)
            self._check_content(answer)
            expected = answer.length  # None if the body comes in chunks
            if expected is None and not answer.chunked:
                raise RefusedError(f"{_NO_END}: a connection that breaks would cut the file off")
            data = bytearray()
            while chunk := answer.read(min(_READ_BYTES, most + 1 - len(data))):
                data += chunk
                if len(data) > most:
                    raise RefusedError(f"it has more than the {most} bytes that are accepted")
            if expected is not None and len(data) != expected:
                raise BusyError(f"the answer ends after {len(data)} of {expected} bytes")
            return bytes(data)

    def read(self, name: str, begin: int, view: memoryview) -> Answer:
        """Read bytes from ``begin`` on into ``view``, fewer where the file ends before."""
        asked = f"bytes={begin}-{begin + len(view) - 1}"
        with self._answer(name, {"Range": asked}) as answer:
            if answer.status == 416:
                raise RefusedError(ends_before(begin))
            if answer.status not in (200, 206):
                self._refuse_status(answer)
            self._check_content(answer)
            if answer.status == 200 and answer.length == 0:
                raise RefusedError(ends_before(0))
            given = _RANGE.fullmatch(answer.headers["Content-Range"] or "")
            if answer.status == 200:
                raise RefusedError(
                    "the server answers a request for a range with the whole file: it serves no "
                    "ranges; download the checkpoint and load its folder"
                )
            if given is None:
                got = shorten(answer.headers["Content-Range"])
                raise RefusedError(
                    "the server should name the range and the size of the file in Content-Range, "
                    f"got {got}; download the checkpoint and load its folder"
                )
            first, last, size = map(int, given.groups())
            if (first, last) != (begin, min(begin + len(view), size) - 1):
                raise RefusedError(
                    f"the server answers {asked} with bytes {first} to {last} of {size}"
                )
            nbytes = last + 1 - first
            if answer.length not in (None, nbytes):
                raise RefusedError(
                    f"the server answers {asked} with {answer.length} bytes, and not {nbytes}"
                )
            self._read_body(answer, view[:nbytes])
            headers = answer.headers
            return Answer(nbytes, version_of(size, headers["ETag"], headers["Last-Modified"]))

    def _read_body(self, answer: http.client.HTTPResponse, view: memoryview) -> None:
        got = 0
        while got < len(view):
            count = answer.readinto(view[got:])
            if not count:
                raise BusyError(f"the answer ends after {got} of {len(view)} bytes")
            got += count
        # Reads the end of a body in chunks, so that the connection can be used again.
        if answer.read(1):
            raise RefusedError(
                f"the answer goes on after the {len(view)} bytes that it should have"
            )

    # One request

    @contextmanager
    def _answer(self, name: str, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        """Send a GET request for a file, and follow redirects that may be followed."""
        request = HttpRequest()
        with self._lock:
            self._under_way.add(request)
        try:
            with self._answer_of(request, name, headers) as answer:
                yield answer
        except (BusyError, RefusedError):
            if request.ended is None:  # or what failed is that it was ended
                raise
        finally:
            request.release()
            with self._lock:
                self._under_way.discard(request)
        if request.ended is not None:
            raise BusyError(request.ended)

    @contextmanager
    def _answer_of(
        self, request: HttpRequest, name: str, headers: dict[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        original = self._url_of(name)
        url = self._targets.get(name, original)
        remembered = url != original
        for _ in range(_MOST_REDIRECTS + 1):
            connection, answer = self._send(request, urlsplit(url), headers)
            if remembered and answer.status in (400, 401, 403, 404, 410):
                # A target's signature is valid for some time only. Ask for a new one. Google's
                # storage answers 400 then (ExpiredToken).
                answer.close()
                connection.opened.close()
                with self._lock:
                    if self._targets.get(name) == url:
                        del self._targets[name]
                url, remembered = original, False
                continue
            if answer.status in _REDIRECTS:
                with closing(connection.opened), closing(answer):
                    url = self._target(url, answer)
                continue
            if url != original and answer.status in (200, 206):
                with self._lock:
                    self._targets[name] = url
            break
        else:
            raise RefusedError(f"it redirects more than {_MOST_REDIRECTS} times; check the URL")
        try:
            with failures_as_busy():
                yield answer
        finally:
            reusable = _is_read(answer)
            request.release()
            with self._lock:
                reusable &= not self._closed and request.ended is None
                if reusable:
                    self._idle.setdefault(_origin(urlsplit(url)), []).append(connection)
            if not reusable:
                answer.close()
                connection.opened.close()

    def _send(
        self, request: HttpRequest, url: SplitResult, headers: dict[str, str]
    ) -> tuple[HttpConnection, http.client.HTTPResponse]:
        headers = {
            "Accept-Encoding": "identity",
            "User-Agent": f"vllm-module/{__version__}",
        } | headers
        if authorization := self._authorization(url):
            if not (authorization.isascii() and authorization.isprintable()):
                raise ForbiddenError(  # the error of http.client would show it
                    "a token with line ends, or characters beyond ASCII, cannot be sent: correct "
                    f"{self._place.credentials}"
                )
            headers["Authorization"] = authorization
        while True:
            with self._lock:
                idle = self._idle.get(_origin(url), [])
                reused = idle.pop() if idle else None
            with failures_as_busy():
                connection = reused or HttpConnection.to(url)
            try:
                with failures_as_busy(final=not self._answered):
                    request.use(connection.opened)
                    return connection, connection.get(url, headers)
            except BaseException as error:
                connection.opened.close()
                # The server may have closed an idle connection: try the others, then a new one.
                again = reused is not None and request.ended is None
                if not again or not isinstance(error, BusyError):
                    raise
            finally:
                self._answered = True

    def _target(self, url: str, answer: http.client.HTTPResponse) -> str:
        """Return the URL that an answer redirects to, if it may be followed."""
        before, location = urlsplit(url), answer.headers["Location"]
        try:
            after = urlsplit(urljoin(url, location or ""))
            text = after.geturl()
            valid = bool(location and after.hostname) and after.scheme in ("http", "https")
            valid &= text.isascii() and text.isprintable() and " " not in text and after.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise RefusedError(f"the server answers {answer.status}, a redirect to no URL")
        # Without its path and query, which may hold a signature.
        to = printable_name(f"{after.scheme}://{after.hostname}")
        if before.scheme == "https" and after.scheme == "http":
            raise RefusedError(f"the server redirects to {to}, which is not encrypted")
        if not self._follows and after.hostname != before.hostname:
            raise RefusedError(
                f"the server redirects to another host, {to}, such as a page to log in; "
                f"set credentials ({self._place.credentials}), or name a URL there if you trust it"
            )
        return text

    # Answers that are refused

    def _refuse_status(self, answer: http.client.HTTPResponse) -> NoReturn:
        status = answer.status
        said = f"the server answers {status} ({printable_name(answer.reason or 'no reason')})"
        if status in _BUSY:
            raise BusyError(said, _seconds(answer.headers["Retry-After"]))
        if status == 407:
            raise ForbiddenError(f"{said}: {proxy_asks('http')}")
        if status in (401, 403):
            raise ForbiddenError(f"{said}: no access; set {self._place.credentials}")
        if status in (404, 410):
            raise MissingError(f"{said}: there is no such file; check the URL")
        raise RefusedError(said)

    def _check_content(self, answer: http.client.HTTPResponse) -> None:
        self._check_length(answer.headers)
        kind, encoding = answer.headers.get_content_type(), answer.headers["Content-Encoding"]
        if kind in ("text/html", "application/xhtml+xml"):
            raise RefusedError(
                "the server answers with a web page, such as one to log in, instead of the file; "
                f"set {self._place.credentials}, or check the URL"
            )
        if encoding and encoding.lower() != "identity":
            raise RefusedError(
                f"the server answers with Content-Encoding {shorten(encoding)}, in which ranges "
                "are not those of the file; switch it off for this folder"
            )

    def _check_length(self, headers: http.client.HTTPMessage) -> None:
        """Refuse headers by which the body could end at several places (RFC 9112, section 6.3)."""
        lengths = {each.strip() for each in headers.get_all("Content-Length", ())}
        encodings = [each.strip().lower() for each in headers.get_all("Transfer-Encoding", ())]
        plain = all(each.isascii() and each.isdecimal() for each in lengths)
        if headers.defects or len(lengths) > 1 or not plain or encodings not in ([], ["chunked"]):
            raise RefusedError(f"{_NO_END}; check the server and the proxy")


def web_client(place: Place, replica_token: str | None = None) -> HttpClient:
    """Return the client of an ``http://`` or ``https://`` folder, with the entry of ~/.netrc.

    An engine's weights are read by HTTP, with ``replica_token`` or that of the environment.
    """
    is_replica = place.scheme == REPLICA
    base = urlsplit(str(place))
    if is_replica:
        base = base._replace(scheme="http")

    def authorization(url: SplitResult) -> str | None:
        if url.netloc != base.netloc:
            return None
        if is_replica:
            token = os.environ.get(TOKEN, "") if replica_token is None else replica_token
            return "Bearer " + token.rstrip("\r\n")  # of a file that it was read from
        try:
            found = netrc.netrc().authenticators(url.hostname or "")
        except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
            return None
        return found and basic(found[0], found[2])

    # What is no character of a URL is encoded; what the user encoded stays.
    folder = base.scheme + "://" + base.netloc + quote(base.path, safe="/%:@!$&'()*+,;=~")
    return HttpClient(place, lambda name: f"{folder}/{quote(name)}", authorization)


def _origin(url: SplitResult) -> str:
    return f"{url.scheme}://{url.netloc}"


def _close(idle: dict[str, list[HttpConnection]]) -> None:
    for connections in idle.values():
        while connections:
            connections.pop().opened.close()


def _is_read(answer: http.client.HTTPResponse) -> bool:
    """Whether the connection can be used again. The short body of an error is read for that."""
    short = answer.length is not None and answer.length <= _SHORT_BODY
    if answer.status >= 400 and short:
        with suppress(OSError, http.client.HTTPException):
            answer.read()
    return answer.isclosed() and not answer.will_close


def _seconds(after: str | None) -> float | None:
    """Return the seconds that Retry-After asks for: a number of them, or a date."""
    if after is None:
        return None
    if after.isdecimal() and len(after) < 10:
        return float(after)
    try:
        then = parsedate_to_datetime(after)
    except (TypeError, ValueError, OverflowError):
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=timezone.utc)
    return max(0.0, (then - datetime.now(timezone.utc)).total_seconds())
