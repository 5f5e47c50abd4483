"""One rank's part of the law of sharding, run under torchrun: ``under_torchrun.py DIRECTORY``.

With a file ``fault`` in the directory, the running code has the fault of that name.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import settings

from vllm_module.testing import assert_sharding_equivalent

_TABLE = runpy.run_path(str(Path(__file__).with_name("faults.py")))
FAULTS = _TABLE["FAULTS"]
_ALL = runpy.run_path(str(Path(__file__).with_name("subjects.py")))

# Loaded together as well: KV heads, experts and, in batches of another order, stored layouts.
TOGETHER = ("attention", "experts", "layouts")


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    # All ranks draw the same cases, and hold each of them together.
    settings.register_profile("ranks", derandomize=True, deadline=None, max_examples=4)
    settings.load_profile("ranks")
    faulty = nullcontext()
    if (file := directory / "fault").exists():
        (faulty,) = [each.applied() for each in FAULTS if each.name == file.read_text()]
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
        (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(tried))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Threads of torch that outlive the group abort a process now and then while it ends.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
