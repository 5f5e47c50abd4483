"""The oracle of the fuzzing holds for every input of the corpus."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KINDS = runpy.run_path(str(HERE / "oracle.py"))["KINDS"]
INPUTS = sorted(path for path in (HERE / "corpus").rglob("*") if path.is_file())


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_input_of_the_corpus_breaks_nothing(path: Path, tmp_path: Path) -> None:
    """It is refused with a printable message, or read as the reference implementation does."""
    KINDS[path.parent.name](tmp_path, path.read_bytes())


def test_the_corpus_is_small() -> None:
    assert {path.parent.name for path in INPUTS} == KINDS.keys()
    assert len(INPUTS) <= 180
    assert max(path.stat().st_size for path in INPUTS) < 2048


@pytest.mark.parametrize("kind", ["file", "folder", "torch", "npcache"])
def test_the_oracle_sees_a_wrong_value(kind: str, tmp_path: Path, monkeypatch) -> None:
    """A handle that reads from one byte too early is caught."""
    from vllm_module.weights.weight_file import WeightFile

    name = "matrix" if kind == "file" else "two-files" if kind == "folder" else "two-tensors"
    of = WeightFile.__getitem__

    def shifted(self: WeightFile, key: str) -> object:
        handle = of(self, key)
        handle._offset -= 1
        return handle

    monkeypatch.setattr(WeightFile, "__getitem__", shifted)
    with pytest.raises(AssertionError):
        KINDS[kind](tmp_path, (HERE / "corpus" / kind / name).read_bytes())
