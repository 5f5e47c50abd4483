"""One rank's command lines, run under torchrun: ``under_torchrun.py DIRECTORY``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from vllm_module.cli import main


def run(*arguments: str) -> dict[str, object]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    folder = (directory / "folder").read_text()
    ids = ("--dtype", "float32", "--max-new-tokens", "6", "--prompt-ids")
    leave, dist.destroy_process_group = dist.destroy_process_group, lambda *_: None  # one for all
    results = {
        "load": run("load", folder, "--json"),
        "generate": run("generate", folder, *ids, "1,2,3"),
        "refused": run("generate", folder, *ids, "130"),
        "usage": run("load", folder, "--tp", "4"),
        "quantized": run("load", folder, "--quantization", "fp8_per_tensor", "--json"),
    }
    leave()
    (directory / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
