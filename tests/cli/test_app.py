"""What all commands share: help, exit codes, errors, pipes and encodings."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from vllm_module.cli import main, rank_load, rank_plan
from vllm_module.cli.choices import DType
from vllm_module.cli.options import PrecisionOptions, RankOptions, UsageError, expanded
from vllm_module.cli.output import by_number, size

Run = Callable[..., Any]
COMMANDS = ("inspect", "plan", "load", "generate", "chat", "bench", "demo")


def test_version(run: Run) -> None:
    """The version is the installed one."""
    result = run("--version")
    assert result.code == 0
    assert result.out.startswith(f"vllm-module {importlib.metadata.version('vllm-module')} (torch ")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_the_keys_of_json(run: Run, command: str) -> None:
    """Each command's help has an example, and says what --json prints."""
    result = run(command, "--help")
    assert result.code == 0
    assert f"Example: vllm-module {command}" in " ".join(result.out.split())
    assert (
        ("JSON keys:" in result.out)
        == ("--json" in result.out)
        == (command not in ("chat", "demo"))
    )
    assert command in run("--help").out


def test_json_keys_are_documented(run: Run, folder: Path) -> None:
    """The help names every top-level key of the JSON."""
    for command, options in (
        ("inspect", []),
        ("plan", []),
        ("load", []),
        ("generate", ["--prompt-ids", "1", "--max-new-tokens", 2]),
        ("bench", ["--input-len", 4, "--output-len", 2, "--num-prompts", 1]),
    ):
        text = run(command, "--help").out
        printed = run(command, folder, *options, "--json").json
        assert [key for key in printed if key not in text] == []


def test_wrong_usage_is_2(run: Run, folder: Path) -> None:
    """The exit code is 2 for unknown commands, missing arguments and invalid values."""
    for arguments in (
        ["frob"],
        ["plan"],
        ["plan", folder, "--tp", 0],
        ["load", folder, "--dtype", "i"],
    ):
        result = run(*arguments)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("error: ")
        assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--tp", "x", "a valid integer"),
        ("--tp", "0", "greater than or equal to 1"),
        ("--timeout", "x", "a valid number"),
    ],
)
def test_a_number_that_is_none_is_said_to_be_so(
    run: Run, folder: Path, option: str, value: str, wanted: str
) -> None:
    """The words are those of the other options, and not of the library that reads them."""
    result = run("load", folder, option, value)
    assert result.code == 2
    assert result.err.splitlines()[0] == (
        f"error: Invalid value for '{option}': should be {wanted}"
    )


@pytest.mark.parametrize("command", ["plan", "load", "generate", "bench", "demo"])
def test_checkpoints_that_cannot_be_used_are_1(
    run: Run, edited: Callable[..., Path], tmp_path: Path, command: str
) -> None:
    """Every command prints one whole message on standard error, and the exit code is 1."""
    prompt = ["--prompt-ids", "1"] if command == "generate" else []

    def refused(path: object) -> str:
        source = ["--checkpoint", path] if command == "demo" else [path]
        result = run(command, *source, *prompt)
        assert result.code == 1
        (begin,) = [i for i in range(len(result.err)) if result.err.startswith("error: ", i)]
        assert result.err[:begin] in ("", f"loading {path}\n")
        assert "Traceback" not in result.err
        return str(result.err)

    assert "/not/there does not exist" in refused("/not/there")
    no_config = edited()
    (no_config / "config.json").unlink()
    assert "has no config.json" in refused(no_config)
    unknown = refused(edited(architectures=["UnknownForCausalLM"]))
    assert "no model here implements UnknownForCausalLM; supported: " in unknown
    missing = refused(edited(lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight")))
    assert "model.layers.2.mlp.up_proj.weight: expected shape [48, 32]" in missing
    cut = edited()
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[:-10])
    assert "was cut off" in refused(cut)


@pytest.mark.parametrize("command", ["plan", "load"])
def test_a_size_that_does_not_divide_is_1(run: Run, folder: Path, command: str) -> None:
    """The exit code is 1 and the message has the numbers."""
    result = run(command, folder, "--tp", 3)
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        "error: 4 attention heads cannot be shared evenly by 3 tensor-parallel ranks: choose a "
        "size that divides them\n"
    )


def test_names_of_vllm_are_understood(run: Run, folder: Path) -> None:
    """As those of ours, and help shows one name of each option."""
    ours = run("plan", folder, "--tp", 2, "--pp", 2, "--json")
    names = "--tensor-parallel-size", 2, "--pipeline-parallel-size=2"
    assert run("plan", folder, *names, "--json") == ours
    assert ours[0] == 0
    assert run("inspect", folder, "--tensor-parallel-size", 2)[0] == 2  # it has no such option
    assert "tensor-parallel-size" not in run("plan", "--help")[1]


def test_a_bug_keeps_its_traceback(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only refusals are caught."""

    def broken(*_: object) -> None:
        raise ValueError("ours")

    # A bug of ours: no checkpoint is known that causes one.
    monkeypatch.setattr(rank_plan, "plan_ranks", broken)
    with pytest.raises(ValueError, match="ours"):
        run("plan", folder)


def test_an_interruption_is_130(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C prints a message and no traceback; the exit code is 130."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    # In the middle of the load: a signal from outside could come before or after it.
    monkeypatch.setattr(rank_load, "load_rank", interrupted)
    result = run("load", folder)
    assert (result.code, result.out, result.err) == (130, "", "error: interrupted\n")


def test_a_closed_pipe_ends_quietly(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `| head`, nothing is printed on standard error; the exit code is that of SIGPIPE."""
    for command in (["inspect", "--all"], ["plan", "--json"]):
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "w") as pipe:
            monkeypatch.setattr(sys, "stdout", pipe)
            assert main([*command, str(folder)]) == 128 + signal.SIGPIPE
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_a_terminal_that_lacks_a_character(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A character that the encoding lacks is replaced."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["load", str(folder), "--device", "nonsense"]) == 2
    stream.seek(0)
    assert "cuda:1 ? or auto" in stream.read()


def test_only_what_computes_imports_torch(folder: Path) -> None:
    """Help, the version, usage errors and inspect import no torch, which takes seconds."""
    commands = [
        (0, ["--help"]),
        (0, ["--version"]),
        *((0, [command, "--help"]) for command in COMMANDS),
        (2, []),
        (2, ["frob"]),
        *((2, [command, "--frob"]) for command in COMMANDS),
        *((2, [command]) for command in COMMANDS if command != "demo"),
        *((2, ["load", "x", "--device", device]) for device in ("xpu", "mps", "meta", "cuda:-1")),
        *((2, ["chat", "x", "--timeout", text]) for text in ("inf", "nan", "-1", "1e300", "a")),
        (2, ["plan", "x", "--dtype", "int4"]),
        (2, ["plan", "x", "--tp", "0"]),
        (2, ["load", "x", "--rank", "3"]),
        (2, ["generate", "x", "--prompt", "a", "--temperature", "-1"]),
        (2, ["generate", "x", "--prompt-ids", "a"]),
        (2, ["bench", "x", "--concurrency", "0"]),
        (2, ["demo", "--keep", "x", "--checkpoint", "x"]),
        (1, ["inspect", "/not/there"]),
        (0, ["inspect", str(folder)]),
        (0, ["inspect", str(folder), "--all"]),
        (0, ["inspect", str(folder), "--json"]),
    ]
    code = """
import json, sys
from vllm_module.cli import main
for expected, arguments in json.load(sys.stdin):
    code = main(arguments)
    assert code == expected, (arguments, code)
    assert "torch" not in sys.modules, arguments
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(commands), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_the_module_and_the_installed_script_are_one_program() -> None:
    """Both end with main(), whose import imports the standard library only."""
    code = "import sys; before = set(sys.modules); from vllm_module.cli import main; "
    code += "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = [name for name in ast.literal_eval(done.stdout) if name not in sys.stdlib_module_names]
    assert ours == ["vllm_module"]
    as_module = [sys.executable, "-X", "importtime", "-m", "vllm_module.cli", "--version"]
    done = subprocess.run(as_module, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("vllm-module ")
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="vllm-module")
    assert script.value == "vllm_module.cli:main"


def test_sizes() -> None:
    """A size has three digits and a decimal unit."""
    written = [size(n) for n in (0, 999, 1000, 1234567, 999_600, 2.1e9, 4e15)]
    assert written == ["0 B", "999 B", "1 kB", "1.23 MB", "1 MB", "2.1 GB", "4e+03 TB"]


def test_names_are_sorted_by_number() -> None:
    """Layer 2 comes before layer 10."""
    names = ["layers.10.w", "layers.2.w", "layers.2.a", "embed.w"]
    assert sorted(names, key=by_number) == ["embed.w", "layers.2.a", "layers.2.w", "layers.10.w"]


@pytest.mark.parametrize("command", ["load", "plan", "generate", "inspect"])
def test_a_path_without_a_folder_is_refused_before_torch_is_imported(command: str) -> None:
    """The import takes seconds; a misspelt path need not wait for it."""
    script = (
        "import sys; from vllm_module.cli.entry import main; "
        f"code = main([{command!r}, '/not/there']); print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "False"]
    assert "the folder /not/there does not exist; check the path" in done.stderr


def test_shared_options_reach_a_command_as_objects() -> None:
    """Those of a class become one object, with defaults for those left out; others stay alone."""
    received: list[object] = []

    def command(*, ranks: RankOptions, number: int = 3, precision: PrecisionOptions) -> None:
        received.extend([ranks, number, precision])

    app = typer.Typer(add_completion=False)
    app.command()(expanded(command))
    app(["--tp", "2", "--dtype", "float16"], standalone_mode=False)
    assert received == [RankOptions(2, False), 3, PrecisionOptions(DType.float16, None)]
    with pytest.raises(UsageError, match="No such option"):
        app(["--ranks", "2"], standalone_mode=False)
