"""A process at the limits of its files and memory: told which, and it goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights import open_checkpoint

LIMITED = """
import os, resource, sys, torch
from safetensors.torch import save_file
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights import open_checkpoint

folder = sys.argv[1]
if sys.argv[2] == "files":
    for index in range(200):
        save_file({f"w{index}": torch.ones(1)}, f"{folder}/{index:03}.safetensors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    before = len(os.listdir("/proc/self/fd"))
    try:
        open_checkpoint(folder)
    except CheckpointFormatError as error:
        print(error)
    assert len(os.listdir("/proc/self/fd")) == before
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    print(len(open_checkpoint(folder)))
else:
    rows = 1 << 20
    head = '{"w":{"dtype":"U8","shape":[%d,1024],"data_offsets":[0,%d]}}' % (rows, rows << 10)
    with open(f"{folder}/model.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head.encode())
        file.truncate(file.tell() + (rows << 10))
    handle = open_checkpoint(folder)["w"].narrow(0, 0, 100)
    handle.narrow(1, 0, 1024).read()
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    try:
        handle.narrow(1, 0, 8).read()
    except WeightReadError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(handle.narrow(1, 0, 8).read().numel())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("what", "words", "then"),
    [
        ("files", ["cannot be opened: Too many open files", "ulimit -n"], "200"),
        ("memory", ["model.safetensors", "mapping it into memory failed"], "800"),
    ],
)
def test_a_process_at_its_limits_is_told_which_and_goes_on(tmp_path, what, words, then) -> None:
    script = [sys.executable, "-c", LIMITED, str(tmp_path), what]
    result = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    said, after = result.stdout.splitlines()
    for word in [*words, str(tmp_path)]:
        assert word in said
    assert after == then


def test_a_header_that_memory_does_not_hold_names_the_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(2)}, path)

    def full(*_: object, **__: object) -> object:
        raise MemoryError

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr("json.loads", full)
        with pytest.raises(CheckpointFormatError, match="does not fit into memory") as refusal:
            open_checkpoint(path)
    assert str(path) in str(refusal.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_may_not_be_listed_is_named(tmp_path: Path, monkeypatch) -> None:
    def denied(_: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(CheckpointFormatError, match="cannot be listed: Permission denied") as no:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(no.value)
