"""``vllm-module generate``: continue prompts."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_module.cli.choices import CacheDType
from vllm_module.cli.hosts import HostOptions
from vllm_module.cli.options import (
    AdapterOption,
    CacheDTypeOption,
    DeviceOptions,
    EngineRankOptions,
    JsonOption,
    LengthOption,
    ModelOptions,
    PrecisionOptions,
    SamplingOptions,
    Source,
    UsageError,
)
from vllm_module.cli.output import (
    CommandError,
    announce,
    console,
    error_text,
    plural,
    print_json,
    working,
)
from vllm_module.cli.serving import (
    check_text,
    given_params,
    loaded_adapter,
    sampling_params,
    serving,
)
from vllm_module.cli.streams import complain
from vllm_module.errors import CheckpointFormatError

if TYPE_CHECKING:
    from vllm_module.runtime.llm import LLM
    from vllm_module.runtime.outputs import RequestOutput
    from vllm_module.runtime.sampling_params import SamplingParams

_MAX_TOKENS = 64  # without --max-new-tokens and generation_config.json


def generate(
    context: typer.Context,
    source: Source,
    *,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="Text to continue; may be repeated."),
    ] = None,
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt-ids", metavar="1,2,3", help="Token ids to continue; may be repeated."
        ),
    ] = None,
    ranks: EngineRankOptions,
    hosts: HostOptions,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            min=1,
            metavar="K",
            help="Most tokens to generate for each prompt; default: "
            f"generation_config.json's, or {_MAX_TOKENS}.",
        ),
    ] = None,
    sampling: SamplingOptions,
    precision: PrecisionOptions,
    model: ModelOptions,
    kv_cache_dtype: CacheDTypeOption = CacheDType.auto,
    max_model_len: LengthOption = None,
    adapter: AdapterOption = None,
    devices: DeviceOptions,
    as_json: JsonOption = False,
) -> None:
    """Continue prompts.

    The text is printed as it is generated. Several prompts make one batch, and each text is printed
    when it is complete. For --prompt-ids, which need no tokenizer, token ids are printed. Sampling
    options that are left out are those of the checkpoint's generation_config.json, which are
    printed; without it, decoding is greedy. With --tp, each rank is a process; under torchrun, its
    processes are the ranks. With --nnodes, start the command on each host. The exit
    code is 1 if a prompt is refused; the other prompts are still completed.

    JSON keys: checkpoint; dtype; device; tensor_parallel_size; seconds (without loading);
    completions, one a prompt (prompt or null, prompt_ids, text or null, ids, stopped: whether a
    stop token or text ended it, error or null).
    """
    if bool(prompts) == bool(prompt_ids):
        both = ", and not both" if prompts else ""
        raise UsageError(f"give --prompt or --prompt-ids{both}")
    completions = [Completion(check_text(text, "--prompt"), []) for text in prompts or ()]
    completions += [Completion(None, _parse_ids(ids)) for ids in prompt_ids or ()]
    given = given_params(sampling, max_new_tokens)
    hosts.start(context.find_root().obj, ranks, devices.timeout, ranks.pp)
    with serving(
        source,
        ranks,
        precision,
        model,
        devices,
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype.value,
    ) as llm:
        for completion in completions if prompts else ():
            if llm.tokenizer is None:
                raise CheckpointFormatError(f"{llm.no_tokenizer} (--prompt-ids)")
            try:
                completion.prompt_ids = llm.tokenizer.encode(completion.prompt or "")
            except ValueError as error:  # half of a character, for example
                raise CommandError(str(error)) from error
        params = sampling_params(llm, given, max_tokens=_MAX_TOKENS)
        name = loaded_adapter(llm, adapter)
        start = time.perf_counter()
        _run(llm, completions, params, name, quiet=as_json)
        seconds = time.perf_counter() - start
        limit = params.max_tokens
        if "max_tokens" not in given and any(
            len(each.ids) == limit and not each.stopped for each in completions
        ):
            announce(f"ended at {limit} tokens; --max-new-tokens takes another number")
        if as_json:
            print_json(
                {
                    "checkpoint": llm.source.name,
                    "dtype": llm.model_config.dtype,
                    "device": llm.model_config.device,
                    "tensor_parallel_size": llm.model_config.tensor_parallel_size,
                    "seconds": seconds,
                    "completions": completions,
                }
            )
    if any(completion.error for completion in completions):
        raise typer.Exit(1)


@dataclass
class Completion:
    """A prompt and its output so far; ``text`` stays None for a prompt of token ids."""

    prompt: str | None
    prompt_ids: list[int]
    text: str | None = None
    ids: list[int] = field(default_factory=list)
    stopped: bool = False
    error: str | None = None

    @property
    def shown(self) -> str:
        """The text, or the token ids of a prompt of token ids."""
        return ",".join(map(str, self.ids)) if self.prompt is None else self.text or ""

    def update(self, output: RequestOutput) -> None:
        """Copy the output that the prompt has so far."""
        (sample,) = output.outputs
        self.ids, self.error = sample.token_ids, output.error
        self.text = None if self.prompt is None else sample.text
        self.stopped = sample.finish_reason == "stop"


def _run(
    llm: LLM,
    completions: list[Completion],
    params: SamplingParams,
    adapter: str | None,
    *,
    quiet: bool,
) -> None:
    """Complete all prompts; print one alone token by token, or several when complete."""
    alone, out = len(completions) == 1, console()
    streams = alone and not quiet
    prompts = [{"prompt_token_ids": each.prompt_ids, "adapter": adapter} for each in completions]
    outputs = llm.serve(prompts, params, every_token=streams)
    with ExitStack() as stack:
        show = stack.enter_context(working("computing prompts"))
        for count, (index, output) in enumerate(outputs, 1):
            completion = completions[index]
            if streams:
                stack.close()  # the live line ends where the text begins
            begun, before = bool(completion.ids), len(completion.shown)
            completion.update(output)
            if streams and not begun and completion.ids:
                out.print(completion.prompt or "", style="bold", end="")
            if completion.error:
                which = "" if alone else f"prompt {index + 1}: "
                complain(error_text(f"{which}{completion.error}"))
            elif streams:
                print(completion.shown[before:], end="", flush=True)
            elif not quiet:
                out.print(f"[{index + 1}] ", style="dim", end="")
                out.print(completion.prompt or "", style="bold", end="")
                print(completion.shown, flush=True)
            show(f"{count} of {plural(len(completions), 'prompt')} complete")
    if alone and completions[0].ids and not quiet:
        print(flush=True)


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(token) for token in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of token ids such as 1,2,3", param_hint="--prompt-ids"
        ) from None
