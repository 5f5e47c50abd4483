"""The reader in docs/layouts.md cuts every rank's tensors as ranks load them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_module.build.registry import model_class
from vllm_module.distributed import expert_parallel, tensor_parallel
from vllm_module.errors import ShardingError
from vllm_module.layout.layout_file import layout_json
from vllm_module.testing import model_configs, random_weights
from vllm_module.weights import open_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def reader() -> Any:
    """Return the function on the page."""
    code = re.search(r"```python\n(import json.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    function = code[1].partition("def read")[2].strip().splitlines()
    assert len(function) <= 30, f"the page promises a small reader: {len(function)} lines"
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names["read"]


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"])
@given(data=st.data())
@settings(max_examples=3)
def test_the_reader_on_the_page_reads_what_ranks_load(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of a folder that was written in two files, each rank's tensors are cut bit for bit."""
    config = data.draw(model_configs(model_class((name,))))
    folder = tmp_path_factory.mktemp(name)

    def build(rank: int, size: int) -> Any:
        with tensor_parallel(rank=rank, size=size), expert_parallel(rank=rank, size=size):
            return model_class((name,))(config)

    try:
        models = [build(rank, 2) for rank in range(2)]
    except ShardingError:
        models = [build(0, 1)]
    weights = random_weights(models[0].expected_weights())
    names = sorted(weights)
    for part in range(2):
        save_file({each: weights[each] for each in names[part::2]}, folder / f"{part}.safetensors")
    with open_checkpoint(folder) as checkpoint:
        layout = models[0].plan_weights(dict(checkpoint.items())).layout(len(models))
    file = folder / "layout.json"
    file.write_bytes(layout_json(layout))
    read = reader()
    for rank, model in enumerate(models):
        model.load_weights(weights)
        held = dict(model.named_parameters()) | dict(model.named_buffers())
        got = read(folder, file, rank)
        assert got.keys() == model.state_dict(keep_vars=True).keys() & got.keys()
        assert len(got) >= len(dict(model.named_parameters()))
        for path, tensor in got.items():
            assert torch.equal(tensor, held[path].detach()), f"{path} on rank {rank}"
