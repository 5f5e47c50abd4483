"""Laws of cost: memory, bytes read, and function calls of routing."""

from __future__ import annotations

import cProfile
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_module.base.garbage import paused_gc
from vllm_module.core.module import vLLMModule
from vllm_module.parameters import BasevLLMParameter, Slot
from vllm_module.testing.case import Case, law
from vllm_module.testing.checkpoints import made_up_weights
from vllm_module.testing.names import Names, made
from vllm_module.testing.sharding import experts_kept
from vllm_module.testing.sources import WatchedSource, WatchedStream


@law
def assert_reads_what_it_keeps(case: Case) -> None:
    """Law 8: a rank reads exactly what it keeps, once, and only after every name is routed."""
    module = case.build(case.rank, case.size)
    source = WatchedSource(case.tensors)
    # Handles hold no memory, so even a stream of handles is routed to its end first.
    streamed = case.choose([False, True], "as a stream")
    module.load_weights(iter(source.items()) if streamed else source)
    watch = source.watch
    assert watch.routed, "a byte was read before every name was routed"
    kept = sum(map(_kept, _loaded(module)))
    read = sum(prod(shape) for _, _, shape in watch.reads)
    assert read == kept, f"{case.at()} keeps {kept} elements and reads {read}"
    for part, times in Counter(watch.reads).items():
        assert times == 1, f"{case.at()} reads {part[0]} from {part[1]}, {part[2]}, {times} times"


def _loaded(module: vLLMModule) -> list[torch.Tensor]:
    """Return the tensors that a checkpoint fills, a tied tensor once."""
    computed = made(module, below=True)
    persistent = module.state_dict().keys()
    buffers = [buffer for name, buffer in module.named_buffers() if name in persistent]
    return [*(p for name, p in module.named_parameters() if name not in computed), *buffers]


def _kept(tensor: torch.Tensor) -> int:
    """Return the number of elements that come from the checkpoint, without padding."""
    if not isinstance(tensor, BasevLLMParameter):
        return tensor.numel()
    dims = tensor.dims if tensor.experts is None else tensor.dims[1:]
    kept = 1 if tensor.experts is None else len(experts_kept(tensor.experts))
    return kept * prod(
        sum(_length(slot, tensor.tp_rank, tensor.tp_size) for slot in dim.slots) for dim in dims
    )


def _length(slot: Slot, tp_rank: int, tp_size: int) -> int:
    """Return the number of features of ``slot`` that a rank keeps, counted one by one."""
    part_size, ranks_per_part = slot.padded // slot.parts, tp_size // slot.parts
    part = tp_rank // ranks_per_part
    return sum(feature // part_size == part for feature in range(slot.size))


@law
def assert_memory_bounded(case: Case) -> None:
    """Law 7: a load needs memory for the final module and for one tensor of the checkpoint.

    No streamed tensor is held while the next one is made, and no tensor of a collection after the
    load. The peak of all allocations is the parameters and one tensor of the checkpoint. Slots that
    alternate or are stored as pairs need a copy of it too, and weights that are processed need the
    working memory for one tensor.
    """
    module = case.build(case.rank, case.size)
    stream = WatchedStream(case.tensors)
    with _Allocations() as allocations:
        module.load_weights(stream)
    held = 1 if case.overridden else 0  # an override's loop holds the tensor it passed on
    assert stream.most_held <= held, f"{stream.most_held} streamed tensors are held at a time"
    given = {name: tensor.clone() for name, tensor in case.tensors.items()}
    kept = [weakref.ref(tensor) for tensor in given.values()]
    module.load_weights(given)
    del given
    if any(tensor() is not None for tensor in kept):
        gc.collect()
    alive = sum(tensor() is not None for tensor in kept)
    assert not alive, f"{alive} tensors of a checkpoint are held after it is loaded"
    persistent = module.state_dict(keep_vars=True).values()
    final = sum({id(tensor): tensor.nbytes for tensor in persistent}.values())
    largest = max(tensor.nbytes for tensor in case.tensors.values())
    # A tensor in another order is reordered in a copy, padded as the parameter is.
    copies = max(_reorderings(each) * max(largest, each.nbytes) for each in module.parameters())
    working = 0
    if any(each.processing() for each in module.modules() if isinstance(each, vLLMModule)):
        # Converting and checking work on one tensor at a time, with float32 copies of it and of its
        # scales.
        working = 6 * 4 * max(tensor.numel() for tensor in case.tensors.values())
    number = 8  # bytes of the sum that shows whether a tensor has a NaN
    assert allocations.peak <= final + (1 + held) * largest + copies + working + number, (
        f"loading {final} bytes, of which the largest tensor has {largest} in the checkpoint, "
        f"took {allocations.peak}"
    )


def _reorderings(parameter: nn.Parameter) -> int:
    """Count the reorderings of features, each of which takes a copy."""
    dims = parameter.dims if isinstance(parameter, BasevLLMParameter) else ()
    pairs = any(slot.pairs for dim in dims for slot in dim.slots)
    return pairs + any(dim.alternates for dim in dims)


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as PyTorch has it
    """Tracks the memory that PyTorch allocates in this thread; ``peak`` is in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._live = {key: ref for key, ref in self._live.items() if not ref[0].expired()}
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                alive: Any = StorageWeakRef
                self._live[storage._cdata] = alive(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


@law
def assert_cost_linear(case: Case) -> None:
    """Law 10: routing needs as many function calls per name in a large tree as in a small one.

    The names of different modules alternate. Counted are a plan of a collection, a load of a stream
    and an update of one name, whose cost does not depend on the size of the tree (unless its tensor
    is tied: then the tree is searched).
    """
    small, large = _calls(case, 2), _calls(case, 8)
    for what, few, many in zip(("plan", "load", "update one name"), small, large, strict=True):
        most = 1.2 if what.startswith("update") else 4.2
        assert many <= most * few, (
            f"4 times the tree takes {many / few:.1f} times the calls to {what}"
        )


def _calls(case: Case, copies: int) -> tuple[int, int, int]:
    """Count the calls of a plan, of a streamed load and of an update of one name."""
    forest = vLLMModule()
    forest.trees = nn.ModuleList(vLLMModule() for _ in range(copies))
    for each in forest.trees:
        each.tree = case.build()
    expected = forest.expected_weights()
    tensors = made_up_weights(forest)
    # Sorted from the end, so that modules alternate.
    names = sorted(expected, key=lambda name: name[::-1])
    pairs = [(name, tensors[name]) for name in names]
    planned = count_calls(lambda: forest.plan_weights([(name, expected[name]) for name in names]))
    loaded = count_calls(lambda: forest.load_weights(iter(pairs)))
    tied = Names.of(forest).tied.keys()
    one = [pair for pair in pairs if pair[0] not in tied][:1]
    return planned, loaded, count_calls(lambda: forest.update_weights(one))


def count_calls(work: Callable[[], object]) -> int:
    """Return the number of Python function calls in ``work``."""
    # The profiler is written in C: a Python function would be called for every call and return.
    profiler, before = cProfile.Profile(builtins=False), sys.getprofile()
    sys.setprofile(None)
    with paused_gc():  # a pass calls what others have left behind
        profiler.enable()
        try:
            work()
        finally:
            profiler.disable()
            sys.setprofile(before)
    return sum(entry.callcount for entry in profiler.getstats())
