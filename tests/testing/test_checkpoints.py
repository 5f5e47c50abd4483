"""Made-up checkpoints, their files, and sources that fail or record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file

from vllm_module import ModelConfig, get_model, vLLMModule
from vllm_module.errors import ModelNotReadyError
from vllm_module.layers import MergedColumnParallelLinear, ParallelLMHead, VocabParallelEmbedding
from vllm_module.models.llama import LlamaForCausalLM
from vllm_module.testing import (
    failing_reads,
    failing_stream,
    model_configs,
    random_weights,
    write_checkpoint,
)
from vllm_module.testing.checkpoints import assert_same_state, fuse
from vllm_module.testing.names import Fused, Names
from vllm_module.weights import open_checkpoint


class Tied(vLLMModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(5, 4)
        self.up = MergedColumnParallelLinear(4, [2, 3], bias=True, shard_names=["gate", "fold"])
        self.head = ParallelLMHead(5, 4)
        self.head.tie_weights(self.embed)


EXPECTED = {
    "embed.weight": [5, 4],
    "gate.weight": [2, 4],
    "fold.weight": [3, 4],
    "gate.bias": [2],
    "fold.bias": [3],
}


def test_a_module_says_what_a_whole_checkpoint_holds() -> None:
    """Slots have their own names, tied tensors appear once, and tensors are unsharded."""
    expected = Tied().expected_weights()
    assert {name: list(tensor.shape) for name, tensor in expected.items()} == EXPECTED
    assert all(tensor.is_meta for tensor in expected.values())


def test_random_weights_load() -> None:
    """They have the expected shapes and dtypes, differ by seed and do not repeat."""
    model = Tied()
    expected = model.expected_weights()
    one, other = random_weights(expected), random_weights(expected, seed=1)
    model.load_weights(one)
    for name, tensor in one.items():
        assert tensor.shape == expected[name].shape
        assert tensor.unique().numel() == tensor.numel()
        assert not torch.equal(tensor, other[name])
    assert torch.equal(random_weights(expected)["gate.bias"], one["gate.bias"])


def test_random_weights_are_the_seeds() -> None:
    """Those of every dtype, whatever was drawn before."""
    kinds = torch.float32, torch.uint8, torch.int64, torch.bool
    expected = {str(kind): torch.empty(9, 9, dtype=kind, device="meta") for kind in kinds}
    first, second = random_weights(expected, seed=5), random_weights(expected, seed=5)
    assert all(torch.equal(first[name], second[name]) for name in expected)


def test_states_differ_in_shape_and_dtype_as_well() -> None:
    """The same bytes are another tensor in another shape or dtype; NaN is the same as itself."""
    values = torch.tensor([[1.0, torch.nan], [-0.0, 2.0]], dtype=torch.float16)
    for other in (values.view(torch.bfloat16), values.view(torch.int16), values.view(4)):
        assert other.view(-1).view(torch.uint8).equal(values.view(-1).view(torch.uint8))
        with pytest.raises(AssertionError, match="x has different bits"):
            assert_same_state({"x": other}, {"x": values}, "in a test")
    assert_same_state({"x": values.t().contiguous().t()}, {"x": values}, "in a test")
    with pytest.raises(AssertionError, match="x has different bits"):
        assert_same_state({"x": values.abs()}, {"x": values}, "in a test")


def test_the_names_that_a_module_knows_are_read_off_it() -> None:
    """Fused layers have their slots in the order of shard_names; tied tensors their other names."""
    names = Names.of(Tied())
    assert names.tied == {"embed.weight": ("head.weight",)}
    assert names.fused == (
        Fused("up.weight", "up.weight", (("gate", "fold"),), (-2,)),
        Fused("up.bias", "up.bias", (("gate", "fold"),), (-1,)),
    )
    assert names.fused[0].slot_names == ("gate.weight", "fold.weight")
    fused = fuse(random_weights(Tied().expected_weights()), names.fused[:1])
    assert fused["up.weight"].shape == (5, 4)
    assert fused.keys() == {"embed.weight", "up.weight", "gate.bias", "fold.bias"}


@pytest.mark.parametrize("files", [1, 2, 4])
def test_a_written_checkpoint_is_read_back(tmp_path: Path, files: int) -> None:
    """It is split into files, fused and renamed as requested, and otherwise unchanged."""
    tensors = random_weights(Tied().expected_weights())
    layers = Names.of(Tied()).fused[:1]
    renamed = {"embed.weight": "head.weight"}
    folder = write_checkpoint(
        tmp_path / "new", tensors, files=files, fused=layers, renamed=renamed, config={"a": 1}
    )
    assert len(list(folder.glob("*.safetensors"))) == files
    assert (folder / "model.safetensors.index.json").exists() == (files > 1)
    assert (folder / "config.json").read_text() == '{\n  "a": 1\n}'
    checkpoint = open_checkpoint(folder)
    assert checkpoint.keys() == {"head.weight", "up.weight", "gate.bias", "fold.bias"}
    model = Tied()
    model.load_weights(checkpoint.items())
    assert torch.equal(model.up.weight, torch.cat([tensors["gate.weight"], tensors["fold.weight"]]))
    stored = {}
    for file in folder.glob("*.safetensors"):  # the reference implementation reads the same
        stored |= load_file(file)
    assert all(torch.equal(stored[name], handle.read()) for name, handle in checkpoint.items())


@given(model_configs("LlamaForCausalLM"))
def test_a_drawn_configuration_makes_a_loadable_checkpoint(tmp_path_factory, config) -> None:
    """A drawn config.json with random weights is a folder that get_model loads."""
    folder = tmp_path_factory.mktemp("drawn")
    tensors = random_weights(LlamaForCausalLM(config).expected_weights())
    write_checkpoint(folder, tensors, config=config.model_dump())
    get_model(model_config=ModelConfig(model=str(folder))).check_ready()


def test_a_stream_fails_where_it_is_told_to() -> None:
    """Pairs before the fault arrive; if the fault returns, so does the rest."""
    tensors = random_weights(Tied().expected_weights())
    for after in (0, 2, len(tensors)):
        seen: list[str] = []
        stream = failing_stream(tensors, after, OSError("gone"))
        with pytest.raises(OSError, match="gone"):
            seen.extend(name for name, _ in stream)
        assert seen == list(tensors)[:after]
    happened = []
    pairs = list(failing_stream(tensors, 1, lambda: happened.append("waited")))
    assert dict(pairs).keys() == tensors.keys()
    assert happened == ["waited"]


def test_reads_fail_where_they_are_told_to() -> None:
    """Handles can be looked at and narrowed; reading a named one fails the load."""
    tensors = random_weights(Tied().expected_weights())
    model = Tied()
    with pytest.raises(OSError, match="disk"):
        model.load_weights(failing_reads(tensors, ["fold.weight"], OSError("disk")))
    with pytest.raises(ModelNotReadyError, match="OSError: disk"):
        model.check_ready()
    model.load_weights(failing_reads(tensors, ["fold.weight"], lambda: None))
    model.check_ready()
    with pytest.raises(ValueError, match="no weights are called nope"):
        failing_reads(tensors, ["nope"], OSError())
