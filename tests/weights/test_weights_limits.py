"""A process that reaches a limit of files or memory gets an error and can continue."""

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

many, large = sys.argv[1:]
for index in range(200):
    save_file({f"w{index}": torch.ones(1)}, f"{many}/{index:03}.safetensors")
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
before = len(os.listdir("/proc/self/fd"))
try:
    open_checkpoint(many)
except CheckpointFormatError as error:
    print(error)
assert len(os.listdir("/proc/self/fd")) == before
resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
print(len(open_checkpoint(many)))

rows = 1 << 20
head = '{"w":{"dtype":"U8","shape":[%d,1024],"data_offsets":[0,%d]}}' % (rows, rows << 10)
with open(f"{large}/model.safetensors", "wb") as file:
    file.write(len(head).to_bytes(8, "little") + head.encode())
    file.truncate(file.tell() + (rows << 10))
handle = open_checkpoint(large)["w"].narrow(0, 0, 100)
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
def test_a_process_at_its_limits_is_told_which_and_goes_on(tmp_path: Path) -> None:
    """Too many open files, then too little memory; with the limit lifted each is read."""
    folders = [tmp_path / "many", tmp_path / "large"]
    for folder in folders:
        folder.mkdir()
    script = [sys.executable, "-c", LIMITED, *map(str, folders)]
    result = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    files, opened, memory, elements = result.stdout.splitlines()
    for words in ("cannot be opened: Too many open files", "ulimit -n", str(folders[0])):
        assert words in files
    for words in (str(folders[1] / "model.safetensors"), "mapping it into memory failed"):
        assert words in memory
    assert (opened, elements) == ("200", "800")


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
