"""The Dockerfiles, read as text: what they copy, install and start is what this repository has."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from vllm_module import AsyncLLM
from vllm_module.cli import main

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted((ROOT / "examples/docker").glob("Dockerfile.*"))
KNOWN = {
    *("FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"),
}


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the name and the arguments of each instruction; lines that go on are joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in pairs]


def stages(path: Path) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for name, rest in instructions(path):
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest))
    return found


def of(stage: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for each, rest in stage if each == name]


def copied(stage: list[tuple[str, str]]) -> list[str]:
    return [source for rest in of(stage, "COPY") for source in shlex.split(rest)[:-1]]


def health_command(path: Path) -> list[str]:
    (rest,) = of(stages(path)[1], "HEALTHCHECK")
    command: list[str] = json.loads(rest.partition("CMD ")[2])
    return command


def test_there_are_two() -> None:
    assert [path.suffix for path in FILES] == [".cpu", ".cuda"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix)
def test_what_is_installed(path: Path) -> None:
    """The first stage takes torch and the extras of pyproject.toml, as constraints.txt has them."""
    build, _ = stages(path)
    assert {name for name, _ in instructions(path)} <= KNOWN
    sources = copied(build)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    installs = [rest for rest in of(build, "RUN") if "pip install" in rest]
    for install in installs:
        assert install.startswith("pip install -c constraints.txt ")
        assert "constraints.txt" in sources
    torch, ours = (shlex.split(install)[4:] for install in installs)
    index = ["--index-url", "https://download.pytorch.org/whl/cpu"]
    assert torch == [*(index if path.suffix == ".cpu" else []), "torch"]
    match = re.fullmatch(r"\.\[(.+)\]", *ours)
    assert match is not None
    extras = set(match.group(1).split(","))
    assert extras <= PROJECT["optional-dependencies"].keys()
    assert "serve" in extras
    assert ("cpu" in extras) == (path.suffix == ".cpu")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix)
def test_what_is_started(
    path: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is root; the entry point is a script of ours with options that it has."""
    build, final = stages(path)
    python = [rest.split()[0] for stage in (build, final) for rest in of(stage, "FROM")]
    assert python[0] == python[1]
    version = re.fullmatch(r"python:(3\.\d+)-slim", python[0])
    assert version is not None
    assert f"Programming Language :: Python :: {version.group(1)}" in PROJECT["classifiers"]
    (user,) = of(final, "USER")
    assert int(user) > 0
    assert any(f"useradd --uid {user} " in rest for rest in of(final, "RUN"))
    names = [name for name, _ in final]
    assert not {"RUN", "COPY"} & {*names[names.index("USER") :]}
    (entry,) = of(final, "ENTRYPOINT")
    script, *arguments = json.loads(entry)
    assert script in PROJECT["scripts"]
    port = arguments[arguments.index("--port") + 1]
    assert of(final, "EXPOSE") == [port]
    assert f"'127.0.0.1', {port}," in health_command(path)[2]
    # Refused before anything is loaded, but only after all options of the entry point are read.
    monkeypatch.delenv("VLLM_MODULE_ADMIN_KEY", raising=False)
    assert main([*arguments, str(folder), "--weights-port", "1"]) == 2
    assert "it needs an --admin-key" in capsys.readouterr().err


def test_the_wheel_needs_no_more_than_what_is_copied(tmp_path: Path) -> None:
    """Built from the copied files alone, it has each module and each data file."""
    first, second = (copied(stages(path)[0]) for path in FILES)
    assert first == second
    for source in first:
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, tmp_path / source, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(ROOT / source, tmp_path)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", "out", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "out").iterdir()
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    tracked = {
        path.relative_to(tmp_path).as_posix()
        for folder in ("vllm_module", "models", "kernels")
        for path in (tmp_path / folder).rglob("*")
        if path.is_file() and path.suffix != ".md"
    }
    ours = {re.sub("^(models|kernels)/", r"vllm_module/\1/", name) for name in tracked}
    assert names == ours


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.suffix)
def test_the_health_check(path: Path, start: Any, engine: Any) -> None:
    """It fails without a server and while the model loads, and passes when it is there."""
    with start(None) as server:
        program = health_command(path)[2].replace("8000", str(server.port))

        def status() -> int:
            command = [sys.executable, *health_command(path)[1:2], program]
            return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode

        assert status() == 1
        llm = AsyncLLM(engine())
        try:
            server.state.llm = llm
            assert status() == 0
        finally:
            llm.close()
    assert status() == 1
