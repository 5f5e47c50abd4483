"""The site has a place for every public name, design note, law, extra and page.

`make docs` builds it, and fails on any warning, broken link or docstring that cannot be read.
"""

from __future__ import annotations

import importlib
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

import vllm_module
from vllm_module.testing import LAWS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MKDOCS = (ROOT / "mkdocs.yml").read_text()
SUFFIXES = {".html", ".js", ".json", ".md", ".py", ".toml", ".yml", ".yaml", ".cpu", ".cuda"}
DOCUMENTED = [
    name
    for page in sorted((DOCS / "api").glob("*.md"))
    for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE)
]


def test_every_public_name_is_in_the_reference() -> None:
    """The names that the package exports are documented, one by one or with their module."""
    modules = tuple(f"{name}." for name in DOCUMENTED)
    missing = [
        name
        for name in vllm_module.__all__
        if f"vllm_module.{name}" not in DOCUMENTED
        and not f"{getattr(vllm_module, name).__module__}.".startswith(modules)
    ]
    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_the_reference_documents_exists(name: str) -> None:
    """Each entry of the reference is a module, or an attribute of one."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


def test_every_page_and_note_is_in_the_navigation() -> None:
    """mkdocs.yml lists each page, and each design note."""
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    notes = {f"design/{path.name}" for path in (ROOT / "design").glob("*.md")}
    listed = set(re.findall(r"[\w/-]+\.md", MKDOCS))
    assert listed == pages | notes


def test_links_lead_to_pages_of_the_site() -> None:
    """A link between files leads to one that the site has, from where the site has the page."""
    pages = [*DOCS.rglob("*.md"), *(DOCS / "design").glob("*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:\s]+)[)#]", page.read_text())
    ]
    assert len(links) > 20
    # The site knows no symbolic links, by which "design/.." would be the root of the repository.
    targets = {(page, link): os.path.normpath(page.parent / link) for page, link in links}
    assert [each for each, target in targets.items() if not Path(target).exists()] == []


def test_the_laws_are_listed_in_order() -> None:
    """The page of the laws has each law's function."""
    text = (DOCS / "laws.md").read_text()
    functions = re.findall(r"^::: vllm_module\.testing\.(\w+)", text, re.MULTILINE)
    assert functions == [law.__name__ for law in LAWS]


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md", "CONTRIBUTING.md", "docs/laws.md"])
def test_the_files_that_a_page_names_exist(page: str) -> None:
    """Tests, examples and other files that stand for a claim are in the repository."""
    text = (ROOT / page).read_text()
    paths = re.findall(r"(?:`|python )((?:tests|examples|docs|design|vllm_module)/[\w/.-]+)", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_extra_is_listed() -> None:
    """The home page says what each extra is for, and `make wheel` tries each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    text = (DOCS / "index.md").read_text()
    assert {extra for extra in extras if f"`{extra}`" in text} == extras
    assert set(runpy.run_path(str(ROOT / "tests/try_wheel.py"))["EXTRAS"]) == extras


def test_no_advice_names_a_package_that_no_index_has() -> None:
    """No file of the tree tells anyone to install this package by its name: it is in no index."""
    advice = re.compile(r"pip3? install [^\n|;&(]*['\" ]vllm[-_]module\b")
    texts = [*ROOT.glob("*.*"), ROOT / "Makefile"]
    for folder in ("design", "docs", "examples", "kernels", "models", "tests", "vllm_module"):
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    assert len(texts) > 1000
    wrong = {path for path in texts if path.is_file() and advice.search(path.read_text())}
    assert wrong == set()
