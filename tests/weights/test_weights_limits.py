"""A process that reaches a limit of files or memory gets an error and can continue."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_module.errors import CheckpointFormatError
from vllm_module.weights import open_checkpoint, read_json, resolve

LIMITED = """
import os, resource, sys, torch
from safetensors.torch import save_file
from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights import open_checkpoint, read_json, resolve

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
def test_a_process_at_its_limits_is_told_which_and_goes_on(
    tmp_path: Path, run_with_torch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Too many open files, then too little memory; with the limit lifted each is read."""
    folders = [tmp_path / "many", tmp_path / "large"]
    for folder in folders:
        folder.mkdir()
    result = run_with_torch(LIMITED, *map(str, folders))
    assert result.returncode == 0, result.stderr
    files, opened, memory, elements = result.stdout.splitlines()
    for words in ("cannot be opened: Too many open files", "ulimit -n", str(folders[0])):
        assert words in files
    for words in (str(folders[1] / "model.safetensors"), "mapping it into memory failed"):
        assert words in memory
    assert (opened, elements) == ("200", "800")


def test_a_header_that_memory_does_not_hold_names_the_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"too large": torch.ones(2)}, path)  # the last headers, of other tests, are kept

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


@pytest.fixture
def plain() -> Iterator[Path]:
    """Yield a checkpoint that every user may read, until the test takes a right away."""
    # Not tmp_path, in which only its owner may look anything up.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        folder.mkdir()
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")
        for file in ("config.json", "model.safetensors.index.json"):
            (folder / file).write_text('{"weight_map": {"w": "model.safetensors"}}')
        for path in (Path(name), folder, *folder.iterdir()):
            path.chmod(0o755)
        try:
            yield folder
        finally:
            os.chmod(name, 0o755)
            folder.chmod(0o755)


@contextmanager
def rights_of_a_user() -> Iterator[None]:
    """Let this thread open files as another user if it is root's, who may open all of them."""
    is_root, libc = os.geteuid() == 0, ctypes.CDLL(None)
    if is_root:
        libc.setfsuid(65534)
    try:
        yield
    finally:
        if is_root:
            libc.setfsuid(0)


INDEX = "model.safetensors.index.json"
DENIED = {
    "folder above": ("..", 0, "", "looked up"),
    "folder": ("", 0, "sharded_state.json", "looked up"),
    "folder that may be listed only": ("", 0o444, "sharded_state.json", "looked up"),
    "index": (INDEX, 0, INDEX, "opened"),
    "file": ("model.safetensors", 0, "model.safetensors", "opened"),
    "configuration": ("config.json", 0, "config.json", "opened"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="setfsuid is Linux's")
@pytest.mark.parametrize(("denied", "mode", "named", "action"), DENIED.values(), ids=DENIED)
def test_what_may_not_be_read_is_named(
    plain: Path, denied: str, mode: int, named: str, action: str
) -> None:
    """Each refusal names the path and the reason; none says that a path does not exist."""

    def read() -> None:
        folder = resolve(str(plain), None)
        open_checkpoint(folder)
        read_json(folder / "config.json", folder)

    (plain / denied).chmod(mode)
    with rights_of_a_user(), pytest.raises(CheckpointFormatError) as refused:
        read()
    expected = f"{plain / named} cannot be {action}: Permission denied; check its permissions"
    assert str(refused.value) == expected
