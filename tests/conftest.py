"""What every test runs under: poisoned memory, a seeded torch and its share of the cores."""

from __future__ import annotations

import os

# Kernels run where there is no GPU, on the CPU; Triton reads this when it is imported.
os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator

import pytest
import torch
from hypothesis import register_random, settings

from vllm_module.testing import poisoned_memory

# The same examples every time, and no clock: a failure is the change's and not the machine's.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci")


class _TorchRandom:
    """PyTorch's generator, in the shape in which Hypothesis seeds it before each example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_torch_random = _TorchRandom()  # has a name because Hypothesis keeps only a weak reference
register_random(_torch_random)


def pytest_configure(config: pytest.Config) -> None:
    # Poisoning switches deterministic algorithms on; an operation that has none is no news here.
    config.addinivalue_line("filterwarnings", "ignore:.*deterministic:UserWarning")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the workers share the cores


@pytest.fixture(autouse=True, scope="session")
def _poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN, so that what nobody wrote shows."""
    with poisoned_memory():
        assert torch.empty(1).isnan(), "PyTorch no longer fills uninitialized memory: poison it"
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # fixtures shared by several tests are built now


@pytest.fixture(autouse=True)
def _seeded_torch() -> None:
    torch.manual_seed(0)  # whether or not this test was the one that built them
