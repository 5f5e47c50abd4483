"""Run several command lines as one rank of torchrun: ``under_torchrun.py DIRECTORY``.

In the last one, the first rank kills itself while it loads.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from vllm_module.cli import main
from vllm_module.weights.handle import FileHandle


def run(*arguments: str) -> dict[str, object]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def die(self: FileHandle, address: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory, rank = Path(sys.argv[1]), os.environ["RANK"]
    folder = (directory / "folder").read_text()
    ids = ("--dtype", "float32", "--max-new-tokens", "6", "--prompt-ids")
    dist.destroy_process_group = lambda *_: None  # one group for all commands
    results = {
        "load": run("load", folder, "--json"),
        "generate": run("generate", folder, *ids, "1,2,3"),
        "refused": run("generate", folder, *ids, "130"),
        "usage": run("load", folder, "--tp", "4"),
        "quantized": run("load", folder, "--quantization", "fp8_per_tensor", "--json"),
        "quantized text": run("generate", folder, *ids, "1,2", "--quantization", "fp8_per_channel"),
    }
    (directory / f"rank{rank}.json").write_text(json.dumps(results))
    # When a rank dies, torchrun sends SIGTERM to the others: this one has to write its result.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == "0":
        # Killed in the middle of a load, which no signal from outside could time.
        FileHandle.runs_to = die  # type: ignore[method-assign]
    result = run("load", folder, "--device", "cpu")
    (directory / f"rank{rank}-dying.json").write_text(json.dumps(result))
    os._exit(int(str(result["code"])))  # the group of a dead rank cannot be destroyed
