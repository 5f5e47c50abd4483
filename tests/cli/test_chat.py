from __future__ import annotations

import io
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_module import LLM, SamplingParams
from vllm_module.cli.commands import chat

Run = Callable[..., Any]
Say = Callable[..., Any]
MOST = 6
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


class Terminal(io.StringIO):
    """Standard input that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def talking(with_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Add a chat template."""
    path = tmp_path_factory.mktemp("talking")
    shutil.copytree(with_text, path, dirs_exist_ok=True)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def answers(talking: Path) -> Callable[..., str]:
    """Return a function that answers messages: the user's, the assistant's, and so on."""
    llm = LLM(str(talking), kv_cache_memory_bytes=1 << 20, device="cpu")

    def answer(*contents: str, system: str | None = None) -> str:
        roles = ("user", "assistant") * len(contents)
        messages: Any = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        (output,) = llm.chat(
            messages, SamplingParams(temperature=0, max_tokens=MOST), use_tqdm=False
        )
        return output.outputs[0].text

    return answer


@pytest.fixture
def say(run: Run, talking: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Return a function that runs ``chat`` with these lines as standard input."""

    def call(*lines: str, options: tuple[Any, ...] = (), kind: type[io.StringIO] = io.StringIO):
        monkeypatch.setattr("sys.stdin", kind("".join(f"{line}\n" for line in lines)))
        return run("chat", talking, "--max-new-tokens", MOST, "--device", "cpu", *options)

    return call


def test_a_conversation_goes_on(say: Say, answers: Callable[..., str]) -> None:
    """An answer depends on all earlier messages; /reset forgets them; /exit and the end leave."""
    first = answers("hi")
    second = answers("hi", first, "tree?")
    fresh = answers("tree?")
    assert second != fresh
    result = say("hi", "", "tree?", "/reset", "tree?")
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{first}\n{second}\n{fresh}\n"
    assert say("hi", "/exit", "tree?").out == f"{first}\n"
    instructed = say("hi", "/reset", "hi", options=("--system", "x"))
    assert instructed.out == 2 * f"{answers('hi', system='x')}\n"


def test_commands(say: Say, answers: Callable[..., str]) -> None:
    """A terminal is told of /help; what is no command is not sent, unless a space is before it."""
    result = say("/help", "/hepl me", " /hepl", "/quit", "hi", kind=Terminal)
    assert result.out == f"> > > {answers('/hepl')}\n> "
    greeting, *help_text, error = result.err.splitlines()
    assert greeting == "/help lists the commands, /exit leaves"
    assert [line.split()[0] for line in help_text[:3]] == ["/help", "/reset", "/exit"]
    assert error.startswith("error: there is no command /hepl; /help lists the commands")
    piped = say("/hepl", "hi")
    assert (piped.code, piped.out) == (1, f"{answers('hi')}\n")
    assert piped.err.splitlines() == [error]


def test_a_terminal_is_prompted(say: Say, answers: Callable[..., str]) -> None:
    """Each message has a prompt, and leaving prints a new line."""
    assert say("hi", kind=Terminal).out == f"> {answers('hi')}\n> \n"


def test_a_refused_message_is_not_part_of_the_conversation(
    say: Say, answers: Callable[..., str]
) -> None:
    """The refusal says why, the conversation continues without it, and the exit code is 1."""
    result = say("hi", "x" * 80, "tree?")
    first = answers("hi")
    assert result.out == f"{first}\n{answers('hi', first, 'tree?')}\n"
    assert result.err.startswith("error: the prompt has ")
    assert "a sequence has at most 64" in result.err
    assert result.code == 1
    assert say("x" * 80, kind=Terminal).code == 0


def test_ctrl_c_stops_only_the_answer(
    say: Say, answers: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part that was printed stays in the conversation; the next message is answered."""
    first = answers("hi")
    pieces: list[str] = []

    def interrupted(*values: object, end: str = "\n", flush: bool = False) -> None:
        pieces.append("".join(map(str, values)) + end)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    # Ctrl-C after the third piece: only what prints knows when that is.
    monkeypatch.setattr(chat, "print", interrupted, raising=False)
    before = signal.getsignal(signal.SIGINT)
    assert say("hi", "tree?").code == 0
    assert signal.getsignal(signal.SIGINT) is before
    stopped, answer, _ = "".join(pieces).split("\n")
    assert first.startswith(stopped)
    assert stopped != first
    assert answer == answers("hi", stopped, "tree?")


def test_ctrl_c_at_the_prompt_leaves(say: Say, answers: Callable[..., str]) -> None:
    """It prints a new line and no error."""

    class Interrupted(Terminal):
        def readline(self, *_: Any) -> str:
            raise KeyboardInterrupt

    result = say(kind=Interrupted)
    assert (result.code, result.out) == (0, "> \n")
    assert "error" not in result.err


def test_a_second_ctrl_c_ends_the_command(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is noticed only after a step, and a step could hang."""

    def hangs(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("vllm_module.runtime.engine.Engine.step", hangs)
    result = say("hi")
    assert (result.code, result.err) == (130, "error: interrupted\n")


def test_a_checkpoint_without_a_template_is_refused(run: Run, with_text: Path) -> None:
    """The message says what is missing, before weights are read."""
    result = run("chat", with_text)
    assert (result.code, result.out) == (1, "")
    assert "has no chat template" in result.err
    assert "save the model's as chat_template.jinja beside config.json" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--system", "a\udcff"], r"'a\udcff' is no text"),
        (["--top-p", "0"], "for --top-p: should"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
    ],
)
def test_wrong_usage(run: Run, with_text: Path, options: list[str], message: str) -> None:
    """The exit code is 2; the message says what is wrong and names the help."""
    result = run("chat", with_text, *options)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.endswith("Try: vllm-module chat --help\n")


def test_an_adapter(say: Say, talking: Path, tmp_path: Path) -> None:
    """All answers are computed with it."""
    base = AutoModelForCausalLM.from_pretrained(talking, dtype=torch.float32)
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        tuned = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(0)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    tuned.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=MOST)
    messages: Any = [{"role": "user", "content": "hi"}]
    with LLM(str(talking), kv_cache_memory_bytes=1 << 20, device="cpu") as llm:
        llm.load_adapter("a", tmp_path)
        texts = [
            llm.chat(messages, params, use_tqdm=False, lora_request=name)[0].outputs[0].text
            for name in ("a", None)
        ]
    assert texts[0] != texts[1]
    assert say("hi", options=("--adapter", tmp_path)).out == f"{texts[0]}\n"
    assert say("hi").out == f"{texts[1]}\n"
