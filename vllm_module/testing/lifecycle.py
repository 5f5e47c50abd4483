"""Laws of a module's life: meta, loaded, updated in place, and pure throughout."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from vllm_module.errors import ModelNotReadyError
from vllm_module.module import vLLMModule
from vllm_module.parameters import BasevLLMParameter
from vllm_module.testing.case import Case, law, refusal
from vllm_module.testing.checkpoints import (
    assert_same_state,
    made,
    part_name,
    random_weights,
    same_bits,
    state,
)
from vllm_module.testing.sources import failing_reads, failing_stream


@law
def assert_pure(case: Case) -> None:
    """Law 5: loading leaves no trace but the values.

    Plain parameters have an empty ``__dict__`` before, while and after; typed ones have what their
    constructor declares; types, strides and ``requires_grad`` stay, and the checkpoint's tensors
    gain nothing. Modules gain no attributes, Python modules no globals, and PyTorch and the
    interpreter are left as they were. Two modules loaded by two threads get the bits of one.
    """
    tensors, module = case.tensors, case.build(case.rank, case.size)
    declared = {path: dict(vars(tensor)) for path, tensor in _tensors(module)}
    kinds = {path: _kind(tensor) for path, tensor in _tensors(module)}

    def check(when: str) -> None:
        for path, tensor in _tensors(module):
            assert _kind(tensor) == kinds[path], f"{path} was {kinds[path]}: {_kind(tensor)} {when}"
            extra = vars(tensor).keys() - (
                declared[path].keys() if isinstance(tensor, BasevLLMParameter) else ()
            )
            assert not extra, f"{path} carries {sorted(extra)} {when}"
            for name, value in vars(tensor).items():
                same = value is declared[path][name] or value == declared[path][name]
                assert same, f"{path}.{name} changed {when}"

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in tensors.items():
            check("while it is loaded")
            yield pair

    check("before it is loaded")
    before = _surroundings(module)
    module.load_weights(watched())
    module.update_weights(tensors)
    check("after it is loaded")
    for name, tensor in tensors.items():
        assert not vars(tensor), f"the checkpoint's {name} now carries {sorted(vars(tensor))}"
    after = _surroundings(module)
    changed = sorted(name for name in before | after if before.get(name) != after.get(name))
    assert not changed, f"loading changed {', '.join(changed)}"

    others = [case.build(case.rank, case.size) for _ in range(2)]
    threads = [threading.Thread(target=m.load_weights, args=(tensors,)) for m in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for other in others:
        assert_same_state(state(other), state(module), f"on {case.at()}, loaded beside another")


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tensor.stride(), tensor.requires_grad


def _surroundings(module: nn.Module) -> dict[str, object]:
    """Return what a load has no business with, each thing by name."""
    found: dict[str, object] = {
        "garbage collection": gc.isenabled(),
        "grad mode": torch.is_grad_enabled(),
        "torch's threads": torch.get_num_threads(),
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "the default dtype": torch.get_default_dtype(),
        "the number of threads": threading.active_count(),
    }
    for path, each in module.named_modules():
        found[f"attributes of {path or 'the module'}"] = set(vars(each))
    owners = {name for each in module.modules() for name in (type(each).__module__,)}
    for name, python_module in list(sys.modules.items()):
        framework = name.startswith("vllm_module.") and not name.startswith("vllm_module.testing")
        if framework or (name in owners and not name.startswith("torch")):
            found |= _contents(name, vars(python_module))
    for cls in {type(each) for each in module.modules()}:
        if not cls.__module__.startswith("torch"):
            found |= _contents(f"{cls.__module__}.{cls.__qualname__}", dict(vars(cls)))
    return found


def _contents(where: str, names: dict[str, object]) -> dict[str, object]:
    """Return the identity and length of everything that has a name there."""
    return {
        f"{where}.{name}": (id(value), len(value) if isinstance(value, list | dict | set) else 0)
        for name, value in list(names.items())
        if not name.startswith("__")
    }


@law
def assert_meta_first(case: Case) -> None:
    """Law 6: parameters are born on meta, become real as they arrive, and all have to.

    With any part of the checkpoint the module refuses to run and names exactly the slots that are
    not filled; only what arrived has memory. When the rest arrives, it runs.
    """
    module = case.build(case.rank, case.size)
    for path, parameter in module.named_parameters():
        if isinstance(parameter, BasevLLMParameter):
            assert parameter.is_meta, f"{path} is born on {parameter.device}"
    module.plan_weights(iter(case.tensors.items()))
    for path, parameter in module.named_parameters():
        if isinstance(parameter, BasevLLMParameter):
            assert parameter.is_meta, f"{path} is on {parameter.device} after a plan"
    names = sorted(case.tensors)
    late = case.some(names, "arrive late")
    _assert_refuses(module, "before anything was loaded")
    module.update_weights({n: t for n, t in case.tensors.items() if n not in late})
    message = _assert_refuses(module, f"without {sorted(late)}")
    others = made(module, below=True)
    for path, parameter in module.named_parameters(remove_duplicate=True):
        if path in others:
            continue
        slots = parameter.slots if isinstance(parameter, BasevLLMParameter) else ("",)
        missing = [s for s in slots if (part_name(path, s) if s else path) in late]
        if isinstance(parameter, BasevLLMParameter):
            assert parameter.is_meta == (len(missing) == len(slots)), (
                f"{path} is on {parameter.device}, and lacks {missing} of its slots {slots}"
            )
        leaf = path.split(".")[-1]
        for slot in missing:
            assert leaf in message, f"{path} (slot {slot!r}) is not in the message: {message}"
            assert not slot or repr(slot) in message, f"slot {slot!r} is not in: {message}"
    module.update_weights({name: case.tensors[name] for name in sorted(late)})
    module.check_ready()
    whole = case.build(case.rank, case.size)
    whole.load_weights(case.tensors)
    assert_same_state(state(module), state(whole), f"on {case.at()}, filled in two updates")


def _assert_refuses(module: vLLMModule, when: str) -> str:
    """Check that neither ``check_ready`` nor a call goes through, and return what it says."""
    # The refusal comes before the arguments are looked at.
    error = refusal((ModelNotReadyError, TypeError), module, f"runs {when}")
    assert isinstance(error, ModelNotReadyError), f"runs {when}: {error}"
    return str(error)


@law
def assert_reload_in_place(case: Case) -> None:
    """Law 9: new weights, whole or in part, go into the memory that is there, by the same path.

    A reload gives the bits of a first load; an update changes the slots it names and no other;
    neither moves a tensor. While it is loaded a module refuses to run and to be loaded by others.
    A load that breaks midway, of the module or of one below it, leaves it refusing to run, through
    any later update, until a whole load succeeds.
    """
    module = case.build(case.rank, case.size)
    module.load_weights(case.tensors)
    memory = {path: tensor.data_ptr() for path, tensor in _tensors(module)}
    other = case.other_tensors()
    updated = case.some(sorted(other), "updated")
    mixed = case.tensors | {name: other[name] for name in updated}
    for what, call, given, result in (
        ("after a reload", module.load_weights, other, other),
        ("after a second reload", module.load_weights, case.tensors, case.tensors),
        ("after an update", module.update_weights, {n: other[n] for n in updated}, mixed),
    ):
        call(iter(given.items()) if case.choose([False, True], "as a stream") else given)
        module.check_ready()
        fresh = case.build(case.rank, case.size)
        fresh.load_weights(result)
        assert_same_state(state(module), state(fresh), f"on {case.at()} {what}")
        for path, tensor in _tensors(module):
            assert tensor.data_ptr() == memory[path], f"{path} moved {what}"

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(case.tensors.items())[:1]
        refusal(ModelNotReadyError, module.check_ready, "ready while it is loaded")
        with ThreadPoolExecutor(1) as another:
            second = another.submit(module.load_weights, {})
            refusal(RuntimeError, second.result, "loaded by two threads at a time")
        yield from list(case.tensors.items())[1:]

    module.load_weights(interrupted())
    below = [
        (path, each)
        for path, each in module.named_modules()
        if isinstance(each, vLLMModule) and each.expected_weights()
    ]
    path, broken = below[case.choose(range(len(below)), "which module breaks")]
    if not _break(case, broken):
        if not case.overridden:
            module.check_ready()  # it broke before anything was written
        return  # or an override took in the whole stream first
    when = f"after a load of {path or 'the module'} that broke midway"
    for each in broken.modules():
        if isinstance(each, vLLMModule):
            _assert_refuses(each, when)
    refusal(ModelNotReadyError, module.check_ready, f"ready {when}")
    module.update_weights(mixed)
    refusal(ModelNotReadyError, module.check_ready, f"ready {when}, and an update")
    module.load_weights(case.tensors)
    module.check_ready()
    for path, tensor in _tensors(module):
        assert tensor.data_ptr() == memory[path], f"{path} moved after a load that broke"


def _break(case: Case, module: vLLMModule) -> bool:
    """Have a load or an update break; return whether something was written before."""
    tensors = random_weights(module.expected_weights(), seed=case.seed + 2)
    before = state(module)
    call = case.choose(["load_weights", "update_weights"], "call")
    fault = OSError("the source broke")
    kept = sorted({read.name for read in module.plan_weights(tensors).reads()})
    of_reads = case.choose([False, True], "a read fails")
    after = 1
    weights: Any
    if kept and of_reads:
        name = case.choose(kept, "fails to be read")
        weights = failing_reads(tensors, [name], fault)
    else:
        after = case.choose(range(len(tensors) + 1), "the stream breaks after")
        weights = failing_stream(tensors, after, fault)
    broken = refusal(OSError, lambda: getattr(module, call)(weights), "a broken source was loaded")
    assert broken is fault, f"raised {broken!r} in place of the source's own error"
    if after and not case.overridden:
        return True
    return any(not same_bits(tensor, before[path]) for path, tensor in state(module).items())
