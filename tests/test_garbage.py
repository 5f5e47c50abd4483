"""Pausing garbage collection: what a program has set of it stays."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: this one's objects are frozen, so that no pass looks at all of them.
PROGRAM = """
import gc
import itertools

from vllm_module.base.garbage import paused_gc

for made, enabled, frozen in itertools.product((10, 150_000), (True, False), (True, False)):
    case, kept = (made, enabled, frozen), []
    gc.unfreeze()
    gc.collect()
    (gc.enable if enabled else gc.disable)()
    if frozen:
        gc.freeze()
    before = gc.get_freeze_count()
    assert (before > 0) == frozen, case
    with paused_gc():
        assert not gc.isenabled(), case
        kept += [[each] for each in range(made)]
    assert gc.isenabled() == enabled, case
    # Other threads of the process may free some objects meanwhile.
    assert before - 9 <= gc.get_freeze_count() <= before, case

gc.enable()
try:
    with paused_gc():
        raise OSError("broke")
except OSError as error:
    assert str(error) == "broke"
assert gc.isenabled()
with paused_gc(False):
    assert gc.isenabled()
print("all cases")
"""


def test_what_a_program_has_set_stays() -> None:
    """Whether collection is on, and which objects are frozen, however many are made or it fails."""
    run = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all cases\n"), done.stderr
