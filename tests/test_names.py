"""One class name stands for one class, attributes are nouns, and each module has a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = "vllm_module", "models", "kernels"
# Names that begin so say where a value belongs and not what it is: ``_of_rank`` was a checkpoint.
PREPOSITIONS = "at", "by", "for", "from", "in", "of", "on", "to", "what", "with"
# Hugging Face's names of layers, and states that English says so.
IDIOMS = "in_proj", "in_flight", "in_memory", "in_place", "in_progress"


@cache  # parsing all takes a second
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def class_homes(files: Iterable[Path]) -> dict[str, set[Path]]:
    """Return the files that define each class, by its name; private classes are left out."""
    homes: dict[str, set[Path]] = {}
    for path in files:
        for node in ast.walk(parsed(path)):
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


def attributes(file: Path) -> set[str]:
    """Return the names that classes of a file declare or assign as attributes."""
    names = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            declared = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            names |= {each.target.id for each in declared if isinstance(each.target, ast.Name)}
    return names


def misnamed(names: Iterable[str]) -> list[str]:
    plain = {name: name.lstrip("_") for name in names}
    return sorted(
        name for name, each in plain.items()
        if each.partition("_")[0] in PREPOSITIONS and "_" in each and not each.startswith(IDIOMS)
    )  # fmt: skip


def test_attributes_are_nouns() -> None:
    """No attribute of several words begins with a preposition."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {str(path): misnamed(attributes(path)) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_preposition_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "class A:\n    at_first: int\n    in_proj: int\n    def f(self): self._of_rank = 1\n"
    )
    assert misnamed(attributes(file)) == ["_of_rank", "at_first"]


def test_every_module_says_what_it_is() -> None:
    """Each file of the package begins with a docstring."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in files if not ast.get_docstring(parsed(path))] == []
