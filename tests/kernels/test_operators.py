"""What all operations share: refusals, when values are checked, and importing without Triton."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from vllm_module.kernels.attention.copy_blocks import copy_blocks
from vllm_module.kernels.attention.reshape_and_cache import reshape_and_cache
from vllm_module.kernels.attention.rotary_embedding import rotary_embedding
from vllm_module.kernels.attention.swap_blocks import swap_blocks
from vllm_module.kernels.operators import checks_values, expect, expect_writable, operator
from vllm_module.kernels.rows.quantize import quantize

sizes = st.lists(st.integers(0, 4), max_size=4)


@given(sizes, st.data())
def test_no_tensor_whose_elements_share_memory_is_written(shape, data) -> None:
    """For any sizes and strides, a tensor is refused if two elements share memory."""
    strides = [data.draw(st.integers(0, 30)) for _ in shape]
    tensor = torch.zeros(500).as_strided(shape, strides)
    places = torch.arange(500).as_strided(shape, strides)
    if places.unique().numel() < places.numel():
        with pytest.raises(ValueError, match=r"x is written, and elements of its .* share memory"):
            expect_writable("x", tensor)


@given(sizes.flatmap(st.permutations), st.data())
def test_parts_of_a_tensor_are_written(shape, data) -> None:
    """Any view of a contiguous tensor, in steps and permuted, is accepted."""
    steps = [data.draw(st.integers(1, 3)) for _ in shape]
    whole = torch.zeros([size * step + 1 for size, step in zip(shape, steps, strict=True)])
    part = whole[tuple(slice(1, None, step) for step in steps)]
    expect_writable("x", part.permute(data.draw(st.permutations(range(len(shape))))).unsqueeze(0))


def shared(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that is expanded along its second dimension."""
    return torch.zeros(shape[0], 1, *shape[2:], dtype=dtype).expand(shape)


def test_operations_refuse_to_write_what_shares_memory() -> None:
    """Each operation names the argument whose elements share memory."""
    x, angles = torch.zeros(3, 4, 8), torch.zeros(3, 4)
    cache, slots = torch.zeros(5, 2, 4, 8), torch.arange(3)
    pages = torch.tensor([[0, 1]])
    narrow, scale = torch.zeros(3, 4, dtype=torch.int8), torch.zeros(3, 4)
    calls = {
        "query": lambda: rotary_embedding(shared(3, 4, 8), x, angles, angles),
        "key": lambda: rotary_embedding(x, shared(3, 4, 8), angles, angles),
        "k_cache": lambda: reshape_and_cache(x, x, shared(5, 2, 4, 8), cache, slots),
        "v_cache": lambda: reshape_and_cache(x, x, cache, shared(5, 2, 4, 8), slots),
        "kv_cache": lambda: copy_blocks(cache.expand(2, 5, 2, 4, 8), pages),
        "quantized": lambda: quantize(scale, shared(3, 4, dtype=torch.int8), scale, (1, 1)),
        "scale": lambda: quantize(torch.zeros(3, 4), narrow, shared(3, 4), (1, 1)),
        "destination": lambda: swap_blocks(
            torch.zeros(2, 5, 2, 4, 8), cache.expand(2, 5, 2, 4, 8), pages
        ),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name} is written"):
            call()


def test_pages_that_overlap_are_refused() -> None:
    """Pages that overlap are refused."""
    cache = torch.zeros(40).as_strided((4, 1, 1, 10), (5, 10, 10, 1))
    with pytest.raises(ValueError, match=r"kv_cache is written, .* strides \[5, 10, 10, 1\]"):
        copy_blocks(cache, torch.tensor([[0, 2]]))


def test_any_shape_can_be_expected() -> None:
    """Without a shape, dtype and device are still checked."""
    expect("x", torch.zeros(2, 3), None, (torch.float32,))
    with pytest.raises(ValueError, match=r"x must be torch.int8, got torch.float32"):
        expect("x", torch.zeros(2, 3), None, (torch.int8,))


def test_values_are_checked_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are always checked on the CPU; never on meta or while a graph is captured."""
    assert checks_values(torch.zeros(1))
    assert not checks_values(torch.zeros(1, device="meta"))
    with FakeTensorMode():
        cache, key = torch.zeros(4, 3, 2, 8), torch.zeros(2, 2, 8)
        assert not checks_values(key)
        reshape_and_cache(key, key, cache, cache.clone(), torch.zeros(2, dtype=torch.int64))

    class OnDevice:
        is_meta = is_cpu = False

    monkeypatch.setenv("VLLM_MODULE_CHECKS", "1")
    assert checks_values(OnDevice())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda of=capturing: of)
        assert checks_values(OnDevice()) is not capturing


def test_kernels_are_imported_where_there_is_no_triton(
    run_with_torch: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Without Triton, plain torch computes every operation."""
    program = """
import sys
sys.modules["triton"] = sys.modules["triton.language"] = None
import torch
from vllm_module.kernels.attention import copy_blocks, paged_attention, reshape_and_cache
from vllm_module.kernels.attention import rotary_embedding
from vllm_module.kernels.rows import act_and_mul
from vllm_module.kernels.matmul import scaled_matmul
from vllm_module.kernels.experts import combine_experts, grouped_matmul_mxfp4
from vllm_module.kernels.experts import sort_by_expert, topk_routing
from vllm_module.kernels.rows.rms_norm import rms_norm
assert rms_norm(torch.ones(2, 4), torch.ones(4), 0.0).equal(torch.ones(2, 4))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = run_with_torch(program, environment=environment)
    assert done.returncode == 0, done.stderr


def scaled_for_gradients_reference(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


def test_gradients_of_any_argument() -> None:
    """The plain function computes them, whether the tensor is given by position or by name."""

    def empty(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    scaled = operator(scaled_for_gradients_reference, scaled_for_gradients_reference, empty)
    x, scale = torch.rand(4), torch.rand(4)
    for trained in ("x", "scale"):
        given = {"x": x.clone(), "scale": scale.clone()}
        given[trained].requires_grad_(True)
        for positions in range(3):
            by_position = [given[name] for name in ("x", "scale")[:positions]]
            by_name = {name: given[name] for name in ("x", "scale")[positions:]}
            given[trained].grad = None
            scaled(*by_position, **by_name).sum().backward()
            assert torch.equal(given[trained].grad, scale if trained == "x" else x)
