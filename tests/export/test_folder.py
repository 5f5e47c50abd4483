"""Which files beside the weights a written folder has: all that a load of it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_module.export.folder import copy_small_files

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
