"""Quantized modules that PyTorch casts, copies, saves, loads and compiles."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn import functional as F

from vllm_module import vLLMModule
from vllm_module.errors import ModelNotReadyError
from vllm_module.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from vllm_module.quantization import ONLINE, EightBitMethod
from vllm_module.testing.checkpoints import assert_same_state, random_weights, state


class Model(vLLMModule):
    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.up = MergedColumnParallelLinear(128, [128, 256], True, shard_names=["a", "b"])
        self.down = RowParallelLinear(384, 128)
        for layer in (self.up, self.down):
            layer.quantize(EightBitMethod(ONLINE[scheme]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def loaded(scheme: str, seed: int = 0) -> Model:
    model = Model(scheme).eval()
    model.load_weights(random_weights(model.expected_weights(), seed=seed))
    return model


@pytest.mark.parametrize("scheme", ONLINE)
def test_forward_multiplies_by_the_dequantized_weight(scheme: str) -> None:
    """The layer multiplies by its dequantized weight, each slot by its own scale."""
    model, x = loaded(scheme), torch.randn(3, 128)
    restored = model.up.conversions["weight"].restored(model.up)
    torch.testing.assert_close(model.up(x), F.linear(x, restored, model.up.bias))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
@pytest.mark.parametrize("scheme", ONLINE)
def test_casting_a_model_leaves_eight_bits_alone(scheme: str, dtype: torch.dtype) -> None:
    """A cast changes biases only; weights and scales stay, and can be updated as before."""
    model, same = loaded(scheme), loaded(scheme)
    model.to(dtype)
    assert model.up.bias.dtype == dtype
    new = {name: 1e-4 * t for name, t in random_weights(same.expected_weights(), seed=1).items()}
    for each in (model, same):
        each.update_weights(new)
    for name in ("up.weight", "up.weight_scale", "down.weight", "down.weight_scale"):
        assert_same_state(
            {name: state(model)[name]}, {name: state(same)[name]}, f"after a cast to {dtype}"
        )


@pytest.mark.parametrize("scheme", ONLINE)
def test_copies_share_no_memory(scheme: str) -> None:
    """A deep copy and a saved model give the same output; an update of one changes no other."""
    model, x = loaded(scheme), torch.randn(2, 128)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    before = state(model)
    for other in copies:
        assert torch.equal(other(x), model(x))
        other.update_weights({"b.weight": torch.ones(256, 128)})
        assert not torch.equal(other(x), model(x))
        assert_same_state(state(model), before, "after an update of its copy")


@pytest.mark.parametrize("scheme", ONLINE)
def test_a_compiled_model_sees_new_weights(scheme: str) -> None:
    """A compiled graph reads the memory that an update writes."""
    model, x = loaded(scheme), torch.randn(2, 128)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    new = random_weights(model.expected_weights(), seed=5)
    model.update_weights(new)
    fresh = Model(scheme)
    fresh.load_weights(new)
    torch.testing.assert_close(compiled(x), fresh(x))


@pytest.mark.parametrize("scheme", ONLINE)
def test_a_state_dict_can_be_loaded_and_full_precision_cannot(scheme: str) -> None:
    """A saved state dict can be loaded; one that PyTorch would cast without scales is refused."""
    model, other = loaded(scheme), loaded(scheme, seed=1)
    other.load_state_dict(model.state_dict())
    assert_same_state(state(other), state(model), "after load_state_dict")
    wide = model.state_dict() | {"up.weight": torch.randn(384, 128)}
    with pytest.raises(RuntimeError, match=r"up\.weight is held in torch\.(float8|int8)"):
        other.load_state_dict(wide)
    assert_same_state(state(other), state(model), "after a refused load_state_dict")


def test_loading_under_inference_mode() -> None:
    """Memory allocated in inference mode can be written afterwards, inside it and outside."""
    model = Model("fp8_per_channel")
    tensors = random_weights(model.expected_weights())
    with torch.inference_mode():
        model.load_weights(tensors)
        model(torch.randn(1, 128))
    model.update_weights(tensors)
    with torch.inference_mode():
        model.load_weights(iter(tensors.items()))
    model.load_weights(tensors)


def test_a_head_is_tied_before_it_is_quantized() -> None:
    """A quantized head cannot be tied: the embedding would read 8-bit numbers as its rows."""
    head, embed = ParallelLMHead(8, 4), VocabParallelEmbedding(8, 4)
    head.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
    with pytest.raises(ValueError, match="tie it first"):
        head.tie_weights(embed)


def test_a_scale_that_was_never_computed_is_missing() -> None:
    """A layer that shares another layer's quantized weight lacks its scales and does not run."""
    a, b = (RowParallelLinear(4, 4, bias=False) for _ in range(2))
    for layer in (a, b):
        layer.quantize(EightBitMethod(ONLINE["fp8_per_channel"]))
    b.weight = a.weight
    both = vLLMModule()
    both.a, both.b = a, b
    both.load_weights({"a.weight": torch.ones(4, 4)})
    with pytest.raises(ModelNotReadyError, match=r"b\.weight_scale"):
        both.check_ready()
    with pytest.raises(ModelNotReadyError, match="weight_scale"):
        b(torch.ones(1, 4))
