"""Messages, and the templates that make prompts of them."""

from __future__ import annotations

import json
import logging
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from vllm_module import LLM
from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.text.chat import ChatTemplate

# Pytest's importlib mode has no imports between test files.
ASKING: Any = runpy.run_path(str(Path(__file__).with_name("asking.py")))
write_tokenizer, SMALL, greedy, ids_of = (
    ASKING[name] for name in ("write_tokenizer", "SMALL", "greedy", "ids_of")
)


def test_chat_renders_messages_by_the_checkpoints_template(llm: LLM) -> None:
    """The prompt is the template's text, and its special tokens are encoded once."""
    messages = [{"role": "user", "content": "hi"}]
    prompt = llm.chat_prompt(messages)
    assert prompt["prompt"] == "<s><user>hi<assistant>"
    assert prompt["prompt_token_ids"] == [128, *ids_of("<user>hi<assistant>")]
    (output,) = llm.chat(messages, greedy(5), use_tqdm=False)
    (same,) = llm.generate([prompt], greedy(5), use_tqdm=False)
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    assert len(llm.chat([messages, messages], greedy(2), use_tqdm=False)) == 2
    assert llm.get_tokenizer() is llm.tokenizer
    for wrong in ([], ["hi"], [{"content": "hi"}]):
        with pytest.raises(ValueError, match="messages should be a list of mappings with a role"):
            llm.chat_prompt(wrong)


def test_chat_by_another_template_and_its_variables(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """A template may be given; the log has variables that it does not read, once."""
    messages = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]
    source = "{{ messages[0].content + (mood or '') }}{% if tools %}<tools>{% endif %}"
    assert llm.chat_prompt(messages, source, mood="!")["prompt"] == "a\nb!"
    options: dict[str, Any] = {"chat_template": source, "chat_template_kwargs": {"mood": "?"}}
    (output,) = llm.chat(messages, greedy(1), False, **options, tools=[{"name": "any"}])
    assert output.prompt == "a\nb?<tools>"
    (plain,) = llm.chat(messages, greedy(1), False, add_generation_prompt=False)
    assert plain.prompt == "<s><user>a\nb"
    with caplog.at_level(logging.WARNING, "vllm_module"):
        for _ in range(2):
            given: dict[str, Any] = {"chat_template_kwargs": {"mood": "?"}, "tools": []}
            (unread,) = llm.chat(messages, greedy(1), False, **given)
            assert unread.prompt == "<s><user>a\nb<assistant>"
    (record,) = [each for each in caplog.records if "does not read" in each.message]
    assert "does not read mood, tools: it reads add_generation_prompt, bos" in record.message
    with caplog.at_level(logging.WARNING, "vllm_module"):
        for _ in range(2):
            llm.chat(messages, greedy(1), False, **options | {"chat_template_kwargs": {"age": 3}})
    assert sum("does not read age" in each.message for each in caplog.records) == 1
    for parts in ([{"type": "image_url", "image_url": "x"}], [3]):
        with pytest.raises(ValueError, match="a part of a message's content should be text, got"):
            llm.chat([{"role": "user", "content": parts}])
    (empty,) = llm.chat([{"role": "user", "content": None}], greedy(1), False, **options)
    assert empty.prompt == "?"
    with pytest.raises(ValueError, match=r"cannot format the messages: TypeError: "):
        llm.chat([{"role": "user", "content": 3}], chat_template=source)
    assert llm.chat([]) == []
    for wrong in (None, "hi", 5):
        with pytest.raises(ValueError, match="messages should be"):
            llm.chat(wrong)  # type: ignore[arg-type]
    for wrong_format in ("text", None, 3):
        with pytest.raises(ValueError, match="chat_template_content_format should be 'auto'"):
            llm.chat(messages, chat_template_content_format=wrong_format)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got multiple values"):
        llm.chat(messages, chat_template_kwargs={"messages": []})
    both = llm.chat(iter([messages[0], {"role": "assistant", "content": "c"}]), greedy(1), False)  # type: ignore[arg-type]
    assert both[0].prompt == "<s><user>a\nb<assistant>c<assistant>"


STRING = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
PARTS = "{% for m in messages %}{% for c in m.content %}<{{ c.text }}>{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]"
    "{% else %}{% for c in m['content'] %}<{{ c['text'] }}>{% endfor %}{% endif %}{% endfor %}"
)
TEXTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
EMPTY = {"type": "text", "text": ""}
OTHERS = [
    {"type": "input_text", "text": "a"},
    {"type": "output_text", "text": "b"},
    {"type": "refusal", "refusal": "c"},
    {"type": "thinking", "thinking": "d"},
]


@pytest.mark.parametrize(
    ("template", "content", "given", "text"),
    [
        (STRING, "a", "auto", "<a>"),
        (STRING, TEXTS, "auto", "<a\nb>"),
        (STRING, None, "auto", "<>"),
        (PARTS, "a", "auto", "<a>"),  # as transformers with parts, and vLLM
        (PARTS, TEXTS, "auto", "<a><b>"),
        (PARTS, ["a", "b"], "auto", "<a><b>"),
        (PARTS, None, "auto", ""),
        (PARTS, "ab", "string", "<><>"),
        (EITHER, "a", "auto", "[a]"),
        (EITHER, TEXTS, "auto", "<a><b>"),
        (EITHER, "a", "openai", "<a>"),
        (EITHER, TEXTS, "string", "[a\nb]"),
        (PARTS, [*TEXTS, {"type": "text", "text": None}], "auto", "<a><b>"),
        (PARTS, tuple(TEXTS), "auto", "<a><b>"),
        (PARTS, [EMPTY, *TEXTS, EMPTY], "auto", "<><a><b><>"),
        (STRING, [EMPTY, TEXTS[0], EMPTY, TEXTS[1]], "auto", "<a\nb>"),  # as vLLM joins them
        (STRING, [EMPTY], "auto", "<>"),
        (STRING, [], "auto", "<>"),
        (PARTS, [], "auto", ""),
        (STRING, OTHERS, "auto", "<a\nb\nc\nd>"),
        (PARTS.replace("c.text", "c.text[:1]"), "ab", "auto", "<a>"),
        (PARTS.replace("c.text", "c.text|upper"), "a", "auto", "<A>"),
        (STRING.replace("m.content", "m.content|upper"), TEXTS, "auto", "<A\nB>"),
        ("{% if messages|length < 2 %}{{ raise_exception('two') }}{% endif %}", "a", "auto", ""),
    ],
)
def test_a_template_gets_the_content_that_it_shows(
    tmp_path: Path, template: str, content: Any, given: Any, text: str
) -> None:
    """Text or a list of parts, whichever the messages have; what is asked for goes before."""
    messages = [{"role": "user", "content": content}]
    if "length" in template:
        messages *= 2
    rendered = ChatTemplate(tmp_path, template).render(messages, content_format=given)
    assert rendered == text


@pytest.mark.parametrize("refusal", ["{{ raise_exception('no system') }}", ""])
def test_a_template_that_begins_with_the_system_gets_the_content_that_it_shows(
    tmp_path: Path, refusal: str
) -> None:
    """It shows nothing of a user's message alone, and is tried with another before."""
    check = f"{{% if messages[0].role != 'system' %}}{refusal}{{% endif %}}"
    template = ChatTemplate(tmp_path, check + PARTS.replace("in messages", "in messages[1:]"))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert template.render(messages) == "<a>"


@pytest.mark.parametrize("source", [STRING, STRING.replace("m.content", "m.content|trim"), PARTS])
def test_a_message_is_continued_as_by_transformers(
    folder: Path, tmp_path: Path, source: str
) -> None:
    """The prompt ends with the message's text, as the template shows it; an empty one too."""
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    template = ChatTemplate(tmp_path, source)
    for text in ("b", "", " ", "  b \n ", "a"):
        messages: list[Any] = [{"role": r, "content": c} for r, c in (("user", "a"), ("ai", text))]
        if source is PARTS:
            for each in messages:
                each["content"] = [{"type": "text", "text": each["content"]}]
        expected = theirs.apply_chat_template(
            messages, chat_template=source, tokenize=False, continue_final_message=True
        )
        assert template.render(messages, False, continue_final_message=True) == expected, text
    with pytest.raises(ValueError, match="whose text the chat template shows"):
        ChatTemplate(tmp_path, "x").render(messages, False, continue_final_message=True)


def test_messages_of_tools_are_rendered_as_elsewhere(tmp_path: Path) -> None:
    """A message without content is empty, and arguments that are JSON text are read before."""
    calls = "{% for c in m.tool_calls %}{{ c.function.arguments.city }};{% endfor %}"
    source = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    template = ChatTemplate(tmp_path, source)

    def message(arguments: Any) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
        return {"role": "assistant", "tool_calls": calls}

    given = [
        message('{"city": "Rome"}'),
        message({"city": "Bern"}),
        message(""),
        message("no JSON"),
        message(None),
        {"role": "assistant", "tool_calls": (*message('{"city": "Oslo"}')["tool_calls"],)},
    ]
    assert template.render(given) == "Rome;Bern;;;;Oslo;"
    (first,) = given[0]["tool_calls"]
    del first["function"]["name"]
    assert template.render([message({}), {"role": "assistant", "tool_calls": [first]}]) == ";Rome;"
    assert given[0]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'  # unchanged


OTHERWISE = "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
CALLS = "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
FORMS_OF_CALLS = {
    # DeepSeek's: calls are looked for where content is null, and arguments are added as text.
    "deepseek": "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}{{ c.function.name + '|' + c.function.arguments }}{% endfor %}"
    + OTHERWISE,
    # Mistral's: an id has nine characters, there and at the result.
    "mistral": CALLS + "{{ c.function|tojson }}{{ raise_exception('nine') if c.id|length != 9 }}"
    "{{ c.id }}{% endfor %}{% elif m.role == 'tool' %}{{ m.tool_call_id }}"
    "{{ raise_exception('nine') if m.tool_call_id|length != 9 }}" + OTHERWISE,
    "mistral, later": CALLS + "{{ c.function|tojson }}{{ raise_exception('nine') if c.id|length < 9"
    " }}{{ c.id[-9:] }}{% endfor %}" + OTHERWISE,
    # Kimi's: the id has the function's name, which is written nowhere else.
    "kimi": CALLS + "<call>{{ c.id }}{{ c.function.arguments|tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}Return of {{ m.tool_call_id }}" + OTHERWISE,
    # GLM's writes content that is no text as it is.
    "glm": CALLS + "{{ m.content }}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
    + OTHERWISE,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS_OF_CALLS)
def test_a_template_gets_calls_in_the_form_that_it_takes(tmp_path: Path, name: str) -> None:
    """As transformers renders the form that the model knows, whatever form clients send."""
    source, user = FORMS_OF_CALLS[name], {"role": "user", "content": "Hi"}

    def turns(content: Any, as_text: bool, ids: list[str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [user]
        for at, each in enumerate(ids):
            arguments: Any = {"city": "Rome", "day": at}
            if as_text:
                arguments = json.dumps(arguments)
            function = {"name": f"f{at}", "arguments": arguments}
            call = {"id": each, "type": "function", "function": function}
            found.append({"role": "assistant", "content": content, "tool_calls": [call]})
            found.append({"role": "tool", "tool_call_id": each, "content": f"result {at}"})
        return [*found, {"role": "assistant", "content": "So."}, user]

    known = {
        "deepseek": (None, True, ["", ""]),
        "mistral": (None, False, ["123456789", "000000f:1"]),
        "mistral, later": (None, False, ["123456789", "000000f:1"]),
        "kimi": (None, False, ["functions.f0:0", "functions.f1:1"]),
        "glm": ("", False, ["", ""]),
    }
    ([written], _) = render_jinja_template([turns(*known[name])], chat_template=source)
    template = ChatTemplate(tmp_path, source)
    for content in (None, "", []):
        for as_text in (False, True):
            messages = turns(content, as_text, ["toolu_123456789", "f:1"])
            before = json.dumps(messages)
            assert template.render(messages) == written
            assert json.dumps(messages) == before


def test_ids_that_end_alike_stay_apart(tmp_path: Path) -> None:
    """Each result has the id of its call, also of nine characters."""
    template = ChatTemplate(tmp_path, FORMS_OF_CALLS["mistral"])
    given = ["call_0_get_weather", "call_1_get_weather"]
    function = {"name": "f", "arguments": {}}
    calls = [{"id": each, "type": "function", "function": function} for each in given]
    results = [{"role": "tool", "tool_call_id": each, "content": ""} for each in given]
    text = template.render([{"role": "assistant", "content": None, "tool_calls": calls}, *results])
    shown = text.replace(json.dumps(function), "")
    first, second = shown[:9], shown[9:18]
    assert shown == f"{first}{second}" * 2
    assert first != second


def test_reasoning_has_the_names_that_templates_read(tmp_path: Path) -> None:
    """As in transformers; but not beside text and calls, if the template refuses ``thinking``."""
    source = (
        "{% for m in messages %}{{ raise_exception('all') if m.content and m.thinking and "
        "m.tool_calls }}{{ m.thinking }}|{{ m.reasoning_content }};{% endfor %}"
    )
    template = ChatTemplate(tmp_path, source)
    said: dict[str, Any] = {"role": "assistant", "content": "a"}
    for name in ("reasoning_content", "thinking", "reasoning"):
        messages = [said, {**said, name: "hm"}]
        ([written], _) = render_jinja_template([messages], chat_template=source)
        assert template.render(messages) == written
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert template.render([{**said, "tool_calls": calls, "reasoning": "hm"}]) == "|hm;"
    assert template.render([{**said, "content": "", "tool_calls": calls, "reasoning": "hm"}]) == (
        "hm|hm;"
    )


def test_thinking_stands_beside_text_and_calls(tmp_path: Path) -> None:
    """LFM2.5's template reads this name alone, beside text and calls, too."""
    source = (
        "{% for m in messages %}{% if m.thinking is defined %}<think>{{ m.thinking }}</think>"
        "{% endif %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
        "{% endfor %}"
    )
    function = {"name": "f", "arguments": {}}
    calls = [{"id": "c", "type": "function", "function": function}]
    messages = [{"role": "assistant", "content": "a", "reasoning": "hm", "tool_calls": calls}]
    ([written], _) = render_jinja_template([messages], chat_template=source)
    assert ChatTemplate(tmp_path, source).render(messages) == written == "<think>hm</think>af"


def test_a_template_for_training_is_rendered(tmp_path: Path) -> None:
    """``{% generation %}`` marks the assistant's text for trainers, and shows it, in its scope."""
    source = (
        "{% for m in messages %}{% set end = '.' %}{% generation %}{% set end = '!' %}"
        "{{ loop.index }}{{ m.content }}{{ end }}{% endgeneration %}{{ end }}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "a"}]
    ([written], _) = render_jinja_template([messages], chat_template=source)
    assert ChatTemplate(tmp_path, source).render(messages) == written == "1a!."


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"chat_template": [1]}, "has no chat template"),
        ({"chat_template": [{"name": "other", "template": "x"}]}, "templates 'other', and none"),
        ({"chat_template": 5}, "has no chat template"),
    ],
)
def test_an_entry_that_is_no_template_is_refused(
    tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointFormatError, match=message):
        ChatTemplate(tmp_path)


def test_special_tokens_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    entries = {"bos_token": {"a": 1}, "chat_template": "{{ bos_token or 'none' }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    assert ChatTemplate(tmp_path).render([{"role": "user"}]) == "none"


def test_a_template_that_cannot_be_compiled_is_refused_by_chat_alone(
    folder: Path, tmp_path: Path
) -> None:
    """The engine is made and generates; the reason is known before the first message."""
    shutil.copytree(folder, tmp_path / "model")
    write_tokenizer(tmp_path / "model", "{% if %}")
    with LLM(tmp_path / "model", **SMALL) as llm:
        assert "cannot be read: Expected an expression" in llm.no_chat_template
        assert llm.generate("fox", greedy(1), use_tqdm=False)[0].error is None
        with pytest.raises(CheckpointFormatError, match="cannot be read: Expected an expression"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_a_template_of_a_file_is_read_again(llm: LLM, tmp_path: Path) -> None:
    """Its path is the same, and its text may be another one in the next call."""
    path = tmp_path / "own.jinja"
    for text in ("one {{ messages[0].content }}", "two"):
        path.write_text(text)
        found = llm.chat_prompt([{"role": "user", "content": "fox"}], str(path))
        assert found["prompt"] == text.replace("{{ messages[0].content }}", "fox")
