from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from vllm_module.cli.generation import Completion, Job
from vllm_module.cli.options import (
    DeviceOption,
    DType,
    DTypeOption,
    JsonOption,
    QuantizationOption,
    SizeOption,
    Source,
    UsageError,
    model_config,
    torch_device,
)
from vllm_module.cli.output import print_json
from vllm_module.cli.ranks import (
    TIMEOUT,
    TimeoutOption,
    find_alike,
    is_first_rank,
    on_every_rank,
    process_group,
    rank_device,
    tensor_parallel_size,
    under_torchrun,
)
from vllm_module.distributed import run_ranks


def generate(
    source: Source,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="Text to go on from; may be repeated."),
    ] = None,
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option("--prompt-ids", metavar="1,2,3", help="Token ids instead, tokenizer or not."),
    ] = None,
    tp: SizeOption = None,
    max_new_tokens: Annotated[
        int,
        typer.Option("--max-new-tokens", min=1, metavar="K", help="Most tokens for each prompt."),
    ] = 64,
    dtype: DTypeOption = DType.auto,
    quantization: QuantizationOption = None,
    device: DeviceOption = "auto",
    timeout: TimeoutOption = TIMEOUT,
    as_json: JsonOption = False,
) -> None:
    """Go on from prompts, printing text as it comes.

    Decoding is greedy. The ranks run in threads of this process; under torchrun, each process
    is one. Several prompts make one batch, each printed when it is done. Token ids in give
    token ids out.

    JSON keys: checkpoint; dtype; device; tensor_parallel_size; simulated; seconds (without
    loading); completions, one a prompt (prompt or null, prompt_ids, text or null, ids, stopped:
    whether a stop token ended it).
    """
    if bool(prompts) == bool(prompt_ids):
        raise UsageError("give --prompt or --prompt-ids, one of the two")
    completions = [Completion(_check_text(text), []) for text in prompts or ()]
    completions += [Completion(None, _parse_ids(ids)) for ids in prompt_ids or ()]
    tp_size = tensor_parallel_size(tp)
    target = rank_device(torch_device(device))
    asked = model_config(source, dtype, quantization)
    quiet = as_json or not is_first_rank()
    if under_torchrun():
        with process_group(target):
            find_alike(asked, timeout)

            def prepare() -> Job:
                return Job.prepare(asked, completions, max_new_tokens, quiet)

            job = _run_own_rank(prepare, target, timeout)
    else:
        job = Job.prepare(asked, completions, max_new_tokens, quiet)
        run_ranks(tp_size, lambda rank: job.run(job.begin(target, rank), printing=rank == 0))
    if as_json and is_first_rank():
        print_json(
            {
                "checkpoint": str(job.found.folder),
                "dtype": job.found.dtype,
                "device": target,
                "tensor_parallel_size": tp_size,
                "simulated": not under_torchrun(),
                "seconds": job.seconds,
                "completions": completions,
            }
        )


def _run_own_rank(prepare: Callable[[], Job], device: torch.device, timeout: float) -> Job:
    begun = []

    def begin() -> None:
        job = prepare()
        begun.append((job, job.begin(device, dist.get_rank())))

    on_every_rank(begin, timeout)
    job, steps = begun[0]
    job.run(steps, printing=True)
    return job


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the shell that are no text in its encoding
        raise typer.BadParameter(f"{text!a} is no text", param_hint="--prompt") from None
    return text


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(token) for token in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of token ids such as 1,2,3", param_hint="--prompt-ids"
        ) from None
