"""Clients that keep a server waiting, and too many of them: each is cut off, and others are not."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette

from vllm_module import AsyncLLM
from vllm_module.server import listener
from vllm_module.server.connection import Limits

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-two\r\n"
JSON = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
PAGE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"  # its answer is long, and fills buffers soon
ASKED = {"prompt": "hello", "temperature": 0, "max_tokens": 40}
SECONDS = 0.5  # that a client of these tests may take


def until_closed(connection: socket.socket, parts: Iterable[bytes] = ()) -> bytes:
    """Send parts, each after a moment, until the server closes; return what it has said."""
    received, parts = b"", iter(parts)
    end = time.monotonic() + 60
    connection.settimeout(SECONDS / 10)
    while time.monotonic() < end:
        try:
            connection.sendall(next(parts, b""))
            if not (more := connection.recv(1 << 16)):
                return received
            received += more
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return received
    raise AssertionError("the server keeps the connection")


def silent(connection: socket.socket) -> bytes:
    return until_closed(connection)


def slow_headers(connection: socket.socket) -> bytes:
    connection.sendall(HEAD)
    return until_closed(connection, (b"X-%d: y\r\n" % i for i in itertools.count()))


def slow_second_headers(connection: socket.socket) -> bytes:
    connection.sendall(VERSION + HEAD)
    return until_closed(connection, (b"X-%d: y\r\n" % i for i in itertools.count()))


def slow_body(connection: socket.socket) -> bytes:
    connection.sendall(HEAD + JSON)
    return until_closed(connection, itertools.repeat(b" "))


def body_after_a_refusal(connection: socket.socket) -> bytes:
    connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\n" + JSON)
    return until_closed(connection, itertools.repeat(b" "))


def idle_after_an_answer(connection: socket.socket) -> bytes:
    connection.sendall(VERSION)
    return until_closed(connection)


def takes_nothing(connection: socket.socket) -> bytes:
    connection.settimeout(60)
    try:
        while True:
            connection.sendall(PAGE * 100)
    except (ConnectionResetError, BrokenPipeError):
        return b""


SLOW: dict[Callable[[socket.socket], bytes], list[int]] = {  # with the statuses of the answers
    silent: [],
    slow_headers: [],
    slow_second_headers: [200],
    slow_body: [408],
    body_after_a_refusal: [404],
    idle_after_an_answer: [200],
    takes_nothing: [],
}


@pytest.fixture(scope="module")
def impatient(start: Any, engine: Any) -> Iterator[Any]:
    with start(AsyncLLM(engine()), client_seconds=SECONDS) as server:
        yield server


def connections(server: Any) -> set[Any]:
    found: set[Any] = server.listener._server.server_state.connections
    return found


@pytest.mark.parametrize("client", SLOW, ids=lambda client: client.__name__)
def test_a_client_that_keeps_the_server_waiting_is_cut_off(
    impatient: Any, client: Callable[[socket.socket], bytes], until: Any
) -> None:
    """Nothing of it is left, and another client gets the same tokens at the same time."""
    expected = impatient.ask("POST", "/v1/completions", ASKED)[1]["choices"]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # it is full soon
        connection.connect(("127.0.0.1", impatient.port))
        said = client(connection)
        assert impatient.ask("POST", "/v1/completions", ASKED)[1]["choices"] == expected
    statuses = [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:]]
    assert statuses == SLOW[client]
    until(lambda: not connections(impatient) and not impatient.llm._accepted)


@pytest.mark.parametrize("closes", [False, True])
def test_a_client_that_takes_some_is_not_cut_off(impatient: Any, until: Any, closes: bool) -> None:
    """It takes a large answer slowly, without a pause; when it stops to take, it is cut off."""
    data = json.dumps({"prompt": "abcdefgh" * 80_000, "return_token_strs": True}).encode()
    close = b"Connection: close\r\n" if closes else b""
    head = HEAD.replace(b"/v1/completions", b"/tokenize") + JSON.replace(b"1000", b"%d" % len(data))
    asked = head.replace(b"Host", close + b"Host") + data
    for stops in (False, True):
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", impatient.port))
            connection.settimeout(60)
            connection.sendall(asked)
            head, _, said = connection.recv(1 << 12).partition(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            begin = time.monotonic()
            while time.monotonic() < begin + 3 * SECONDS:
                time.sleep(SECONDS / 50)
                taken = connection.recv(1 << 12)
                assert taken
                said += taken
            assert len(said) < size // 2
            if stops:
                until(lambda: not connections(impatient))
            with contextlib.suppress(ConnectionResetError):
                while len(said) < size and (more := connection.recv(1 << 20)):
                    said += more
        assert (len(said) < size) == stops


def test_a_slow_answer_is_not_cut_off(impatient: Any) -> None:
    """The limit is the client's, not the engine's."""
    stream = impatient.client().completions.create(
        model="tiny", prompt="a", max_tokens=900, stream=True, temperature=0
    )
    begin = time.monotonic()
    pieces = []
    for piece in stream:
        pieces.append(piece)
        time.sleep(SECONDS / 100)
    assert time.monotonic() - begin > SECONDS
    assert pieces[-1].choices[0].finish_reason == "length"


def test_connections_have_a_bound(start: Any, until: Any) -> None:
    """One too many is told so and closed; when another ends, there is room again."""
    with start(None, connections=3) as server:
        opened = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        until(lambda: len(connections(server)) == 3)
        with socket.create_connection(("127.0.0.1", server.port)) as one_more:
            head, _, body = until_closed(one_more).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"\r\nretry-after: 1\r\n" in head
        assert json.loads(body)["error"]["type"] == "server_error"
        opened[0].sendall(VERSION)
        assert opened[0].recv(1000).startswith(b"HTTP/1.1 200")
        for each in opened:
            each.close()
        until(lambda: not connections(server))
        assert server.ask("GET", "/version")[0] == 200


def test_files_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of open files grows to what connections need; where it cannot, they are fewer."""
    limits = [(1024, 100_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert listener._allow_files(500) == 500
    assert limits == [(1024, 100_000)]
    assert listener._allow_files(4096) == 4096
    assert limits.pop() == (4096 + 256, 100_000)
    limits[:] = [(1024, 2000)]
    assert listener._allow_files(4096) == 2000 - 256
    assert limits.pop() == (2000, 2000)


@pytest.mark.parametrize("files", [1, 2, 3])
def test_connections_that_need_several_files(files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections have their files where the system allows that, else as many as have them."""
    infinity, others = resource.RLIM_INFINITY, listener._OTHER_FILES
    allowed = [(0, 0)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: allowed[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: allowed.append(new))
    sizes = [*(others + more for more in (-1, 0, 1, 7, 30, 31)), infinity]  # in their order
    cases = itertools.product(itertools.combinations_with_replacement(sizes, 2), (1, 10, 15, 31))
    for limit, wanted in cases:
        allowed[:] = [limit]
        limits, address = Limits(connections=wanted), listener.Address(port=0)
        made = listener.Listener(Starlette(), address, limits, files=files)
        made._socket.close()
        room = wanted if limit[1] == infinity else max(1, (limit[1] - others) // files)
        count = made._server.config.http.keywords["limits"].connections  # type: ignore[union-attr]
        assert count == min(wanted, room)
        soft, hard = allowed[-1]
        assert hard == limit[1]
        assert soft in (infinity, hard) or soft >= count * files + others


def test_what_is_no_http(impatient: Any, until: Any) -> None:
    """The answer is one JSON error; nothing is kept of what came."""
    for data in (b"\x16\x03\x01\x02", b"GET /\r\n\r\n", b"\r\n" * 3 + b"\0"):
        with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
            check_refusal(until_closed(connection, [data]))
    # Half of a chunk's length, after the answer has begun: there is no second answer.
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        chunked = b"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        said = until_closed(connection, [chunked, b"no length\r\n"])
        assert said.count(b"HTTP/1.1") <= 1
    until(lambda: not connections(impatient))


def check_refusal(said: bytes) -> None:
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def held(server: Any, client: socket.socket) -> int | None:
    """Return how many bytes of unfinished headers the server has; ``None`` once it has closed."""
    found = [each for each in [*connections(server)] if each.client == client.getsockname()]
    return len(found[0].conn.trailing_data[0]) if found else None


ENDLESS = {
    "lines": (HEAD, b"X: %b\r\n" % (b"y" * 995)),
    "short lines": (HEAD, b"X:\r\n" * 250),
    "one line": (HEAD + b"X: ", b"y" * 1000),
    "a path": (b"GET /", b"y" * 1000),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_headers_without_end_are_refused_above_the_limit(
    server: Any, until: Any, what: str
) -> None:
    """In small pieces, of which the server has each before the next; others get their tokens."""
    expected = server.ask("POST", "/v1/completions", ASKED)[1]["choices"]
    data, piece = ENDLESS[what]
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(data)
        size = len(data)
        until(lambda: held(server, connection) == size)
        while size + len(piece) <= Limits.header_bytes:
            connection.sendall(piece)
            size += len(piece)
            until(lambda: held(server, connection) == size)  # noqa: B023 - called at once
        assert server.ask("POST", "/v1/completions", ASKED)[1]["choices"] == expected
        connection.sendall(piece)
        until(lambda: held(server, connection) is None)
        check_refusal(until_closed(connection))
    assert server.ask("POST", "/v1/completions", ASKED)[1]["choices"] == expected


@pytest.mark.parametrize("more", [0, 1])
def test_headers_at_the_limit(server: Any, until: Any, more: int) -> None:
    """As many unfinished bytes as may be are finished by the next ones; one more is refused."""
    begin = VERSION[:-2] + b"Connection: close\r\nX: "
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(begin + b"y" * (Limits.header_bytes + more - len(begin)))
        wanted = None if more else Limits.header_bytes
        until(lambda: held(server, connection) == wanted)
        if more:
            check_refusal(until_closed(connection))
        else:
            said = until_closed(connection, [b"y" * 1000 + b"\r\n\r\n"])
            assert said.startswith(b"HTTP/1.1 200")


def test_whole_headers_have_a_bound(server: Any) -> None:
    """What one read of the socket finishes may be above the limit, by as much as one read takes."""
    begin, end = VERSION[:-2] + b"Connection: close\r\nX: ", b"\r\n\r\n"
    most = Limits.header_bytes + (256 << 10)  # asyncio reads as many bytes at once
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(begin + b"y" * (most + 1 - len(begin + end)) + end)
        said = until_closed(connection)
    if said:  # else the server closed with bytes that it had not read
        check_refusal(said)


def test_a_flood_of_headers_is_cut_off(server: Any, until: Any) -> None:
    """A client that sends as fast as it can, and reads nothing, fills the system's buffers."""
    expected = server.ask("POST", "/v1/completions", ASKED)[1]["choices"]
    lines, sent = b"X-Y: z\r\n" * 10_000, 0

    def flood() -> None:
        nonlocal sent
        while sent < 64 << 20:
            sent += connection.send(lines)

    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(HEAD)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            flood()
        assert held(server, connection) is None
        said = until_closed(connection)
    if said:  # what is in the client's buffer when the connection is reset may be lost
        check_refusal(said)
    assert server.ask("POST", "/v1/completions", ASKED)[1]["choices"] == expected
