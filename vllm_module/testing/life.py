"""Laws of a module's life: meta, loaded, updated in place, and pure throughout."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from vllm_module.errors import ModelNotReadyError
from vllm_module.module import vLLMModule
from vllm_module.parameters import BasevLLMParameter
from vllm_module.testing.case import Case, law, refusal
from vllm_module.testing.checkpoints import Tensors, assert_same_state, part_name, state
from vllm_module.testing.sources import failing_reads, failing_stream


@law
def assert_pure(case: Case) -> None:
    """Law 5: loading leaves no trace but the values.

    Plain parameters have an empty ``__dict__`` before, while and after; typed ones have what their
    constructor declares; the checkpoint's tensors gain nothing; no module of the framework changes
    a global; and two modules loaded by two threads at once get the same bits as one.
    """
    module = case.build(case.rank, case.size)
    declared = {path: dict(vars(tensor)) for path, tensor in _tensors(module)}
    types = {path: type(tensor) for path, tensor in _tensors(module)}

    def check(when: str) -> None:
        for path, tensor in _tensors(module):
            assert type(tensor) is types[path], f"{path} is a {type(tensor).__name__} {when}"
            extra = vars(tensor).keys() - (
                declared[path].keys() if isinstance(tensor, BasevLLMParameter) else ()
            )
            assert not extra, f"{path} carries {sorted(extra)} {when}"
            for name, value in vars(tensor).items():
                assert value == declared[path][name], f"{path}.{name} changed {when}"

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for pair in case.tensors.items():
            check("while it is loaded")
            yield pair

    check("before it is loaded")
    before = _globals()
    module.load_weights(watched())
    module.update_weights(case.tensors)
    check("after it is loaded")
    for name, tensor in case.tensors.items():
        assert not vars(tensor), f"the checkpoint's {name} now carries {sorted(vars(tensor))}"
    for name, value in _globals().items():
        assert before.get(name) == value, f"loading changed the global {name}"

    others = [case.build(case.rank, case.size) for _ in range(2)]
    threads = [threading.Thread(target=m.load_weights, args=(case.tensors,)) for m in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for other in others:
        assert_same_state(state(other), state(module), f"on {case.at()}, loaded beside another")


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _globals() -> dict[str, tuple[int, int]]:
    """Return the identity and length of every global of the framework's modules."""
    return {
        f"{name}.{key}": (id(value), len(value) if isinstance(value, list | dict | set) else 0)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "vllm_module"
        and not name.startswith("vllm_module.testing")
        and module is not None
        for key, value in list(vars(module).items())
        if not key.startswith("__")
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
    names = sorted(case.tensors)
    late = case.draw(st.sets(st.sampled_from(names), min_size=1), "arrive late")
    _assert_refuses(module, "before anything was loaded")
    module.update_weights({n: t for n, t in case.tensors.items() if n not in late})
    message = _assert_refuses(module, f"without {sorted(late)}")
    for path, parameter in module.named_parameters(remove_duplicate=True):
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
    neither moves a tensor. A load that breaks midway leaves the module refusing to run, through
    any later update, until a whole load succeeds.
    """
    module = case.build(case.rank, case.size)
    module.load_weights(case.tensors)
    memory = {path: tensor.data_ptr() for path, tensor in _tensors(module)}
    other = case.other_tensors()
    updated = case.draw(st.sets(st.sampled_from(sorted(other)), min_size=1), "updated")
    mixed = case.tensors | {name: other[name] for name in updated}
    for what, call, given, result in (
        ("after a reload", module.load_weights, other, other),
        ("after a second reload", module.load_weights, case.tensors, case.tensors),
        ("after an update", module.update_weights, {n: other[n] for n in updated}, mixed),
    ):
        call(iter(given.items()) if case.draw(st.booleans(), "as a stream") else given)
        module.check_ready()
        fresh = case.build(case.rank, case.size)
        fresh.load_weights(result)
        assert_same_state(state(module), state(fresh), f"on {case.at()} {what}")
        for path, tensor in _tensors(module):
            assert tensor.data_ptr() == memory[path], f"{path} moved {what}"

    _break(case, module, other)
    _assert_refuses(module, "after a load that broke midway")
    module.update_weights(mixed)
    _assert_refuses(module, "after a load that broke midway and an update")
    module.load_weights(case.tensors)
    module.check_ready()
    for path, tensor in _tensors(module):
        assert tensor.data_ptr() == memory[path], f"{path} moved after a load that broke"


def _break(case: Case, module: vLLMModule, tensors: Tensors) -> None:
    """Have a load or an update break after something was written."""
    call = case.draw(st.sampled_from(["load_weights", "update_weights"]), "call")
    fault = OSError("the source broke")
    kept = sorted({read.name for read in module.plan_weights(tensors).reads()})
    weights: Any
    of_reads = case.draw(st.booleans(), "a read fails")
    if kept and of_reads:
        name = case.draw(st.sampled_from(kept), "fails to be read")
        weights = failing_reads(tensors, [name], fault)
    else:
        after = case.draw(st.integers(1, len(tensors)), "the stream breaks after")
        weights = failing_stream(tensors, after, fault)
    broken = refusal(OSError, lambda: getattr(module, call)(weights), "a broken source was loaded")
    assert broken is fault, f"raised {broken!r} in place of the source's own error"
