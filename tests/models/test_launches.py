"""How many kernels a decoder layer launches on a GPU, how much it allocates, and what it calls.

It runs on a CPU. What torch computes is counted by operator, and what this package's operators
launch by calling their kernels with tensors that have no memory.
"""

from __future__ import annotations

import importlib
import pkgutil
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.runtime.interpreter import InterpretedFunction

import vllm_module.kernels
from vllm_module.build.model_source import build_model
from vllm_module.hf_config import HFConfig
from vllm_module.kernels.attention import reshape_and_cache
from vllm_module.layers import AttentionMetadata, mla
from vllm_module.quantization import online_rules, rows
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.testing.checkpoints import random_weights

_configurations = runpy.run_path(str(Path(__file__).with_name("configurations.py")))
CONFIGS: dict[str, dict[str, Any]] = _configurations["CONFIGS"]
CPU = torch.device("cpu")
# Without a kernel: memory alone, and what the host asks of dtypes.
QUIET = ("result_type", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Counts(NamedTuple):
    """Of one layer: kernels and library calls, new tensors, calls of modules."""

    launches: int
    allocations: int
    modules: int


def kernel_of(operator: str) -> Callable[..., Any]:
    """Return the function that launches the kernels of ``torch.ops.vllm_module.<operator>``."""
    kernels = vllm_module.kernels
    for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(found.name)
        if callable(launch := vars(module).get(f"{operator}_triton")):  # and no module
            return launch
    raise AssertionError(f"{operator} has no kernel")


class Launches(TorchDispatchMode):
    """Notes, in order, what a GPU would be given, and counts the tensors that are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.allocations = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, schema = kwargs or {}, function._schema
        if function.namespace == "vllm_module":
            with_no_memory = tree_map_only(
                torch.Tensor,
                lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"),
                (args, kwargs),
            )
            with self, launching(self.names):
                kernel_of(schema.name.partition("::")[2])(*with_no_memory[0], **with_no_memory[1])
            return function(*args, **kwargs)
        name = schema.name.partition("::")[2]
        written = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        is_view = any(r.alias_info is not None for r in schema.returns) or name == "_unsafe_view"
        if written or not is_view:
            self.allocations += 0 if written or name == "result_type" else len(schema.returns)
            self.names += [] if name in QUIET else [name]
        return function(*args, **kwargs)


@contextmanager
def launching(names: list[str]) -> Iterator[None]:
    """Note the names of kernels, in place of running them in the interpreter."""

    def note(self: InterpretedFunction, *args: Any, **kwargs: Any) -> None:
        names.append(self.fn.__name__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", note)
        yield


def counted(layer: torch.nn.Module, step: Callable[[], object]) -> tuple[Counts, list[str]]:
    """Run ``step`` and return what ``layer`` takes of it."""
    mode, modules = Launches(), []
    inside = False

    def begin(*_: object) -> None:
        nonlocal inside
        inside = True
        mode.__enter__()

    def end(*_: object) -> None:
        nonlocal inside
        inside = False
        mode.__exit__(None, None, None)

    call = torch.nn.Module.__call__

    def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if inside:
            modules.append(module)
        return call(module, *args, **kwargs)

    with (
        layer.register_forward_pre_hook(begin),
        layer.register_forward_hook(end),
        pytest.MonkeyPatch.context() as patch,
    ):
        # No hook, which would keep norms and rotation from being one launch.
        patch.setattr(torch.nn.Module, "__call__", called)
        step()
    return Counts(len(mode.names), mode.allocations, len(modules)), mode.names


def step_of(new: list[int]) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Return a step in which each sequence has so many new tokens, on a page of its own."""
    starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    contexts = torch.tensor(new, dtype=torch.int32) + 3
    places = [torch.arange(count) + 3 for count in new]
    metadata = AttentionMetadata(
        torch.cat([place + 16 * index for index, place in enumerate(places)]),
        # As in a graph, where contexts may need several splits.
        torch.arange(len(new), dtype=torch.int32).unsqueeze(1).repeat(1, 64),
        contexts,
        starts,
        max(new),
    )
    return torch.ones(sum(new), dtype=torch.int64), torch.cat(places), metadata


STEPS = {"decode": [1, 1, 1], "mixed": [1, 9, 1]}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
}
# At most, by configuration, and how weights are quantized while they are loaded.
BOUNDS: dict[tuple[str, str | None], dict[str, Counts]] = {
    ("llama", None): {"decode": Counts(10, 12, 11), "mixed": Counts(11, 12, 11)},
    ("llama", "fp8_per_channel"): {"decode": Counts(11, 17, 11), "mixed": Counts(12, 17, 11)},
    ("qwen3", None): {"decode": Counts(10, 12, 13), "mixed": Counts(11, 12, 13)},
    ("qwen3", "fp8_per_channel"): {"decode": Counts(11, 17, 13), "mixed": Counts(12, 17, 13)},
    ("qwen3-moe", None): {"decode": Counts(15, 19, 15), "mixed": Counts(16, 19, 15)},
    ("deepseek-v3", "fp8_per_channel"): {"decode": Counts(28, 40, 20), "mixed": Counts(29, 40, 20)},
    ("deepseek-v3", None): {"decode": Counts(24, 28, 20), "mixed": Counts(25, 28, 20)},
}


def built(kind: str, quantization: str | None, patch: pytest.MonkeyPatch) -> Any:
    """Return a model that does what it would do on a GPU."""
    # The host does not wait for a GPU to check cache slots.
    patch.setattr(reshape_and_cache, "checks_values", lambda _: False)
    patch.setattr(mla, "_fuses", lambda query, latents: True)
    patch.setattr(rows, "quantizes_inputs", lambda x: True)
    config = HFConfig(**CONFIGS[kind], architectures=[ARCHITECTURES[kind]])
    rules = None if quantization is None else online_rules(quantization)
    model = build_model(config, torch.bfloat16, CPU, rules)
    model.load_weights(random_weights(model.expected_weights()))
    return model


@pytest.mark.parametrize(("kind", "quantization"), BOUNDS, ids=str)
@torch.no_grad()
def test_what_a_layer_launches(kind: str, quantization: str | None, monkeypatch) -> None:
    """A decoder layer takes a bounded number of launches, allocations and calls of modules."""
    model = built(kind, quantization, monkeypatch)
    cache = KVCache(model, 4, 16, CPU, torch.bfloat16)
    layer = model.model.layers[-1]
    for name, new in STEPS.items():
        step = step_of(new)
        model(*step)  # checks that the model is loaded
        counts, launched = counted(layer, lambda step=step: model(*step))
        # pytest -s prints the table.
        sys.stdout.write(f"\n{kind} {quantization or ''} {name}: {counts} {' '.join(launched)}")
        bound = BOUNDS[kind, quantization][name]
        assert all(map(int.__le__, counts, bound)), f"{counts}: {' '.join(launched)}"
    cache.close()
