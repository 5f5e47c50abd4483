"""Pausing garbage collection: what a program has set of it stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from vllm_module.base.garbage import paused_gc

MANY = 150_000


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """Leave the interpreter's collector as it was."""
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("made", [10, MANY])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_what_a_program_has_set_stays(made: int, enabled: bool, frozen: bool) -> None:
    """Whether collection is on, and which objects are frozen, however many are made."""
    gc.collect()
    (gc.enable if enabled else gc.disable)()
    kept: list[list[int]] = []
    if frozen:
        gc.freeze()
    before = gc.get_freeze_count()
    assert (before > 0) == frozen
    with paused_gc():
        assert not gc.isenabled()
        kept += [[each] for each in range(made)]
    assert gc.isenabled() == enabled
    # Other threads of this process may free some objects meanwhile.
    assert before - 9 <= gc.get_freeze_count() <= before


def test_a_pause_ends_with_an_error() -> None:
    gc.enable()
    with pytest.raises(OSError, match="broke"), paused_gc():
        raise OSError("broke")
    assert gc.isenabled()
    with paused_gc(False):
        assert gc.isenabled()
