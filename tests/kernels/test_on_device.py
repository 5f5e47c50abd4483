"""Every operation, its reference and its truth on a simulated device: nothing is of the host."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vllm_module.kernels.attention import fused_attention as fused
from vllm_module.kernels.attention import paged_layout
from vllm_module.kernels.attention.concat_and_cache_mla import concat_and_cache_mla
from vllm_module.kernels.matmul.gguf_blocks import blocks_matmul
from vllm_module.kernels.matmul.gguf_types import BLOCK_TYPES
from vllm_module.kernels.rows.quantize import quantize_static

TESTS = Path(__file__).parents[1]
_simulated = runpy.run_path(str(TESTS / "runtime" / "simulated_device.py"))
SimulatedDevice, OnDevice = _simulated["SimulatedDevice"], _simulated["OnDevice"]
HostError = _simulated["HostError"]


@contextmanager
def bench_cases() -> Iterator[Any]:
    """Yield the cases of the benchmark, small."""
    sys.path.insert(0, str(TESTS / "bench"))
    try:
        from gpu.cases.operations import all_cases

        yield all_cases(True)
    finally:
        sys.path.remove(str(TESTS / "bench"))


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """Import the cases of the benchmark, and what makes one."""
    with bench_cases() as cases:
        from gpu.cases.attention import attention
        from gpu.check import tensors

        yield SimpleNamespace(cases=cases, tensors=tensors, attention=attention)


def results(bench: Any, case: Any, what: str, device: str) -> list[torch.Tensor]:
    """Return what a case's function computes of inputs that were made on a device."""
    torch.manual_seed(1)
    with torch.device(device):
        inputs = case.make()
    found = bench.tensors(getattr(case, what)(*inputs))
    return [x.memory if isinstance(x, OnDevice) else x.clone() for x in found]


def compare(bench: Any, case: Any, what: str) -> None:
    """Compare with the same on a CPU, where arithmetic may be in another order."""
    expected = results(bench, case, what, "cpu")
    with SimulatedDevice(launches=True).present():
        found = results(bench, case, what, "cuda")
    for got, want in zip(found, expected, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        got, want = (x.double() if x.is_floating_point() else x for x in (got, want))
        rounding = 2e-2 if found[0].dtype.itemsize < 4 else 1e-4
        torch.testing.assert_close(got, want, rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.parametrize("what", ["ours", "reference", "truth"])
def test_operations_use_nothing_of_the_host(bench: Any, what: str) -> None:
    """Operations, references and truths of all cases give on a device what they give on a CPU."""
    wrong = {}
    for _, case in bench.cases:
        if getattr(case, what) is None or (case.truth is None and what == "reference"):
            continue  # a reference without a truth runs on a CPU alone
        if case.name.startswith("digest") and what == "ours":
            continue  # no operator, and the stand-in computes what operators do and launches do not
        try:
            compare(bench, case, what)
        except Exception as error:
            wrong[case.name] = f"{type(error).__name__}: {error}"[:300]
    assert wrong == {}


def short_sequences(bench: Any, **extras: Any) -> Any:
    """Return a ragged batch of short sequences of one new token, with NaN where pages end."""
    lengths = [(1, 3), (1, 17), (5, 21), (1, 1), (1, 16)]
    return bench.attention("ragged", "", lengths, (4, 2), 16, dtype=torch.float32, **extras)


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"kv_dtype": torch.float8_e4m3fn},
        {"sliding_window": lambda query: 5},
        {"softcap": lambda query: 20.0},
        {"sinks": lambda query: torch.linspace(-1, 1, query.shape[1], device=query.device)},
        {"alibi_slopes": lambda query: torch.linspace(0.1, 1, query.shape[1], device=query.device)},
    ],
    ids=["plain", "e4m3", "window", "soft cap", "sinks", "slopes"],
)
@pytest.mark.parametrize("what", ["ours", "reference", "truth"])
def test_short_sequences_in_one_batch(bench: Any, what: str, extras: dict[str, Any]) -> None:
    """Short sequences of one new token are finite and right, whatever lies behind their ends."""
    case = short_sequences(bench, **extras)
    with SimulatedDevice(launches=True).present():
        assert all(bool(x.isfinite().all()) for x in results(bench, case, what, "cuda"))
    compare(bench, case, what)


class WithoutDevices:
    """Torch, whose functions make tensors on the host whatever device they are given."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("arange", "tensor", "zeros"):
            return found
        return lambda *args, **others: found(*args, **{**others, "device": "cpu"})


@pytest.mark.parametrize(
    ("module", "name", "instead", "message"),
    [
        (paged_layout, "torch", WithoutDevices(), "of the device and of the host"),
        (fused, "_without_unseen", lambda keys, values, seen: (keys, values), "Tensor-likes"),
        (
            fused, "F", SimpleNamespace(scaled_dot_product_attention=lambda *x, **_: F.
            scaled_dot_product_attention(*x[:4], 0.0, False, 0.1)), "positional arguments",
        ),
    ],
    ids=["tensors without a device", "NaN behind the end", "a scale by position"],
)  # fmt: skip
def test_planted_faults_of_references_are_found(
    bench: Any, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, instead: Any, message: str
) -> None:
    """Three mistakes that once ended every start on a GPU, and that no test on a CPU can see."""
    monkeypatch.setattr(module, name, instead)
    with pytest.raises(Exception, match=message):  # what fails is not of one kind
        compare(bench, short_sequences(bench), "reference")


def quantized_statically() -> list[torch.Tensor]:
    wide, quantized = torch.randn(3, 8), torch.empty(3, 8, dtype=torch.float8_e4m3fn)
    quantize_static(wide, quantized, torch.full((3, 1), 0.1), (1, 8))
    return [quantized.float()]


def cached_latents() -> list[torch.Tensor]:
    cache, slots = torch.zeros(2, 4, 6), torch.tensor([5, -1, 0])
    concat_and_cache_mla(torch.randn(3, 4), torch.randn(3, 2), cache, slots)
    return [cache]


# What no case of the benchmark launches, in sizes of its own.
BESIDE = [quantized_statically, cached_latents]


@pytest.mark.parametrize("operation", BESIDE)
def test_operations_without_a_case(operation: Any) -> None:
    """These, too, give on a device what they give on a CPU."""
    torch.manual_seed(1)
    expected = operation()
    torch.manual_seed(1)
    with SimulatedDevice(launches=True).present(), torch.device("cuda"):
        found = [x.memory for x in operation()]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_graphs_capture_products_with_blocks(kind: str) -> None:
    """After a first run, nothing of a GGUF file's type comes from the host."""
    block = BLOCK_TYPES[kind]
    with SimulatedDevice(launches=True).present():
        x = torch.ones(2, 256, device="cuda")
        blocks = torch.zeros(3, 256 // block.values, block.nbytes, device="cuda").byte()
        product = partial(blocks_matmul, x, blocks, kind)
        product()
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(x.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool, stream):
            product()


def operations() -> set[str]:
    """Return the names of all operations of kernels/, each of which has a reference."""
    names = set()
    for path in (TESTS.parent / "kernels").rglob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith("def ") and "_reference(" in line:
                names.add(line.removeprefix("def ").split("_reference(")[0])
    return names


def launched_by(cases: Any) -> set[str]:
    """Return the operations that the benchmark's cases launch."""
    device = SimulatedDevice(launches=True)
    with device.present():
        for _, case in cases:
            if case.name.startswith("digest"):
                continue  # it makes keys on the host before its first launch, in no graph
            with torch.device("cuda"):
                inputs = case.make()
            case.ours(*inputs)
        for operation in BESIDE:
            with torch.device("cuda"):
                operation()
    return device.launched | {"digest_matrix"}  # which was left out above
