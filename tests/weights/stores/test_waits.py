"""Stores that answer late, slowly or not at all."""

from __future__ import annotations

import runpy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module.errors import WeightReadError
from vllm_module.weights import reading as weight_reading
from vllm_module.weights.stores import http_client, http_connection, store
from vllm_module.weights.stores.client import BusyError
from vllm_module.weights.stores.place import parse

# Pytest's importlib mode has no imports between test files.
STORES: Any = runpy.run_path(str(Path(__file__).with_name("served.py")))
FILE, web, state, busy = (STORES[name] for name in ("FILE", "web", "state", "busy"))
always, refused, opened = (STORES[name] for name in ("always", "refused", "opened"))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses between requests, which take no time here; the clock runs with them."""
    found: list[float] = []

    def wait(_: Any, seconds: float) -> None:
        found.append(seconds)
        assert sum(found) < 3 * store.RETRY_SECONDS, "the deadline never comes"

    monkeypatch.setattr(store.Store, "_wait", wait)
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: 100 + sum(found)))
    monkeypatch.setattr(store, "_FIRST_DELAY", 0.1)
    return found


def test_requests_end_at_the_deadline(server: Any, kind: Any, pauses: list[float]) -> None:
    """The pauses double up to a limit; then one error has the URL, the tries and the reason."""
    url = kind(server, busy(503))
    text = refused(url)
    assert url in text
    assert f"in {len(pauses) + 1} tries" in text
    assert "503" in text
    assert 50 < sum(pauses) <= store.RETRY_SECONDS
    delays = [0.1 * 2**number for number in range(7)] + [8.0] * 20
    assert all(delay / 2 <= pause <= delay for pause, delay in zip(pauses, delays, strict=False))


@pytest.mark.parametrize("after", ["17", "Sun, 01 Jan 2040 00:00:00 GMT"])
def test_retry_after_is_waited_for_until_the_deadline(
    server: Any, pauses: list[float], after: str
) -> None:
    """Seconds within the deadline are waited for, a date beyond it ends the request at once."""
    text = refused(web(server, busy(429, Retry_After=after)))
    assert pauses == ([17.0] * 3 if after == "17" else [])
    assert "asks to wait" in text


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/m", "https://no-such-host.invalid/m"])
def test_an_unreachable_server_is_refused_at_once(
    server: Any, pauses: list[float], url: str
) -> None:
    """A port that nobody listens on, and a name that is not found, are not tried again."""
    assert "check the URL and the network" in refused(url)
    assert pauses == []


@pytest.mark.parametrize("url", ["http://a..b/m", "http://" + "a" * 64 + ".org/m"])
def test_a_host_that_no_name_server_knows_is_refused(
    server: Any, pauses: list[float], url: str
) -> None:
    """A label of a host that is empty or too long is an error with the URL."""
    assert "its host is not valid" in refused(url)
    assert pauses == []


SLOW = {
    "a body": "206 Partial\r\nContent-Range: bytes 0-511/9999\r\nContent-Length: 512\r\n\r\n",
    "a body without a length": "206 Partial\r\nContent-Range: bytes 0-511/9999\r\n\r\n",
    "an answer that is to come": "",
    "trailers": "206 Partial\r\nContent-Range: bytes 0-0/1\r\nTransfer-Encoding: chunked\r\n\r\n"
    "1\r\nx\r\n0\r\n",
    "the body of an error": "404 Missing\r\nContent-Length: 512\r\n\r\n",
    "a header": "206 Partial\r\nX: ",
}
PIECES = {"an answer that is to come": b"HTTP/1.1 100 Continue\r\n\r\n", "trailers": b"A: b\r\n"}


@pytest.mark.parametrize("what", SLOW)
def test_a_request_ends_however_slowly_its_answer_comes(
    server: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What comes piece by piece, without an end, is not waited for longer than one request may."""
    monkeypatch.setattr(store, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(http_connection, "_REQUEST_SECONDS", 0.05)
    pause = threading.Event()

    def drip(handler: Any) -> None:
        handler.wfile.write(f"HTTP/1.1 {SLOW[what]}".encode() if SLOW[what] else b"")
        for _ in range(400):  # ends when the client has closed the connection
            handler.wfile.write(PIECES.get(what, b"x"))
            pause.wait(0.005)

    begin = time.monotonic()
    text = refused(web(server, always(drip)))
    assert "its answer did not end in 0.05 s" in text
    assert time.monotonic() - begin < 1


def test_a_file_that_is_cut_off_by_the_deadline_is_not_whole(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in chunks ends with the last of them, and not with its deadline."""
    monkeypatch.setattr(http_connection, "_REQUEST_SECONDS", 0.05)
    done = threading.Event()

    def fault(handler: Any) -> bool:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        done.wait(5)
        return True

    client = http_client.web_client(parse(web(server, fault)))
    with pytest.raises(BusyError, match="did not end"):
        client.fetch("config.json", 100)
    done.set()


def test_closing_ends_requests_under_way(server: Any) -> None:
    """A request whose answer does not come ends when its store is closed."""
    asked, done = threading.Event(), threading.Event()

    def fault(handler: Any) -> bool:
        asked.set()
        return done.wait(5)

    client = http_client.web_client(parse(web(server, fault)))
    with ThreadPoolExecutor(1) as executor:
        reading = executor.submit(client.read, FILE, 0, memoryview(bytearray(8)))
        assert asked.wait(5)
        client.close()
        assert "the store was closed" in str(reading.exception(timeout=2))
        done.set()


def reading(works: Callable[[store.Store], Iterator[Callable[[], None]]]) -> list[BaseException]:
    """Return what a thread raises that does ``works`` with a store; it has two seconds."""
    place = parse("https://host/m")
    closing, errors = store.Store(place, http_client.web_client(place)), []

    def read() -> None:
        try:
            closing.together(works(closing))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(2)
    assert not thread.is_alive()
    return errors


def test_closing_ends_requests_that_have_not_begun() -> None:
    """While others are under way, those that wait for a thread are dropped, and the read fails."""
    submitted, closed = threading.Event(), threading.Event()

    def works(closing: store.Store) -> Iterator[Callable[[], None]]:
        def close() -> None:
            submitted.wait(5)
            closing.close()
            closed.set()

        def wait() -> None:
            closed.wait(5)

        yield close
        for _ in range(store.UNDER_WAY + 3):
            yield wait
        submitted.set()

    (error,) = reading(works)
    assert isinstance(error, WeightReadError)
    assert "was closed" in str(error)


def test_what_is_under_way_is_waited_for_where_no_more_can_begin() -> None:
    """It writes to memory of the caller, who may free that when the error comes."""
    begun, ended = threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        time.sleep(0.3)
        ended.set()

    def works(closing: store.Store) -> Iterator[Callable[[], None]]:
        yield write
        begun.wait(5)
        closing.close()
        yield write

    (error,) = reading(works)
    assert isinstance(error, WeightReadError)
    assert ended.is_set()


def test_where_no_thread_can_be_started_nothing_is_written_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The executor keeps the work for which it wanted a thread, and would do it later."""
    start, started, done = threading.Thread.start, [], []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("store-request"):
            started.append(thread)
            if len(started) > 2:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)

    def write() -> None:
        time.sleep(0.1)
        done.append(time.monotonic())

    (error,) = reading(lambda closing: iter([write] * 4))
    assert "can't start new thread; raise the limit of threads" in str(error)
    assert len(done) == 2
    time.sleep(0.3)
    assert len(done) == 2


@pytest.mark.parametrize("silent", ["config.json", FILE])
def test_an_interrupt_ends_a_load_whose_store_is_silent(
    server: Any, kind: Any, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is raised while answers are waited for, whichever thread the signal is sent to."""
    done = threading.Event()
    waited: list[bool] = []

    def elsewhere() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def fault(handler: Any) -> bool:
        begins = silent == FILE and (handler.headers["Range"] or "").startswith("bytes=0-")
        if silent not in handler.path or begins:
            return False
        if not waited:
            threading.Thread(target=elsewhere).start()
        waited.append(done.wait(10))
        return True

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            state(kind(server, fault))
        assert not waited or all(waited), "the answers were waited for"
    finally:
        done.set()
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_a_request_of_another_thread(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes when the main thread has read its share, and waits for a thread that reads."""
    monkeypatch.setattr(weight_reading, "_REMOTE_BATCH_BYTES", 4096)
    monkeypatch.setattr(weight_reading, "reader_threads", lambda device: 2)
    done, main = threading.Event(), threading.main_thread().ident
    url = web(server)
    with opened(url) as checkpoint:
        jobs = [(each, torch.empty(each.shape)) for each in checkpoint.values()]
        first = jobs[0][0].byte_range[0]

        def fault(handler: Any) -> bool:
            begin, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
            if not begin <= first <= end or jobs[0][0].file.name not in handler.path:
                return False
            threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
            return done.wait(10)

        server.fault = fault
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        begun = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                weight_reading.read_all(jobs)
            assert time.monotonic() - begun < 5
        finally:
            done.set()
            signal.signal(signal.SIGINT, before)
