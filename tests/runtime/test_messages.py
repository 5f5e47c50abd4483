"""What a chat template gets of each message, beside the rules of vLLM and transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from jinja2 import Environment

from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.text.chat import _END, ChatTemplate, template_of, template_text
from vllm_module.runtime.text.template_process import TemplateProcess
from vllm_module.runtime.text.tokenizer import Tokenizer

SHOWN = "{{ messages | tojson }}"


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


def given(process: TemplateProcess, message: dict[str, Any], content_format: Any) -> Any:
    """Return a message as the template gets it."""
    template = ChatTemplate(Path("folder"), SHOWN, process)
    (found,) = json.loads(template.render([message], content_format=content_format))
    return found


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


# Content; what a template of texts gets of it, and what one of lists gets (vLLM's chat_utils.py:
# texts are joined by line breaks, without empty ones, and every kind of text becomes "text").
CONTENTS: list[tuple[Any, str, list[Any]]] = [
    ("hi", "hi", parts("hi")),
    ("", "", parts("")),
    (None, "", []),
    ([], "", []),
    (parts("a", "b"), "a\nb", parts("a", "b")),
    (tuple(parts("a", "b")), "a\nb", parts("a", "b")),
    (parts("a", "", "b"), "a\nb", parts("a", "", "b")),
    (parts("", ""), "", parts("", "")),
    (["a", "b"], "a\nb", parts("a", "b")),
    ([{"type": "input_text", "text": "a"}], "a", parts("a")),
    ([{"type": "output_text", "text": "a"}], "a", parts("a")),
    ([{"type": "refusal", "refusal": "no"}], "no", parts("no")),
    ([{"type": "thinking", "thinking": "hm"}], "hm", parts("hm")),
    ([{"type": "text", "text": None}, *parts("b")], "b", parts("b")),
    ([{"type": "text"}, None, *parts("b")], "b", parts("b")),
    ([{"type": "refusal", "text": "no", "refusal": "yes"}], "yes", parts("yes")),
]


@pytest.mark.parametrize(("content", "text", "listed"), CONTENTS)
def test_content_has_the_form_that_is_asked_for(
    process: TemplateProcess, content: Any, text: str, listed: list[Any]
) -> None:
    """Other keys of a message stay, and so does the message of the caller."""
    message = {"role": "user", "content": content, "name": "x"}
    before = json.dumps(message)
    assert given(process, message, "string") == {"role": "user", "content": text, "name": "x"}
    assert given(process, message, "openai") == {"role": "user", "content": listed, "name": "x"}
    assert json.dumps(message) == before
    if content is None:
        assert given(process, {"role": "user"}, "string")["content"] == ""
        assert given(process, {"role": "user"}, "openai")["content"] == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": "x"}, {"type": "text", "text": 3}, 3, ["x"], {},
        {"text": "a"}, {"type": "Text", "text": "a"}, {"type": "thinking", "thinking": {"a": 1}},
    ],
)  # fmt: skip
def test_a_part_that_is_no_text_is_refused(process: TemplateProcess, part: Any) -> None:
    with pytest.raises(ValueError, match="a part of a message's content should be text, got "):
        given(process, {"role": "user", "content": [part]}, "string")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": [1, null]}', {"a": [1, None]}),
        ("[1]", [1]),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ({}, {}),
        ("{}", {}),
        ("null", {}),
        ("{broken", "{broken"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_of_calls_are_read(
    process: TemplateProcess, arguments: Any, expected: Any
) -> None:
    """JSON text is read, as vLLM does before it renders; none are {}, and what is broken stays."""
    call = {"type": "function", "id": "7", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, "odd", {"function": 3}]}
    first, *others = given(process, message, "string")["tool_calls"]
    assert first == {**call, "function": {"name": "f", "arguments": expected}}
    assert others == ["odd", {"function": 3}]
    assert call["function"] == {"name": "f", "arguments": arguments}
    (named,) = given(process, {**message, "tool_calls": ({"function": {"name": "g"}},)}, "string")[
        "tool_calls"
    ]
    assert named == {"function": {"name": "g", "arguments": {}}}


FORMS = {
    "{% for m in messages %}{{ m.content }}{% endfor %}": "string",
    "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}": "openai",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}": "both",
    "nothing": "string",
    "{{ raise_exception('no') }}": "",
    # Needs a message of the system before.
    "{% if messages[0].role != 'system' %}{{ raise_exception('none') }}{% endif %}"
    "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}": "openai",
}


@pytest.mark.parametrize("template", FORMS)
def test_a_template_gets_what_it_shows(process: TemplateProcess, template: str) -> None:
    """The prompt is that of Jinja itself for content in the form that the template shows."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "one"}, {"role": "user", "content": parts("two", "three")},
    ]  # fmt: skip
    formatter = ChatTemplate(Path("folder"), template, process)
    if not (form := FORMS[template]):
        with pytest.raises(ValueError, match="refuses the messages: no"):
            formatter.render(messages)
        return
    written: list[dict[str, Any]] = {
        "string": [{"role": "system", "content": "one"}, {"content": "two\nthree"}],
        "openai": [{"role": "system", "content": parts("one")}, {"content": parts("two", "three")}],
        "both": [{"content": "one"}, {"content": parts("two", "three")}],
    }[form]
    environment = Environment(autoescape=False)
    environment.globals["raise_exception"] = None
    assert formatter.render(messages) == environment.from_string(template).render(messages=written)


def test_variables_and_special_tokens_reach_the_template(
    process: TemplateProcess, tmp_path: Path
) -> None:
    """A caller's value goes before a token of the checkpoint; null is no token."""
    entries = {
        "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": True}, "pad_token": None,
        "unk_token": 3, "bos": "x", "model_max_length": 4,
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    source = (
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}|{{ unk_token is defined }}|"
        "{{ tools is none }}|{{ documents is none }}|{{ add_generation_prompt }}|{{ extra }}"
    )
    template = ChatTemplate(tmp_path, source, process)
    hello = [{"role": "user", "content": "hi"}]
    rendered = template.render(hello, extra=3)
    assert rendered == "<s>|</s>|False|False|True|True|True|3"
    rendered = template.render(hello, False, extra="", bos_token="!", tools=[], documents=[1])
    assert rendered == "!|</s>|False|False|False|False|False|"
    with pytest.raises(ValueError, match="multiple values for messages"):
        template.render(hello, messages=[])
    for wrong in ([], None, "hi", {"role": "user"}, ["hi"], ["role"], [3], [{"content": "hi"}], 3):
        with pytest.raises(ValueError, match="messages should be a list of mappings with a role"):
            template.render(wrong)  # type: ignore[arg-type]


def test_a_template_that_needs_a_special_token_is_tried_with_one(
    process: TemplateProcess, tmp_path: Path
) -> None:
    """What it shows is found without the checkpoint's tokens, which may be undefined."""
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    source = (
        "{% for m in messages %}{{ bos_token + m.role }}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(tmp_path, source, process)
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>userhi"


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
SOURCES: list[tuple[Any, str | None, str | None]] = [
    # The entry of tokenizer_config.json, the file, and which is taken, as in transformers.
    ("entry", None, "entry"),
    (None, "file", "file"),
    ("entry", "file", "file"),
    (NAMED, None, "default"),
    (NAMED[:1], None, None),
    (NAMED[:1], "file", "file"),
    ([3, *NAMED], None, "default"),
    ([], None, None),
    (3, None, None),
    (None, None, None),
    ("", None, ""),
    (None, "", ""),
]


@pytest.mark.parametrize(("entry", "file", "taken"), SOURCES)
def test_where_a_template_is_taken_from(
    process: TemplateProcess, tmp_path: Path, entry: Any, file: str | None, taken: str | None
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    if taken is None:
        with pytest.raises(
            CheckpointFormatError,
            match=r"no chat template, neither|none that is the def",
        ):
            ChatTemplate(tmp_path, process=process)
    else:
        assert ChatTemplate(tmp_path, process=process).source == taken
    assert ChatTemplate(tmp_path, "given", process).source == "given"


def test_a_template_is_given_as_text_or_as_a_file(tmp_path: Path) -> None:
    """Text has a brace or a line break; anything else is a path, as in vLLM."""
    path = tmp_path / "a.jinja"
    path.write_bytes("{{ '\u6f22' }}".encode())
    assert template_text(path) == template_text(str(path)) == "{{ '\u6f22' }}"
    for text in ("{{ x }}", "a}", "{", "a\nb"):
        assert template_text(text) == text
    path.write_bytes(b"\xff")
    for wrong in (path, tmp_path / "none", tmp_path / "{none}", "plain", "a\0b"):
        with pytest.raises(ValueError, match="is no file that can be read, and no template"):
            template_text(wrong)


def test_variables_that_are_not_read_are_logged_once(
    process: TemplateProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """None is no variable, and one that the template reads is not logged."""
    template = ChatTemplate(Path("folder"), "{{ messages }}{{ known }}", process)
    hello = [{"role": "user", "content": "hi"}]
    template.render(hello, known=1, empty=None)
    assert not caplog.messages
    for _ in range(2):
        template.render(hello, known=1, b=False, a="")
    template.render(hello, c=0, a=1)
    reads = "it reads known, messages"
    assert caplog.messages == [
        f"the chat template does not read a, b: {reads}",
        f"the chat template does not read c: {reads}",
    ]


def test_few_variables_of_strangers_are_logged(
    process: TemplateProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """Their names are a client's: they fill neither memory nor the log, and forge no line of it."""
    template = ChatTemplate(Path("folder"), "{{ messages }}", process)
    hello = [{"role": "user", "content": "hi"}]
    template.render(hello, **{"a\nERROR: on fire": 1, "b" * 10_000: 1})
    assert caplog.messages == [
        r"the chat template does not read a\nERROR: on fire: it reads messages"
    ]
    for number in range(3):
        template.render(hello, **{f"x{number}-{i}": 1 for i in range(1000)})
    assert len("".join(caplog.messages)) < 2000
    assert len(template._unread) < 100
    with pytest.raises(ValueError, match="content_format should be one of 'auto', 'string'"):
        template.render(hello, content_format=["string"])


@pytest.mark.parametrize(
    ("template", "content", "prompt"),
    [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}<end>", "Hi ", "[Hi "),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}<end>", "Hi ", "[Hi"),
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}<end>", "", "["),
        ("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}",
         parts("a", "b"), "[a][b"),
        ("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}",
         [], "["),
    ],
)  # fmt: skip
def test_the_last_message_is_continued(
    process: TemplateProcess, template: str, content: Any, prompt: str
) -> None:
    """The prompt ends with its text, as the template writes it."""
    formatter = ChatTemplate(Path("folder"), template, process)
    message = [{"role": "assistant", "content": content}]
    assert formatter.render(message, False, continue_final_message=True) == prompt
    with pytest.raises(ValueError, match="give add_generation_prompt=False"):
        formatter.render(message, continue_final_message=True)


MARKED = [
    "",
    "Hi ",
    _END,
    f"{_END} ",
    f"{_END} now",
    f"a {_END}",
    f"{_END} {_END}",
    f"{_END}{_END}",
]


@pytest.mark.parametrize("last", MARKED)
@pytest.mark.parametrize("first", MARKED)
@pytest.mark.parametrize("trims", [False, True])
def test_texts_may_have_the_mark_of_the_end(
    process: TemplateProcess, trims: bool, first: str, last: str
) -> None:
    """Where the last message ends does not depend on what any message says."""
    content = "m.content | trim" if trims else "m.content"
    template = "{% for m in messages %}[{{ " + content + " }}]{% endfor %}<end>"
    formatter = ChatTemplate(Path("folder"), template, process)
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": last}]
    written = [text.strip() if trims else text for text in (first, last)]
    prompt = formatter.render(messages, False, continue_final_message=True)
    assert prompt == f"[{written[0]}][{written[1]}"


NAMES = [[], ["tool_use"], ["default", "tool_use"], ["tool_use", "default", "short"]]


@pytest.mark.parametrize(
    ("where", "named"),
    [
        *(("both", named) for named in NAMES),
        ("entry", NAMES[0]),
        ("entry", NAMES[2]),
        ("files", NAMES[1]),
        ("files", NAMES[3]),
    ],
    ids=str,
)
def test_templates_are_chosen_by_name_and_by_tools(
    tmp_path: Path, named: list[str], where: str
) -> None:
    """As transformers chooses: for tools ``tool_use``, else ``default``, or the one of a name."""
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    fast.save(str(tmp_path / "tokenizer.json"))
    text = "{%% if tools %%}tools in %s{%% else %%}in %s{%% endif %%}"
    entries = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "a"}
    if where != "files":
        entries["chat_template"] = [{"name": n, "template": text % (n, n)} for n in named]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    if where != "entry":
        (tmp_path / "additional_chat_templates").mkdir()
        for name in named[:2]:
            path = tmp_path / "additional_chat_templates" / f"{name}.jinja"
            path = tmp_path / "chat_template.jinja" if name == "default" else path
            path.write_text(text % (f"file {name}", f"file {name}"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for tools in (None, [], [tool]):
        for template in (None, "tool_use", "short", "{{ messages[0].content }}"):
            try:
                expected = theirs.apply_chat_template(
                    messages, tools=tools, chat_template=template, tokenize=False
                )
            except ValueError:
                expected = None
            without = template is None and "default" not in named  # is refused as a whole
            if expected is None or expected == template or without:  # a name is no conversation
                with pytest.raises((ValueError, CheckpointFormatError), match="template"):
                    ours.apply_chat_template(
                        messages, tools, chat_template=template, tokenize=False
                    )
                continue
            found = ours.apply_chat_template(
                messages, tools, chat_template=template, tokenize=False
            )
            assert found == expected


def test_a_checkpoint_without_a_default_has_its_others(tmp_path: Path) -> None:
    """They are chosen by name, as the message of the missing default says."""
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("{{ 'rag' }}")
    with pytest.raises(CheckpointFormatError, match=r"'rag', and none .* LLM\(chat_template=\)"):
        ChatTemplate(tmp_path)
    assert template_of(tmp_path, "rag") == "{{ 'rag' }}"
    with pytest.raises(ValueError, match="no file that can be read"):
        template_of(tmp_path, "other")


@pytest.mark.parametrize("content_format", ["auto", "string", "openai"])
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("continues", [True, False])
def test_a_template_for_tools_gets_all_that_it_gets_alone(
    tmp_path: Path, process: TemplateProcess, content_format: Any, begins: bool, continues: bool
) -> None:
    """As if it were the only template, also where it is refused; the log names each variable once.

    The default one shows nothing, so that what it would show of a message has no effect.
    """
    written = "{{ tools }}{{ messages }}{{ add_generation_prompt }}{{ thinks }}{{ eos_token }}"
    entries = {
        "eos_token": "</s>",
        "chat_template": [
            {"name": "default", "template": "-"},
            {"name": "tool_use", "template": written},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    content = parts("a", "b")
    variables = {"tools": [{"name": "f"}], "thinks": 3}
    found = []
    for template in (None, written):
        formatter = ChatTemplate(tmp_path, template, process)
        try:
            text = formatter.render(
                [{"role": "user", "content": content}],
                begins,
                content_format=content_format,
                continue_final_message=continues,
                **variables,
            )
        except ValueError as error:
            text = f"refused: {error}"
        found.append(text)
    assert found[0] == found[1]
    assert found[0].startswith("refused: ") == (begins and continues)
