"""Single requests: what each status, header and URL means by its RFC, and what is tried again."""

from __future__ import annotations

import runpy
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights.stores import store as store_module
from vllm_module.weights.stores import stored_bytes
from vllm_module.weights.stores.client import (
    Answer,
    BusyError,
    ForbiddenError,
    MissingError,
    RefusedError,
    Version,
)
from vllm_module.weights.stores.http_client import HttpClient, web_client
from vllm_module.weights.stores.place import Place, parse, parse_file
from vllm_module.weights.stores.store import Store

stores_server = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("stores_server.py"))))
DATA = bytes(range(100))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "f").write_bytes(DATA)
    with stores_server.serving(folder) as server:
        yield server


@pytest.fixture
def server(serving: Any) -> Any:
    serving.fault = None
    return serving


@pytest.fixture
def client(server: Any) -> Iterator[HttpClient]:
    client = web_client(parse(server.url))
    yield client
    client.close()


def answering(server: Any, answer: Callable[[Any], object]) -> None:
    """Let the server answer so to each request."""

    def fault(handler: Any) -> bool:
        answer(handler)
        return True

    server.fault = fault


def ask(client: HttpClient, begin: int = 0, count: int = 10) -> Answer:
    return client.read("f", begin, memoryview(bytearray(count)))


# RFC 9110 (section 15), 6585 (429) and 8470 (425): statuses after which a client may try again,
# those that ask who is there, those of what is not there; all others would come again.
STATUSES = {
    **dict.fromkeys((408, 425, 429, 500, 502, 503, 504), BusyError),
    **dict.fromkeys((401, 403, 407), ForbiddenError),
    **dict.fromkeys((404, 410), MissingError),
    **dict.fromkeys(
        (204, 300, 304, 400, 402, 405, 409, 412, 423, 451, 501, 505, 507), RefusedError
    ),
}


@pytest.mark.parametrize("status", STATUSES)
def test_what_a_status_means(server: Any, client: HttpClient, status: int) -> None:
    """The kind of error is that of the status, for whole files and for ranges."""
    answering(server, lambda handler: handler.answer(status))
    for call in (lambda: ask(client), lambda: client.fetch("f", 1000)):
        with pytest.raises((BusyError, RefusedError)) as error:
            call()
        assert type(error.value) is STATUSES[status]
        assert f"{status} " in str(error.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_every_redirect_is_followed_five_times(
    server: Any, client: HttpClient, status: int
) -> None:
    """The place that a redirect leads to is relative to the one before; a sixth is refused."""
    for most in (1, 5, 6):

        def fault(handler: Any, most: int = most) -> bool:
            number = int(handler.path.partition("?")[2] or 0)
            if number < most:
                handler.answer(status, Location=f"f?{number + 1}")
            return number < most

        server.fault = fault
        fresh = web_client(parse(server.url))
        if most > 5:
            with pytest.raises(RefusedError, match="redirects more than 5 times"):
                fresh.fetch("f", 1000)
        else:
            assert fresh.fetch("f", 1000) == DATA
        fresh.close()


def in_seconds(seconds: int) -> str:
    return format_datetime(datetime.now(timezone.utc) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("", None, None), ("0", 0, 0), ("17", 17, 17), ("999999999", 999999999, 999999999),
        ("1.5", None, None), ("-3", None, None), ("soon", None, None), ("9999999999", None, None),
        ("in 600", 500, 601), ("in -600", 0, 0), ("in 600 -0000", 500, 601),
    ],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date(
    server: Any, client: HttpClient, header: str, least: float | None, most: float | None
) -> None:
    """RFC 9110, section 10.2.3; a date that has passed is now, and nonsense is no answer."""
    if header.startswith("in "):
        _, seconds, *zone = header.split()
        header = in_seconds(int(seconds)).replace("GMT", *(zone or ["GMT"]))
    answering(server, lambda handler: handler.answer(503, Retry_After=header))
    with pytest.raises(BusyError) as error:
        ask(client)
    after = error.value.after
    assert after is None if least is None or most is None else least <= (after or 0.0) <= most


def test_ranges_are_what_the_file_has(server: Any, client: HttpClient) -> None:
    """Each range has its bytes, fewer at the end; one that begins after it is refused."""
    for begin in (0, 1, 50, 89, 90, 91, 99):
        for count in (1, 9, 10, 11, 200):
            view = bytearray(count)
            answer = client.read("f", begin, memoryview(view))
            expected = DATA[begin : begin + count]
            assert (view[: len(expected)], answer.nbytes) == (expected, len(expected))
            assert not any(view[len(expected) :])
            assert answer.version == Version(100, '"one"', True)
    with pytest.raises(RefusedError, match="it ends before byte 100"):
        ask(client, 100)
    assert [client.fetch("f", most) for most in (100, 101)] == [DATA, DATA]
    with pytest.raises(RefusedError, match="more than the 99 bytes"):
        client.fetch("f", 99)


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        ({"ETag": '"a"'}, ('"a"', True)),
        ({"ETag": 'W/"a"'}, ('"a"', False)),
        ({"ETag": '"a"', "Last_Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, ('"a"', True)),
        ({"ETag": "", "Last_Modified": "Mon"}, ("Mon", False)),
        ({"ETag": "", "Last_Modified": ""}, ("", False)),
        ({"ETag": '"W/a"'}, ('"W/a"', True)),
    ],
)
def test_what_proves_a_version(
    server: Any, client: HttpClient, headers: dict[str, str], version: tuple[str, bool]
) -> None:
    """RFC 9110, section 8.8: a strong tag does; a weak one and a time tell changes only."""
    answering(server, lambda handler: handler.serve(200, **headers))
    assert ask(client).version == Version(100, *version)


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({"Content_Encoding": "identity"}, None),
        ({"Content_Encoding": "Identity"}, None),
        ({"Content_Encoding": "br"}, "Content-Encoding 'br'"),
        ({"Content_Type": "text/plain"}, None),
        ({"Content_Type": "TEXT/HTML"}, "a web page"),
        ({"Content_Type": "application/xhtml+xml; charset=x"}, "a web page"),
        ({"Content_Range": "bytes 0-9/100"}, None),
        ({"Content_Range": "bytes 0-8/100"}, "with bytes 0 to 8 of 100"),
        ({"Content_Range": "bytes 1-10/100"}, "with bytes 1 to 10 of 100"),
        ({"Content_Range": "bytes 0-10/100"}, "with bytes 0 to 10 of 100"),
        ({"Content_Range": "bytes 0-9/10"}, None),
        ({"Content_Range": "bytes 0-9/9"}, "with bytes 0 to 9 of 9"),
        ({"Content_Range": "items 0-9/100"}, "in Content-Range"),
        ({"Content_Range": "bytes 0-9/*"}, "in Content-Range"),
        ({"Content_Range": "bytes 0-9/" + "9" * 20}, "in Content-Range"),
        ({"Content_Length": "9"}, "with 9 bytes, and not 10"),
        ({"Content_Length": "+10"}, "where its answer ends"),
        ({"Content_Length": "0x0a"}, "where its answer ends"),
        ({"Content_Length": "10, 10"}, "where its answer ends"),
        ({"Transfer_Encoding": "gzip, chunked"}, "where its answer ends"),
        ({"Transfer_Encoding": "identity"}, "where its answer ends"),
    ],
)
def test_headers_that_do_not_fit_are_refused(
    server: Any, client: HttpClient, headers: dict[str, str], problem: str | None
) -> None:
    """Ten bytes were asked for, and ten come."""
    answering(server, lambda handler: handler.serve(200, **headers))
    if problem is None:
        assert ask(client).nbytes == 10
        return
    with pytest.raises(RefusedError) as error:
        ask(client)
    assert type(error.value) is RefusedError
    assert problem in str(error.value)


def test_a_body_that_ends_early_is_asked_for_again(server: Any, client: HttpClient) -> None:
    """And one that goes on is refused."""
    answering(server, lambda handler: handler.serve(200, keep=9))
    with pytest.raises(BusyError, match=r"9 of 10 bytes|IncompleteRead"):
        ask(client)
    with pytest.raises(BusyError, match="9 of 100 bytes"):
        client.fetch("f", 1000)


@pytest.mark.parametrize("keep", [9, None])
def test_a_whole_file_whose_end_is_not_told_is_refused(
    server: Any, client: HttpClient, keep: int | None
) -> None:
    """It would end where the connection breaks (RFC 9112, section 8): urllib takes what came."""

    def answer(handler: Any) -> None:
        handler.close_connection = True
        handler.serve(200, keep=keep, Content_Length="", Connection="close")

    answering(server, answer)
    with urllib.request.urlopen(f"{server.url}/f") as opened:
        assert opened.read() == DATA[:keep]
    with pytest.raises(RefusedError, match="where its answer ends"):
        client.fetch("f", 1000)


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([10], None),
        ([1, 9], None),
        ([9], BusyError),
        ([11], RefusedError),
        ([10, 1], RefusedError),
    ],
)
def test_a_body_in_chunks_has_the_bytes_of_the_range(
    server: Any, client: HttpClient, chunks: list[int], error: type[Exception] | None
) -> None:
    """RFC 9112, section 7.1; the connection of a whole one is used again."""
    ports: list[int] = []

    def answer(handler: Any) -> None:
        ports.append(handler.client_address[1])
        handler.send_response(206)
        handler.send_header("Content-Range", "bytes 0-9/100")
        handler.send_header("Transfer-Encoding", "Chunked")
        handler.end_headers()
        at = 0
        for size in chunks:
            handler.wfile.write(b"%x\r\n%b\r\n" % (size, DATA[at : at + size]))
            at += size
        handler.wfile.write(b"0\r\n\r\n")

    answering(server, answer)
    if error is not None:
        with pytest.raises(error, match=r"9 of 10 bytes|goes on after the 10 bytes"):
            ask(client)
        return
    view = bytearray(10)
    for _ in range(2):
        client.read("f", 0, memoryview(view))
        assert view == DATA[:10]
    assert len(set(ports)) == 1


def test_connections_are_used_again(server: Any, client: HttpClient) -> None:
    """After an answer that was read, and a short error; not after one that says that it closes."""
    ports: list[int] = []

    def fault(handler: Any) -> bool:
        ports.append(handler.client_address[1])
        if len(ports) == 3:
            handler.answer(503, b"busy")
        if len(ports) == 5:
            handler.close_connection = True
            handler.answer(503, b"busy", Connection="close")
        return len(ports) in (3, 5)

    server.fault = fault
    for number in range(1, 8):
        if number in (3, 5):
            with pytest.raises(BusyError):
                ask(client)
        else:
            ask(client)
    assert len(set(ports[:5])) == 1
    assert len(set(ports[5:])) == 1
    assert ports[5] != ports[4]


class Failing:
    """A client whose calls raise what is listed, one after the other, and then succeed."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    def close(self) -> None: ...

    def names(self) -> list[str] | None:
        self.read("", 0, memoryview(b""))
        return ["f"]

    def fetch(self, name: str, most: int) -> bytes:
        self.read(name, 0, memoryview(b""))
        return b"data"

    def read(self, name: str, begin: int, view: memoryview) -> Answer:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return Answer(len(view), Version(1, "", False))


def store_of(monkeypatch: pytest.MonkeyPatch, client: Failing) -> tuple[Store, list[float]]:
    """Return a store whose clock is moved by its waits alone, which are listed."""
    clock, pauses = [1000.0], list[float]()
    store = Store(parse("http://h/m"), client)

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        clock[0] += seconds
        return False

    monkeypatch.setattr(store, "_wait", wait)
    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return store, pauses


def test_pauses_double_up_to_eight_seconds_and_end_after_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is between half of its length and all of it; the last would end after the deadline."""
    store, pauses = store_of(monkeypatch, Failing(*[BusyError("busy") for _ in range(99)]))
    with pytest.raises(WeightReadError, match=r"bytes 0 to 9 could not be read in \d+ tries: busy"):
        store.read("f", 0, memoryview(bytearray(10)))
    for number, pause in enumerate(pauses):
        length = min(0.1 * 2**number, 8.0)
        assert length / 2 <= pause <= length
    assert 60 - 8 < sum(pauses) <= 60
    assert max(pauses) > 4


@pytest.mark.parametrize("patience", [0.0, 0.01, 0.3, 1.0, 20.0])
def test_a_request_is_tried_again_for_as_long_as_was_asked(
    monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """It counts from the first try, and 0 asks for one try; another pause would end after it."""
    store, pauses = store_of(monkeypatch, Failing(*[BusyError("busy") for _ in range(99)]))
    store.patience = patience
    with pytest.raises(WeightReadError, match=r"in \d+ tr(y|ies): busy"):
        store.read("f", 0, memoryview(bytearray(10)))
    assert sum(pauses) <= patience
    assert sum(pauses) + min(0.1 * 2 ** len(pauses), 8.0) > patience


@pytest.mark.parametrize(("after", "tries"), [(59.0, 2), (60.0, 2), (61.0, 1)])
def test_what_a_server_asks_for_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, after: float, tries: int
) -> None:
    """As long as that ends by the deadline, which counts from the first failure."""
    client = Failing(BusyError("busy", after))
    store, pauses = store_of(monkeypatch, client)
    if tries == 2:
        assert store.fetch("f", 9) == b"data"
        assert pauses == [after]
    else:
        with pytest.raises(WeightReadError, match=r"in 1 try: busy, which asks to wait 61 s"):
            store.fetch("f", 9)
        assert not pauses
    assert client.calls == tries


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MissingError("gone"), CheckpointFormatError),
        (ForbiddenError("no access"), CheckpointFormatError),
        (RefusedError("wrong"), WeightReadError),
    ],
)
def test_what_is_refused_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    """A file that may be missing is missing then; what is no answer is raised."""
    for call in ("fetch", "read", "fetch_optional", "has"):
        client = Failing(error)
        store, pauses = store_of(monkeypatch, client)
        view = memoryview(bytearray(1))
        made: Callable[[], object] = {
            "fetch": lambda store=store: store.fetch("f", 9),
            "read": lambda store=store, view=view: store.read("f", 0, view),
            "fetch_optional": lambda store=store: store.fetch_optional("f", 9),
            "has": lambda store=store: store.has("f"),
        }[call]
        if kind is CheckpointFormatError and call in ("fetch_optional", "has"):
            assert made() is (None if call == "fetch_optional" else False)
        else:
            with pytest.raises(kind, match=f"http://h/m/f: {error}") as raised:
                made()
            assert type(raised.value) is kind
        assert (client.calls, pauses) == (1, [])
    store, _ = store_of(monkeypatch, Failing())
    assert (store.has("f"), store.fetch_optional("f", 9)) == (True, b"data")


@pytest.mark.parametrize("nbytes", [0, 4999, 5001])
def test_an_answer_of_another_length_is_refused(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Where the file is as long as it was: a part of what was asked for holds no bytes of it."""

    class Short(Failing):
        def read(self, name: str, begin: int, view: memoryview) -> Answer:
            count = min(len(view), 20_000 - begin)
            return Answer(nbytes if begin else count, Version(20_000, "a", True))

    monkeypatch.setattr(stored_bytes, "_FIRST_BYTES", 10)  # else the first request has all of it
    store, _ = store_of(monkeypatch, Short())
    opened = stored_bytes.StoredBytes(store, "f")
    with pytest.raises(WeightReadError, match=f"{nbytes} bytes came from byte 500 on, where 5000"):
        opened.read_bytes(500, 5000)


PLACES: list[tuple[str, Place]] = [
    ("s3://bucket", Place("s3", "bucket", "")),
    ("s3://bucket/", Place("s3", "bucket", "")),
    ("S3://Bucket/a/b/", Place("s3", "Bucket", "a/b")),
    ("gs://b/a%20b", Place("gs", "b", "a%20b")),
    ("http://h:80/a b", Place("http", "h:80", "a b")),
    ("https://[::1]:8/x", Place("https", "[::1]:8", "x")),
    ("hf://owner/name", Place("hf", "owner", "name", None)),
    ("hf://owner/name@v1", Place("hf", "owner", "name", "v1")),
]


@pytest.mark.parametrize(("url", "place"), PLACES)
def test_parts_of_a_url(url: str, place: Place) -> None:
    """They are taken as they are, without slashes at the end."""
    assert parse(url) == place
    assert parse(str(place)) == place
    assert str(place.file("x.json")) == f"{place}/x.json"


def test_a_revision_is_the_hubs() -> None:
    """Given with the URL or beside it; both have to agree, and other stores have none."""
    assert parse("hf://o/n", "v1").revision == parse("hf://o/n@v1", "v1").revision == "v1"
    for url, revision in (("hf://o/n@v1", "v2"), ("s3://b/m", "v1"), ("https://h/m", "v1")):
        with pytest.raises(CheckpointFormatError, match=f"revision '{revision}'|for revision 'v1'"):
            parse(url, revision)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/m/x.gguf", ("s3://b/m", "x.gguf")),
        ("s3://b/x.gguf", ("s3://b", "x.gguf")),
        ("s3://x.gguf", ("s3://x.gguf", None)),
        ("s3://b/m", ("s3://b/m", None)),
        ("s3://b/m.gguf/", ("s3://b/m.gguf/", None)),
        ("hf://o/x.gguf", ("hf://o/x.gguf", None)),
        ("HF://o/x.gguf", ("HF://o/x.gguf", None)),
        ("hf://o/n/x.gguf", ("hf://o/n", "x.gguf")),
        ("hf://o/n/x.GGUF", ("hf://o/n/x.GGUF", None)),
        ("https://h/x.safetensors", ("https://h", "x.safetensors")),
    ],
)
def test_a_file_at_the_end_of_a_url(url: str, expected: tuple[str, str | None]) -> None:
    """Only where a folder is left; a model of the hub has an owner and a name."""
    assert parse_file(url, (".gguf", ".safetensors")) == expected
