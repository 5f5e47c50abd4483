"""``--model-code``: a file that fails is one message, and its exit is no success."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_module.build import registry
from vllm_module.weights import source

Run = Callable[..., Any]

MODEL = """import sys
from vllm_module.models.qwen3 import Qwen3ForCausalLM as Base
from vllm_module.build.registry import register_model
from vllm_module.weights.source import Folder, register_source

class Qwen3ForCausalLM(Base):
    """
CODE = {
    "exits": ("config_class = sys.exit(0)", "fails in line 7: SystemExit: 0"),
    "exits when built": ("def __init__(self, _): sys.exit(0)", "fails in line 7: SystemExit: 0"),
    "fails when built": ("def __init__(self, _): 1 / 0", "fails in line 7: ZeroDivisionError"),
    "a wrong configuration": (
        "config_class = dict",
        "should be a subclass of HFConfig, got <class",
    ),
    "no configuration": ("config_class = None", "should be a subclass of HFConfig, got None"),
    "another class": (
        "pass\nregister_model('Qwen3ForCausalLM', 'os:path')",
        "should be a subclass of vLLMModule",
    ),
}


@pytest.fixture(autouse=True)
def _registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a file registers: the registries belong to the process."""
    # Replaced: what a process registers stays, because no user needs to take it back.
    monkeypatch.setattr(registry, "registered", registry.Registrations())
    monkeypatch.setattr(registry, "registered_sources", sources := {})
    monkeypatch.setattr(source, "registered_sources", sources)
    yield
    registry._from_files.clear()


@pytest.mark.parametrize("command", ["plan", "load", "generate"])
@pytest.mark.parametrize(("body", "message"), CODE.values(), ids=CODE)
def test_a_file_that_fails_is_refused(
    run: Run, folder: Path, tmp_path: Path, command: str, body: str, message: str
) -> None:
    """One message says what failed where, and the exit code is 1."""
    (tmp_path / "mine.py").write_text(MODEL + body)
    prompt = ["--prompt", "x"] if command == "generate" else []
    result = run(command, folder, "--model-code", tmp_path / "mine.py", *prompt)
    assert result.code == 1
    assert result.err.startswith("error: ")
    assert message in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def forward(self, a, b): pass", "of {file} fails: TypeError: "),
        ("def forward(self, *_): sys.exit(0)", "of {file} fails in line 7: SystemExit: 0"),
        ("compute_logits = None", "cannot generate: expected a method compute_logits(hidden)"),
    ],
)
def test_a_model_that_fails_as_it_runs_is_refused(
    run: Run, with_text: Path, tmp_path: Path, body: str, message: str
) -> None:
    """A forward pass is the user's, and so is its failure."""
    file = tmp_path / "mine.py"
    file.write_text(MODEL + body)
    result = run("generate", with_text, "--model-code", file, "--prompt", "x", "--device", "cpu")
    assert result.code == 1
    assert message.format(file=file) in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("command", ["plan", "generate"])
def test_a_source_that_exits_is_no_success(
    run: Run, folder: Path, tmp_path: Path, command: str
) -> None:
    """``sys.exit`` in any code of the user's is a failure of the command."""
    (tmp_path / "mine.py").write_text(f"{MODEL}pass\nregister_source('s3', sys.exit)")
    prompt = ["--prompt", "x"] if command == "generate" else []
    result = run(command, "s3://x", "--model-code", tmp_path / "mine.py", *prompt)
    assert result.code == 1
    assert "the opener of s3://x fails: SystemExit: s3://x" in result.err


def test_a_chat_finds_the_source_that_the_file_registers(
    run: Run, with_text: Path, tmp_path: Path
) -> None:
    """The template is looked for in the source's folder, as the model is."""
    file = tmp_path / "mine.py"
    opener = f"lambda url: Folder(Path({str(with_text)!r}))"
    imports = "from pathlib import Path\nfrom vllm_module.weights.source import Folder"
    file.write_text(f"{MODEL}pass\n{imports}\nregister_source('near', {opener})")
    result = run("chat", "near://x", "--model-code", file, "--device", "cpu")
    assert result.code == 1
    assert f"{with_text} has no chat template" in result.err
