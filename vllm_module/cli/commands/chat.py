"""``vllm-module chat``: a conversation with a model in the terminal."""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_module.cli.choices import CacheDType
from vllm_module.cli.options import (
    AdapterOption,
    CacheDTypeOption,
    DeviceOptions,
    EngineRankOptions,
    LengthOption,
    ModelOptions,
    PrecisionOptions,
    SamplingOptions,
    Source,
)
from vllm_module.cli.output import announce, error_text
from vllm_module.cli.ranks import is_first_rank
from vllm_module.cli.serving import (
    check_text,
    given_params,
    loaded_adapter,
    sampling_params,
    serving,
)
from vllm_module.cli.streams import complain
from vllm_module.errors import WeightLoadError

if TYPE_CHECKING:
    from vllm_module.runtime.llm import LLM
    from vllm_module.runtime.sampling_params import SamplingParams


HELP = """\
/help   show this text
/reset  start a new conversation
/exit   leave; so do /quit and Ctrl-D
Ctrl-C  stop the answer, or leave if there is none
Anything else is a message, also a command after a space."""
_HINT = "/help lists the commands; a message that begins with a slash needs a space before it"


def chat(
    source: Source,
    *,
    system: Annotated[
        str | None,
        typer.Option(
            "--system", metavar="TEXT", help="Instructions for the model, before the first message."
        ),
    ] = None,
    ranks: EngineRankOptions,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            min=1,
            metavar="K",
            help="Most tokens to generate for each answer; default: "
            "generation_config.json's, or 1024.",
        ),
    ] = None,
    sampling: SamplingOptions,
    precision: PrecisionOptions,
    model: ModelOptions,
    kv_cache_dtype: CacheDTypeOption = CacheDType.auto,
    max_model_len: LengthOption = None,
    adapter: AdapterOption = None,
    devices: DeviceOptions,
) -> None:
    """Chat with a model.

    The checkpoint needs a chat template. /help lists the commands. /reset starts a new
    conversation; /exit, /quit or Ctrl-D leaves. Ctrl-C stops the answer, or leaves if no answer is
    being printed. If standard input is not a terminal, each of its lines is a message or a command,
    and the exit code is 1 if one is refused.
    """
    given = given_params(sampling, max_new_tokens)
    system_messages = (
        [] if system is None else [{"role": "system", "content": check_text(system, "--system")}]
    )
    if is_first_rank():  # the rank that chats; it refuses before weights are read
        from vllm_module.build.registry import load_model_code
        from vllm_module.runtime.text.chat import ChatTemplate
        from vllm_module.weights.source import Folder, find_source

        if model.model_code is not None:  # which may register the source
            load_model_code(model.model_code)
        found = find_source(
            source,
            load_format=model.load_format.value,
            download_dir=model.download_dir,
            code=model.trust_remote_code,
        )
        ChatTemplate(found.folder)
        source = str(found.path) if isinstance(found, Folder) else source
    with serving(
        source,
        ranks,
        precision,
        model,
        devices,
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype.value,
    ) as llm:
        params = sampling_params(llm, given, max_tokens=1024)
        name = loaded_adapter(llm, adapter)
        refused = _converse(llm, params, system_messages, name)
    if refused and not sys.stdin.isatty():
        raise typer.Exit(1)


def _converse(
    llm: LLM, params: SamplingParams, system_messages: list[dict[str, str]], adapter: str | None
) -> bool:
    """Answer the user's messages; return whether any was refused."""
    refused = False
    messages = list(system_messages)
    terminal = sys.stdin.isatty()
    if terminal:
        announce("/help lists the commands, /exit leaves")
    for line in _typed_lines():
        text = line.strip()
        if text in ("/exit", "/quit"):
            break
        if text == "/reset":
            messages = list(system_messages)
            if terminal:
                announce("a new conversation")
        elif text == "/help":
            announce(HELP)
        elif line.startswith("/"):
            complain(error_text(f"there is no command {text.split()[0]}; {_HINT}"))
            refused = True
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                answer = _answer(llm, params, messages, adapter)
            except WeightLoadError:
                raise
            except ValueError as error:
                complain(error_text(str(error)))
                refused = True
                del messages[-1]
                continue
            messages.append({"role": "assistant", "content": answer})
    return refused


def _typed_lines() -> Iterator[str]:
    """Yield the lines of standard input, with a prompt on a terminal."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() arrow keys and a history
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input(prompt)
    if prompt:
        print()


def _answer(
    llm: LLM, params: SamplingParams, messages: list[dict[str, str]], adapter: str | None
) -> str:
    """Print the answer as it is generated, until its end or Ctrl-C, and return it."""
    text = ""
    with _interrupts() as interrupted:
        try:
            prompt = llm.chat_prompt(messages)
            for output in llm.stream({**prompt, "adapter": adapter}, params):
                if output.error:
                    raise ValueError(output.error)
                (completion,) = output.outputs
                print(completion.text[len(text) :], end="", flush=True)
                text = completion.text
                if interrupted.is_set():
                    break
        finally:
            if text:
                print(flush=True)
    return text


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Set an event at the first Ctrl-C, and raise ``KeyboardInterrupt`` at the second.

    An exception in the middle of a step would end the engine.
    """
    interrupted = threading.Event()

    def handle(*_: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
