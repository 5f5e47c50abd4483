"""When ranks read one checkpoint together, if they may choose."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from vllm_module.cooperative.choice import Facts, chosen, is_cached, reads_less
from vllm_module.weights import os_pages
from vllm_module.weights.pairs import PairsCheckpoint

FILES, OTHER = ((1, 10),), ((2, 10),)
SOURCE = Path("a source")


@pytest.mark.parametrize(
    ("facts", "less"),
    [
        ([("a", None, False)] * 2, True),
        ([("a", FILES, False)] * 2, False),
        ([("a", FILES, False), ("b", FILES, False)], True),
        ([("a", FILES, True), ("b", FILES, False)], True),
        ([("a", FILES, True), ("b", FILES, True)], False),
        ([("a", FILES, False), ("b", OTHER, False)], False),
        ([("a", FILES, True), ("b", None, False)], True),
        ([("a", None, False), ("a", FILES, True)], True),
    ],
    ids=[
        "source",
        "one host",
        "shared",
        "cached on one host",
        "cached",
        "copies",
        "a source on one host",
        "a source on one rank",
    ],
)
def test_auto_reads_together_where_that_reads_less(facts: Any, less: bool) -> None:
    """Ranks read together from a source, or from files that several hosts share and lack."""
    ranks = [Facts(*each) for each in facts]
    assert reads_less(ranks) is less
    assert chosen("auto", PairsCheckpoint(SOURCE, {}), lambda _: ranks) is less
    assert chosen(True, PairsCheckpoint(SOURCE, {}), lambda _: []) is True


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux tells what is cached")
def test_the_page_cache_is_asked(tmp_path: Path) -> None:
    """A file that was written just now is cached; it is not once the kernel has dropped it."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert is_cached([path])
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if os.statvfs(tmp_path).f_fsid:  # tmpfs is the page cache
        assert not is_cached([path])


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux tells what is cached")
def test_a_part_that_is_not_cached_is_found(tmp_path: Path) -> None:
    """Wherever it is in a file, and whichever of the files it is in."""
    size = 1 << 21  # as much as the page cache may hold as one
    paths = [tmp_path / "partly", tmp_path / "whole"]
    for path in paths:
        path.write_bytes(bytes(4 * size))
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not on the disk stays in memory
    for order in (paths, paths[::-1]):
        for part in range(4):
            for path in paths:
                path.read_bytes()
            assert is_cached(order)
            with paths[0].open("rb") as file:
                os.posix_fadvise(file.fileno(), part * size, size, os.POSIX_FADV_DONTNEED)
            if os.statvfs(tmp_path).f_fsid:  # tmpfs is the page cache
                assert not is_cached(order), part


@pytest.mark.parametrize("told", [True, False, None])
def test_a_system_that_cannot_tell_has_nothing_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool | None
) -> None:
    """Files that hosts share are read together unless the kernel says that they are there."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8))
    # Replaced because no file system here lacks the answer.
    monkeypatch.setattr(os_pages, "is_cached", lambda *_: told)
    assert is_cached([path]) is bool(told)
