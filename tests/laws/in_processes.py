"""The law of sharding on ranks that are forks of this process: ``in_processes.py DIRECTORY CASES``.

Each of ``RUNS`` has its folder there, and tries so many cases of each subject. A rank writes how
many it tried to ``rank<R>.json``, or what it raised to ``rank<R>.failed``.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import settings

from vllm_module.testing import assert_sharding_equivalent

HERE = Path(__file__).parent
SUPPORT = runpy.run_path(str(HERE.parent / "support.py"))
_TABLE = runpy.run_path(str(HERE / "faults.py"))
_ALL = runpy.run_path(str(HERE / "subjects.py"))

# Loaded together as well: KV heads, experts and, in batches of another order, stored layouts.
TOGETHER = ("attention", "experts", "layouts")
RUNS = {"two": (2, ""), "three": (3, ""), "faulty": (2, "the rank is always 0")}


def hold(folder: Path, fault: str, rank: int) -> None:
    faulty = nullcontext()
    if fault:
        (faulty,) = [each.applied() for each in _TABLE["FAULTS"] if each.name == fault]
    dist.init_process_group("gloo")
    try:
        # Models wire layers together, and quantized layers are cut as others: ranks in threads try
        # them, and processes compare some of them with transformers.
        size = dist.get_world_size()
        every = _ALL["SUBJECTS"].items()
        subjects = {k: s for k, s in every if not _ALL["large"](k) and (size == 2 or k in TOGETHER)}
        with faulty:
            tried = {name: s.hold(assert_sharding_equivalent) for name, s in subjects.items()}
        if size == 3:
            with _TABLE["cooperating"](_TABLE["instead"]):
                for name in TOGETHER:
                    held = subjects[name].hold(assert_sharding_equivalent)
                    tried[f"{name}, loaded together"] = held
        (folder / f"rank{rank}.json").write_text(json.dumps(tried))
    except Exception:
        (folder / f"rank{rank}.failed").write_text(traceback.format_exc())
    finally:
        dist.destroy_process_group()


def main(directory: Path, cases: int) -> None:
    torch.set_num_threads(1)
    # All ranks draw the same cases, and hold each of them together.
    settings.register_profile("ranks", derandomize=True, deadline=None, max_examples=cases)
    settings.load_profile("ranks")
    for name, (size, fault) in RUNS.items():
        (folder := directory / name).mkdir()
        work = partial(hold, folder, fault)
        SUPPORT["exit_codes"](SUPPORT["fork_ranks"](size, work, port=SUPPORT["free_port"]()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
