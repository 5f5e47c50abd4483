"""Queries and keys that attention normalizes and rotates in one operation with the cache."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_module import vLLMModule
from vllm_module.layers import (
    Attention,
    AttentionMetadata,
    LatentRotation,
    MLAAttention,
    PerHeadLayerNorm,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    attention,
    mla,
)
from vllm_module.models.gemma3 import Gemma3Attention
from vllm_module.models.llama import LlamaAttention
from vllm_module.parameters import Slot

TOKENS, PAGE, SIZE = 5, 4, 8


class Turned(RotaryEmbedding):
    """A user's rotation."""

    def forward(self, query: Any, key: Any, cos_sin: Any) -> Any:
        return super().forward(-query, key.clone(), cos_sin)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note the calls of the operation."""
    calls = []

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return rotate_and_cache(*args, **kwargs)

    rotate_and_cache = attention.rotate_and_cache
    monkeypatch.setattr(attention, "rotate_and_cache", noted)
    return calls


def norm(dtype: torch.dtype, eps: float = 1e-6, offset: float = 0.0) -> RMSNorm:
    made = RMSNorm(SIZE, eps, dtype, offset)
    made.load_weights({"weight": torch.randn(SIZE, dtype=dtype)})
    return made


def metadata() -> AttentionMetadata:
    return AttentionMetadata(
        slot_mapping=torch.tensor([9, 10, 11, 0, -1]),
        block_tables=torch.tensor([[2, 0]], dtype=torch.int32),
        context_lens=torch.tensor([6], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
        max_query_len=5,
    ).laid_out()


def attended(rotation: Any, dtype: torch.dtype, *, separate: bool) -> list[torch.Tensor]:
    """Return output and cache of a step, which ``rotation`` precedes or is part of."""
    torch.manual_seed(1)
    q, k, v = torch.randn(TOKENS, 4 + 2 + 2, SIZE).to(dtype).split([4, 2, 2], dim=1)
    layer = Attention(4, SIZE, num_kv_heads=2)
    layer.kv_cache = torch.randn(2, 3, PAGE, 2, SIZE).to(dtype)
    if separate:
        return [layer(*rotation(q, k), v, metadata()), layer.kv_cache]
    return [layer(q, k, v, metadata(), rotate=rotation), layer.kv_cache]


def rotation_of(dtype: torch.dtype = torch.float32, **changed: Any) -> Rotation:
    rotary_emb = RotaryEmbedding(SIZE, 64, rotary_dim=6, is_neox_style=False)
    parts = {"rotary_emb": rotary_emb, "cos_sin": rotary_emb.cos_sin(torch.arange(1, 6))}
    norms = {name: norm(dtype) for name in ("q_norm", "k_norm")}
    rotation = Rotation(**(parts | norms | changed))
    rotation(torch.ones(TOKENS, 4, SIZE), torch.ones(TOKENS, 2, SIZE))  # checks that it is loaded
    return rotation


NO_NORMS = {"q_norm": None, "k_norm": None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_a_rotation_gives_the_bits_of_its_modules(dtype, normed, inference, fused) -> None:
    """Attention normalizes, rotates and stores by one operation, as the modules and it would."""
    rotation = rotation_of(dtype, **({} if normed else NO_NORMS))
    with torch.inference_mode(inference), torch.no_grad():
        together = attended(rotation, dtype, separate=False)
        assert len(fused) == 1
        apart = attended(rotation, dtype, separate=True)
    assert all(map(torch.equal, together, apart))
    assert len(fused) == 1


def hooked(module: vLLMModule) -> vLLMModule:
    module.register_forward_hook(lambda module, args, output: output * 2)
    return module


def replaced(module: vLLMModule) -> vLLMModule:
    module.forward = lambda x: x.flip(-1)
    return module


def per_head() -> PerHeadLayerNorm:
    made = PerHeadLayerNorm(Slot("", 4 * SIZE, 1), SIZE)
    made.load_weights({"weight": torch.randn(4, SIZE)})
    return made


SEPARATE: dict[str, Callable[[], Any]] = {
    "a norm has a hook": lambda: rotation_of(q_norm=hooked(norm(torch.float32))),
    "a norm was replaced": lambda: rotation_of(k_norm=replaced(norm(torch.float32))),
    "a norm of another class": lambda: rotation_of(q_norm=per_head()),
    "norms differ in eps": lambda: rotation_of(k_norm=norm(torch.float32, 0.1)),
    "norms differ in offset": lambda: rotation_of(k_norm=norm(torch.float32, offset=1.0)),
    "a rotation of its own": lambda: rotation_of(rotary_emb=Turned(SIZE, 64, rotary_dim=6)),
    "any callable": lambda: lambda q, k: (q * 2, k + 1),
}


@pytest.mark.parametrize("case", SEPARATE)
def test_modules_that_do_more_are_called(case: str, fused) -> None:
    """Where modules do not run their class's forward pass alone, they are called one by one."""
    torch.manual_seed(0)
    rotation = SEPARATE[case]()
    with torch.inference_mode():
        together, apart = (attended(rotation, torch.float32, separate=s) for s in (False, True))
    assert all(map(torch.equal, together, apart))
    assert not fused


def test_a_hook_of_all_modules_is_called(fused) -> None:
    """Where a hook is registered for every module, norms and rotation are modules, too."""
    called = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: called.append(type(module).__name__)
    )
    with hook, torch.inference_mode():
        attended(
            rotation_of(q_norm=norm(torch.float32), k_norm=norm(torch.float32)),
            torch.float32,
            separate=False,
        )
    assert {"RMSNorm", "RotaryEmbedding"} <= set(called)
    assert not fused


def test_weights_of_another_dtype_are_multiplied_by_their_modules(fused) -> None:
    """A norm whose weight has another dtype gives other numbers than the operation."""
    rotation = rotation_of(q_norm=norm(torch.float32), k_norm=norm(torch.float32))
    assert rotation.is_plain(torch.float32)
    assert not rotation.is_plain(torch.bfloat16)


def test_derivatives_pass_through_the_modules(fused) -> None:
    """Where a gradient is needed, or nothing is cached, the modules compute it."""
    rotation, layer = rotation_of(), Attention(2, SIZE)
    q, k, v = torch.randn(3, TOKENS, 2, SIZE)
    expected = layer(*rotation(q.clone(), k.clone()), v)
    q.requires_grad_()
    output = layer(q, k, v, rotate=rotation)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert q.grad.isfinite().all()
    assert not fused


@pytest.mark.parametrize("case", ["plain", "hooked", "own rotation", "gradients"])
def test_latents_are_rotated_as_by_their_modules(case: str, monkeypatch) -> None:
    """Latent attention gives the bits of its modules, and calls those that do more."""
    torch.manual_seed(0)
    calls = []

    def noted(*args: Any) -> None:
        calls.append(args)
        rotate_and_cache_mla(*args)

    rotate_and_cache_mla = mla.rotate_and_cache_mla
    monkeypatch.setattr(mla, "rotate_and_cache_mla", noted)
    # As on a GPU.
    monkeypatch.setattr(mla, "_fuses", lambda rotate, query: rotate.is_plain(query.dtype))
    rotary_emb = (Turned if case == "own rotation" else RotaryEmbedding)(SIZE, 64)
    kv_norm = norm(torch.float32)
    rotation = LatentRotation(rotary_emb, rotary_emb.cos_sin(torch.arange(1, 6)), kv_norm)
    rotation(torch.ones(TOKENS, 1, SIZE), torch.ones(TOKENS, SIZE), torch.ones(TOKENS, SIZE))
    if case == "hooked":
        hooked(kv_norm)
    layer = MLAAttention(2, SIZE, 6, SIZE)
    tokens = [torch.randn(TOKENS, *shape) for shape in ((2, 6), (2, SIZE), (SIZE,), (SIZE,))]
    weights = torch.randn(2, 6, SIZE), torch.randn(2, SIZE, 3)
    results = []
    for together in (True, False):
        layer.kv_cache = torch.zeros(1, 3, PAGE, 1, 2 * SIZE)
        q_nope, *parts = (x.clone() for x in tokens)
        with torch.set_grad_enabled(case == "gradients"):
            given = parts if together else rotation(*parts)
            last = (rotation,) if together else ()
            output = layer(q_nope, *given, *weights, metadata(), *last)
        results.append((output, layer.kv_cache))
    assert all(map(torch.equal, *results))
    assert len(calls) == (case == "plain")


class Doubled(LlamaAttention):
    """A user's attention with operations of its own before the rotation."""

    def rotate(self, q: Any, k: Any, cos_sin: Any) -> Any:
        return super().rotate(q * 2, k, cos_sin)


class DoubledGemma(Gemma3Attention):
    def rotate(self, q: Any, k: Any, cos_sin: Any) -> Any:
        q, k = super().rotate(q, k, cos_sin)
        return q * 2, k


CONFIG = SimpleNamespace(
    num_attention_heads=2, num_key_value_heads=1, hidden_size=6, attention_bias=False,
    sliding_window=None, use_sliding_window=False, query_pre_attn_scalar=16.0,
    attn_logit_softcapping=None, rms_norm_eps=1e-6, stored_rotary_pairs=False,
)  # fmt: skip


@pytest.mark.parametrize(("own", "base"), [(Doubled, LlamaAttention), (DoubledGemma, None)])
def test_an_override_of_rotate_is_called(own, base, fused) -> None:
    """A subclass that overrides ``rotate`` has its own operations, and its base's."""
    torch.manual_seed(0)
    base = base or Gemma3Attention
    rotary_emb = RotaryEmbedding(SIZE, 64)
    cos_sin = rotary_emb.cos_sin(torch.arange(TOKENS))
    modules = [cls(CONFIG, rotary_emb, 0) for cls in (own, base)]
    weights = {name: torch.randn(shape) for name, shape in shapes(modules[1]).items()}
    outputs = []
    for module, scale in zip(modules, (1, 2), strict=True):
        module.load_weights(weights)
        module.attn.kv_cache = torch.zeros(2, 3, PAGE, 1, SIZE)
        module.attn.scale *= scale  # twice the query is twice the scores
        with torch.inference_mode():
            outputs.append(module(torch.ones(TOKENS, 6), cos_sin, metadata()))
    torch.testing.assert_close(*outputs)
    assert len(fused) == 1


def shapes(module: vLLMModule) -> dict[str, torch.Size]:
    return {name: expected.shape for name, expected in module.expected_weights().items()}
