"""Connections to web servers: by a proxy, with TLS, and with an end to each request."""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from vllm_module.base.messages import printable_name
from vllm_module.weights.stores.client import BusyError, ForbiddenError, RefusedError

_STALL_SECONDS = 30.0  # without a byte
_TUNNEL = re.compile(r"Tunnel connection failed: (4\d\d)")  # http.client's words
_AGAIN = ("408", "425", "429")  # after which a client may ask again
_REQUEST_SECONDS = 300.0  # of one request with its redirects, however slowly its bytes come


class HttpRequest:
    """The end of one request: after ``_REQUEST_SECONDS`` its socket is shut down.

    Whatever is read from it then ends, however slowly it comes and however much there is of it.

    Attributes:
        ended: why it was ended before its answer was read; else ``None``.

    """

    def __init__(self) -> None:
        self.ended: str | None = None
        self._socket: socket.socket | None = None
        self._opened: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()
        late = f"its answer did not end in {_REQUEST_SECONDS:g} s"
        self._timer = threading.Timer(_REQUEST_SECONDS, self.end, (late,))
        self._timer.daemon = True
        self._timer.start()

    def use(self, opened: http.client.HTTPConnection) -> None:
        """Go on over this connection, and connect it. Raises OSError if the request was ended."""
        with self._lock:
            self._opened, self._socket = opened, opened.sock
        connects = opened.sock is None
        if connects:
            opened.connect()
        with self._lock:
            # http.client forgets it, with the answer still to read, if it is not to be kept open.
            self._socket = opened.sock
            if self.ended is not None:
                raise OSError(self.ended)
        if connects and isinstance(opened.sock, ssl.SSLSocket):
            opened.sock.do_handshake()

    def release(self) -> None:
        """Leave the connection alone from now on."""
        self._timer.cancel()
        with self._lock:
            self._opened = self._socket = None

    def end(self, reason: str) -> None:
        """Shut the connection down."""
        with self._lock:
            self.ended = self.ended or reason
            used = self._socket or (self._opened and self._opened.sock)
            if used:
                with suppress(OSError):
                    # Not that of ssl.SSLSocket, which also takes what another thread reads with.
                    socket.socket.shutdown(used, socket.SHUT_RDWR)


class _TLSConnection(http.client.HTTPSConnection):
    """A connection whose ``connect`` leaves the handshake to its caller.

    While http.client is at it, no other thread could shut the socket down.
    """

    def __init__(self, host: str, port: int, server_hostname: str, timeout: float) -> None:
        self._server_hostname, self._tls = server_hostname, ssl.create_default_context()
        self._tls.set_alpn_protocols(["http/1.1"])
        super().__init__(host, port, timeout=timeout, context=self._tls)

    def connect(self) -> None:
        """Connect, through a tunnel if one is set."""
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(
            self.sock, server_hostname=self._server_hostname, do_handshake_on_connect=False
        )


class HttpConnection(NamedTuple):
    """A connection, and headers for a proxy if it leads to one that is asked for whole URLs."""

    opened: http.client.HTTPConnection
    proxy_headers: dict[str, str] | None = None

    @staticmethod
    def to(url: SplitResult) -> HttpConnection:
        """Return a new connection, by the proxy that the environment names.

        This host's own address is reached without one.
        """
        host, secure = url.hostname or "", url.scheme == "https"
        # Entries of no_proxy may have ports.
        direct = host == "127.0.0.1" or proxy_bypass(host) or proxy_bypass(url.netloc)
        proxy = None if direct else getproxies().get(url.scheme)
        if proxy is None:
            return HttpConnection(_opened(host, url.port, host if secure else None))
        try:
            via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            valid = bool(via.hostname) and via.port != 0 and via.scheme in ("http", "https")
        except ValueError:
            valid = False
        if not valid:  # it is not shown, because it may hold a password
            raise RefusedError(
                f"the proxy of the environment for {url.scheme}:// is no URL http://host:port; "
                f"correct {url.scheme}_proxy"
            )
        headers = {}
        if via.username:
            user, password = unquote(via.username), unquote(via.password or "")
            headers["Proxy-Authorization"] = basic(user, password)
        connection = _opened(via.hostname or "", via.port, host if secure else None)
        if not secure:
            return HttpConnection(connection, headers)
        connection.set_tunnel(host, url.port or http.client.HTTPS_PORT, headers)
        return HttpConnection(connection)

    def get(self, url: SplitResult, headers: dict[str, str]) -> http.client.HTTPResponse:
        """Send a GET request, and return the answer once its headers have come."""
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        if self.proxy_headers is not None:
            target, headers = url.geturl(), headers | self.proxy_headers
        self.opened.request("GET", target, headers=headers)
        return self.opened.getresponse()


def _opened(host: str, port: int | None, secure: str | None) -> http.client.HTTPConnection:
    """Return a connection that is not made yet; ``secure`` is whose certificate it demands."""
    # A port always: http.client would look for one in the digits of an IPv6 address.
    if secure is not None:
        return _TLSConnection(host, port or http.client.HTTPS_PORT, secure, _STALL_SECONDS)
    return http.client.HTTPConnection(host, port or http.client.HTTP_PORT, timeout=_STALL_SECONDS)


@contextmanager
def failures_as_busy(*, final: bool = False) -> Iterator[None]:
    """Raise what fails on the way as BusyError, or as RefusedError what will fail again.

    ``final``: a name that is not found, or a port that nobody listens on, is refused.
    """
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(f"its certificate is not valid ({error.verify_message})") from None
    except (UnicodeError, http.client.InvalidURL) as error:
        raise RefusedError(f"its host is not valid ({type(error).__name__}); check it") from None
    except (OSError, http.client.HTTPException) as error:
        reason = printable_name(str(error)) or "the connection ended"
        reason = f"the connection failed ({type(error).__name__}: {reason})"
        if (tunnel := _TUNNEL.match(str(error))) is not None and tunnel[1] not in _AGAIN:
            advice = "the proxy lets no request through to this host: name it in no_proxy"
            advice = proxy_asks("https") if tunnel[1] == "407" else advice
            raise ForbiddenError(f"{reason}: {advice}") from None
        if final and isinstance(error, (socket.gaierror, ConnectionRefusedError)):
            raise RefusedError(f"{reason}; check the URL and the network") from None
        raise BusyError(reason) from None


def proxy_asks(scheme: str) -> str:
    """Return what to do where a proxy for URLs of this scheme answers 407."""
    return (
        "the proxy asks for a user name and password, or for others: set "
        f"{scheme}_proxy=http://user:password@host:port"
    )


def basic(user: str, password: str) -> str:
    """Return the value of a header with a name and a password (RFC 7617)."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
