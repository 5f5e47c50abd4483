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
    MLAAttention,
    PerHeadLayerNorm,
    Positions,
    RMSNorm,
    RotaryEmbedding,
    attention,
    fuse,
    mla,
)
from vllm_module.models.gemma3 import Gemma3Attention
from vllm_module.models.llama import LlamaAttention
from vllm_module.parameters import Slot

TOKENS, PAGE, SIZE = 5, 4, 8


class Turned(RotaryEmbedding):
    """A user's rotation."""

    def forward(self, positions: Any, query: Any, key: Any) -> Any:
        return super().forward(positions, -query, key.clone())


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


class Attending(torch.nn.Module):
    """Attention whose norms and rotation are modules, as a model has it."""

    sole_readers = {"q_norm": "rotary_emb", "k_norm": "rotary_emb", "rotary_emb": "attn"}

    def __init__(self, dtype: torch.dtype = torch.float32, **changed: Any) -> None:
        super().__init__()
        self.attn = Attention(4, SIZE, num_kv_heads=2)
        self.rotary_emb = RotaryEmbedding(SIZE, 64, rotary_dim=6, is_neox_style=False)
        self.q_norm, self.k_norm = norm(dtype), norm(dtype)
        for name, module in changed.items():
            setattr(self, name, module)
        self.attended(dtype)  # checks that it is loaded

    def forward(self, positions: Any, q: Any, k: Any, v: Any, metadata: Any = None) -> Any:
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v, metadata)

    def attended(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return output and cache of a step."""
        torch.manual_seed(1)
        q, k, v = torch.randn(TOKENS, 4 + 2 + 2, SIZE).to(dtype).split([4, 2, 2], dim=1)
        cache = self.attn.kv_cache = torch.randn(2, 3, PAGE, 2, SIZE).to(dtype)
        return [self(torch.arange(1, 6), q, k, v, metadata()), cache]


NO_NORMS = {"q_norm": None, "k_norm": None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_a_rotation_gives_the_bits_of_its_modules(dtype, normed, inference, fused) -> None:
    """Attention normalizes, rotates and stores by one operation, as the modules and it would."""
    module = Attending(dtype, **({} if normed else NO_NORMS))
    with torch.inference_mode(inference), torch.no_grad():
        apart = module.attended(dtype)
        assert not fused
        together = fuse(module).attended(dtype)
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


# By case, what is changed, and whether the rotation and the cache are one operation all the same.
CHANGED: dict[str, tuple[Callable[[], dict[str, Any]], bool]] = {
    "a norm has a hook": (lambda: {"q_norm": hooked(norm(torch.float32))}, True),
    "a norm was replaced": (lambda: {"k_norm": replaced(norm(torch.float32))}, True),
    "a norm of another class": (lambda: {"q_norm": per_head()}, True),
    "norms differ in eps": (lambda: {"k_norm": norm(torch.float32, 0.1)}, True),
    "norms differ in offset": (lambda: {"k_norm": norm(torch.float32, offset=1.0)}, True),
    "a rotation of its own": (lambda: {"rotary_emb": Turned(SIZE, 64, rotary_dim=6)}, False),
    "attention has a hook": (lambda: {"attn": hooked(Attention(4, SIZE, num_kv_heads=2))}, False),
}


@pytest.mark.parametrize("case", CHANGED)
def test_modules_that_do_more_are_called(case: str, fused) -> None:
    """Where modules do not run their class's forward pass alone, they are called one by one."""
    torch.manual_seed(0)
    changed, rotates = CHANGED[case]
    module = Attending(**changed())
    with torch.inference_mode():
        apart = module.attended(torch.float32)
        together = fuse(module).attended(torch.float32)
    assert all(map(torch.equal, together, apart))
    assert len(fused) == rotates
    if fused:
        assert fused[0][11:13] == (None, None)  # the weights of the norms


def test_a_hook_of_all_modules_is_called(fused) -> None:
    """Where a hook is registered for every module, norms and rotation give it tensors."""
    called = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: called.append((type(module).__name__, output))
    )
    module = fuse(Attending())
    with hook, torch.inference_mode():
        module.attended(torch.float32)
    assert {"RMSNorm", "RotaryEmbedding"} <= {name for name, _ in called}
    for _, output in called:
        for each in output if isinstance(output, tuple) else (output,):
            assert type(each) is torch.Tensor
    assert not fused


def test_weights_of_another_dtype_are_multiplied_by_their_modules(fused) -> None:
    """A norm whose weight has another dtype gives other numbers than the operation."""
    module = Attending(q_norm=norm(torch.bfloat16), k_norm=norm(torch.bfloat16))
    with torch.inference_mode():
        apart = module.attended(torch.float32)
        together = fuse(module).attended(torch.float32)
    assert all(map(torch.equal, together, apart))
    assert fused[0][11:13] == (None, None)


def test_derivatives_pass_through_the_modules(fused) -> None:
    """Where a gradient is needed, the modules compute it, and without a cache nothing is stored."""
    module = fuse(Attending())
    q, k, v = torch.randn(TOKENS, 8, SIZE).split([4, 2, 2], dim=1)
    with torch.inference_mode():
        expected = module(torch.arange(TOKENS), q.clone(), k.clone(), v)
    q.requires_grad_()
    output = module(torch.arange(TOKENS), q, k, v)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert q.grad.isfinite().all()
    assert not fused


@torch.inference_mode()
def test_rotation_is_a_tensor_to_anyone_else() -> None:
    """Norms and rotation give tensors where something else than attention is to read them."""
    module = fuse(Attending())
    module.attended(torch.float32)
    q, k = torch.randn(TOKENS, 4, SIZE), torch.randn(TOKENS, 2, SIZE)
    for each in (module.q_norm(q), *module.rotary_emb(torch.arange(TOKENS), q, k)):
        assert type(each) is torch.Tensor


@torch.inference_mode()
def test_positions_are_turned_to_angles_once(monkeypatch) -> None:
    """Layers that share positions share their cosines and sines, each rotation its own."""
    calls, cos_sin = [], RotaryEmbedding.cos_sin

    def noted(self: Any, positions: Any) -> Any:
        calls.append(self)
        return cos_sin(self, positions)

    monkeypatch.setattr(RotaryEmbedding, "cos_sin", noted)
    near, far = RotaryEmbedding(SIZE, 64), RotaryEmbedding(SIZE, 64, base=100.0)
    tensor, x = torch.arange(TOKENS) * 3, torch.randn(TOKENS, 4, SIZE)
    shared = Positions(tensor)
    for rotary_emb in (near, far, near, far):
        got, _ = rotary_emb(shared, x.clone(), x.clone())
        expected, _ = rotary_emb(tensor, x.clone(), x.clone())
        assert torch.equal(got, expected)
    assert calls == [near, near, far, far, near, far]


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
    monkeypatch.setattr(mla, "_fuses", lambda query, latents: True)
    module = Latents((Turned if case == "own rotation" else RotaryEmbedding)(SIZE, 64))
    tokens = [torch.randn(TOKENS, *shape) for shape in ((2, 6), (2, SIZE), (SIZE,), (1, SIZE))]
    weights = torch.randn(2, 6, SIZE), torch.randn(2, SIZE, 3)
    module(*tokens, *weights)  # checks that it is loaded
    if case == "hooked":
        hooked(module.kv_norm)
    results = []
    for change in (lambda: None, lambda: fuse(module)):
        change()
        module.attn.kv_cache = torch.zeros(1, 3, PAGE, 1, 2 * SIZE)
        with torch.set_grad_enabled(case == "gradients"):
            output = module(*(x.clone() for x in tokens), *weights, metadata())
        results.append((output, module.attn.kv_cache))
    assert all(map(torch.equal, *results))
    assert len(calls) == (case == "plain")
    with torch.no_grad():
        whole = module(*(x.clone() for x in tokens), *weights)  # without metadata
    assert len(calls) == (case == "plain")
    assert whole.isfinite().all()


class Latents(torch.nn.Module):
    """Latent attention whose norm and rotation are modules, as a model has it."""

    sole_readers = {"kv_norm": "attn", "rotary_emb": "attn"}

    def __init__(self, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary_emb, self.kv_norm = rotary_emb, norm(torch.float32)
        self.attn = MLAAttention(2, SIZE, 6, SIZE)

    def forward(self, q_nope: Any, q_pe: Any, kv_c: Any, k_pe: Any, *others: Any) -> Any:
        q_pe, k_pe = self.rotary_emb(torch.arange(1, 6), q_pe, k_pe)
        return self.attn(q_nope, q_pe, self.kv_norm(kv_c), k_pe, *others)


class Doubled(LlamaAttention):
    """A user's attention with an operation of its own after the rotation."""

    def forward(self, positions: Any, hidden_states: Any, metadata: Any) -> Any:
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.qkv_proj.heads, dim=-2)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q * 2, k, v, metadata))


class DoubledGemma(Gemma3Attention):
    def forward(self, positions: Any, hidden_states: Any, metadata: Any) -> Any:
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.qkv_proj.heads, dim=-2)
        q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        return self.o_proj(self.attn(q * 2, k, v, metadata))


CONFIG = SimpleNamespace(
    num_attention_heads=2, num_key_value_heads=1, hidden_size=6, attention_bias=False,
    sliding_window=None, use_sliding_window=False, query_pre_attn_scalar=16.0,
    attn_logit_softcapping=None, rms_norm_eps=1e-6, stored_rotary_pairs=False,
)  # fmt: skip


@pytest.mark.parametrize(("own", "base"), [(Doubled, LlamaAttention), (DoubledGemma, None)])
def test_an_override_is_given_tensors(own, base, fused) -> None:
    """A subclass that overrides the forward pass works on rotated queries; its base need not."""
    torch.manual_seed(0)
    base = base or Gemma3Attention
    rotary_emb = RotaryEmbedding(SIZE, 64)
    modules = [fuse(cls(CONFIG, rotary_emb, 0)) for cls in (own, base)]
    weights = {name: torch.randn(shape) for name, shape in shapes(modules[1]).items()}
    outputs = []
    for module, scale in zip(modules, (1, 2), strict=True):
        module.load_weights(weights)
        module.attn.kv_cache = torch.zeros(2, 3, PAGE, 1, SIZE)
        module.attn.scale *= scale  # twice the query is twice the scores
        with torch.inference_mode():
            outputs.append(module(torch.arange(TOKENS), torch.ones(TOKENS, 6), metadata()))
    torch.testing.assert_close(*outputs)
    assert len(fused) == 1


def shapes(module: vLLMModule) -> dict[str, torch.Size]:
    return {name: expected.shape for name, expected in module.expected_weights().items()}
