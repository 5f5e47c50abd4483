"""The ``vllm-module`` program: its commands, their errors and exit codes."""

from __future__ import annotations

import importlib.metadata
import io
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
import typer

from vllm_module.cli.commands.bench import bench
from vllm_module.cli.commands.chat import chat
from vllm_module.cli.commands.generate import generate
from vllm_module.cli.commands.inspect import inspect
from vllm_module.cli.commands.load import load
from vllm_module.cli.commands.plan import plan
from vllm_module.cli.demo.command import demo
from vllm_module.cli.options import UsageError
from vllm_module.cli.output import REFUSALS, describe_refusal, printable_lines
from vllm_module.cli.ranks import is_first_rank

OK, REFUSED, USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

EXAMPLES: dict[Callable[..., None], str] = {
    inspect: "vllm-module inspect Qwen/Qwen3-0.6B --all",
    plan: "vllm-module plan ./Qwen3-8B --tp 4",
    load: "vllm-module load ./Qwen3-8B --tp 2 --dtype bfloat16, or in one process a rank: "
    "torchrun --nproc-per-node 2 -m vllm_module.cli load ./Qwen3-8B",
    generate: 'vllm-module generate ./Qwen3-0.6B --tp 2 --prompt "The sky is"',
    chat: "vllm-module chat ./Qwen3-0.6B --temperature 0.7 --top-p 0.9",
    bench: "vllm-module bench ./Qwen3-0.6B --input-len 512 --concurrency 32",
    demo: "vllm-module demo --keep ./demo-checkpoint",
}

# Help without rich's panels, whose frames and cut lines would end up in pipes.
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success, 1 refused or failed, 2 wrong usage, 130 interrupted, "
    "141 pipe closed.",
)
for command, example in EXAMPLES.items():
    app.command(epilog=f"Example: {example}")(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(
            f"vllm-module {importlib.metadata.version('vllm-module')} "
            f"(torch {torch.__version__}, Python {platform.python_version()})"
        )
        raise typer.Exit


@app.callback()
def vllm_module(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Inspect a checkpoint, plan how ranks load it, load it and run it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    An error that the user can correct is one message on standard error. A bug here keeps its
    traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may have no ✓
            stream.reconfigure(errors="replace")
    try:
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return code


def _run(arguments: list[str]) -> int:
    try:
        command = typer.main.get_command(app)
        with command.make_context("vllm-module", arguments) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("\nerror: interrupted", file=sys.stderr)
        _exit_if_ranks_run()
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except UsageError as error:
        _show_usage_error(error)
        return USAGE
    except REFUSALS as error:
        print(f"error: {printable_lines(describe_refusal(error))}", file=sys.stderr)
        return REFUSED
    return OK


def _show_usage_error(error: Exception) -> None:
    message = error.format_message()  # type: ignore[attr-defined]  # of click's class, or typer's
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
    elif is_first_rank():  # every rank has the same arguments
        hint = f"\nTry: {context.command_path} --help" if context else ""
        print(f"error: {printable_lines(message)}{hint}", file=sys.stderr)


def _exit_if_ranks_run() -> None:
    """End the process at once if ranks still run in threads: Python would wait for the threads."""
    if any(t.name.startswith("rank ") and not t.daemon for t in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
