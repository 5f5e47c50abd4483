"""The commands under one name, and what their exit codes mean."""

from __future__ import annotations

import importlib.metadata
import io
import os
import platform
import sys
import threading
from collections.abc import Sequence
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
from vllm_module.cli.options import EXAMPLES, UsageError
from vllm_module.cli.output import REFUSALS, printable
from vllm_module.cli.ranks import is_first_rank

OK, REFUSED, USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

# Plain help: panels would be drawn into pipes, and cut at their width.
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted, 141 pipe closed.",
)
for command in (inspect, plan, load, generate, chat, bench, demo):
    app.command(epilog=EXAMPLES[command.__name__])(command)


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
    """Look at a checkpoint, plan, load and run it: the module tree loads itself."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    What the user can mend is one message on standard error; a bug of ours keeps its traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks ✓ still gets the rest
            stream.reconfigure(errors="replace")
    try:
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has had enough
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
        _leave_running_ranks()
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except UsageError as error:
        _show_usage_error(error)
        return USAGE
    except REFUSALS as error:
        print(f"error: {printable(str(error) or type(error).__name__)}", file=sys.stderr)
        return REFUSED
    return OK


def _show_usage_error(error: Exception) -> None:
    message = error.format_message()  # type: ignore[attr-defined]  # it has one, by whatever name
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
    elif is_first_rank():  # the others have the same arguments
        hint = f"\nTry: {context.command_path} --help" if context else ""
        print(f"error: {printable(message)}{hint}", file=sys.stderr)


def _leave_running_ranks() -> None:
    """End the process at once if ranks still run in threads, which Python would wait for."""
    others = [t for t in threading.enumerate() if t is not threading.main_thread()]
    if any(thread.name.startswith("rank ") and not thread.daemon for thread in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
