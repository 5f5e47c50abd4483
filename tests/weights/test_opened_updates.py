"""Updates in files that are refused: while the error is held, nothing of the file is open."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_module.errors import CheckpointFormatError, WeightReadError
from vllm_module.weights import open_update, write_update
from vllm_module.weights.changes import Changes

WHOLE, SOME = torch.ones(4), Changes(torch.tensor([1, 3]), torch.ones(2), (8,))


def still_open(folder: Path) -> list[str]:
    """Return the files below a folder that this process has open, or has mapped."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd", number)
        if path.is_symlink():
            found.append(os.readlink(path))
    found += re.findall(r"/.*", Path("/proc/self/maps").read_text())
    return [each for each in found if each.startswith(str(folder))]


def changed(path: Path, tensors: dict[str, Any], **entries: Any) -> None:
    """Write an update with other tensors or other entries; ``None`` leaves one out."""
    write_update(path, {"whole": WHOLE, "some": SOME}, version="b", after="a", digests=True)
    with open_update(path) as update:
        header = json.loads(update._opened.metadata[0]["update"])
        held = {name: update._opened[name].read().clone() for name in update._opened}
    held = {name: each for name, each in (held | tensors).items() if each is not None}
    save_file(held, path, {"update": json.dumps(header | entries)})


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a version that is no text": ({}, {"version": 3}),
    "elements after no version": ({}, {"after": None}),
    "a negative size": ({}, {"shapes": {"some": [-8]}}),
    "no steps": ({"steps/some": None}, {"digests": {}}),
    "no values": ({"values/some": None}, {"digests": {}}),
    "digests of others": ({"more": torch.ones(1)}, {}),
    "another value": ({"values/some": torch.zeros(2)}, {}),
    "steps in floats": ({"steps/some": torch.ones(2)}, {"digests": {}}),
    "steps beyond the tensor": ({"steps/some": torch.tensor([9, 9]).byte()}, {"digests": {}}),
    "more values than steps": ({"values/some": torch.zeros(3)}, {"digests": {}}),
    "whole and in elements": ({"some": torch.ones(8)}, {"digests": {}}),
    "one entry more": ({}, {"other": 1}),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_refused_update_is_closed(wrong: str, tmp_path: Path) -> None:
    tensors, entries = REFUSED[wrong]
    path = tmp_path / "update.safetensors"
    changed(path, {})
    with open_update(path) as update:
        assert still_open(tmp_path), "so an open file is found"
        assert set(update) == {"whole", "some"}
    assert not still_open(tmp_path)
    changed(path, tensors, **entries)
    with pytest.raises((CheckpointFormatError, WeightReadError)) as error:
        open_update(path)
    assert not still_open(tmp_path), error
