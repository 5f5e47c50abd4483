"""Requests that are broken, too large, too slow or cut: refused, and others are not disturbed."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import select
import socket
import time
from http.client import HTTPConnection
from typing import Any

import pytest
from starlette.datastructures import Headers

from vllm_module.server.choices import CompletionBody
from vllm_module.server.connection import Limits
from vllm_module.server.endpoint import HandlerEndpoint, Keys
from vllm_module.server.errors import ApiError

HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    "Authorization: Bearer sk-two\r\nContent-Type: application/json\r\n"
)
KEY = "sk-two"
GOOD = {"prompt": "hello", "temperature": 0, "max_tokens": 5}

BROKEN = {
    "no JSON": b"{",
    "text": b'"prompt"',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinite": b'{"prompt": "a", "temperature": 1e999}',
    "infinite inside": b'{"prompt": "a", "extra": {"a": [-1e400]}}',
    "infinite by digits": b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b".5}",
    "infinite by both": b'{"prompt": "a", "temperature": 1' + b"0" * 220 + b"e90}",
    "deep": b"[" * 60_000,
    "deep prompt": b'{"prompt": ' + b"[" * 150 + b"]" * 150 + b"}",
    "huge number": b'{"prompt": [' + b"9" * 5000 + b"]}",
    "long field": b'{"prompt": "a", "%b": 1}' % (b"x" * 500_000),
    "half a pair": b'{"prompt": "\\ud800"}',
    "no UTF-8": b'{"prompt": "\xff"}',
    "nul": b"\0" * 100,
    "many fields": json.dumps({f"x{i}": i for i in range(5000)}).encode(),
    "private field": b'{"prompt": "a", "sampling": {"n": 2}}',
    "dunder": b'{"prompt": "a", "__class__": 1}',
    "many stops": json.dumps({**GOOD, "stop": [""]}).encode(),
    "bias": b'{"prompt": "a", "logit_bias": {"x": 1}}',
    "bias token": b'{"prompt": "a", "logit_bias": {"99999": 1}}',
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_body_is_a_400(server: Any, what: str) -> None:
    """The answer has the protocol's shape, and the server goes on."""
    code, answer = server.ask("POST", "/v1/completions", BROKEN[what])
    assert code == 400, answer
    assert answer["error"]["message"]
    assert len(json.dumps(answer)) < 2000
    assert server.ask("POST", "/v1/completions", GOOD)[0] == 200


MANY = {
    "messages": ("/v1/chat/completions", {"messages": [1] * 6000}),
    "tools": ("/v1/responses", {"input": "a", "tools": [1] * 6000}),
    "sequences": ("/v1/messages", {"messages": [{}], "max_tokens": 1, "stop_sequences": [1] * 999}),
    "tokens": ("/detokenize", {"tokens": ["a"] * 6000}),
    "ids": ("/v1/completions", {**GOOD, "allowed_token_ids": ["a"] * 6000}),
    "bias": ("/v1/completions", {**GOOD, "logit_bias": {f"x{i}": "" for i in range(6000)}}),
    "stops": ("/v1/completions", {**GOOD, "stop": [f"x{i}" for i in range(6000)]}),
    "bad words": ("/v1/completions", {**GOOD, "bad_words": ["ab" * 8000] * 3}),
    "bad word": ("/v1/completions", {**GOOD, "bad_words": "ab" * 200_000}),
}  # fmt: skip


@pytest.mark.parametrize("what", MANY)
def test_many_wrong_entries_hold_up_nobody(server: Any, what: str) -> None:
    """They are checked in the loop that answers all clients, so that each would cost all of them.

    A list of 6000 once took 13 s, and one of 100,000 an hour.
    """
    path, body = MANY[what]
    begin = time.monotonic()
    code, answer = server.ask("POST", path, {"model": "tiny", **body})
    assert (code, len(json.dumps(answer)) < 2000) == (400, True), answer
    assert time.monotonic() - begin < 3


def test_a_large_answer_holds_up_nobody(server: Any) -> None:
    """A short request has an answer of megabytes; others are answered before it is written."""
    wanted = {"prompt": "x" * 900, "max_tokens": 1, "n": 64, "echo": True, "logprobs": 5}
    gc.collect()  # a pass over all that other tests have loaded would hold it up, too
    gc.freeze()  # as `serve` does
    data = json.dumps(wanted).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        begin, times = time.monotonic(), list[float]()
        while not select.select([connection], [], [], 0)[0]:
            asked = time.monotonic()
            assert server.ask("GET", "/version")[0] == 200
            times.append(time.monotonic() - asked)
        whole = time.monotonic() - begin
        received = b""
        while more := connection.recv(1 << 20):
            received += more
    choices = json.loads(received.partition(b"\r\n\r\n")[2])["choices"]
    assert {len(each["logprobs"]["tokens"]) for each in choices} == {901}
    gc.unfreeze()
    assert max(times) < whole / 2


def test_many_biases_are_refused_by_their_number() -> None:
    """In a body that is large enough for them."""
    with pytest.raises(ApiError, match="logit_bias has 70000 entries, and may have 65536"):
        CompletionBody.of({**GOOD, "logit_bias": {f"{i}": 1 for i in range(70_000)}})
    most = {f"{i}": 1 for i in range(1 << 16)}
    assert CompletionBody.of({**GOOD, "logit_bias": most}).sampling["logit_bias"] == most
    with pytest.raises(ApiError, match="logit_bias has 65537 entries"):
        CompletionBody.of({**GOOD, "logit_bias": {**most, "65536": 1}})


def test_a_body_of_many_values_is_refused_unread(server: Any) -> None:
    """By every path, and before it is known what it asks for."""
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"):
        code, answer = server.ask("POST", path, b"[" * 100_000)
        assert (code, "more than 65536 JSON values" in str(answer)) == (413, True), answer


def numbers_of_every_length() -> list[str]:
    """Return numbers on both sides of the largest float, by digits, by an exponent and by both."""
    counts = [1, 2, 98, 99, 100, *range(190, 320), 350, 399, 400, 401, 999]
    found = []
    for digits in counts:
        found += [f"{'1' * digits}.5", f"-{'9' * digits}.0", f"{'1' * digits}e0"]
        found += [f"1e{digits}", f"1E+{digits}", f"-1.5e{digits:05}"]
        found += [f"{'1' * digits}e{308 - digits}", f"{'1' * digits}e{309 - digits}"]
        found += [f"{'1' * digits}.0e+{exponent}" for exponent in (5, 9, 10, 99, 108, 109, 110)]
    return found


def an_endpoint() -> HandlerEndpoint:
    async def handler(state: Any, body: CompletionBody) -> str:
        return ""

    keys = Keys([], [])
    return HandlerEndpoint("/", "open", handler, None, keys, Limits())


@pytest.mark.parametrize("number", [b"1e999", b"1" + b"0" * 400 + b".5"])
def test_a_number_is_too_large_wherever_it_is_in_a_large_body(number: bytes) -> None:
    """The body is looked at in parts, and the number begins near an edge of each."""
    endpoint, headers = an_endpoint(), Headers({"content-type": "application/json"})
    head, middle = b'{"prompt": "', b'", "temperature": '
    for edge in (1 << 16, 1 << 17):
        for first in (*range(edge - 420, edge + 3, 7), *range(edge - 6, edge + 3)):
            text = b"x" * (first - len(head) - len(middle))
            body = head + text + middle + number + b"}"
            assert body.index(number) == first
            with pytest.raises(ApiError, match="too large for a float"):
                endpoint._checked(headers, {}, body)


def test_a_number_is_too_large_where_python_has_it_infinite() -> None:
    endpoint, headers = an_endpoint(), Headers({"content-type": "application/json"})
    told = {True: 0, False: 0}
    for number in numbers_of_every_length():
        infinite, refused = math.isinf(float(number)), ""
        try:
            endpoint._checked(headers, {}, b'{"prompt": "a", "temperature": %b}' % number.encode())
        except ApiError as error:  # one that is no temperature is refused, too
            refused = error.message
        assert ("too large for a float" in refused) == infinite, number
        told[infinite] += 1
    assert min(told.values()) > 500


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_page_of_another_origin_cannot_ask(server: Any, kind: str) -> None:
    """Its browser sends these types without asking the server first: they are refused."""
    headers = {"Content-Type": kind}
    code, answer = server.ask("POST", "/v1/completions", GOOD, **headers)
    assert (code, "application/json" in answer["error"]["message"]) == (415, True)


def test_other_paths_and_methods(server: Any) -> None:
    """Both are answered in the protocol's shape."""
    for method, path, expected in (
        ("GET", "/v1/nothing", 404), ("GET", "/../../etc/passwd", 404), ("GET", "//health", 404),
        ("GET", "/v1/completions", 405), ("DELETE", "/health", 405), ("POST", "/%2e%2e/x", 404),
        ("OPTIONS", "/v1/completions", 405),
    ):  # fmt: skip
        code, answer = server.ask(method, path)
        assert (code, set(answer)) == (expected, {"error"})
    assert b"access-control" not in _raw(server, "OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")


def test_a_target_may_have_its_host(server: Any) -> None:
    """HTTP has servers accept it (RFC 9112, 3.2.2); keys and paths are as without one."""
    for target, key, expected in (
        ("http://x/health", None, 200), ("HTTPS://x:80/v1/models?a=b", KEY, 200),
        ("http://x/v1/models", None, 401), ("http://x/v1/nothing", KEY, 404),
        ("http://x", KEY, 200), ("ftp://x/health", KEY, 404), ("x/health", KEY, 404),
        ("/http://x/health", KEY, 404),
    ):  # fmt: skip
        assert server.ask("GET", target, key=key)[0] == expected, target
    assert server.ask("POST", "http://x/v1/completions", GOOD)[0] == 200


def _raw(server: Any, text: str) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(text.encode())
        return connection.recv(1 << 16).lower()


def test_large_bodies(server: Any) -> None:
    """A length above the limit is refused before the body; so are chunks without a length."""
    code, answer = server.send(f"{HEAD}Content-Length: 104857600\r\n\r\n".encode())
    assert code == 413
    assert json.loads(answer)["error"]["code"] == "body_too_large"
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
        received = b""
        try:
            for _ in range(1000):
                connection.sendall(chunk)
            received = connection.recv(1000)
        except (BrokenPipeError, ConnectionResetError):
            received = b"HTTP/1.1 413"
        assert received.startswith(b"HTTP/1.1 413")
    assert server.send(f"{HEAD}Content-Length: x\r\n\r\n".encode())[0] == 400
    assert server.ask("POST", "/v1/completions", GOOD)[0] == 200


def test_requests_cut_at_every_byte(server: Any) -> None:
    """A client that leaves in the middle of its request leaves nothing behind."""
    body = json.dumps(GOOD)
    whole = f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    for end in range(len(whole)):
        server.send(whole[:end], wait=False)
    assert server.send(whole)[0] == 200
    assert not server.llm._accepted
    assert not server.llm.llm.engine.requests


CUT = {
    "/v1/completions": {"prompt": "é", "stop": ["\n"], "max_tokens": 1},
    "/v1/chat/completions": {
        "model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "é"}],
    },
    "/v1/responses": {"input": "é", "max_output_tokens": 1, "model": "tiny"},
    "/v1/messages": {
        "model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "é"}],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", CUT)
def test_bodies_cut_at_every_byte(server: Any, path: str) -> None:
    """Each is a 400 in the protocol's shape, on one connection, which serves the whole one last."""
    whole = json.dumps(CUT[path], ensure_ascii=False).encode()
    headers = {"Authorization": "Bearer sk-two", "Content-Type": "application/json"}
    with contextlib.closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        for end in range(len(whole) + 1):
            connection.request("POST", path, whole[:end], headers)
            answer = connection.getresponse()
            told = json.loads(answer.read())
            assert answer.status == (200 if end == len(whole) else 400), (whole[:end], told)
            if answer.status == 400:
                assert told["error"]["type"] == "invalid_request_error"
                assert told["error"]["message"]
    assert not server.llm.llm.engine.requests


def test_a_slow_body(start: Any) -> None:
    """A body that does not arrive in time is a 408."""
    with start(None, client_seconds=0.2) as server:
        code, answer = server.send(f"{HEAD}Content-Length: 10\r\n\r\n{{".encode())
        assert code == 408
        assert "0.2 s" in json.loads(answer)["error"]["message"]


def test_logs_hold_no_prompts_and_no_keys(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is asked, and however wrong it is."""
    secret = "correct horse battery"
    with caplog.at_level(logging.DEBUG):
        for body in (
            {**GOOD, "prompt": secret},
            {"prompt": secret, secret: 1},
            {"prompt": {secret: 1}},
        ):
            server.ask("POST", "/v1/completions", body)
        server.ask("POST", "/v1/completions", GOOD, key="sk-wrong-secret")
        server.ask("GET", f"/{secret.replace(' ', '-')}?key=sk-secret")
    # pytest gives the logger of accesses a handler, without which uvicorn does not use it.
    records = [each for each in caplog.records if each.name != "uvicorn.access"]
    text = "\n".join(each.getMessage() for each in records)
    assert secret not in text
    assert "sk-" not in text


def test_a_list_that_is_no_prompt_is_refused_by_its_length(server: Any) -> None:
    """Its entries are not looked at, for which other requests would wait."""
    for entry in (1, "a", {}):
        body = {**GOOD, "prompt": [entry] * 2000}
        code, answer = server.ask("POST", "/v1/completions", body)
        message = "prompt has 2000 entries: expected at most 64 prompts, or 1024 tokens of one"
        assert (code, answer["error"]["message"]) == (400, message)
