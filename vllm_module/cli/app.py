"""The ``vllm-module`` program: its commands, their errors and exit codes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Annotated

import typer

from vllm_module.cli.commands.bench import bench
from vllm_module.cli.commands.chat import chat
from vllm_module.cli.commands.check import check
from vllm_module.cli.commands.convert import convert
from vllm_module.cli.commands.digest import digest
from vllm_module.cli.commands.generate import generate
from vllm_module.cli.commands.inspect import inspect
from vllm_module.cli.commands.load import load
from vllm_module.cli.commands.plan import plan
from vllm_module.cli.commands.serve import serve
from vllm_module.cli.commands.shard import shard
from vllm_module.cli.demo.command import demo
from vllm_module.cli.options import UsageError, expanded
from vllm_module.cli.output import describe_refusal, error_text, is_refusal
from vllm_module.cli.ranks import is_first_rank
from vllm_module.cli.streams import OK, REFUSED, USAGE, OutputError, complain

EXAMPLES: dict[Callable[..., None], str] = {
    inspect: "vllm-module inspect Qwen/Qwen3-0.6B --all",
    plan: "vllm-module plan ./Qwen3-8B --tp 4",
    load: "vllm-module load ./Qwen3-8B --tp 2 --dtype bfloat16, or in one process a rank: "
    "torchrun --nproc-per-node 2 -m vllm_module.cli load ./Qwen3-8B",
    generate: 'vllm-module generate ./Qwen3-0.6B --tp 2 --prompt "The sky is"',
    chat: "vllm-module chat ./Qwen3-0.6B --temperature 0.7 --top-p 0.9",
    serve: "vllm-module serve ./Qwen3-0.6B --port 8000",
    bench: "vllm-module bench ./Qwen3-0.6B --input-len 512 --concurrency 32",
    check: "vllm-module check ./Qwen3-0.6B --dtype float32 --tp 2",
    shard: "vllm-module shard ./Qwen3-8B --tp 8 --quantization fp8 --out ./Qwen3-8B-fp8-tp8",
    convert: "vllm-module convert ./Qwen3-8B --quantization fp8_per_block --out ./Qwen3-8B-fp8",
    digest: "vllm-module digest ./Qwen3-8B --json",
    demo: "vllm-module demo --keep ./demo-checkpoint",
}

# vLLM's names of options, which are understood, too.
_NAMES_OF_VLLM = {
    "tensor-parallel-size": "tp", "pipeline-parallel-size": "pp", "max-tokens": "max-new-tokens",
}  # fmt: skip

# Help without rich's panels, whose frames and cut lines would end up in pipes.
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: _NAMES_OF_VLLM.get(token, token),
    },
    epilog="Exit codes: 0 success, 1 refused or failed, 2 wrong usage, 130 interrupted, "
    "141 pipe closed.",
)
for command, example in EXAMPLES.items():
    app.command(epilog=f"Example: {example}")(expanded(command))


def _print_version(wanted: bool) -> None:
    if wanted:
        # Imported here because no command needs them.
        import platform
        from importlib.metadata import version as version_of

        from vllm_module.base.version import __version__

        print(
            f"vllm-module {__version__} "
            f"(torch {version_of('torch')}, Python {platform.python_version()})"
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


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; print an error that the user can correct."""
    try:
        command = typer.main.get_command(app)
        with command.make_context("vllm-module", [*arguments], obj=arguments) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except (BrokenPipeError, OutputError):
        raise
    except SystemExit as error:  # no command exits so: a user's model or source did
        complain(error_text(f"a model or a source of your own called sys.exit({error.code!r})"))
        return REFUSED
    except UsageError as error:
        _show_usage_error(error)
        return USAGE
    except Exception as error:
        if not is_refusal(error):
            raise
        complain(error_text(describe_refusal(error)))
        return REFUSED
    return OK


def _show_usage_error(error: Exception) -> None:
    message = error.format_message()  # type: ignore[attr-defined]  # of click's class, or typer's
    # Words of pydantic's, by which typer reads values.
    message = message.replace(": Value error, ", ": ", 1)
    message = re.sub(r": Input (should .*?)(, unable to parse .*)?$", r": \1", message)
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        complain(message)
    elif is_first_rank():  # every rank has the same arguments
        hint = f"\nTry: {context.command_path} --help" if context else ""
        complain(error_text(f"{message}{_closest(message)}{hint}"))


def _closest(message: str) -> str:
    """Return a question about the choice that is most like the value that a message refuses."""
    found = re.search(r"'([^']*)' is not one of (.*)", message, re.DOTALL)
    if found is None:
        return ""
    # Half of the letters are enough: fp16 is to find float16.
    choices = re.findall(r"'([^']+)'", found[2])
    close = difflib.get_close_matches(found[1][:200].lower(), choices, 1, 0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
