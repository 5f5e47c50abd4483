"""A sleeping model has no weights in memory, refuses to run, and wakes up by loading."""

from __future__ import annotations

import gc
import runpy
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_module.errors import ModelNotReadyError
from vllm_module.quantization import ONLINE, EightBitMethod
from vllm_module.testing.checkpoints import assert_same_state, random_weights, state

tree = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tree.py"))))


def quantized() -> torch.nn.Module:
    model = tree.Model()
    for block in model.blocks:
        for layer in (block.qkv_proj, block.mlp.gate_up_proj, block.mlp.down_proj):
            layer.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
    return model


MODELS = {
    "plain": tree.Model,
    "tied": lambda: tree.Model(tied=True),
    "quantized": quantized,
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_sleeping_model_has_no_memory_and_refuses_to_run(build) -> None:
    """Every stored tensor is on meta and its memory released; every call is refused."""
    model = build().eval()
    model.load_weights(random_weights(model.expected_weights()))
    model(torch.arange(3))
    held = [weakref.ref(tensor) for tensor in model.parameters()]
    model.sleep()
    gc.collect()
    assert not any(reference() is not None for reference in held)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    for call in (model.check_ready, lambda: model(torch.arange(3))):
        with pytest.raises(ModelNotReadyError, match="call load_weights"):
            call()
    with pytest.raises(ModelNotReadyError):
        model.blocks[1].mlp(torch.zeros(1, 8))


@pytest.mark.parametrize("in_buckets", [False, True])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_model_wakes_up_by_loading(build, in_buckets: bool) -> None:
    """A load, or updates that fill everything, give the bits of a first load; ties stay ties."""
    model = build().eval()
    tensors = random_weights(model.expected_weights())
    model.load_weights(tensors)
    before = state(model)
    out = model(torch.arange(3))
    model.sleep()
    if in_buckets:
        names = sorted(tensors)
        for first in range(0, len(names), 3):
            with pytest.raises(ModelNotReadyError):
                model(torch.arange(3))
            model.update_weights({name: tensors[name] for name in names[first : first + 3]})
    else:
        model.load_weights(tensors)
    assert_same_state(state(model), before, "after sleep")
    assert torch.equal(model(torch.arange(3)), out)
    tied = {id(model.embed.weight), id(model.head.weight)}
    assert len(tied) == (1 if build is MODELS["tied"] else 2)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_sleeping_twice_or_before_loading_changes_nothing() -> None:
    """A second sleep does nothing, and a sleeping model loads as a new one does."""
    model = tree.Model()
    model.sleep()
    model.sleep()
    model.load_weights(tree.checkpoint())
    model.check_ready()


def test_a_part_of_a_model_can_sleep() -> None:
    """The rest keeps its weights; the model refuses to run until the part is loaded."""
    model = tree.Model().eval()
    model.load_weights(tree.checkpoint())
    part = model.blocks[0].mlp
    tensors = random_weights(part.expected_weights())
    part.sleep()
    assert not model.blocks[1].mlp.down_proj.weight.is_meta
    with pytest.raises(ModelNotReadyError, match="down_proj"):
        model(torch.arange(3))
    part.load_weights(tensors)
    model(torch.arange(3))


def test_sleep_is_refused_during_a_load() -> None:
    """The load is writing to the memory."""
    model = tree.Model()

    def stream():
        for name, tensor in tree.checkpoint().items():
            with pytest.raises(RuntimeError, match="being loaded"):
                model.sleep()
            yield name, tensor

    model.load_weights(stream())


def test_computed_buffers_stay() -> None:
    """Sleep keeps tensors that no checkpoint stores, because no load could restore them."""
    model = tree.Model()
    model.register_buffer("table", torch.ones(3), persistent=False)
    model.load_weights(tree.checkpoint())
    model.sleep()
    assert torch.equal(model.table, torch.ones(3))


def test_updates_wake_what_was_refused_before_it_slept() -> None:
    """Sleep releases the mixture that a broken load left, so updates may fill the model."""
    model = tree.Model()
    tensors = tree.checkpoint()

    def broken():
        yield next(iter(tensors.items()))
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        model.load_weights(broken())
    model.sleep()
    model.update_weights(tensors)
    model.check_ready()
