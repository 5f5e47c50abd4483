"""Wrong answers of stores: each is refused with its URL and the reason, or asked for again."""

from __future__ import annotations

import errno
import itertools
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights.source import find_source
from vllm_module.weights.stores import source as stores_source
from vllm_module.weights.stores import store

# Pytest's importlib mode has no imports between test files.
STORES: Any = runpy.run_path(str(Path(__file__).with_name("served.py")))
LIST, list_names, web, s3 = (STORES[name] for name in ("LIST", "list_names", "web", "s3"))
state, same, busy, always = (STORES[name] for name in ("state", "same", "busy", "always"))
whole, refused, listed = (STORES[name] for name in ("whole", "refused", "listed"))


def reset(handler: Any) -> bool:
    handler.close_connection = True
    return True


def truncated(handler: Any) -> bool:
    if LIST in handler.path:
        return False
    handler.path = handler.path.replace("/bucket/folder", "/model")
    handler.serve(200, keep=7)
    return True


PASSING = {
    "an answer 503": busy(503),
    "an answer 500": busy(500),
    "an answer 429 that asks to wait": busy(429, Retry_After="0"),
    "a connection that is reset": reset,
    "an answer that is cut off": truncated,
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_request_that_fails_is_tried_again(
    server: Any, kind: Any, local: Any, fault: Any
) -> None:
    """Every third request fails, listing and headers too; the model has the same bits."""
    number = itertools.count(2)
    url = kind(server, lambda handler: next(number) % 3 == 0 and fault(handler))
    assert same(state(url), local[0][0])
    assert next(number) > 30


def second(answer: Callable[[Any], object]) -> Callable[[Any], bool]:
    """Return a fault of what follows the first request for a file of weights."""

    def fault(handler: Any) -> bool:
        first = (handler.headers["Range"] or "").startswith("bytes=0-")
        return not first and always(answer)(handler)

    return fault


def grown(handler: Any) -> None:
    """Serve the file as if a byte had been added to it."""
    data = handler.data() or b""
    handler.data = lambda: data + b"\0"
    handler.serve(200)


def page(handler: Any) -> None:
    handler.answer(200, b"<html>log in</html>", Content_Type="text/html; charset=utf-8")


def redirect(handler: Any) -> None:
    handler.answer(302, Location="http://login.invalid/?token=HIDDEN")


def to(location: str) -> Callable[[Any], None]:
    return lambda handler: handler.answer(302, Location=location)


def loop(handler: Any) -> None:
    handler.answer(302, Location=handler.path)


def shifted(handler: Any) -> None:
    first = int(handler.headers["Range"].removeprefix("bytes=").partition("-")[0])
    handler.answer(206, bytes(8), Content_Range=f"bytes {first + 1}-{first + 8}/99999")


def nothing(handler: Any) -> None:
    handler.answer(416, Content_Range="bytes */0")


WEB_ONLY = {
    "an empty answer": (always(lambda h: h.answer(200)), "it is empty: copy it there again"),
    "an empty answer in between": (second(lambda h: h.answer(200)), "it is empty"),
    "an empty config.json": (always(lambda h: h.answer(200), "config.json"), "is not valid JSON"),
    "a page that says it is a file": (
        always(lambda h: h.answer(200, b"<html>log in</html>"), "config.json"),
        "is not valid JSON",
    ),
    "a web page": (always(page), "with a web page, such as one to log in"),
    "a web page as config.json": (always(page, "config.json"), "config.json: .* a web page"),
    "a redirect elsewhere": (always(redirect), r"another host, http://login.invalid,"),
    "a redirect of config.json": (always(redirect, "config.json"), "config.json: .*another host"),
    "redirects without end": (always(loop), "redirects more than 5 times"),
    "a redirect to nothing": (always(lambda h: h.answer(302)), "302, a redirect to no URL"),
    "a redirect to no port": (always(to("http://h:99999/")), "302, a redirect to no URL"),
    "a redirect with a space": (always(to("/a b")), "302, a redirect to no URL"),
    "a redirect that is not ASCII": (always(to("/\xe9")), "302, a redirect to no URL"),
    "an encoding": (
        always(lambda h: h.serve(200, Content_Encoding="gzip")),
        "with Content-Encoding 'gzip'",
    ),
    "a size that is not told": (
        always(lambda h: h.serve(200, Content_Range="bytes 0-511/*")),
        r"size of the file in Content-Range, got 'bytes 0-511/\*'",
    ),
    "another range": (always(shifted), "answers bytes=0-511 with bytes 1 to 8 of 99999"),
    "the whole file": (always(whole), "it serves no ranges; download"),
    "more than the range": (
        second(lambda h: h.serve(200, Content_Length="9999")),
        "with 9999 bytes, and not",
    ),
}
REFUSED = {
    "no permission": (always(lambda h: h.answer(403)), "403 Forbidden|no access"),
    "no credentials": (
        always(lambda h: h.answer(401)),
        r"401.*set an entry for 127\.0\.0\.1 in ~/\.netrc|no access.*AWS_",
    ),
    "a file that is missing": (always(lambda h: h.answer(404)), "no such file"),
    "no config.json": (always(lambda h: h.answer(404), "config.json"), "config.json: .*no such"),
    "a bad request": (always(lambda h: h.answer(400)), "400"),
    "another ETag": (
        second(lambda h: h.serve(200, ETag='"two"')),
        'changed since it was opened .*the tag "one", and now has .*"two"',
    ),
    "another size, and the same ETag": (
        second(grown),
        'changed since it was opened .*the tag "one", and now has .*"one"',
    ),
    "an empty file": (always(nothing), "it is empty: copy it there again"),
    "a file that was emptied": (second(nothing), "it ends before byte"),
    "a file that was deleted": (
        second(lambda h: h.answer(404)),
        "no such file.*It could be read when it was opened",
    ),
    "permission withdrawn": (
        second(lambda h: h.answer(403)),
        "It could be read when it was opened",
    ),
}


@pytest.mark.parametrize(("fault", "message"), WEB_ONLY.values(), ids=WEB_ONLY)
def test_a_wrong_answer_of_a_web_server_is_refused(
    server: Any, fault: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error names the URL and what came, at once; no secret of a redirect is in it."""
    monkeypatch.setattr(store, "RETRY_SECONDS", 0.0)
    text = refused(web(server, fault))
    assert f"{server.url}/model" in text
    assert re.search(message, text), text


@pytest.mark.parametrize(("fault", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_answer_is_refused_at_once(
    server: Any, kind: Any, fault: Any, message: str
) -> None:
    """One error names the URL and the reason; nothing is asked for twice."""
    url = kind(server, fault)
    text = refused(url)
    assert f"{url}/" in text
    assert re.search(message, text), text


def test_a_key_that_is_no_file_name_is_left_out(server: Any) -> None:
    """Keys of buckets may be longer than names of files are, and have invisible characters."""
    s3(server)
    server.fault = listed(["a" * 300 + ".json", "\xe9" * 150 + ".json", "a\u200b.json", "b.json"])
    found = find_source("s3://bucket/folder")  # which keeps the folder
    assert sorted(path.name for path in found.folder.iterdir()) == ["b.json", "config.json"]


@pytest.mark.parametrize("key", ["/x.json", "x\t.json", "../x.json"])
def test_a_key_that_is_no_path_hides_no_file(server: Any, local: Any, key: str) -> None:
    """Where the library lists nothing because of one key, files are asked for by their names."""

    def fault(handler: Any) -> bool:
        if LIST in handler.path:
            names = sorted(path.name for path in (handler.server.folder / "model").iterdir())
            list_names(handler, [*names, key])
            return True
        handler.path = handler.path.replace("/bucket/folder", "/model")
        return False

    s3(server)
    server.fault = fault
    assert same(state("s3://bucket/folder"), local[0][0])


# With what libraries write into them.
QUANTIZED = {
    "hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}},
    "quantize_config.json": {"bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "quant_config.json": {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"},
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_file_beside_config_json_says_how_weights_are_quantized(server: Any, name: str) -> None:
    """It is asked for where a folder is not listed."""

    def fault(handler: Any) -> bool:
        if handler.path.endswith(name):
            handler.answer(200, json.dumps(QUANTIZED[name]).encode())
        return bool(handler.path.endswith(name))

    found = find_source(web(server, fault))  # which keeps the folder
    assert json.loads((found.folder / name).read_text()) == QUANTIZED[name]


@pytest.mark.parametrize("name", ["generation_config.json", "other.json"])
def test_a_file_that_is_listed_and_forbidden_is_named(server: Any, name: str) -> None:
    """Without it the model would answer otherwise; only files that nothing reads are left out."""
    s3(server)
    there = listed([name])

    def fault(handler: Any) -> bool:
        if handler.path.endswith(name):
            handler.answer(403)
            return True
        return there(handler)

    server.fault = fault
    if name == "other.json":
        assert find_source("s3://bucket/folder").folder.is_dir()
        return
    with pytest.raises(CheckpointFormatError, match=rf"folder/{name}: .*set AWS_ACCESS_KEY_ID"):
        find_source("s3://bucket/folder")


@pytest.mark.parametrize(
    "name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"]
)
def test_what_says_how_weights_are_quantized_is_fetched(server: Any, kind: Any, name: str) -> None:
    """ModelOpt, AutoGPTQ and AutoAWQ write it beside config.json; a web server lists no files."""
    text = b'{"bits": 4, "group_size": 32}'

    def fault(handler: Any) -> bool:
        if LIST in handler.path:
            list_names(handler, ["config.json", name])
        elif handler.path.endswith(f"/{name}"):
            handler.answer(200, text)
        else:
            return False
        return True

    source = find_source(kind(server, fault))
    assert (source.folder / name).read_bytes() == text


def test_small_files_have_a_limit(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many of them, and too many bytes of them, are refused, and so is a full disk."""
    s3(server)
    server.fault = listed([f"{number}.json" for number in range(3)])
    monkeypatch.setattr(stores_source, "_MOST_FILES", 3)
    with pytest.raises(CheckpointFormatError, match=r"has 4 files .* at most 3 are fetched"):
        find_source("s3://bucket/folder")
    monkeypatch.setattr(stores_source, "_MOST_FILES", 4)
    monkeypatch.setattr(stores_source, "_MOST_BYTES", 5)
    with pytest.raises(CheckpointFormatError, match="more than 5 bytes together"):
        find_source("s3://bucket/folder")

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CheckpointFormatError, match="No space left on device; free space"):
        find_source("s3://bucket/folder")


def test_the_index_and_the_files_must_agree(server: Any, kind: Any) -> None:
    """A tensor that the index does not know is refused, as in a local folder."""
    index = server.folder / "model" / "model.safetensors.index.json"
    text = index.read_text()
    wrong = text.replace("model.norm.weight", "model.nrom.weight")

    def fault(handler: Any) -> bool:
        if not handler.path.endswith("index.json"):
            return False
        handler.answer(200, wrong.encode())
        return True

    assert "'model.norm.weight' is here" in refused(kind(server, fault))
