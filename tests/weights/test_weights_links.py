"""Only regular files inside of a checkpoint's folder are read."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_module.build.model_source import read_config
from vllm_module.config import ModelConfig
from vllm_module.errors import CheckpointFormatError
from vllm_module.runtime.generation_config import stop_tokens
from vllm_module.runtime.text.tokenizer import Tokenizer
from vllm_module.weights import open_checkpoint, regular_file
from vllm_module.weights.regular_file import open_regular

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
CONFIG = (
    '{"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_hidden_layers": 1, '
    '"num_attention_heads": 1, "vocab_size": 8, "intermediate_size": 8}'
)

# Every file of a checkpoint that is read, and the function that reads it.
READERS: dict[str, Callable[[Path], object]] = {
    WEIGHTS: open_checkpoint,
    INDEX: open_checkpoint,
    "config.json": lambda folder: read_config(folder, ModelConfig(model=str(folder))),
    "generation_config.json": stop_tokens,
    "tokenizer.json": Tokenizer,
}
every_file = pytest.mark.parametrize("name", READERS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty checkpoint folder."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    return folder


def write(path: Path) -> Path:
    """Write a valid file of the kind that the name of ``path`` stands for."""
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.startswith("model-") or path.name == WEIGHTS:
        save_file({"w": torch.ones(2)}, path)
    elif path.name == INDEX:
        save_file({"w": torch.ones(2)}, path.parent / "model-1.safetensors")
        path.write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    elif path.name == "tokenizer.json":
        Library(WordLevel({"a": 0}, unk_token="a")).save(str(path))
    else:
        path.write_text(CONFIG)
    return path


@every_file
def test_a_file_or_a_link_inside_the_folder_is_read(folder: Path, name: str) -> None:
    write(folder / name)
    READERS[name](folder)
    (folder / "sub").mkdir()
    (folder / name).rename(folder / "sub" / "stored")
    (folder / name).symlink_to("sub/stored")
    READERS[name](folder)
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "sub" / "stored")  # an absolute link works too
    READERS[name](folder)


@every_file
def test_a_link_out_of_the_folder_is_refused(folder: Path, name: str, tmp_path: Path) -> None:
    """The message names the link, its target and what to do."""
    write(tmp_path / "elsewhere" / name)
    for target in (f"../elsewhere/{name}", str(tmp_path / "elsewhere" / name), "/etc/passwd"):
        (folder / name).symlink_to(target)
        with pytest.raises(CheckpointFormatError, match="outside of the checkpoint") as refusal:
            READERS[name](folder)
        for words in (str(folder / name), os.path.realpath(folder / name), "copy the file into"):
            assert words in str(refusal.value)
        (folder / name).unlink()


def test_a_folder_on_the_way_that_leads_out_is_refused(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / WEIGHTS)
    (folder / "sub").symlink_to("../elsewhere")
    (folder / WEIGHTS).symlink_to(f"sub/{WEIGHTS}")
    with pytest.raises(CheckpointFormatError, match="outside of the checkpoint"):
        open_checkpoint(folder)


def test_without_an_index_every_link_of_the_folder_counts(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / WEIGHTS)
    write(folder / "model-1.safetensors")
    (folder / "more.safetensors").symlink_to(f"../elsewhere/{WEIGHTS}")
    with pytest.raises(CheckpointFormatError, match=r"more\.safetensors is a link to"):
        open_checkpoint(folder)


def test_the_folder_and_a_single_file_may_be_links(folder: Path, tmp_path: Path) -> None:
    """A path that the user names is trusted; a link inside of the checkpoint is not."""
    write(folder / WEIGHTS)
    (tmp_path / "folder").symlink_to("checkpoint")
    (tmp_path / "one.safetensors").symlink_to(f"checkpoint/{WEIGHTS}")
    assert list(open_checkpoint(tmp_path / "folder")) == ["w"]
    assert list(open_checkpoint(tmp_path / "one.safetensors")) == ["w"]


@every_file
def test_the_hubs_cache_is_read(tmp_path: Path, name: str) -> None:
    """A snapshot links to blobs of its repository, which link to blobs that repositories share."""
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / "0123abc"
    write(snapshot / name)
    (repository / "blobs").mkdir()
    for path in [*snapshot.iterdir()]:
        path.rename(repository / "blobs" / f"{path.name}.etag")
        path.symlink_to(f"../../blobs/{path.name}.etag")
    READERS[name](snapshot)
    (tmp_path / "short").symlink_to(snapshot)
    READERS[name](tmp_path / "short")
    digest = "ab" + "0" * 62
    shared = tmp_path / "blobs" / "ab" / digest
    shared.parent.mkdir(parents=True)
    blob = repository / "blobs" / f"{name}.etag"
    blob.rename(shared)
    blob.symlink_to(f"../../blobs/ab/{digest}")
    READERS[name](snapshot)


def test_what_only_looks_like_the_hubs_cache_is_refused(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abc"
    write(tmp_path / "blobs" / "secret").rename(tmp_path / "blobs" / "stored")
    snapshot.mkdir(parents=True)
    (snapshot / WEIGHTS).symlink_to("../../../blobs/stored")  # not the name of a shared blob
    with pytest.raises(CheckpointFormatError, match="outside of the checkpoint"):
        open_checkpoint(snapshot)
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to("../../blobs/stored")
    (tmp_path / "models--owner--name" / "blobs").symlink_to("../blobs")  # this link leads out
    with pytest.raises(CheckpointFormatError, match="outside of the checkpoint"):
        open_checkpoint(snapshot)
    other = tmp_path / "other" / "0123abc"  # its parent is not called snapshots
    other.mkdir(parents=True)
    (other / WEIGHTS).symlink_to("../../blobs/stored")
    with pytest.raises(CheckpointFormatError, match="outside of the checkpoint"):
        open_checkpoint(other)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's address must be short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def loop_of_two(path: Path) -> None:
    path.symlink_to("other")
    (path.parent / "other").symlink_to(path.name)


@every_file
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (fifo, "device, socket or pipe"),
        (unix_socket, "device, socket or pipe"),
        (Path.mkdir, "device, socket or pipe"),
        (lambda path: path.symlink_to("."), "device, socket or pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "outside of the checkpoint"),
        (lambda path: path.symlink_to("/dev/stdin"), r"outside of the checkpoint|leads nowhere"),
        (lambda path: path.symlink_to("/proc/self/mem"), "outside of the checkpoint"),
        (lambda path: path.symlink_to("nowhere"), "leads nowhere"),
        (link_to_itself, "a link to itself"),
        (loop_of_two, "a link to itself"),
    ],
    ids=["fifo", "socket", "folder", "link to folder", "zero", "stdin", "mem", "none", "self", "2"],
)
def test_what_is_no_file_is_refused_and_not_waited_for(
    folder: Path, name: str, make: Callable[[Path], None], message: str
) -> None:
    make(folder / name)
    with pytest.raises(CheckpointFormatError, match=message) as refusal:
        READERS[name](folder)
    assert name in str(refusal.value)


def test_a_fifo_named_by_the_user_is_refused(tmp_path: Path) -> None:
    fifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path / "pipe.safetensors", Path("/dev/zero")):
        with pytest.raises(CheckpointFormatError, match=r"pipe|not a \.safetensors or"):
            open_checkpoint(path)


def test_a_fifo_put_there_between_look_and_opening_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder / WEIGHTS)
    open_file = os.open

    def swap_then_open(target: Path, flags: int) -> int:
        path.unlink()
        fifo(path)
        return open_file(target, flags)

    monkeypatch.setattr(os, "open", swap_then_open)
    with pytest.raises(CheckpointFormatError, match="device, socket or pipe"):
        open_regular(path, folder)


@pytest.mark.parametrize("swapped", ["file", "folder"])
def test_a_link_put_there_between_look_and_opening_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    """Neither the file nor a folder on the way to it may become a link that leads out."""
    path = write(folder / "sub" / WEIGHTS)
    outside = write(folder.parent / "elsewhere" / WEIGHTS)
    open_file = os.open

    def swap_then_open(target: Path, flags: int) -> int:
        moved = path if swapped == "file" else path.parent
        moved.rename(folder / "moved")
        moved.symlink_to(outside if swapped == "file" else outside.parent)
        return open_file(target, flags)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(regular_file.os, "open", swap_then_open)
    with pytest.raises(CheckpointFormatError, match=r"a link to itself|was replaced while"):
        open_regular(path, folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_that_change_all_the_time_never_lead_out(folder: Path) -> None:
    """At any timing, the file inside of the folder is opened or an error is raised."""
    inside, outside = write(folder / "in.safetensors"), folder.parent / "out.safetensors"
    save_file({"secret": torch.ones(1)}, outside)
    save_file({"w": torch.ones(2)}, inside)
    stop = threading.Event()

    def swap() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            (folder / "next").symlink_to("in.safetensors" if turn % 2 else outside)
            os.replace(folder / "next", folder / WEIGHTS)

    (folder / WEIGHTS).symlink_to(outside)
    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = set()
    try:
        for _ in range(300):
            try:
                with open_checkpoint(folder) as checkpoint:
                    seen.update(checkpoint)
            except CheckpointFormatError as error:
                assert "outside of" in str(error) or "replaced" in str(error)  # noqa: PT017
    finally:
        stop.set()
        swapper.join()
    assert seen <= {"w"}
