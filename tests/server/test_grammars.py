"""Grammars are checked and compiled beside the engine: no step waits, and none ends the process."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from vllm_module import AsyncLLM, SamplingParams, StructuredOutputsParams
from vllm_module.runtime import async_llm
from vllm_module.runtime.sampling import grammar
from vllm_module.runtime.sampling.grammar import Grammars

CHAIN = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(5_000)), 'r5000: "a"'])
REFERENCES = {
    "$ref": "#/$defs/r0",
    "$defs": {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(5_000)} | {"r5000": {}},
}
PATTERNS = {"type": "object", "patternProperties": {f"^a{i}$": {} for i in range(3_000)}}
GOOD = {"prompt": "hello", "temperature": 0, "max_tokens": 5}
TOO_DEEP = "compiling it needs more than the stack"


class Gate:
    """Stops each compilation until it is opened, and counts them."""

    def __init__(self, grammars: Grammars) -> None:
        self.begun, self.open, self.compiled = threading.Event(), threading.Event(), 0
        self._compile = grammars._compile
        grammars._compile = self  # type: ignore[method-assign]

    def __call__(self, *description: str) -> Any:
        self.begun.set()
        assert self.open.wait(60)
        self.compiled += 1
        return self._compile(*description)


@pytest.fixture
def llm(engine: Callable[..., Any]) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(engine())
    yield llm
    llm.close()


@pytest.fixture
def gate(llm: AsyncLLM) -> Iterator[Gate]:
    gate = Gate(llm.llm.engine.grammars)
    yield gate
    gate.open.set()


def following(**what: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=60, structured_outputs=what)


def run(what: Any) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(what, 120)

    return asyncio.run(limited())


async def happens(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 60)


async def last(llm: AsyncLLM, *arguments: Any, **options: Any) -> Any:
    return [output async for output in llm.generate(*arguments, **options)][-1]


def test_tokens_come_while_a_schema_compiles(llm: AsyncLLM, gate: Gate, start: Any) -> None:
    """A stream gets all of its tokens, and new requests theirs; then the schema is followed."""
    execute, steps = llm.llm.engine.execute, 0

    def waiting(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            assert gate.begun.wait(60), "the schema is compiled during the stream"
        return execute(*arguments)

    llm.llm.engine.execute = waiting
    with start(llm) as server, ThreadPoolExecutor(1) as pool:
        stream = server.client().completions.create(
            model="tiny", stream=True, **{**GOOD, "max_tokens": 200}
        )
        next(stream)
        body = {**GOOD, "max_tokens": 60, "structured_outputs": {"regex": "ab{3}c"}}
        slow = pool.submit(server.ask, "POST", "/v1/completions", body)
        *_, end = stream
        assert gate.begun.is_set()
        assert end.choices[0].finish_reason == "length"
        assert server.ask("POST", "/v1/completions", GOOD)[0] == 200
        assert not slow.done()
        gate.open.set()
        assert slow.result()[1]["choices"][0]["text"] == "abbbc"


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"structured_outputs": {"grammar": CHAIN}}, TOO_DEEP),
        ({"structured_outputs": {"json": REFERENCES}}, TOO_DEEP),
        ({"structured_outputs": {"json": json.dumps(REFERENCES)}}, TOO_DEEP),
        ({"structured_outputs": {"regex": "a?" * 20_000}}, r"compiling it runs longer than 0\.3 s"),
        ({"structured_outputs": {"json": PATTERNS}}, r"compiling it runs longer than 0\.3 s"),
        ({"structured_outputs": {"regex": "0" + "a?" * 6_000}}, "too much work for a token"),
        (
            {"structured_outputs": {"choice": [f"v{i}" * 4 for i in range(20_000)]}},
            "compiling it needs more than 16 MiB of memory",
        ),
    ],
    ids=["rules", "references", "text", "slow", "patterns", "slow later", "large"],
)
def test_a_grammar_that_explodes_is_a_400(
    engine: Any, start: Any, monkeypatch: pytest.MonkeyPatch, what: dict[str, Any], reason: str
) -> None:
    """The refusal has the reason and not the schema; the server and its grammars go on."""
    if "16 MiB" in reason:
        monkeypatch.setattr(grammar, "NBYTES", 16 << 20)
    if "too much" in reason:
        monkeypatch.setattr(grammar, "_SLOW_IN_CHECK", 0.02)
    if "0\\.3" in reason:
        monkeypatch.setattr(grammar, "SECONDS", 0.3)
    with start(AsyncLLM(engine())) as server:
        code, answer = server.ask("POST", "/v1/completions", {**GOOD, **what})
        assert code == 400
        assert re.search(reason, answer["error"]["message"])
        assert len(json.dumps(answer)) < 3000
        assert server.ask("POST", "/v1/completions", GOOD)[0] == 200
        body = {**GOOD, "max_tokens": 60, "structured_outputs": {"regex": "xyz"}}
        code, answer = server.ask("POST", "/v1/completions", body)
        assert (code, answer["choices"][0]["text"]) == (200, "xyz")


def test_a_schema_is_compiled_once(llm: AsyncLLM, gate: Gate) -> None:
    """Whether requests come together, later, or in other words of the same kind."""
    gate.open.set()
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}

    async def together() -> None:
        await asyncio.gather(*(last(llm, f"{i}", following(json=schema)) for i in range(6)))
        await last(llm, "later", following(json=json.dumps(schema)))

    run(together())
    llm.llm.generate("sync", following(json=dict(schema)), use_tqdm=False)
    assert gate.compiled == 1
    run(last(llm, "other", following(regex="a|b")))
    assert gate.compiled == 2


def test_the_grammars_that_were_used_last_are_kept(
    llm: AsyncLLM, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither too many of them, nor too long ones; a refusal is not kept."""
    gate.open.set()
    monkeypatch.setattr(grammar, "_MOST_CACHED", 2)
    monkeypatch.setattr(grammar, "_MOST_TEXT", 40)
    grammars = llm.llm.engine.grammars

    def compiled(pattern: str) -> int:
        before = gate.compiled
        grammars.compile(StructuredOutputsParams(regex=pattern))
        return gate.compiled - before

    assert [compiled(each) for each in ("a", "b", "a", "c", "a", "b")] == [1, 1, 0, 1, 0, 1]
    long = "x" * 39
    assert [compiled(each) for each in (long, "a", long, "bb", long)] == [1, 1, 0, 1, 1]
    assert [compiled("y" * 41) for _ in range(2)] == [1, 1]
    for _ in range(2):
        before = gate.compiled
        with pytest.raises(ValueError, match="unclosed group"):
            compiled("(")
        assert gate.compiled == before + 1


def test_a_grammar_that_is_given_up_is_a_400(llm: AsyncLLM, start: Any) -> None:
    """One that explodes after some tokens is the client's mistake, too."""
    with start(llm) as server:
        late = {**GOOD, "structured_outputs": {"regex": "(((a{100}){100}){100}){100}"}}
        code, answer = server.ask("POST", "/v1/completions", late)
        assert (code, "too many expressions" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]], ids=["one", "two"])
def test_abort_while_a_grammar_compiles(llm: AsyncLLM, gate: Gate, prompts: list[str]) -> None:
    """The outputs are empty and say so, before the grammar is there; the next request has it."""

    async def aborted() -> list[Any]:
        calls = llm.serve(prompts, following(regex="ab"), "mine")
        task = asyncio.ensure_future(_all(calls))
        await happens(gate.begun)
        await llm.abort("mine")
        found = await task
        assert not gate.open.is_set()
        return found

    found = run(aborted())
    assert sorted(index for index, _ in found) == list(range(len(prompts)))
    for _, output in found:
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == []
    _nothing_left(llm)
    gate.open.set()
    assert run(last(llm, "b", following(regex="ab"))).outputs[0].text == "ab"


def test_abort_of_one_prompt_while_its_grammar_compiles(llm: AsyncLLM, gate: Gate) -> None:
    """The others are served."""

    async def aborted() -> list[Any]:
        task = asyncio.ensure_future(_all(llm.serve(["a", "b"], following(regex="ab"), "mine")))
        await happens(gate.begun)
        await llm.abort("mine-1")
        gate.open.set()
        return await task

    found = {index: output.outputs[0] for index, output in run(aborted())}
    assert (found[0].text, found[0].finish_reason) == ("ab", "stop")
    assert (found[1].text, found[1].finish_reason) == ("", "abort")
    _nothing_left(llm)


def test_abort_while_a_prompt_is_tokenized(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is not in the engine yet ends as one that is."""
    monkeypatch.setattr(async_llm, "_FEW_CHARACTERS", 0)  # a long one: a thread tokenizes it
    begun, opened = threading.Event(), threading.Event()
    get_tokenizer = llm.llm.get_tokenizer

    def slow() -> Any:
        begun.set()
        assert opened.wait(60)
        return get_tokenizer()

    llm.llm.get_tokenizer = slow  # type: ignore[method-assign]

    async def aborted() -> Any:
        task = asyncio.ensure_future(last(llm, "a", following(regex="ab"), "mine"))
        await happens(begun)
        await llm.abort("mine")
        opened.set()
        return await task

    assert run(aborted()).outputs[0].finish_reason == "abort"
    assert not llm.llm.engine.grammars._cached
    _nothing_left(llm)


def test_abort_of_what_waits_for_a_pause(llm: AsyncLLM) -> None:
    """A request that is held until others are complete ends before they are."""
    execute, opened = llm.llm.engine.execute, threading.Event()
    stepping = threading.Event()

    def waiting(*arguments: Any) -> Any:
        stepping.set()
        assert opened.wait(60)
        return execute(*arguments)

    llm.llm.engine.execute = waiting

    async def aborted() -> None:
        running = asyncio.ensure_future(last(llm, [1], SamplingParams(max_tokens=5)))
        await happens(stepping)
        pausing = asyncio.ensure_future(llm.pause("wait"))
        await asyncio.sleep(0)
        held = asyncio.ensure_future(last(llm, [2], SamplingParams(max_tokens=5), "held"))
        await asyncio.sleep(0)
        await llm.abort("held")
        opened.set()
        assert (await held).outputs[0].finish_reason == "abort"
        await pausing
        assert (await running).outputs[0].finish_reason == "length"
        await llm.resume()

    run(aborted())
    _nothing_left(llm)


def test_whoever_leaves_compiles_nothing(llm: AsyncLLM, gate: Gate) -> None:
    """Callers are cancelled during a compilation and while they wait for its end."""

    async def leave() -> None:
        patterns = ("ab", "cd", "ef")
        tasks = [asyncio.ensure_future(last(llm, "a", following(regex=each))) for each in patterns]
        await happens(gate.begun)
        await llm.call(lambda _: None)  # all are known to the engine's thread
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError)
            for each in await asyncio.gather(*tasks, return_exceptions=True)
        )
        gate.open.set()
        assert (await last(llm, "a", following(regex="gh"))).outputs[0].text == "gh"

    run(leave())
    assert gate.compiled == 2
    _nothing_left(llm)


@pytest.mark.parametrize("pattern", ["ab", "a?" * 20_000], ids=["waits", "works"])
def test_close_while_a_grammar_compiles(llm: AsyncLLM, pattern: str) -> None:
    """Callers are told, whether the process works or the thread waits; the process ends."""
    grammars = llm.llm.engine.grammars
    begun, ask = threading.Event(), grammars._process.ask

    def asked(request: str) -> Any:
        if pattern == "ab":
            begun.set()
            assert closed.wait(60)
        else:
            ask('{"kind": "regex", "text": "a", "limits": {}}')  # the process has started
            begun.set()
        return ask(request)

    closed = threading.Event()
    grammars._process.ask = asked  # type: ignore[method-assign]

    async def closing() -> None:
        calls = [last(llm, "a", following(regex=each)) for each in (pattern, "c")]
        tasks = [asyncio.ensure_future(each) for each in calls]
        await happens(begun)
        await asyncio.to_thread(llm.close)
        closed.set()
        for task in tasks:
            with pytest.raises(RuntimeError, match="the engine was closed"):
                await task

    run(closing())
    _nothing_left(llm)
    with pytest.raises(RuntimeError, match="the engine was closed"):
        grammars.compile(StructuredOutputsParams(regex="z"))


async def _all(outputs: Any) -> list[Any]:
    return [each async for each in outputs]


def _nothing_left(llm: AsyncLLM) -> None:
    """Check that no caller is waited for, and no page is taken."""
    assert not llm._accepted
    assert not llm._thread.coming
    assert not llm._thread.running
    pool = llm.llm.engine.scheduler.pool
    assert pool.free_pages == pool.num_pages
