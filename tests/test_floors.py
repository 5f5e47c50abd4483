"""Imports go down the floors of the house only, lazy ones and those for type checkers included."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the ground up. Rooms on one floor do not import each other. The package is on top.
FLOORS = (
    {"base"},
    {"config", "errors", "kernels", "rope_parameters"},
    {"distributed", "weights"},
    {"layout"},
    {"hf_config", "parameters"},
    {"core"},
    {"quantization"},
    {"layers"},
    {"adapters", "cooperative", "models", "wrapped"},
    {"build"},
    {"export"},
    {"runtime", "testing"},
    {"server"},
    {"cli"},
    {"vllm_module"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Rooms on lower floors that a room must not import all the same.
CLOSED = {
    "layers": {"weights"},
    "models": {"kernels", "quantization", "weights"},
}

FOLDERS = {
    "vllm_module": "vllm_module",
    "models": "vllm_module.models",
    "kernels": "vllm_module.kernels",
}


def module_files(root: Path) -> dict[str, Path]:
    """Return the file of each of our modules, by the name it is imported under."""
    files = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            inside = path.relative_to(root / folder).with_suffix("").parts
            if inside[-1] == "__init__":
                inside = inside[:-1]
            files[".".join((package, *inside))] = path
    return files


def room_of(module: str) -> str:
    package, _, inside = module.partition(".")
    return inside.partition(".")[0] or package


def imports(tree: ast.Module, known: set[str]) -> Iterator[tuple[str, int]]:
    """Yield each module that is imported, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield submodule if submodule in known else base, node.lineno


def complaint(importer: str, imported: str) -> str | None:
    """Return what is wrong with one import; ``None`` if nothing is."""
    if imported.startswith("."):
        return "is a relative import: name the module in full"
    if imported.partition(".")[0] in ("models", "kernels"):
        return f"is no package of ours at the top level: import vllm_module.{imported}"
    if imported.partition(".")[0] != "vllm_module":
        return None
    room, other = room_of(importer), room_of(imported)
    if room == other:
        return None
    if other not in FLOOR_OF:
        return f"is in the room {other!r}, which has no floor"
    if FLOOR_OF[other] > FLOOR_OF[room]:
        return f"runs upward: {room!r} is on floor {FLOOR_OF[room]}, {other!r} on {FLOOR_OF[other]}"
    if FLOOR_OF[other] == FLOOR_OF[room]:
        return f"runs between rooms of one floor: {room!r} and {other!r}"
    if other in CLOSED.get(room, ()):
        return f"is closed to {room!r}"
    return None


@cache  # parsing all takes a second
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def violations(root: Path) -> list[str]:
    """Return one line for each forbidden import, each unknown room, and a cycle if there is one."""
    found = []
    files = module_files(root)
    known = {name.rsplit(".", up)[0] for name in files for up in range(name.count(".") + 1)}
    graph: dict[str, set[str]] = {}
    for importer, path in files.items():
        if room_of(importer) not in FLOOR_OF:
            found.append(f"{importer}: its room {room_of(importer)!r} has no floor")
            continue
        for imported, line in imports(parsed(path), known):
            if problem := complaint(importer, imported):
                found.append(f"{path.relative_to(root)}:{line}: {imported} {problem}")
            elif imported in files:
                graph.setdefault(importer, set()).add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"a cycle of imports: {' <- '.join(error.args[1])}")
    return found


def test_no_import_runs_upward_or_sideways() -> None:
    """Every import in vllm_module/, models/ and kernels/ is of a lower room that is not closed."""
    assert violations(ROOT) == []


def test_the_house_stays_small() -> None:
    """There are at most 24 rooms, and 143 pairs of rooms of which one imports the other."""
    files = module_files(ROOT)
    known = {name.rsplit(".", up)[0] for name in files for up in range(name.count(".") + 1)}
    arrows = {
        (room_of(importer), room_of(imported))
        for importer, path in files.items()
        for imported, _ in imports(parsed(path), known)
        if imported in known and room_of(importer) != room_of(imported)
    }
    assert len(FLOOR_OF) <= 24
    assert len(arrows) <= 145


def test_every_folder_of_the_house_is_walked() -> None:
    """The package, the models and the kernels are found, each under its import name."""
    names = set(module_files(ROOT))
    expected = {
        "vllm_module",
        "vllm_module.models.qwen3",
        "vllm_module.kernels.attention.paged_attention",
    }
    assert expected <= names


CASES = {
    "upward": ("vllm_module/core/tree.py", "from vllm_module.layers.linear import X", "upward"),
    "lazy": (
        "vllm_module/core/module.py",
        "def f():\n    import vllm_module.layers.linear",
        "upward",
    ),
    "typing": (
        "vllm_module/core/module.py",
        "if typing.TYPE_CHECKING:\n    from vllm_module.layers.linear import X",
        "upward",
    ),
    "submodule by name": ("vllm_module/core/module.py", "from vllm_module import layers", "upward"),
    "package": ("vllm_module/cli/main.py", "from vllm_module import get_model", "upward"),
    "sideways": ("vllm_module/runtime/llm.py", "import vllm_module.testing", "one floor"),
    "kernel": ("kernels/gemm.py", "from vllm_module.config import X", "one floor"),
    "closed": ("models/new.py", "from vllm_module.kernels.gemm import gemm", "closed to"),
    "layer and bytes": ("vllm_module/layers/new.py", "import vllm_module.weights", "closed to"),
    "unknown room": ("vllm_module/attic.py", "", "'attic' has no floor"),
    "unknown target": ("vllm_module/cli/main.py", "import vllm_module.attic", "has no floor"),
    "relative": ("models/new.py", "from .llama import X", "relative import"),
    "shadow": ("models/new.py", "from models.llama import X", "no package of ours"),
    "cycle": ("vllm_module/layers/linear.py", "import vllm_module.layers.linear", "a cycle"),
}


@pytest.mark.parametrize(("file", "code", "expected"), CASES.values(), ids=CASES)
def test_a_forbidden_import_is_reported(
    tmp_path: Path, file: str, code: str, expected: str
) -> None:
    """A forbidden import of any form is named in exactly one line."""
    sources = {"vllm_module/layers/linear.py": "", "vllm_module/layers/__init__.py": ""}
    for name, text in (sources | {file: code}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (line,) = violations(tmp_path)
    assert expected in line


def test_an_allowed_import_is_not_reported(tmp_path: Path) -> None:
    """A downward import passes."""
    (tmp_path / "vllm_module").mkdir()
    (tmp_path / "vllm_module/hf_config.py").write_text("from vllm_module.errors import X")
    (tmp_path / "vllm_module/errors.py").write_text("")
    assert violations(tmp_path) == []


@pytest.mark.parametrize("folder", ["models", "kernels"])
def test_models_and_kernels_are_linked_namespace_folders(folder: str) -> None:
    """A top-level folder without __init__.py, reached from the package by a relative link."""
    assert not (ROOT / folder / "__init__.py").exists()
    link = ROOT / "vllm_module" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda path: path.stem)
def test_a_model_is_wiring_only(path: Path) -> None:
    """A model's file loads nothing, touches no handle, and can be read at once."""
    text = path.read_text()
    tree = ast.parse(text)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    loading = {"load_weights", "update_weights", "cut", "pieces", "materialize_on"}
    assert not defined & loading
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    handled = {"pieces", "read", "read_into", "checkpoint_shape", "load_state", "data"}
    assert not used & handled
    assert len(text.splitlines()) <= 150
