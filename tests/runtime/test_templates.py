"""Chat templates are programs of strangers: they run elsewhere, within limits."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.text import template_process
from vllm_module.runtime.text.calls import TRIED
from vllm_module.runtime.text.chat import ChatTemplate
from vllm_module.runtime.text.template_process import TemplateProcess

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)


@pytest.fixture(scope="module")
def process() -> Any:
    process = TemplateProcess()
    yield process
    process.close()


def formatted(process: TemplateProcess, template: str, **variables: Any) -> str:
    return ChatTemplate(Path("folder"), template, process).render(HELLO, **variables)


@pytest.mark.parametrize(
    ("template", "message"),
    {
        "range": ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError: Range too big"),
        "repeat": ("{{ 'x' * 10**10 }}", "needs more than 512 MiB of memory"),
        "center": ("{{ 'x'|center(10**11) }}", "needs more than 512 MiB of memory"),
        "percent": ("{{ '%1000000000000d' % 3 }}", "needs more than 512 MiB of memory"),
        "doubling": (DOUBLING, "needs more than 512 MiB of memory"),
        "text": ("{{ 'x' * 1200000 }}", "writes more than 1 MiB of text besides what it is given"),
        "macro": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        "class": ("{{ ().__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        "change": ("{{ messages.append(1) }}", "SecurityError"),
        "division": ("{{ 1 // 0 }}", "cannot format the messages: ZeroDivisionError"),
        "long refusal": (
            "{{ raise_exception('x' * 10**5) }}",
            r"refuses the messages: x{300}\.{3}$",
        ),
        "colours": ("{{ raise_exception('\x1b[2J') }}", r"refuses the messages: \\x1b\[2J$"),
        "refusal": ("{{ raise_exception('no!') }}", "refuses the messages: no!"),
    }.items(),
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_a_template_that_goes_too_far_is_refused(
    process: TemplateProcess, template: str, message: tuple[str, str]
) -> None:
    """The message names the limit or the failure, and the next template runs."""
    source, expected = message
    with pytest.raises(ValueError, match=expected):
        formatted(process, source)
    assert formatted(process, "{{ messages[0].content }}") == "hi"


def test_a_long_message_may_be_formatted(process: TemplateProcess) -> None:
    """The limit of text does not count the caller's own messages."""
    text = "x" * 1_500_000
    template = ChatTemplate(Path("folder"), "{{ messages[0].content }}", process)
    assert template.render([{"role": "user", "content": text}]) == text


def test_an_endless_template_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops and single operations end at the limit of time, which the message names."""
    # The real limit would make this test wait for seconds.
    monkeypatch.setattr(template_process, "SECONDS", 0.5)
    process = TemplateProcess()
    try:
        for template in (ENDLESS, "{{ 7 ** (10 ** 8) }}"):
            begin = time.monotonic()
            with pytest.raises(ValueError, match=r"the chat template runs longer than 0\.5 s"):
                formatted(process, template)
            assert time.monotonic() - begin < 60
        assert formatted(process, "{{ messages[0].content }}") == "hi"
    finally:
        process.close()


def test_a_template_at_its_limit_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of twelve forms of calls would take as long as the limit, and others wait meanwhile."""
    asked, render = [], TemplateProcess.render

    def counted(process: TemplateProcess, *given: Any) -> str:
        asked.append(given)
        return render(process, *given)

    # Counts the requests; the answers stay what they are.
    monkeypatch.setattr(TemplateProcess, "render", counted)
    process = TemplateProcess()
    try:
        template = ChatTemplate(Path("folder"), "{{ 'x' * (10 ** 10) }}", process)
        with pytest.raises(ValueError, match="the chat template needs more than 512 MiB"):
            template.render(TRIED)
        assert len(asked) == 2  # the conversation itself is the second
    finally:
        process.close()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ x|nofilter }}", "No filter named 'nofilter'"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "RecursionError"),
    ],
)
def test_a_broken_template_is_refused_when_it_is_read(
    process: TemplateProcess, template: str, message: str
) -> None:
    """No message is needed to find out."""
    with pytest.raises(CheckpointFormatError, match=f"that was given cannot be read: {message}"):
        ChatTemplate(Path("folder"), template, process)


def test_what_cannot_be_sent_is_refused(process: TemplateProcess) -> None:
    """Variables are text, numbers, lists and mappings; text may be half a surrogate pair."""
    with pytest.raises(ValueError, match="messages and variables should be text, numbers, lists"):
        formatted(process, "{{ x }}", x=object())
    assert formatted(process, "{{ x[1] ~ x[0] }}", x=("\ud83d", 2)) == "2\ud83d"
    assert formatted(process, "{{ x|tojson }}", x={"b": [None, "<é>"]}) == '{"b": [null, "<é>"]}'


def test_threads_and_forks_share_a_process(process: TemplateProcess) -> None:
    """Each gets its own answer, and a fork starts a process of its own."""
    texts: dict[int, str] = {}

    def work(number: int) -> None:
        for _ in range(20):
            texts[number] = formatted(process, "{{ x }}", x=number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: str(number) for number in range(4)}


def test_a_process_that_was_killed_is_replaced(process: TemplateProcess) -> None:
    """The request that finds it dead is refused at most once."""
    formatted(process, "a")
    running = process._process
    assert running is not None
    os.kill(running.pid, 9)
    running.wait()
    with pytest.raises(ValueError, match="ended the process that runs it, with exit code -9"):
        formatted(process, "a")
    assert formatted(process, "a") == "a"
