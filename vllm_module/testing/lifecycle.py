"""Laws of a module's lifecycle: meta, loaded, updated in place, and pure throughout."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm_module.core.module import vLLMModule
from vllm_module.errors import ModelNotReadyError
from vllm_module.parameters import BasevLLMParameter
from vllm_module.testing.case import Case, law, refusal
from vllm_module.testing.checkpoints import (
    Tensors,
    assert_same_state,
    made_up_weights,
    same_bits,
    state,
)
from vllm_module.testing.names import Names, slot_name, stored_tensors
from vllm_module.testing.sharding import assert_outputs
from vllm_module.testing.sources import failing_reads, failing_stream

_CONTAINERS = list, dict, set
# Settings that a load must not change: how each is read and set, and two values of it.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], tuple[Any, ...]]] = {
    "garbage collection": (
        gc.isenabled, lambda on: gc.enable() if on else gc.disable(), (True, False)
    ),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled, (True, False)),
    "torch's threads": (torch.get_num_threads, torch.set_num_threads, (1, 2)),
    "torch's random state": (
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
        (b"", b""),  # that of a case's seed
    ),
    "the default dtype": (
        torch.get_default_dtype, torch.set_default_dtype, (torch.float32, torch.float64)
    ),
}  # fmt: skip


@law
def assert_pure(case: Case) -> None:
    """Law 5: loading changes the values of tensors and nothing else.

    Before, during and after a load, plain parameters have an empty ``__dict__``, and typed ones
    only the attributes that their constructor declares. Types, strides and ``requires_grad`` stay.
    The checkpoint's tensors get no attributes, modules no attributes, Python modules no globals,
    and the settings of PyTorch and the interpreter stay. Modules loaded by two threads at once get
    the same bits.
    """
    tensors, module = case.tensors, case.build(case.rank, case.size)
    declared = {path: dict(vars(tensor)) for path, tensor in _tensors(module)}
    layouts = {path: _layout(tensor) for path, tensor in _tensors(module)}

    def check(when: str) -> None:
        for path, tensor in _tensors(module):
            layout = _layout(tensor)
            assert layout == layouts[path], f"{path} was {layouts[path]}: {layout} {when}"
            extra = vars(tensor).keys() - (
                declared[path].keys() if isinstance(tensor, BasevLLMParameter) else ()
            )
            assert not extra, f"{path} carries {sorted(extra)} {when}"
            for name, value in vars(tensor).items():
                same = value is declared[path][name] or value == declared[path][name]
                assert same, f"{path}.{name} changed {when}"

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in tensors.items():
            check("during the load")
            yield pair

    check("before the load")
    before, running = _surroundings(module), set(threading.enumerate())
    first = case.seed % 2
    with _kept_settings(case.seed, first):
        module.load_weights(watched())
    with _kept_settings(case.seed, 1 - first):
        module.update_weights(tensors)
    check("after the load")
    for name, tensor in tensors.items():
        assert not vars(tensor), f"the checkpoint's {name} now carries {sorted(vars(tensor))}"
    after = _surroundings(module)
    changed = sorted(
        f"{where}{name}"
        for where in before | after
        if (old := before.get(where, {})) != (new := after.get(where, {}))
        for name in old | new
        if old.get(name) != new.get(name)
    )
    assert not changed, f"loading changed {', '.join(changed)}"
    started = [each.name for each in set(threading.enumerate()) - running]
    assert not started, f"loading left threads: {', '.join(started)}"

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


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tensor.stride(), tensor.requires_grad


@contextmanager
def _kept_settings(seed: int, which: int) -> Iterator[None]:
    """Fail if the block changes a setting of PyTorch or the interpreter; restore them in any case.

    Each has the first or second of two values first, so that a block that sets it to a constant is
    found in one of them, whatever was set before.
    """
    state = torch.Generator().manual_seed(seed + which).get_state()
    given = {name: values[which] for name, (_, _, values) in _SETTINGS.items()}
    given["torch's random state"] = state.numpy().tobytes()
    before = {name: get() for name, (get, _, _) in _SETTINGS.items()}
    try:
        for name, value in given.items():
            _SETTINGS[name][1](value)
        yield
        changed = sorted(name for name in given if _SETTINGS[name][0]() != given[name])
        assert not changed, f"loading changed {', '.join(changed)}"
    finally:
        for name, value in before.items():
            _SETTINGS[name][1](value)


def _surroundings(module: nn.Module) -> dict[str, dict[str, object]]:
    """Return the attributes and globals that a load must not change, by where they are.

    Where they are is the beginning of their names in a message.
    """
    surroundings: dict[str, dict[str, object]] = {
        "attributes of ": {
            path or "the module": set(vars(each)) for path, each in module.named_modules()
        },
    }
    owners = {name for each in module.modules() for name in (type(each).__module__,)}
    for name, python_module in list(sys.modules.items()):
        framework = name.startswith("vllm_module.") and not name.startswith("vllm_module.testing")
        if framework or (name in owners and not name.startswith("torch")):
            surroundings[f"{name}."] = _contents(vars(python_module))
    for cls in {type(each) for each in module.modules()}:
        if not cls.__module__.startswith("torch"):
            surroundings[f"{cls.__module__}.{cls.__qualname__}."] = _contents(dict(vars(cls)))
    return surroundings


def _contents(names: dict[str, object]) -> dict[str, object]:
    """Return the identity, and the length where it can change, of every value in a namespace."""
    return {
        name: (id(value), len(value)) if isinstance(value, _CONTAINERS) else id(value)
        for name, value in list(names.items())
        if name[:2] != "__"
    }


@law
def assert_meta_first(case: Case) -> None:
    """Law 6: parameters are created on meta and materialize as their weights arrive.

    With part of the checkpoint, the module refuses to run and names the unfilled slots; only
    parameters with a filled slot have memory. When the rest arrives, it runs.
    """
    module = case.build(case.rank, case.size)
    for path, parameter in module.named_parameters():
        if isinstance(parameter, BasevLLMParameter):
            assert parameter.is_meta, f"{path} is created on {parameter.device}"
    module.plan_weights(iter(case.tensors.items()))
    for path, parameter in module.named_parameters():
        if isinstance(parameter, BasevLLMParameter):
            assert parameter.is_meta, f"{path} is on {parameter.device} after a plan"
    names = sorted(case.tensors)
    late = case.some(names, "arrive late")
    _assert_refuses(module, "before anything was loaded")
    module.update_weights({n: t for n, t in case.tensors.items() if n not in late})
    message = _assert_refuses(module, f"without {sorted(late)}")
    tied = {other for names in Names.of(module).tied.values() for other in names}
    named = {name for line in message.splitlines()[1:] for name in _unfolded(line.strip())}
    assert named - tied == {*late}, f"without {sorted(late)}, the message is: {message}"
    for path, tensor, slots in _slots_by_name(module):
        if isinstance(tensor, BasevLLMParameter) and not tied & {*slots}:
            missing = [name for name in slots if name in late]
            assert tensor.is_meta == (len(missing) == len(slots)), (
                f"{path} is on {tensor.device}, and lacks {missing} of its slots {slots}"
            )
    module.update_weights({name: case.tensors[name] for name in sorted(late)})
    module.check_ready()
    whole = case.build(case.rank, case.size)
    whole.load_weights(case.tensors)
    assert_same_state(state(module), state(whole), f"on {case.at()}, filled in two updates")


def _slots_by_name(module: vLLMModule) -> Iterator[tuple[str, torch.Tensor, list[str]]]:
    """Yield each stored tensor with its path and the checkpoint's names of its slots."""
    for prefix, owner in module.named_modules():
        for path, whole, tensor in stored_tensors(prefix, owner):
            slots = tensor.slots if isinstance(tensor, BasevLLMParameter) else ("",)
            yield path, tensor, [slot_name(path, slot) if slot else whole for slot in slots]


def _unfolded(name: str) -> Iterator[str]:
    """Yield the names that a message folds into one: ``x.0.y`` and ``x.1.y`` of ``x.{0..1}.y``."""
    folded = re.search(r"\{([\d.,]+)\}", name)
    if folded is None:
        yield name
        return
    for run in folded[1].split(","):
        first, _, last = run.partition("..")
        for number in range(int(first), int(last or first) + 1):
            yield from _unfolded(f"{name[: folded.start()]}{number}{name[folded.end() :]}")


def _assert_refuses(module: vLLMModule, when: str) -> str:
    """Check that the module raises when called, and return the message."""
    # The module raises before it misses its arguments.
    error = refusal((ModelNotReadyError, TypeError), module, f"runs {when}")
    assert isinstance(error, ModelNotReadyError), f"runs {when}: {error}"
    return str(error)


@law
def assert_reload_in_place(case: Case) -> None:
    """Law 9: new weights, all or some, go into the existing memory by the same path.

    A reload gives the bits of a first load. An update changes the slots it names and no others.
    Neither moves a tensor, nor one that a module keeps as an attribute. On one rank, the outputs
    after both are those of a module that is loaded anew. During a load, the module refuses to run
    and to be loaded by another thread. After a load that breaks midway, of the module or of a
    submodule, it refuses to run until a complete load succeeds; an update is not enough.
    """
    module = case.build(case.rank, case.size)
    module.load_weights(case.tensors)
    memory = {path: tensor.data_ptr() for path, tensor in _kept(module)}
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
        for path, tensor in _kept(module):
            assert tensor.data_ptr() == memory.get(path, tensor.data_ptr()), f"{path} moved {what}"
    _assert_computes_anew(case, other, updated)

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(case.tensors.items())[:1]
        refusal(ModelNotReadyError, module.check_ready, "ready during a load")
        with ThreadPoolExecutor(1) as another:
            second = another.submit(module.load_weights, {})
            refusal(RuntimeError, second.result, "loaded by two threads at once")
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
            module.check_ready()  # the load failed before anything was written
        return  # an override may read the whole stream before it passes anything on
    when = f"after a load of {path or 'the module'} that broke midway"
    for each in broken.modules():
        if isinstance(each, vLLMModule):
            _assert_refuses(each, when)
    refusal(ModelNotReadyError, module.check_ready, f"ready {when}")
    module.update_weights(mixed)
    refusal(ModelNotReadyError, module.check_ready, f"ready {when}, and an update")
    module.load_weights(case.tensors)
    module.check_ready()
    for path, tensor in _kept(module):
        where = memory.get(path, tensor.data_ptr())
        assert tensor.data_ptr() == where, f"{path} moved after a load that broke"


def _kept(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of ``module``, and those that its modules keep as attributes."""
    yield from _tensors(module)
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:  # has an address
                yield f"{path}.{name}".lstrip("."), value


def _assert_computes_anew(case: Case, other: Tensors, updated: Sequence[str]) -> None:
    """Check that an unsharded module that has run computes with what it is given after that.

    It is updated with the tensors ``updated`` of ``other``, and then loaded with all of them.
    """
    if case.inputs is None:
        return
    module, changed = case.build(), {name: other[name] for name in updated}
    module.load_weights(case.tensors)
    case.run(module)
    for what, call, given, result in (
        ("an update", module.update_weights, changed, case.tensors | changed),
        ("a reload", module.load_weights, other, other),
    ):
        call(given)
        fresh = case.build()
        fresh.load_weights(result)
        try:
            assert_outputs(case.run(module), case.run(fresh), f"after {what}, output")
        except AssertionError as error:
            raise AssertionError(
                f"{error}\nThe unsharded module is one that is loaded anew. A forward pass must "
                "not keep what it computes of weights: process_weights_after_loading computes it, "
                "in place."
            ) from None


def _break(case: Case, module: vLLMModule) -> bool:
    """Break a load or an update; return whether anything was written before."""
    tensors = made_up_weights(module, seed=case.seed + 2)
    before = state(module)
    call = case.choose(["load_weights", "update_weights"], "call")
    fault = OSError("the source broke")
    kept = sorted({read.name for read in module.plan_weights(tensors).reads()})
    read_fails = case.choose([False, True], "a read fails")
    after = 1
    weights: Any
    if kept and read_fails:
        name = case.choose(kept, "fails to be read")
        weights = failing_reads(tensors, [name], fault)
    else:
        after = case.choose(range(len(tensors) + 1), "the stream breaks after")
        weights = failing_stream(tensors, after, fault)
    broken = refusal(OSError, lambda: getattr(module, call)(weights), "a broken source was loaded")
    assert broken is fault, f"raised {broken!r} in place of the source's error"
    if after and not case.overridden:
        return True
    return any(not same_bits(tensor, before[path]) for path, tensor in state(module).items())
