"""One class name stands for one class in the package, and each module has a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = "vllm_module", "models", "kernels"


def class_homes(files: Iterable[Path]) -> dict[str, set[Path]]:
    """Return the files that define each class, by its name; private classes are left out."""
    homes: dict[str, set[Path]] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(path.resolve())
    return homes


def shared(homes: dict[str, set[Path]]) -> dict[str, list[str]]:
    return {
        name: sorted(str(path) for path in paths) for name, paths in homes.items() if len(paths) > 1
    }


def test_a_class_name_is_defined_in_one_module() -> None:
    """No two modules define a public class of the same name."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert not shared(class_homes(files)), "rename one class of each"


def test_a_second_definition_is_found(tmp_path: Path) -> None:
    """A name in two files is found, also inside of a function; a private one is not."""
    texts = {
        "a.py": "class Step: pass\nclass _Own: pass\nclass Once: pass\n",
        "b.py": "def f():\n    class Step: pass\nclass _Own: pass\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert list(shared(class_homes(sorted(tmp_path.iterdir())))) == ["Step"]


def test_every_module_says_what_it_is() -> None:
    """Each file of the package begins with a docstring."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in files if not ast.get_docstring(ast.parse(path.read_text()))] == []
