"""Folders for temporary files are shown as the model that they were written for."""

from __future__ import annotations

import shutil

from vllm_module.base.messages import printable
from vllm_module.weights.written_folder import new_folder, write_folder


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
