"""Planted faults of a step are found on a simulated device."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_module.kernels.rows import act_and_mul
from vllm_module.layers import RMSNorm
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.sampling import sampler

# Pytest's importlib mode has no imports between test files.
ENGINES: Any = runpy.run_path(str(Path(__file__).with_name("engines_on_device.py")))
folders, generated, on_device, GREEDY = (
    ENGINES[name] for name in ("folders", "generated", "on_device", "GREEDY")
)


# The faults below replace a part of the product by one that does what the device has to refuse.


def later(function: Any) -> Any:
    """Return a fault of a layer's forward pass: ``function`` is called with its hidden states."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        forward = RMSNorm.forward

        def faulty(self: Any, x: torch.Tensor, *others: Any) -> Any:
            function(x)
            return forward(self, x, *others)

        patch.setattr(RMSNorm, "forward", faulty)

    return plant


def positional_scale(patch: pytest.MonkeyPatch) -> None:
    """Pass attention's scale by position, as no step without pages may."""

    def fused(query: Any, keys: Any, values: Any, seen: Any, scale: float, **_: Any) -> Any:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, keys, values, seen, 0.0, False, scale)

    def forward(self: Any, *arguments: Any) -> Any:
        return fused(*torch.zeros(3, 1, 2, 3, 4, device=self.device), None, 0.1)

    patch.setattr(ModelRunner, "_forward", forward)


def unpinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def table_of_host(patch: pytest.MonkeyPatch) -> None:
    made = ModelRunner.__init__

    def init(self: Any, *arguments: Any, **others: Any) -> None:
        made(self, *arguments, **others)
        self._tables = torch.zeros(self._tables.shape, dtype=torch.int32)

    patch.setattr(ModelRunner, "__init__", init)


def sampler_of_host(patch: pytest.MonkeyPatch) -> None:
    draw = sampler.draw_tokens
    one = torch.ones(1, dtype=torch.int64)
    patch.setattr(sampler, "draw_tokens", lambda *arguments: draw(*arguments) * one)


def sampler_that_reads(patch: pytest.MonkeyPatch) -> None:
    draw = sampler.draw_tokens

    def read(*arguments: Any) -> Any:
        found = draw(*arguments)
        found.max().item()
        return found

    patch.setattr(sampler, "draw_tokens", read)


def launch_of_host(patch: pytest.MonkeyPatch) -> None:
    """Have the host's part of a launch make a tensor on the host that it adds."""
    launch = act_and_mul.act_and_mul_triton

    def faulty(x: torch.Tensor, *others: Any) -> Any:
        return launch(x + torch.zeros(x.shape), *others)

    patch.setattr(act_and_mul, "act_and_mul_triton", faulty)


FAULTS: dict[str, tuple[Any, str]] = {
    "a tensor of the host in a layer": (
        later(lambda x: x + torch.ones(x.shape)), "of the device and of the host",
    ),
    "a number for the host": (later(lambda x: x.sum().item()), "waits for the device"),
    "a decision": (later(lambda x: bool((x > 0).all())), "waits for the device"),
    "a list": (later(lambda x: x.sum(-1).tolist()), "waits for the device"),
    "places": (later(lambda x: x.nonzero()), "waits for the device"),
    "a mask as index": (later(lambda x: x[x > 0]), "waits for the device"),
    "a copy to the host": (later(lambda x: x.cpu()), "copies to the host, which waits"),
    "numbers copied to the device": (
        later(lambda x: torch.tensor([1.0], device=x.device)), "copies between host and device",
    ),
    "a tensor moved to the device": (
        later(lambda x: torch.ones(3).to(x.device)), "copies between host and device",
    ),
    "an operator of a CPU": (
        later(
            lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *x.expand(3, 1, 1, *x.shape).unbind()
            )
        ),
        "is an operator of a CPU",
    ),
    "a scale by position": (positional_scale, "positional arguments"),
    "a step that is not pinned": (unpinned, "copies between host and device"),
    "block tables on the host": (table_of_host, "block_tables is on cpu"),
    "a sampler with a tensor of the host": (sampler_of_host, "of the device and of the host"),
    "a sampler that reads a number": (sampler_that_reads, "waits for the device"),
    "a launch with a tensor of the host": (launch_of_host, "makes a tensor on the host"),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "message"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found(folders: Any, plant: Any, message: str) -> None:
    """A mixed device, a wait or a wrong call ends the start or the request, and is named."""
    folder = folders("qwen3")
    with on_device(), pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(Exception, match=message):  # what fails is not of one kind
            generated(folder, GREEDY, device="cuda", enforce_eager=True)
