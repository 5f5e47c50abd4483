"""Folders for temporary files are shown as the model that they were written for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from vllm_module.base.messages import printable
from vllm_module.weights.written_folder import new_folder, remove_all, write_folder


class Owner:
    """Something that a folder is removed with."""


def test_a_path_in_it_names_the_model() -> None:
    """The file is said to be of the model; a folder whose name begins alike is another one."""
    folder = write_folder({"config.json": b"{}"}, "model.gguf")
    assert printable(folder) == printable(str(folder)) == "model.gguf"
    assert printable(folder / "config.json") == "config.json of model.gguf"
    assert printable(folder / "a\nb") == r"a\nb of model.gguf"
    assert printable(f"{folder}2/config.json") == f"{folder}2/config.json"
    shutil.rmtree(folder)


def test_a_folder_that_is_removed_has_its_own_name_again() -> None:
    """Another program may make a folder of that name."""
    owner = Owner()
    folder = new_folder("s3://bucket/model", owner)
    assert printable(folder / "config.json") == "config.json of s3://bucket/model"
    del owner
    assert not folder.exists()
    assert printable(folder) == str(folder)


@pytest.mark.parametrize("makes", [False, True])
@pytest.mark.parametrize("way", ["all", "owner"])
def test_a_fork_removes_its_own_folders_alone(way: str, makes: bool) -> None:
    """A process that was forked has the entries of its parent, whose files others still read."""
    owners = [Owner(), Owner()]
    folder = new_folder("of the parent", owners[0])
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            own = new_folder("of the child", owners[1]) if makes else folder
            os.write(writing, os.fsencode(own))
            if way == "all":
                remove_all()
            else:
                owners.clear()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        of_child = Path(os.fsdecode(pipe.read()))
    assert (of_child == folder) == (not makes)
    assert of_child.exists() == (not makes)
    assert folder.is_dir()
    assert printable(folder) == "of the parent"
    if way == "all":
        remove_all()
    else:
        owners.clear()
    assert not folder.exists()
