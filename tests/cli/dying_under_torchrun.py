"""A rank that is killed while it loads, and another: ``dying_under_torchrun.py DIRECTORY``."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path

import torch

from vllm_module.weights.handle import SafetensorsHandle

run = runpy.run_path(str(Path(__file__).with_name("under_torchrun.py")))["run"]


def die(self: SafetensorsHandle, destination: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    if os.environ["RANK"] == "0":
        SafetensorsHandle.read_into = die  # type: ignore[method-assign]
    else:  # torchrun ends it as soon as the other is dead, and kills it 30 s later
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    result = run("load", (directory / "folder").read_text(), "--device", "cpu")
    (directory / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    sys.exit(result["code"])
