"""The page at ``/``: what it shows, to whom, and how a browser runs it beside a live server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import runpy
import shutil
from collections.abc import Iterator
from contextlib import closing
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from vllm_module import LLM, AsyncLLM

BROWSER = runpy.run_path(str(Path(__file__).parents[1] / "browser.py"))
ADMIN = "sk-admin"
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
)
NEEDS_BROWSER = pytest.mark.skipif(not BROWSER["CHROMIUM"], reason="needs chromium or chrome")
STATE, LOG = (f"document.getElementById('{name}').innerText" for name in ("state", "log"))


class Parts(HTMLParser):
    """The text of each script and style, and the attributes of all elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside, self.texts = "", dict[str, list[str]]()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.inside in ("script", "style") and data.strip():
            self.texts.setdefault(self.inside, []).append(data)


def fetch(server: Any, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = HTTPConnection("127.0.0.1", server.port)
    with closing(connection):
        connection.request(method, "/", headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def test_the_page_is_open_and_says_nothing(server: Any, start: Any) -> None:
    """It has the same bytes with any key, while the model loads, and whatever the model is."""
    status, headers, page = fetch(server)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert fetch(server, Authorization="Bearer sk-two")[2] == page
    assert fetch(server, Authorization="Bearer wrong")[2] == page
    status, told, nothing = fetch(server, "HEAD")
    assert (status, told["content-length"], nothing) == (200, str(len(page.encode())), "")
    assert fetch(server, "POST")[0] == 405
    with start(None) as loading:
        assert fetch(loading)[::2] == (200, page)


def test_the_policy_allows_the_page_and_nothing_else(server: Any) -> None:
    """One script and one style run, by their digests; no address is another origin's."""
    _, headers, page = fetch(server)
    parts = Parts(page)
    policy = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))
    for element in ("script", "style"):
        (text,) = parts.texts[element]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{element}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    names = {name for name, _ in parts.attributes}
    assert not {"src", "style", "action"} & names
    assert not {name for name in names if name.startswith("on")}
    assert [value for name, value in parts.attributes if name == "href"] == ["data:,"]
    assert not re.search(r"https?:|//\w+\.|url\(|@import|\bimport\b", page)
    assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write|eval|Storage", page)


def test_the_summary_is_for_clients(server: Any, start: Any, folder: Path) -> None:
    """It names the model, its layers and its pages; without a key, or an engine, there is none."""
    assert server.ask("GET", "/summary", key=None)[0] == 401
    with start(None) as loading:
        code, answer = loading.ask("GET", "/summary")
        assert (code, answer["error"]["code"]) == (503, "loading")
    code, found = server.ask("GET", "/summary")
    assert (code, found["model"], found["layers"]) == (200, str(folder), "1")
    assert found["architecture"] == "LlamaForCausalLM, float32"
    assert found["device"] == "cpu, ranks: 1"
    assert found["plan"] == "tensor parallel 1, pipeline parallel 1: 4.0 MiB on rank 0"
    assert found["cache of a rank"].startswith("2048 pages of 16 tokens")  # of 2 KiB, in 4 MiB
    assert found["state"] == "ready"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with BROWSER["Browser"](tmp_path_factory.mktemp("browser")) as found:
        yield found


def unlock(tab: Any, key: str) -> None:
    tab.until("!document.getElementById('locked').hidden")
    tab.type("#key", key)
    tab.enter()


@NEEDS_BROWSER
def test_nothing_is_shown_without_the_key(start: Any, engine: Any, browser: Any) -> None:
    """While the model loads, with no key, with a wrong one, and with the right one."""
    with start(None) as server:
        tab = browser.open(server.url, width=390)
        tab.until(f"{STATE} === 'The model is loading.'")
        for wrong in ("wrong", "\u044f"):  # the second one can be no header
            unlock(tab, wrong)
            tab.until("/refuses|could not be sent/.test(document.body.innerText)")
        with closing(AsyncLLM(engine())) as llm:
            server.state.llm = llm
            tab.until(f"{STATE} === 'Ready.'")
            tab.until("document.getElementById('pages').textContent === '0 of 2,048'")
            protected = [*server.state.names, "LlamaForCausalLM", llm.llm.source.name]
            text = tab.run("document.documentElement.outerHTML")
            assert [each for each in protected if each in text] == []
            assert tab.run("document.getElementById('chat').hidden")
            unlock(tab, "sk-two")
            tab.until("document.getElementById('name').textContent === 'tiny'")
            rows = tab.run(
                "[...document.querySelectorAll('#facts tr')]"
                ".map(row => [...row.children].map(cell => cell.textContent))"
            )
            facts = server.ask("GET", "/summary")[1]
            assert facts.pop("state") == "ready"
            assert dict(rows) == facts
            kept = "document.documentElement.outerHTML + document.getElementById('key').value"
            assert "sk-two" not in tab.run(kept)
            assert tab.run("localStorage.length + sessionStorage.length + document.cookie") == "0"
            assert tab.run("document.documentElement.scrollWidth") == 390
            server.listener.stop()
            tab.until(f"{STATE} === 'The server does not answer.'")
        assert tab.complaints() == []


@NEEDS_BROWSER
def test_values_are_live(server: Any, browser: Any) -> None:
    """Requests, pages and counts are the engine's; the line and the rate move while it works."""
    tab = browser.open(server.url)
    values = (
        "Object.fromEntries([...document.querySelectorAll('dd')].map(e => [e.id, e.textContent]))"
    )
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 900, "n": 3, "stream": True}
    stream = server.client().completions.create(model="tiny", **body)
    next(stream)
    rates = tab.until(
        f"(v => Number(v.generating) > 0 && v.running === '3' && [v.generating])({values})"
    )
    assert float(rates[0]) > 0
    assert server.ask("POST", "/pause", {"mode": "keep"}, ADMIN)[0] == 200
    tab.until(f"{STATE} === 'Not ready: the engine is paused'")
    llm = server.llm.llm
    pool, totals = llm.engine.scheduler.pool, llm.engine.totals
    assert pool.free_pages < pool.num_pages
    wanted = {
        "running": "3",
        "waiting": "0",
        "pages": f"{pool.num_pages - pool.free_pages:,} of {pool.num_pages:,}",
        "generating": "0.0",
        "generated": f"{totals.generation_tokens:,}",
        "prompted": f"{totals.prompt_tokens:,}",
    }
    tab.until(f"{values}.generating === '0.0'")  # so two looks found the same counts
    shown = tab.run(values)
    assert {name: shown[name] for name in wanted} == wanted
    points = tab.run("document.getElementById('line').getAttribute('points')").split()
    assert len(points) >= 2
    assert all(0 <= float(each.split(",")[1]) <= 39 for each in points)
    assert server.ask("POST", "/resume", {}, ADMIN)[0] == 200
    stream.close()
    tab.until(f"{values}.running === '0' && {STATE} === 'Ready.'")
    assert tab.complaints() == []


@NEEDS_BROWSER
def test_a_chat(server: Any, browser: Any, until: Any, adapter: Path) -> None:
    """Texts are those that OpenAI's client gets for the same messages; an answer can be stopped."""
    given = {"lora_name": "tuned", "lora_path": str(adapter)}
    assert server.ask("POST", "/v1/load_lora_adapter", given, ADMIN)[0] == 200
    tab = browser.open(server.url)
    unlock(tab, "sk-two")
    tab.until("document.querySelectorAll('#names option').length === 3")
    assert tab.run("document.getElementById('facts').innerText").endswith("tuned")
    tab.type("#temperature", "0")
    tab.type("#limit", "20")
    talk: list[Any] = []
    client = server.client()
    for model, asked in (("tiny", "hello"), ("tiny", "and <b>\nthen</b>?"), ("tuned", "yes")):
        tab.run(f"document.getElementById('names').value = '{model}'")
        tab.type("#message", asked)
        tab.enter()
        talk.append({"role": "user", "content": asked})
        answer = client.chat.completions.create(
            model=model, messages=talk, temperature=0, max_tokens=20
        )
        talk.append({"role": "assistant", "content": answer.choices[0].message.content})
        tab.until(f"document.querySelectorAll('#log .note').length === {len(talk) // 2}")
        shown = tab.run(
            "[...document.querySelectorAll('#log .user, #log .assistant')]"
            ".map(part => part.textContent)"
        )
        assert shown == [message["content"] for message in talk]
        assert re.search(r"20 tokens in [\d.]+ s.*ended by the limit", tab.run(LOG))
    tab.type("#limit", "900")
    tab.type("#message", "a long one")
    tab.enter()
    tab.until("document.querySelectorAll('#log .assistant').length === 4")
    tab.run("document.getElementById('stop').click()")
    tab.until(f"{LOG}.endsWith('stopped')")
    until(lambda: not server.llm.llm.engine.requests)
    tab.type("#temperature", "-3")
    tab.run("document.getElementById('limit').value = ''")
    tab.type("#message", "a wrong one")
    tab.enter()
    tab.until("/temperature/.test(document.querySelector('#log .bad')?.textContent)")
    assert server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "tuned"}, ADMIN)[0] == 200
    tab.until("document.querySelectorAll('#names option').length === 2")
    assert tab.complaints() == []


@NEEDS_BROWSER
@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_stream_is_read_in_any_pieces(server: Any, browser: Any, size: int) -> None:
    """Pieces of a stream end within lines and characters."""
    values = [{"text": "\u00e9\U0001f600\n\ndata: {}"}, {"text": HOSTILE}, {"text": ""}]
    lines = [f"event: x\ndata: {json.dumps(each, ensure_ascii=False)}\n\n" for each in values]
    data = [*"".join([*lines, "data: [DONE]\n\n"]).encode()]
    script = """(async () => {
        const found = [], body = new ReadableStream({ start(stream) {
            for (let at = 0; at < DATA.length; at += SIZE)
                stream.enqueue(new Uint8Array(DATA.slice(at, at + SIZE)));
            stream.close();
        } });
        for await (const each of events({ body })) found.push(each);
        return found;
    })()"""
    tab = browser.open(server.url)
    assert tab.run(script.replace("DATA", str(data)).replace("SIZE", str(size))) == values


@NEEDS_BROWSER
def test_no_text_becomes_markup(start: Any, folder: Path, browser: Any, tmp_path: Path) -> None:
    """Whatever the names, the user and the model write; and no script could make it."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    words = {f"{HOSTILE}{number}": number for number in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"{HOSTILE}0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    llm = LLM(str(tmp_path), kv_cache_memory_bytes=4 << 20, dtype="float32", device="cpu")
    with start(AsyncLLM(llm)) as server:
        server.state.names = [HOSTILE]
        tab = browser.open(server.url)
        unlock(tab, "sk-two")
        tab.until(f"document.getElementById('name').textContent === {json.dumps(HOSTILE)}")
        tab.type("#limit", "5")
        tab.type("#message", HOSTILE)
        tab.enter()
        tab.until("document.querySelectorAll('#log .note').length")
        (answer,) = tab.run(
            "[...document.querySelectorAll('#log .assistant')].map(part => part.textContent)"
        )
        assert answer.count(HOSTILE) == 5
        elements = "document.querySelectorAll('script, img, #log > div > *').length"
        assert tab.run(elements) == 1
        assert tab.run("document.title") == f"{HOSTILE} \u2013 vllm-module"
        assert tab.complaints() == []
        for attempt in ("document.body.innerHTML = '<b>'", "setTimeout('document.title = 1')"):
            assert tab.run(f"(() => {{ try {{ {attempt} }} catch {{ return true }} }})()")
        tab.run("document.body.append(Object.assign(document.createElement('img'), {src: '/x'}))")
        tab.until("!document.images[0].naturalWidth")
        assert "img-src" in str(tab.complaints())
