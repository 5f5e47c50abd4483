"""What the package and its tests import is what pyproject.toml declares."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Modules that another distribution than the one of their name contains, or always brings along.
DISTRIBUTIONS = {
    "markupsafe": "jinja2",  # of whose interface Markup is a part
    "click": "typer",  # typer is built on it, and documents its classes as part of its interface
    "pydantic_core": "pydantic",  # pydantic documents its errors as pydantic_core's
    "h11": "uvicorn",  # whose protocol is built on it
    "filelock": "huggingface_hub",  # which locks its own downloads with it
    "tomllib": "tomli",
    "yaml": "pyyaml",
}
# Who may import what an extra brings. Outside of rooms that name their extra, only lazily.
EXTRAS = {
    ("vllm_module.testing", "hypothesis"): "testing",
    ("vllm_module.quantization.compressed_rules", "compressed_tensors"): "compressed-tensors",
    ("vllm_module.cli.comparison", "transformers"): "transformers",
    ("vllm_module.cli.comparison", "peft"): "peft",
    ("vllm_module.cli.demo.checks", "transformers"): "demo",
    ("vllm_module.build.registry", "transformers"): "transformers",
    ("vllm_module.runtime.text.code_tokenizer", "transformers"): "transformers",
    ("vllm_module.cli.pictures.plots", "matplotlib"): "plot",
    ("vllm_module.weights.stores.obstore_client", "obstore"): "stores",
    ("vllm_module.kernels.digest.compiled", "numba"): "digest",
    ("vllm_module.kernels.attention.compiled_attention", "numba"): "cpu",
    ("vllm_module.kernels.experts.compiled_routing", "numba"): "cpu",
    ("vllm_module.kernels.matmul.compiled_rows", "numba"): "cpu",
    ("vllm_module.kernels.recurrent.compiled_states", "numba"): "cpu",
    ("vllm_module.kernels.rows.compiled_few_rows", "numba"): "cpu",
    ("vllm_module.kernels.rows.compiled_vectors", "llvmlite"): "cpu",
    ("vllm_module.kernels.rows.compiled_vectors", "numba"): "cpu",
    ("vllm_module.kernels.matmul.kept_loops", "llvmlite"): "cpu",
    ("vllm_module.kernels.matmul.kept_loops", "numba"): "cpu",
    ("vllm_module.kernels.matmul.torch_threads", "llvmlite"): "cpu",
    ("vllm_module.kernels.matmul.torch_threads", "numba"): "cpu",
    ("vllm_module.runtime.sampling.grammar", "llguidance"): "structured-outputs",
    ("vllm_module.runtime.sampling.grammar_script", "llguidance"): "structured-outputs",
    ("vllm_module.runtime.ranks.ray_actors", "ray"): "ray",
    ("vllm_module.cooperative.nixl", "nixl"): "nixl",
    ("vllm_module.server", "starlette"): "serve",
    ("vllm_module.server", "uvicorn"): "serve",
    ("vllm_module.server.backends", "h11"): "serve",
    ("vllm_module.server.connection", "h11"): "serve",
}
# Benchmarks measure beside it where it is installed, and say so where it is not.
PEERS = {"llama-cpp", "runai-model-streamer", "runai-model-streamer-s3", "s3fs", "vllm"}
OF_EXAMPLES = {"datasets", "trl"}  # of one, which says what to install
# A script of tests/quantization runs in other interpreters, which have one of them each.
QUANTIZERS = {"auto-round", "auto-round-extension", "awq", "gptqmodel", "modelopt"}
# For type checkers only: mypy brings it.
TYPING_ONLY = {"typing_extensions"}


def distribution(requirement: str) -> str:
    """Return the name that a requirement or a top-level module belongs to, normalized."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", DISTRIBUTIONS.get(name, name)).lower()


def extra(name: str) -> set[str]:
    """Return the distributions of an extra, with those of the extras it names."""
    found = set()
    for requirement in PROJECT["optional-dependencies"][name]:
        if ours := re.match(r"vllm-module\[([\w,-]+)\]", requirement):
            found |= set().union(*map(extra, ours.group(1).split(",")))
        else:
            found.add(distribution(requirement))
    return found


CORE = {distribution(requirement) for requirement in PROJECT["dependencies"]}


@cache  # two tests ask for those of the package
def third_party(path: Path) -> list[tuple[str, int, str]]:
    """Return the top-level name of each foreign import, its line, and when it happens."""
    return list(_third_party(path))


def _third_party(path: Path) -> Iterator[tuple[str, int, str]]:
    source = path.read_bytes()
    for_types = b"TYPE_CHECKING" in source  # few files have it, and writing conditions out is slow
    # An import is a statement, and only a call of import_module stands inside of an expression.
    inside = (
        ast.AST if b"import_module" in source else (ast.stmt, ast.ExceptHandler, ast.match_case)
    )
    waiting: list[tuple[ast.AST, str]] = [(ast.parse(source), "at import")]
    while waiting:
        node, when = waiting.pop()
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif (
            isinstance(node, ast.Call)
            and "import_module" in (getattr(node.func, "attr", ""), getattr(node.func, "id", ""))
            and isinstance(node.args[0], ast.Constant)
        ):
            names = [str(node.args[0].value)]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names | {"vllm_module", "tomllib"}:
                yield top, getattr(node, "lineno", 0), when
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = "lazily"
        if for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            when = "for type checkers"
        children = ast.iter_child_nodes(node)
        waiting.extend((child, when) for child in children if isinstance(child, inside))


def package_problems(root: Path) -> list[str]:
    """Return a line for each import of the package that nothing installs."""
    found = []
    for folder, package in (
        ("vllm_module", "vllm_module"),
        ("models", "vllm_module.models"),
        ("kernels", "vllm_module.kernels"),
    ):
        for path in sorted((root / folder).rglob("*.py")):
            inside = path.relative_to(root / folder).with_suffix("").parts
            module = ".".join((package, *inside)).removesuffix(".__init__")
            for name, line, when in third_party(path):
                if distribution(name) in CORE:
                    continue
                if name in TYPING_ONLY and when == "for type checkers":
                    continue
                where = f"{path.relative_to(root)}:{line}: {name}"
                extras = [
                    declared
                    for (importer, imported), declared in EXTRAS.items()
                    if imported == name and f"{module}.".startswith(f"{importer}.")
                ]
                if not extras:
                    found.append(f"{where} is imported and pyproject.toml does not declare it")
                elif distribution(name) not in extra(extras[0]):
                    found.append(f"{where} is not in the extra {extras[0]!r}")
                elif when == "at import" and extras[0] not in ("testing", "serve"):
                    found.append(f"{where} is of an extra: import it in the function that needs it")
    return found


def test_what_the_package_imports_is_declared() -> None:
    """Each import of another project is a core dependency, or an extra's and lazy."""
    assert package_problems(ROOT) == []


def test_what_is_declared_is_imported() -> None:
    """Each core dependency is imported by the package."""
    imported = {
        distribution(name)
        for folder in ("vllm_module", "models", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        for name, _, _ in third_party(path)
    }
    assert CORE - imported == set()


def test_what_the_tests_import_is_declared() -> None:
    """Tests and examples import core dependencies, what three extras bring, and each other."""
    declared = CORE | extra("test") | extra("fuzz") | extra("ray")
    declared |= PEERS | OF_EXAMPLES | QUANTIZERS
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/*.py")]
    ours = {distribution(p.stem) for p in files} | {
        distribution(p.parent.name) for p in files if p.name == "__init__.py"
    }
    unknown = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in ("tests", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, line, _ in third_party(path)
        if distribution(name) not in declared | ours
    ]
    assert unknown == []


CASES = {
    "undeclared": ("vllm_module/new.py", "import numba.cuda", "does not declare it"),
    "by name": ("models/new.py", "import_module('numba')", "does not declare it"),
    "lazy": ("kernels/new.py", "def f():\n    from numba import jit", "does not declare it"),
    "another room's": ("vllm_module/cli/new.py", "import hypothesis", "does not declare it"),
    "early": (
        "vllm_module/quantization/compressed_rules.py",
        "import compressed_tensors",
        "in the function",
    ),
}


@pytest.mark.parametrize(("file", "code", "expected"), CASES.values(), ids=CASES)
def test_an_undeclared_import_is_reported(
    tmp_path: Path, file: str, code: str, expected: str
) -> None:
    """An import that nothing installs is named, in whatever form it is written."""
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    (line,) = package_problems(tmp_path)
    assert expected in line
