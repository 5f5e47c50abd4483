from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer

from vllm_module.cli.options import (
    DeviceOption,
    DType,
    DTypeOption,
    QuantizationOption,
    SizeOption,
    Source,
)
from vllm_module.cli.output import printable
from vllm_module.cli.ranks import TIMEOUT, TimeoutOption, is_first_rank
from vllm_module.cli.serving import (
    CacheDType,
    CacheDTypeOption,
    LengthOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    check_text,
    sampling,
    serving,
)
from vllm_module.errors import WeightLoadError
from vllm_module.runtime.chat import ChatTemplate
from vllm_module.runtime.llm import LLM
from vllm_module.runtime.sampling_params import SamplingParams
from vllm_module.weights import resolve


def chat(
    source: Source,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="What the model is told to be."),
    ] = None,
    tp: SizeOption = None,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", min=1, metavar="K", help="Most tokens of an answer."),
    ] = 1024,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    stop: StopOption = None,
    dtype: DTypeOption = DType.auto,
    quantization: QuantizationOption = None,
    kv_cache_dtype: CacheDTypeOption = CacheDType.auto,
    max_model_len: LengthOption = None,
    device: DeviceOption = "auto",
    timeout: TimeoutOption = TIMEOUT,
) -> None:
    """Talk with a model whose checkpoint has a chat template.

    /reset begins another conversation; /exit or Ctrl-D leaves. Ctrl-C stops an answer, and leaves
    where there is none. Where standard input is no terminal, each of its lines is a message, and
    the exit code is 1 if one is refused.
    """
    params = sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        max_tokens=max_new_tokens,
    )
    first = (
        [] if system is None else [{"role": "system", "content": check_text(system, "--system")}]
    )
    if is_first_rank():  # which needs the template, and refuses before any weights are read
        folder = resolve(source, None)
        ChatTemplate(folder)
        source = str(folder)
    cache = kv_cache_dtype.value
    with serving(
        source, dtype, quantization, device, tp, timeout, max_model_len, kv_cache_dtype=cache
    ) as llm:
        refused = _talk(llm, params, first)
    if refused and not sys.stdin.isatty():
        raise typer.Exit(1)


def _talk(llm: LLM, params: SamplingParams, first: list[dict[str, str]]) -> bool:
    """Answer messages until there are no more; whether any was refused."""
    refused = False
    messages = list(first)
    for line in _messages():
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(first)
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(llm, params, messages)
        except WeightLoadError:
            raise
        except ValueError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            refused = True
            del messages[-1]
            continue
        messages.append({"role": "assistant", "content": answer})
    return refused


def _messages() -> Iterator[str]:
    """Yield what is typed, or the lines of standard input, as long as there is any."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with suppress(ImportError):
            import readline  # noqa: F401 - input() then knows arrow keys and what was typed before
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            if line := input(prompt).strip():
                yield line
    if prompt:
        print()


def _answer(llm: LLM, params: SamplingParams, messages: list[dict[str, str]]) -> str:
    """Print the answer as it comes, until it is done or Ctrl-C, and return it."""
    text = ""
    with _interrupts() as interrupted:
        try:
            for output in llm.stream(llm.chat_prompt(messages), params):
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
    """Take note of Ctrl-C, which in the middle of a step would end the engine; not the second."""
    interrupted = threading.Event()

    def note(*_: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
