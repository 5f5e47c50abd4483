"""Run models on the meta device through the code that launches kernels, without a GPU.

``python tests/runtime/on_meta.py`` reads JSON from standard input, and prints JSON: what
:func:`main` says. It is a process of its own because kernels are registered when they are imported,
and because in pytest's process Triton interprets.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_module.kernels import operators

# Every operation launches its kernel, as on a CUDA device.
operators.operator = lambda reference, kernel, fake, mutates=(): kernel

# ruff: noqa: E402 - operations are registered when their modules are imported

from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from vllm_module.build.model_source import build_model
from vllm_module.build.registry import config_class
from vllm_module.core import state
from vllm_module.core.tensors import materialized
from vllm_module.distributed import groups, tensor_parallel
from vllm_module.hf_config import parse_config
from vllm_module.kernels.rows.rms_norm import rms_norm
from vllm_module.layers import RotaryEmbedding
from vllm_module.quantization import rows, rules_for
from vllm_module.runtime.cache.kv_cache import KVCache
from vllm_module.runtime.cache.state_cache import StateCache
from vllm_module.runtime.model_runner import ModelRunner
from vllm_module.runtime.pooling.embedding import EmbeddingInputs, embed
from vllm_module.runtime.step_inputs import Moves, StepInputs
from vllm_module.runtime.warm_up import largest_steps, warm_up_batches, warm_up_steps

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from compiling import launching

META, CPU = torch.device("meta"), torch.device("cpu")
PAGE, PAGES, STEPS = 16, 64, 15
tensors_in = runpy.run_path(str(Path(__file__).with_name("simulated_device.py")))["tensors_in"]
LIMITS = {"max_num_batched_tokens": 1100, "max_num_seqs": 40, "max_model_len": 900}
MOST_PAGES = -(-LIMITS["max_model_len"] // PAGE)  # no multiple of 4, as tables may have


class HostUsedError(Exception):
    """An operation took, made or waited for a tensor of the host."""


class NoTensorsOfHost(TorchDispatchMode):
    """Raise where an operation takes or makes a tensor of the host.

    What waits for the device (``item``, ``nonzero``, a mask as an index) raises on meta tensors.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs, result)):
            if tensor.is_cpu:
                raise HostUsedError(f"{func} takes or makes a tensor of the host")
        return result


class NoNumbersOfHost(TorchFunctionMode):
    """Raise where numbers are copied to the device: a meta tensor of them is made without."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indexes = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        if func in COPIES or (indexes and any(isinstance(leaf, list) for leaf in indices(args[1]))):
            raise HostUsedError(f"{func.__name__} copies numbers of the host")
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Remember the elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tensors_in(result)]
        self.elements = max([self.elements, *made])
        return result


COPIES = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.Tensor.new_tensor)


def indices(index: object) -> tuple[object, ...]:
    return index if isinstance(index, tuple) else (index,)


def on_meta(
    entries: dict[str, Any], dtype: torch.dtype, size: int = 1, quantization: str | None = None
) -> Any:
    """Return rank 0's model of a configuration, ready to run, with every tensor on meta.

    Of several ranks, its collectives are those of processes: see :class:`Collectives`.
    """
    rules = rules_for(quantization, entries.get("quantization_config"))
    config = parse_config(config_class(entries["architectures"]), entries, Path("config.json"))
    place: Any = {"rank": 0, "size": 1} if size == 1 else {"group": Group(size)}
    with tensor_parallel(**place):
        model = build_model(config, dtype, CPU, rules).eval()
    load_anything(model)
    model.sleep()  # moves to meta what a load fills
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(META)
    for module in state.modules_that_load(model):
        state.unguard(module)
    return model


@torch.no_grad()
def load_anything(model: Any) -> None:
    """Give every parameter a value that is accepted, and compute what is computed from them."""
    loaded: dict[Any, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in loaded:
                loaded[parameter] = materialized(parameter, CPU)
                narrow = parameter.dtype.itemsize == 1  # zero has the same bits in all of them
                value = loaded[parameter].data
                value.view(torch.uint8).zero_() if narrow else value.fill_(1)
            module._parameters[name] = loaded[parameter]
    for module in reversed(list(state.modules_that_load(model))):
        for step in module.processing():
            step()


class Watched:
    """A model that a runner calls, for which using the host is an error."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *arguments: Any) -> Any:
        with NoTensorsOfHost(), NoNumbersOfHost():
            return self._model(*arguments)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with NoTensorsOfHost(), NoNumbersOfHost():
            return self._model.compute_logits(hidden)


class Group(int):
    """A stand-in for a group of so many ranks, of which this is the first."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return int(self)


class Collectives:
    """A stand-in for torch.distributed, whose groups are numbers of ranks.

    It takes what a CUDA graph can capture: collectives that nobody waits for.
    """

    def get_rank(self, group: int) -> int:
        return 0

    def get_world_size(self, group: int) -> int:
        return group

    def all_reduce(self, tensor: torch.Tensor, group: int) -> None:
        tensor.mul_(group)

    def all_gather(self, parts: list[torch.Tensor], tensor: torch.Tensor, group: int) -> None:
        for part in parts:
            part.copy_(tensor)


class Graph:
    """A CUDA graph, which launches nothing that has to be compiled."""

    replays = 0

    def capture_begin(self, pool: object) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        Graph.replays += 1


def no_graphs() -> None:
    """Let graphs be captured and replayed without a GPU."""

    def nothing(*_: object) -> Any:
        return nullcontext()

    for name in ("graph", "graph_pool_handle", "Stream", "stream", "synchronize"):
        setattr(torch.cuda, name, nothing)
    torch.cuda.CUDAGraph = Graph


class Served:
    """A model with pages and a runner, as a worker has them."""

    def __init__(self, model: Any, watched: bool = False, cache_dtype: Any = None) -> None:
        dtype = next(p.dtype for p in model.parameters() if p.dtype.itemsize > 1)
        self.cache = KVCache(model, PAGES, PAGE, META, cache_dtype or dtype)
        self.states = StateCache(model, LIMITS["max_num_seqs"], META, dtype)
        self.runner = ModelRunner(model, META, LIMITS["max_num_seqs"], MOST_PAGES)
        if watched:
            self.runner.model = Watched(model)

    def run(self, inputs: StepInputs) -> None:
        if inputs.pages is not None:
            self.cache.move(inputs.pages)
        self.runner.run(inputs)


def step(sequences: list[tuple[int, int]], copied: int = 0, first: int = 0) -> StepInputs:
    """Return a step of sequences, each with its new tokens and all of its tokens.

    They have the rows of the block tables from ``first`` on.
    """
    inputs = StepInputs([], [], [], [], [0], [], [], 1, [], 1)
    for new, context in sequences:
        inputs.input_ids += [1] * new
        inputs.positions += range(context - new, context)
        inputs.slot_mapping += range(context - new, context)
        pages, row = -(-context // PAGE), first + len(inputs.table_rows)
        inputs.table_rows.append(row)
        inputs.new_pages.append((row, pages - 1, [1]))
        inputs.num_table_pages = max(inputs.num_table_pages, pages)
        inputs.context_lens.append(context)
        inputs.query_start_loc.append(len(inputs.input_ids))
        inputs.rows.append(len(inputs.input_ids) - 1)
        inputs.max_query_len = max(inputs.max_query_len, new)
    inputs.pages = Moves(copied=[(2 * pair, 2 * pair + 1) for pair in range(copied)]) or None
    return inputs


def some_step(rng: random.Random) -> StepInputs:
    """Return a step that the limits allow: prompts, chunks and single tokens in any mixture."""
    left = rng.choice([1, rng.randint(1, 40), rng.randint(1, LIMITS["max_num_batched_tokens"])])
    sequences: list[tuple[int, int]] = []
    while left and len(sequences) < LIMITS["max_num_seqs"]:
        new = rng.choice([1, 1, rng.randint(1, left)])
        new = min(new, left, LIMITS["max_model_len"])
        longest = rng.choice([new, LIMITS["max_model_len"]])
        sequences.append((new, rng.randint(new, longest)))
        left -= new
    first = rng.randint(0, LIMITS["max_num_seqs"] - len(sequences))
    return step(sequences, rng.choice([0, 0, 1, 5]), first)


def some_batch(rng: random.Random) -> EmbeddingInputs:
    """Return a batch of an encoder that the limits allow."""
    lengths = [rng.randint(1, LIMITS["max_model_len"])]
    while (length := rng.randint(1, 200)) + sum(lengths) <= LIMITS["max_num_batched_tokens"]:
        lengths.append(length)
    return EmbeddingInputs([0] * sum(lengths), lengths, "mean")


def variant(jit: JITFunction, arguments: dict[str, Any], options: dict[str, Any]) -> str:
    """Return what Triton compiles a launch for: dtypes, constants, and what divides by 16."""

    def part(value: Any, whole: bool, aligned: bool) -> object:
        if isinstance(value, tuple):  # Triton specializes elements on whatever it can
            return [part(each, True, True) for each in value]
        if isinstance(value, torch.Tensor):
            offset = value.storage_offset() * value.element_size()
            return value.dtype, aligned and offset % 16 == 0
        if isinstance(value, TensorDescriptor):
            return value.base.dtype, tuple(value.block_shape)
        if value is None:
            return value
        if isinstance(value, float):
            return "float"
        if value == 1 and whole:
            return "one"
        return -(2**31) <= value < 2**31, aligned and value % 16 == 0

    parts = []
    for parameter in jit.params:
        whole = not parameter.do_not_specialize
        aligned = whole and not parameter.do_not_specialize_on_alignment
        value = arguments[parameter.name]
        parts.append(value if parameter.is_constexpr else part(value, whole, aligned))
    return f"{jit.__name__} {parts} {sorted(options.items())}"


def hosts(configurations: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return how steps of models use the host, by configuration; nothing if none does."""
    found = {}
    with launching(lambda *_: None):
        for name, entries in configurations.items():
            model = on_meta(entries, torch.bfloat16, size=2)
            try:
                if not hasattr(model, "compute_logits"):
                    ids = torch.empty(5, dtype=torch.int64, device=META)
                    Watched(model)(ids, ids, [3, 2])
                    continue
                served = Served(model, watched=True)
                served.run(step([(1, 5), (1, 17)]))
                served.run(step([(1, 5), (9, 20), (3, 3)]))
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def growth(configurations: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return how many times the largest tensor of a step grows when its prompt is doubled."""
    found = {}
    with launching(lambda *_: None):
        for name, entries in configurations.items():
            model = on_meta(entries, torch.bfloat16)
            if not hasattr(model, "compute_logits"):
                continue
            served, elements = Served(model), []
            for tokens in (LIMITS["max_model_len"] // 2, LIMITS["max_model_len"]):
                with LargestTensor() as largest:
                    for inputs in largest_steps(tokens, 1, tokens, PAGE):
                        served.run(inputs)
                elements.append(largest.elements)
            found[name] = elements[1] / elements[0]
    return found


def faults(entries: dict[str, Any]) -> dict[str, str]:
    """Return how the check of :func:`hosts` finds each of some faults, planted in a layer."""
    planted: dict[str, Callable[[torch.Tensor], object]] = {
        "a tensor of the host": lambda x: x * torch.tensor(2.0, device="cpu"),
        "a number from the host": lambda x: x * torch.tensor(2.0, device=x.device),
        "a range of the host": lambda x: torch.arange(4, device="cpu").to(x.device),
        "a list as index": lambda x: x[[0]],
        "a copy to the host": lambda x: x.cpu(),
        "a number for the host": lambda x: x.sum().item(),
        "a decision": lambda x: bool(x.sum() > 0),
        "a list": lambda x: x.tolist(),
        "a mask": lambda x: x[x > 0],
        "places": lambda x: x.nonzero(),
        "an empty tensor": lambda x: torch.empty(1, device="cpu").copy_(x[:1]),
    }
    cos_sin, found = RotaryEmbedding.cos_sin, {}
    for name, fault in planted.items():

        def faulty(self: Any, positions: torch.Tensor, fault: Any = fault) -> Any:
            fault(positions)
            return cos_sin(self, positions)

        RotaryEmbedding.cos_sin = faulty
        found[name] = hosts({"": entries}).get("", "nothing")
    RotaryEmbedding.cos_sin = cos_sin
    return found


def variants(
    entries: dict[str, Any], cache_dtype: str = "bfloat16", quantization: str | None = None
) -> dict[str, Any]:
    """Return what is compiled while a model is warmed up, and later, by random steps.

    ``left`` is the number of variants that the longest prompt alone does not compile.
    """
    model = on_meta(entries, torch.bfloat16, quantization=quantization)
    most, rng = LIMITS["max_model_len"], random.Random(0)
    run: Callable[[Any], object]
    served = None
    if hasattr(model, "compute_logits"):
        served = Served(model, cache_dtype=getattr(torch, cache_dtype))
        run = served.run
        longest: Any = step([(most, most)])
        warm_up: Any = warm_up_steps(**LIMITS, page_size=PAGE, num_pages=PAGES, host_pages=0)
        some: Any = some_step
    else:
        run, some = partial(embed, model, META), some_batch
        longest, warm_up = (
            EmbeddingInputs([0] * most, [most], "mean"),
            warm_up_batches(*LIMITS.values()),
        )
    met: set[str] = set()
    with launching(lambda *launch: met.add(variant(*launch))):
        run(longest)
        by_longest = set(met)
        met.clear()
        for inputs in warm_up:
            run(inputs)
        if served is not None:
            served.runner.capture(LIMITS["max_num_batched_tokens"])
        warm = set(met)
        for _ in range(STEPS):
            run(some(rng))
    kernels = Counter(each.split()[0] for each in warm)
    return {
        "warm": kernels,
        "later": sorted(met - warm),
        "left": len(warm - by_longest),
        "replays": Graph.replays,
    }


def sees_alignment() -> bool:
    """Tell whether a tensor that begins beside a multiple of 16 bytes is another variant."""
    met: set[str] = set()
    weight = torch.empty(65, dtype=torch.bfloat16, device=META)
    with launching(lambda *launch: met.add(variant(*launch))):
        for first in (0, 1):
            rms_norm(
                torch.empty(2, 64, dtype=torch.bfloat16, device=META), weight[first:][:64], 0.1
            )
    return len(met) == 2


def main() -> None:
    """Print what the host is used for, by configuration and fault, and the variants of models."""
    given = json.load(sys.stdin)
    groups.dist = Collectives()
    rows.quantizes_inputs = lambda x: True  # as on a GPU
    no_graphs()
    json.dump(
        {
            "hosts": hosts(given["configurations"]),
            "growth": growth(given["configurations"]),
            "faults": faults(given["configurations"]["llama"]),
            "alignment": sees_alignment(),
            "variants": {
                name: variants(entries, **options)
                for name, (entries, options) in given["models"].items()
            },
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
