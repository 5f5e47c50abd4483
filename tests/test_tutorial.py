"""The tutorial's files and commands are run, in their order."""

from __future__ import annotations

import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from vllm_module.build import registry
from vllm_module.cli import main
from vllm_module.testing import LAWS

TUTORIAL = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"```(\w+)(?: title=\"([\w.]+)\")?\n(.*?)```", TUTORIAL, re.DOTALL)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Restore what the training script sets for the process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


settings.register_profile("tutorial", settings.get_profile("ci"), max_examples=4)


def run(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command in this process, which has imported torch already; return its output."""
    echoed, _, command = line.rpartition(" | ")
    if echoed:
        text = shlex.split(echoed)[1]
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{text}\n"))
    program, *arguments = shlex.split(command)
    if program == "python":
        runpy.run_path(arguments[0], run_name="__main__")
    elif program == "pytest":
        monkeypatch.syspath_prepend(".")
        keeps = runpy.run_path(arguments[-1])["test_gpt_keeps_the_law"]
        settings.load_profile("tutorial")
        for law in LAWS:
            keeps(law)
        settings.load_profile("ci")
        return f"{len(LAWS)} passed"
    else:
        assert main(arguments) == 0
    return capsys.readouterr().out


def test_the_tutorial_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command succeeds in the folder of the files above it, and prints what is shown."""
    monkeypatch.chdir(tmp_path)
    # Replaced: what a process registers stays, because no user needs to take it back.
    monkeypatch.setattr(registry, "registered", registry.Registrations())
    for language, title, text in BLOCKS:
        if title:
            with Path(title).open("a") as file:
                file.write(text)
        elif language == "console":
            output = ""
            for line in text.splitlines():
                if line.startswith("$ "):
                    output = run(line[2:], monkeypatch, capsys)
                else:
                    assert line in output, f"{line!r} is not in {output!r}"


def test_the_tutorials_claims_about_size() -> None:
    """The model's file is as long as the tutorial says."""
    length = sum(len(text.splitlines()) for _, title, text in BLOCKS if title == "gpt.py")
    assert 80 < length < 90
