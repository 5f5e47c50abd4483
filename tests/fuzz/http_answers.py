"""What holds for any answer of a web server: the bytes that it declares, or one refusal."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch
from urllib.parse import SplitResult

from vllm_module.weights.stores import http_client, http_connection
from vllm_module.weights.stores.client import BusyError, RefusedError
from vllm_module.weights.stores.place import parse

CUT = b"\n---\n"  # separates the answers, each of a connection of its own
SECRET = "Basic aGlkZGVu"
_BEGIN, _LENGTH, _MOST = 4, 8, 64
# A value may go on in the next line (section 5.2).
_HEADER = re.compile(rb"([!-9;-~]+):[ \t]*((?:[^\r\n]|\r?\n[ \t])*?)[ \t]*\r?\n(?![ \t])")
_STATUS = re.compile(rb"HTTP/1\.\S*[^\S\n]+\+?0*(\d{3})(?:[^\S\n][^\n]*)?\n")
# What http.client takes for a number is more than that of section 7.1, such as "+8" and "0x8".
_SIZE = re.compile(rb"([^;\n]*)(?:;[^\n]*)?\n")


def check_http(folder: Path, data: bytes) -> None:
    """Check ``data`` as the answers of a server to a range, and to a whole file."""
    answers = data.split(CUT)[:8]
    asked: list[bytes] = []
    with _answering(answers, asked):
        client = http_client.HttpClient(
            parse("http://host/model"),
            lambda name: f"http://host/model/{name}",
            lambda url: SECRET if url.netloc == "host" else None,
        )
        try:
            for whole in (False, True):
                before = len(asked)
                view = memoryview(bytearray(b"\xaa" * _LENGTH))
                try:
                    if whole:
                        found = client.fetch("file", _MOST)
                    else:
                        found = bytes(view[: client.read("file", _BEGIN, view).nbytes])
                except (BusyError, RefusedError) as error:
                    words = str(error)
                    assert words.isprintable(), ascii(words)
                    assert len(words) < 1000, words[:200]
                    assert "aGlkZGVu" not in words
                else:
                    if len(asked) > before:  # else over the connection before, with what follows
                        answer = answers[len(asked) - 1]
                        expected = _body(answer)
                        # http.client also takes what RFC 9112 does not allow, such as a space
                        # before the version. Its body is then in what came, or in chunks of it.
                        chunked = b"chunked" in answer.lower()
                        assert found == expected or (
                            expected is None and (chunked or found in answer)
                        )
                    assert len(found) <= (_MOST if whole else _LENGTH)
        finally:
            client.close()


@contextmanager
def _answering(answers: list[bytes], asked: list[bytes]) -> Iterator[None]:
    """Connect to what has the next of ``answers`` and then ends, and never to another host."""
    servers: list[socket.socket] = []

    def to(url: SplitResult) -> http_connection.HttpConnection:
        assert url.hostname == "host", "a connection to another host"
        assert len(asked) < 64, "requests without end"
        ours, theirs = socket.socketpair()
        servers.append(theirs)
        theirs.sendall(answers[len(asked)] if len(asked) < len(answers) else b"")
        theirs.shutdown(socket.SHUT_WR)
        asked.append(url.geturl().encode())
        ours.settimeout(5)
        opened = http_connection.http.client.HTTPConnection("host")
        opened.sock = ours
        return http_connection.HttpConnection(opened)

    try:
        with patch.object(http_connection.HttpConnection, "to", staticmethod(to)):
            yield
    finally:
        for server in servers:
            server.close()


def _body(answer: bytes) -> bytes | None:
    """Return the body of the first final answer in ``answer``; ``None`` if it is not valid.

    RFC 9112. A line may end with LF alone (section 2.2).
    """
    status = 100
    while 100 <= status < 200:
        line = _STATUS.match(answer)
        if line is None:
            return None
        status, answer = int(line.group(1)), answer[line.end() :]
        headers: dict[bytes, list[bytes]] = {}
        while not (end := re.match(rb"\r?\n", answer)):
            header = _HEADER.match(answer)
            if header is None:
                return None
            headers.setdefault(header.group(1).lower(), []).append(header.group(2))
            answer = answer[header.end() :]
        answer = answer[end.end() :]
    if b"transfer-encoding" in headers:
        chunked = headers[b"transfer-encoding"] == [b"chunked"]
        return _chunks(answer) if chunked else None
    lengths = set(headers.get(b"content-length", ()))
    if not lengths:
        return answer
    if len(lengths) > 1 or not (text := lengths.pop()).isdigit() or int(text) > len(answer):
        return None
    return answer[: int(text)]


def _chunks(rest: bytes) -> bytes | None:
    body = b""
    while size := _SIZE.match(rest):
        try:
            length, rest = int(size.group(1), 16), rest[size.end() :]
        except ValueError:
            return None
        if length <= 0:
            return None if length else body
        if len(rest) < length + 2:
            return None
        body, rest = body + rest[:length], rest[length + 2 :]
    return None
