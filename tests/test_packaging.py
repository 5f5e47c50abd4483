"""The wheel has every module and no top-level name but ``vllm_module``; the sdist has the rest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FOLDERS = ("design", "docs", "examples", "kernels", "models", "tests", "vllm_module")
DATA = {  # in the wheel, beside the modules
    "vllm_module/cli/pictures/plan.html",
    "vllm_module/cli/pictures/layout.js",
    "vllm_module/cli/pictures/plan.js",
    "vllm_module/kernels/choices.json",
    "vllm_module/py.typed",
    "vllm_module/server/page.html",
}
FILES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "mkdocs.yml",
)

# Run beside the unpacked wheel, whose folder is the argument.
PROBE = """
import sys
from importlib.machinery import PathFinder

wheel = sys.argv[1]
import vllm_module.kernels.attention.paged_attention
import vllm_module.models.qwen3

for name, module in sorted(sys.modules.items()):
    if name.split(".")[0] == "vllm_module" and getattr(module, "__file__", None):
        assert module.__file__.startswith(wheel), f"{name} came from {module.__file__}"
for name in ("kernels", "models", "tests", "design"):
    assert PathFinder.find_spec(name, [wheel]) is None, f"the wheel has a top-level {name!r}"

# Imports Hugging Face's own `kernels` if there is one.
from transformers import Qwen3ForCausalLM
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkout without caches and old builds."""
    copy = tmp_path_factory.mktemp("tree")
    stale = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=stale)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, copy)
    return copy


@pytest.fixture(scope="module")
def built(tree: Path) -> Path:
    """Build an sdist, a wheel from it, and a wheel from the tree, without the network."""
    output = tree.parent / "built"
    for arguments in (["--outdir", output], ["--outdir", output / "direct", "--wheel"]):
        command = [sys.executable, "-m", "build", "--no-isolation", *arguments, tree]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return output


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    """Unpack the wheel."""
    (archive,) = built.glob("*.whl")
    folder = built / "unpacked"
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    return folder


def modules() -> set[str]:
    """Return every module's path below site-packages."""
    files = {
        (Path(package) / path.relative_to(ROOT / folder)).as_posix()
        for folder, package in (
            ("vllm_module", "vllm_module"),
            ("models", "vllm_module/models"),
            ("kernels", "vllm_module/kernels"),
        )
        for path in (ROOT / folder).rglob("*.py")
    }
    assert "vllm_module/models/qwen3.py" in files
    return files


def setuptools_settings() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return settings["tool"]["setuptools"]


def test_every_package_is_listed() -> None:
    """pyproject.toml names exactly the folders that have a module."""
    folders = {Path(path).parent.as_posix().replace("/", ".") for path in modules()}
    assert sorted(folders) == setuptools_settings()["packages"]


@pytest.mark.parametrize("folder", [".", "direct"])
def test_wheel_holds_exactly_our_modules(built: Path, folder: str) -> None:
    """The wheel has every module, the data files and metadata, and nothing else."""
    (archive,) = (built / folder).glob("*.whl")
    with zipfile.ZipFile(archive) as file:
        ours = {name for name in file.namelist() if ".dist-info/" not in name}
    assert ours == modules() | DATA


def test_sdist_holds_tests_notes_and_instructions(built: Path, tree: Path) -> None:
    """The sdist has what a reader or packager needs, without the two links."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    folders = [folder for folder in FOLDERS if folder != "vllm_module"]
    kept = {
        path.relative_to(tree).as_posix()
        for folder in folders
        for path in (tree / folder).rglob("*")
        if path.is_file()
    }
    assert kept | set(FILES) <= names
    assert not {"vllm_module/models", "vllm_module/kernels"} & names


def test_wheel_imports_beside_transformers(
    wheel: Path,
    run_with_torch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """The installed package has one top-level name, and transformers works beside it."""
    environment = os.environ | {"PYTHONPATH": str(wheel), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_with_torch(PROBE, str(wheel), modules=wheel, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
