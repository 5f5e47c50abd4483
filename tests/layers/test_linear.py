"""Parallel linear layers against the unsharded one, with integers that float32 adds exactly."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from vllm_module.distributed import run_ranks, tensor_parallel
from vllm_module.errors import ShardingError
from vllm_module.layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

INPUT, OUTPUT = 12, 24
sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])
biases = pytest.mark.parametrize("bias", [False, True])


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 10, shape).float()


def weights(output: int, inputs: int, bias: bool) -> dict[str, torch.Tensor]:
    both = {"weight": numbers(output, inputs), "bias": numbers(output)}
    return both if bias else {"weight": both["weight"]}


def unsharded(x: torch.Tensor, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(x, stored["weight"], stored.get("bias"))


@sizes
@biases
def test_replicated(size: int, bias: bool) -> None:
    """Every rank computes the whole layer; with skip_bias_add the caller adds the bias."""
    stored, x = weights(OUTPUT, INPUT, bias), numbers(2, 3, INPUT)

    def rank_fn(rank: int) -> None:
        for skip in (False, True):
            layer = ReplicatedLinear(INPUT, OUTPUT, bias=bias, skip_bias_add=skip)
            layer.load_weights(stored)
            y = layer(x) if not skip or layer.bias is None else layer(x) + layer.bias
            assert torch.equal(y, unsharded(x, stored))
            assert torch.equal(layer(x), y) is not (skip and bias)

    run_ranks(size, rank_fn)


@sizes
@biases
def test_column_parallel(size: int, bias: bool) -> None:
    """The ranks' outputs, concatenated or gathered, are the output of the whole layer."""
    stored, x = weights(OUTPUT, INPUT, bias), numbers(2, 3, INPUT)
    expected = unsharded(x, stored)

    def rank_fn(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = []
        for gather in (False, True):
            layer = ColumnParallelLinear(INPUT, OUTPUT, bias=bias, gather_output=gather)
            layer.load_weights(stored)
            assert layer.weight.shape == (OUTPUT // size, INPUT)
            outputs.append(layer(x))
        return outputs[0], outputs[1]

    own, gathered = zip(*run_ranks(size, rank_fn), strict=True)
    assert torch.equal(torch.cat(own, -1), expected)
    for y in gathered:
        assert torch.equal(y, expected)


@sizes
@pytest.mark.parametrize("gather", [False, True])
def test_column_parallel_without_adding_its_bias(size: int, gather: bool) -> None:
    """With skip_bias_add the output lacks the bias, and each rank has its part of the bias."""
    stored, x = weights(OUTPUT, INPUT, True), numbers(5, INPUT)

    def rank_fn(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer = ColumnParallelLinear(INPUT, OUTPUT, gather_output=gather, skip_bias_add=True)
        layer.load_weights(stored)
        assert layer.bias is not None
        return layer(x), layer.bias

    outputs, parts = zip(*run_ranks(size, rank_fn), strict=True)
    assert torch.equal(torch.cat(parts), stored["bias"])
    expected = F.linear(x, stored["weight"])
    for y in outputs if gather else [torch.cat(outputs, -1)]:
        assert torch.equal(y, expected)


@sizes
@biases
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_row_parallel(size: int, bias: bool, skip: bool, reduce: bool, parallel: bool) -> None:
    """The ranks' partial outputs sum to the whole layer's output, with the bias added once."""
    stored, x = weights(OUTPUT, INPUT, bias), numbers(2, 3, INPUT)

    def rank_fn(rank: int) -> torch.Tensor:
        layer = RowParallelLinear(
            INPUT,
            OUTPUT,
            bias=bias,
            input_is_parallel=parallel,
            skip_bias_add=skip,
            reduce_results=reduce,
        )
        layer.load_weights(stored)
        assert layer.weight.shape == (OUTPUT, INPUT // size)
        if bias:
            assert torch.equal(layer.bias, stored["bias"])
        return layer(x.chunk(size, -1)[rank] if parallel else x)

    outputs = run_ranks(size, rank_fn)
    expected = F.linear(x, stored["weight"], None if skip else stored.get("bias"))
    for y in outputs if reduce else [torch.stack(outputs).sum(0)]:
        assert torch.equal(y, expected)


@sizes
@biases
@pytest.mark.parametrize("gather", [True, False])
def test_merged_columns(size: int, bias: bool, gather: bool) -> None:
    """The output has the slots in order: each whole if gathered, else the rank's part of each."""
    names, features = ("gate_proj", "up_proj", "third_proj"), (24, 12, 36)
    parts = {n: weights(f, INPUT, bias) for n, f in zip(names, features, strict=True)}
    stored = {f"{n}.{key}": tensor for n in names for key, tensor in parts[n].items()}
    x = numbers(2, 3, INPUT)
    separate = [unsharded(x, parts[name]) for name in names]

    def rank_fn(rank: int) -> None:
        layer = MergedColumnParallelLinear(
            INPUT, features, bias=bias, gather_output=gather, shard_names=names
        )
        layer.load_weights(stored)
        own = [y if gather else y.chunk(size, -1)[rank] for y in separate]
        assert torch.equal(layer(x), torch.cat(own, -1))

    run_ranks(size, rank_fn)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ColumnParallelLinear(8, 10), r"10 features .* 4 equal parts \(10 % 4 = 2\)"),
        (lambda: RowParallelLinear(10, 8), r"10 features .* 4 equal parts \(10 % 4 = 2\)"),
        (
            lambda: MergedColumnParallelLinear(8, [8, 7], shard_names=["gate_proj", "up_proj"]),
            r"'up_proj' of 7 features .* 4 equal parts \(7 % 4 = 3\)",
        ),
    ],
)
def test_features_that_the_size_does_not_divide(build: object, message: str) -> None:
    """Features that cannot be cut evenly are refused when the layer is built, with the numbers."""
    assert callable(build)
    with tensor_parallel(rank=0, size=4), pytest.raises(ShardingError, match=message):
        build()


@pytest.mark.parametrize(
    "names", ["ab", ["gate_proj"], ["gate_proj", "gate_proj"], ["gate_proj", ""], []]
)
def test_names_that_do_not_name_each_slot(names: list[str]) -> None:
    """shard_names that are too few, repeated or empty are refused."""
    with pytest.raises(ValueError, match="shard_names must"):
        MergedColumnParallelLinear(8, [8, 8], shard_names=names)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_of_the_parameters(dtype: torch.dtype) -> None:
    """Weight and bias have params_dtype, or the default dtype, and are converted to it."""
    stored = weights(OUTPUT, INPUT, True)
    for layer in (
        ReplicatedLinear(INPUT, OUTPUT, params_dtype=dtype),
        ColumnParallelLinear(INPUT, OUTPUT, params_dtype=dtype),
        RowParallelLinear(INPUT, OUTPUT, params_dtype=dtype),
    ):
        layer.load_weights(stored)
        for name, tensor in layer.named_parameters():
            assert tensor.dtype == dtype
            assert torch.equal(tensor.float(), stored[name])
    assert ReplicatedLinear(INPUT, OUTPUT).weight.dtype == torch.get_default_dtype()
