"""When a module runs: unfilled tensors are named, and a ready module has no check left."""

from __future__ import annotations

import runpy
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_module import vLLMModule
from vllm_module.core import allocation
from vllm_module.core.tensors import materialized
from vllm_module.errors import ModelNotReadyError
from vllm_module.layers import MergedColumnParallelLinear, RMSNorm, SiluAndMul
from vllm_module.parameters import Dim, ModelWeightParameter, Slot
from vllm_module.quantization import ONLINE, EightBitMethod
from vllm_module.testing.checkpoints import assert_same_state, state

tree = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tree.py"))))


def test_every_module_with_an_unfilled_tensor_refuses_to_run() -> None:
    """Law 6: the error names tensors and slots, layers folded; a module without tensors runs."""
    model = tree.Model()
    with pytest.raises(ModelNotReadyError, match=r"blocks\.\{0\.\.1\}\.k_proj\.weight"):
        model(torch.arange(3))
    with pytest.raises(ModelNotReadyError, match=r"down_proj\.bias"):
        model.blocks[0].mlp(torch.zeros(1, 8))
    tensors = tree.checkpoint()
    model.update_weights({n: t for n, t in tensors.items() if n != "blocks.1.v_proj.bias"})
    with pytest.raises(ModelNotReadyError) as refused:
        model.check_ready()
    assert str(refused.value).splitlines() == [
        "Model cannot run: not loaded, or put to sleep (call load_weights):",
        "  blocks.1.v_proj.bias",
    ]
    model.blocks[0].eval()(torch.zeros(1, 8))
    SiluAndMul()(torch.zeros(4))


@pytest.mark.parametrize("scheme", [None, *ONLINE])
def test_a_forward_pass_without_the_check_reads_no_memory_that_nothing_filled(scheme) -> None:
    """Called as ``.forward()``, a layer on meta raises, and a slot that is not filled gives NaN."""
    layer = MergedColumnParallelLinear(128, [128, 128], bias=False, shard_names=["g", "u"])
    if scheme is not None:
        layer.quantize(EightBitMethod(ONLINE[scheme]))
    x = torch.rand(3, 128)
    for inference in (True, False):
        with torch.inference_mode(inference), pytest.raises(ValueError, match="weight is on meta"):
            layer.forward(x)
    layer.update_weights({"u.weight": torch.eye(128)})
    with pytest.raises(ModelNotReadyError, match=r"g\.weight"):
        layer(x)
    unfilled, filled = layer.forward(x).chunk(2, dim=-1)
    assert unfilled.isnan().all()
    if scheme == "fp8_per_tensor":  # the scales of products are computed once all are loaded
        assert filled.isnan().all()
    else:
        torch.testing.assert_close(filled, x, rtol=0.1, atol=0.02)  # FP8 activations


@pytest.mark.parametrize("slots", [2, 3])
def test_a_slot_that_nothing_filled_does_not_show_old_memory(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is allocated again has old numbers in it, which must not become weights."""

    def reused(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        real = materialized(tensor, device)
        real.data.fill_(7)
        return real

    # The tests' own new memory is NaN, which would hide that the product writes none.
    monkeypatch.setattr(allocation, "materialized", reused)
    names = ["a", "b", "c"][:slots]
    layer = MergedColumnParallelLinear(3, [2] * slots, bias=False, shard_names=names)
    layer.update_weights({"b.weight": torch.ones(2, 3)})
    expected = torch.full((slots, 2, 3), torch.nan)
    expected[1] = 1
    assert torch.equal(layer.weight.isnan(), expected.flatten(0, 1).isnan())
    assert torch.equal(layer.weight[2:4], expected[1])


PADDED = Dim((Slot("g", 3, 2, 4), Slot("u", 5, 2, 6)))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("first", ["g", "u"])
def test_padding_is_zero_however_few_slots_were_filled(first: str, rank: int) -> None:
    """A slot that nothing filled is NaN, and what no checkpoint fills is zero at once."""
    place = {"tp_rank": rank, "tp_size": 2, "dtype": torch.float32}

    class Padded(vLLMModule):
        shard_names = ("g", "u")

        def __init__(self) -> None:
            super().__init__()
            self.weight = ModelWeightParameter(PADDED, Dim.whole(2), **place)

    stored = {"g.weight": torch.ones(3, 2), "u.weight": torch.full((5, 2), 2.0)}
    whole = torch.zeros(2, 5, 2)
    for at in (0, 1):  # rows of a slot are dealt out in parts of 2 and 3
        whole[at, :2] = torch.tensor([[1.0], [1.0 - at]])
        whole[at, 2:5] = torch.tensor([[2.0], [2.0], [2.0 - 2 * at]])
    module = Padded()
    module.update_weights({f"{first}.weight": stored[f"{first}.weight"]})
    expected = whole[rank].clone()
    unfilled = expected[2:] if first == "g" else expected[:2]
    unfilled[unfilled != 0] = torch.nan
    torch.testing.assert_close(module.weight.data, expected, rtol=0, atol=0, equal_nan=True)
    module.update_weights(stored)
    assert torch.equal(module.weight, whole[rank])


@pytest.mark.parametrize("tied", [False, True])
def test_no_layer_runs_on_meta_without_the_check(tied: bool) -> None:
    """Called as ``.forward()``, no layer of a model that is not loaded returns host memory."""
    model = tree.Model(1, tied=tied).eval()
    block = model.blocks[0]
    for layer in (block.qkv_proj, block.mlp, block.mlp.down_proj, block.norm, model.head, block):
        with pytest.raises((ValueError, RuntimeError), match=r"meta|not loaded"):
            layer.forward(torch.rand(2, 12 if layer is block.mlp.down_proj else 8))
    assert model.embed.forward(torch.arange(3)).is_meta


def test_a_ready_module_has_no_hook_left() -> None:
    """The check is removed after a load, and at the first run after an update."""
    model = tree.Model().eval()
    model.load_weights(tree.checkpoint())
    assert not any(module._forward_pre_hooks for module in model.modules())
    model(torch.arange(3))
    updated = RMSNorm(2)
    updated.update_weights({"weight": torch.ones(2)})
    updated(torch.ones(2))
    assert not updated._forward_pre_hooks


def test_third_party_modules_on_meta_are_materialized_too() -> None:
    """Law 9: a plain module built under torch.device('meta') loads by the same path."""

    class Wrapper(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x):
            return self.plain(x)

    model = Wrapper().eval()
    reference = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    tensors = {f"plain.{name}": tensor for name, tensor in reference.state_dict().items()}
    model.load_weights(tensors)
    assert model.plain[0].weight.requires_grad
    x = torch.rand(2, 4)
    assert torch.equal(model(x), reference(x))


def loaded_model():
    model = tree.Model().eval()
    model.load_weights(tree.checkpoint())
    return model


def test_a_model_built_on_meta_is_loaded_into_host_memory() -> None:
    """Law 6: under torch.device("meta") nothing says where weights belong, and meta holds none."""
    with torch.device("meta"):
        model = tree.Model().eval()
    model.load_weights(tree.checkpoint())
    assert_same_state(state(model), state(loaded_model()), "built on meta")
    model(torch.arange(3))


def test_what_is_loaded_under_inference_mode_is_updated_outside_of_it() -> None:
    """PyTorch refuses to write outside of inference mode to tensors that were made in it."""
    with torch.device("meta"):  # plain parameters and buffers are materialized too
        model = tree.Model().eval()
    with torch.inference_mode():
        model.load_weights(tree.checkpoint())
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    model.update_weights({name: tensor + 1 for name, tensor in tree.checkpoint().items()})
    model.update_weights(tree.checkpoint())
    assert_same_state(state(model), state(loaded_model()), "loaded under inference mode")


def test_a_computed_buffer_on_meta_is_refused_when_run() -> None:
    """Law 6: a buffer that no checkpoint can fill is named, and the module does not run."""

    class Computed(vLLMModule):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.empty(4, device="meta"), persistent=False)

        def forward(self, x):
            return x + self.table

    model = Computed()
    model.load_weights({})
    with pytest.raises(ModelNotReadyError, match="table"):
        model(torch.zeros(4))


def test_a_tensor_that_becomes_meta_again_is_unfilled() -> None:
    """Law 6: a slot counts as filled only while the memory that was filled is there."""
    mlp = MergedColumnParallelLinear(2, [2, 2], bias=False, shard_names=["g", "u"])
    mlp.load_weights({"g.weight": torch.ones(2, 2), "u.weight": torch.ones(2, 2)})
    fresh = MergedColumnParallelLinear(2, [2, 2], bias=False, shard_names=["g", "u"])
    mlp.weight = fresh.weight
    with pytest.raises(ModelNotReadyError):
        mlp.check_ready()
    mlp.update_weights({"g.weight": torch.ones(2, 2)})
    with pytest.raises(ModelNotReadyError, match=r"u\.weight"):
        mlp.check_ready()


def test_one_model_is_loaded_by_one_call_at_a_time() -> None:
    """A second load during the first is an error, and the first succeeds."""
    model = RMSNorm(2)
    errors = []

    def second() -> None:
        for use in (lambda: model.load_weights({"weight": torch.zeros(2)}), model.check_ready):
            try:
                use()
            except RuntimeError as error:
                errors.append(str(error))

    def weights():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        yield "weight", torch.ones(2)

    model.load_weights(weights())
    assert errors == [
        "this RMSNorm is already being loaded",
        "RMSNorm cannot run: its weights are being loaded",
    ]
    assert model.weight.tolist() == [1, 1]


def test_a_ready_module_does_not_run_while_it_is_updated() -> None:
    """A forward pass between the first and the last write is refused."""
    model = MergedColumnParallelLinear(2, [2, 2], bias=False, shard_names=["g", "u"])
    tensors = {"g.weight": torch.ones(2, 2), "u.weight": torch.ones(2, 2)}
    model.load_weights(tensors)

    def weights():
        model(torch.ones(2))
        yield "g.weight", torch.zeros(2, 2)
        with pytest.raises(ModelNotReadyError, match="its weights are being loaded"):
            model(torch.ones(2))
        yield "u.weight", torch.zeros(2, 2)

    model.update_weights(weights())
    assert model(torch.ones(2)).tolist() == [0] * 4
