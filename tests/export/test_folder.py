"""Which files beside the weights a written folder has: all that a load of it reads."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open

from vllm_module.export.folder import copy_small_files, new_folder
from vllm_module.export.units import CopiedTensor, write_units

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "modeling_own.py",
    "qwen.tiktoken",
)
# Written anew, or of the weights that are not copied.
LEFT_OUT = (
    "config.json",
    "digests.json",
    "sharded_state.json",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin",
    "2_Dense/config.json",
)


@pytest.mark.parametrize("missing", [None, *COPIED])
def test_small_files_are_copied_and_weights_are_not(tmp_path: Path, missing: str | None) -> None:
    """Each of them may be absent alone, and the others are copied byte for byte."""
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    for name in {*COPIED, *LEFT_OUT} - {missing}:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(f"what {name} has".encode())
    copy_small_files(source, target)
    files = [path for path in target.rglob("*") if path.is_file()]
    found = {str(path.relative_to(target)): path.read_bytes() for path in files}
    assert found == {name: f"what {name} has".encode() for name in {*COPIED} - {missing}}


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o027, 0o077])
@pytest.mark.parametrize("exists", [True, False])
def test_a_written_folder_is_open_to_those_whom_a_made_one_is(
    tmp_path: Path, mask: int, exists: bool
) -> None:
    """As a folder of mkdir, by the umask, which stays; nothing else is left beside it."""
    own = os.umask(mask)
    try:
        (tmp_path / "made").mkdir()
        if exists:
            (tmp_path / "out").mkdir()
        with new_folder(tmp_path / "out") as folder:
            (folder / "file").write_text("text")
    finally:
        left = os.umask(own)
    assert left == mask
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "made").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "out"]
    assert (tmp_path / "out/file").read_text() == "text"


@pytest.mark.parametrize("seed", range(12))
def test_files_are_as_large_as_those_of_the_hubs_library(tmp_path: Path, seed: int) -> None:
    """Each has as many tensors as fit, also to the last byte, and the index says which."""
    most = 12
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, most // 4 + 1, (9,), generator=generator).tolist()
    tensors = {f"t{i}": torch.full((size,), float(i)) for i, size in enumerate(sizes)}
    seen = list[int]()
    units = [CopiedTensor(name, tensor) for name, tensor in tensors.items()]
    total = write_units(tmp_path, units, most, seen.append)
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=most)
    assert theirs.is_sharded
    found = defaultdict(list)
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 # it is no mapping
                found[path.name].append(name)
                assert torch.equal(file.get_tensor(name), tensors[name])
    assert found == theirs.filename_to_tensors
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == theirs.tensor_to_filename
    assert index["metadata"]["total_size"] == theirs.metadata["total_size"] == total == seen[-1]
    assert len(seen) == len(tensors)
    assert [later - earlier for earlier, later in zip([0, *seen], seen, strict=False)] == [
        4 * size for size in sizes
    ]
