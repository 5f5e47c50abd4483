"""When a module may run: every slot below it holds values, and no load broke midway.

The check is a hook before the forward pass. It removes itself when it has passed, so a module that
is ready pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm_module.core.report import LoadReport, fold
from vllm_module.core.tensors import materialized, slots_of
from vllm_module.core.tree import LoadState, loads_itself, locations, state_of
from vllm_module.errors import ModelNotReadyError

_NONE: frozenset[str] = frozenset()


def modules_that_load(root: nn.Module) -> Iterator[nn.Module]:
    """Yield ``root`` and every module below it that loads itself."""
    return (module for module in root.modules() if loads_itself(module))


def guard(module: nn.Module) -> None:
    """Check that ``module`` is ready before its next forward pass."""
    state = state_of(module)
    if state.guard is None:
        state.guard = module.register_forward_pre_hook(_require_ready)


def unguard(module: nn.Module) -> None:
    """Run ``module`` without a check from now on."""
    state = state_of(module)
    if state.guard is not None:
        state.guard.remove()
        state.guard = None


@contextmanager
def in_progress(module: nn.Module) -> Iterator[None]:
    """Let no other load or plan of ``module`` begin while the block runs.

    Nor a forward pass, if the module is guarded: a run guards it before it writes.
    """
    state = state_of(module)
    if state.in_progress:
        raise RuntimeError(f"this {type(module).__name__} is already being loaded")
    state.in_progress = True
    try:
        yield
    finally:
        state.in_progress = False


def _require_ready(module: nn.Module, args: object) -> None:
    checked: Any = module
    checked.check_ready()
    unguard(module)


def allow_to_run(modules: Iterable[nn.Module]) -> None:
    """Let ``modules``, all of a tree, run again; check them no longer if nothing is on meta."""
    modules = list(modules)
    ready = not any_on_meta(modules)
    for module in modules:
        if loads_itself(module):
            state = state_of(module)
            state.refusal = None
            if ready and state.guard is not None:  # so that torch.compile sees no hook
                unguard(module)


def refuse_to_run(root: nn.Module, error: BaseException, overwritten: str = "") -> None:
    """Let no module of the tree run until a load succeeds: ``error`` left it half written.

    ``overwritten`` lists tensors that had memory before.
    """
    cause = str(error).partition("\n")[0]
    if overwritten:
        cause += f"\nIt had overwritten, at least in part: {overwritten}"
    for module in modules_that_load(root):
        state_of(module).refusal = (
            "a load broke midway and left a mixture; call load_weights with a whole "
            f"checkpoint. It broke on {type(error).__name__}: {cause}"
        )
        guard(module)


def check_ready(root: nn.Module) -> None:
    """Raise ``ModelNotReadyError``, naming every tensor of the tree that holds no values."""
    cannot = f"{type(root).__name__} cannot run: "
    for module in modules_that_load(root):
        if state_of(module).in_progress:
            raise ModelNotReadyError(f"{cannot}its weights are being loaded")
        if (refusal := state_of(module).refusal) is not None:
            raise ModelNotReadyError(cannot + refusal)
    if unfilled := list(_unfilled(root)):
        lines = "\n".join(f"  {line}" for line in fold(unfilled))
        raise ModelNotReadyError(
            f"{cannot}not loaded, or put to sleep (call load_weights):\n{lines}"
        )
    tensors = (*root.named_parameters(), *root.named_buffers())
    if computed := [name for name, tensor in tensors if tensor.is_meta]:
        raise ModelNotReadyError(
            f"{cannot}tensors that no checkpoint stores are on the meta device, outside of "
            f"which the model has to be built: {', '.join(fold(computed))}"
        )


def is_complete(root: nn.Module) -> bool:
    """Tell whether every slot of the tree holds values and nothing else of it is on meta.

    Processing allocates what it computes.
    """
    return not any_on_meta(root.modules(), but_computed=True) and not any(_unfilled(root))


def any_on_meta(modules: Iterable[nn.Module], *, but_computed: bool = False) -> bool:
    """Tell whether any parameter or buffer of ``modules`` is on the meta device."""
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if not (but_computed and name in getattr(module, "computed_names", ())):
                    return True
    return False


def _unfilled(root: nn.Module) -> Iterator[str]:
    for location in locations(root):
        tensor = location.tensor
        loaded = location.node.state.loaded.get(location.local, _NONE)
        if tensor.is_meta:
            loaded = _NONE
        elif loaded.issuperset(slots_of(tensor)):
            continue
        for slot in slots_of(tensor):
            if slot not in loaded:
                yield location.stored_name(slot)


def sleep(root: nn.Module) -> None:
    """Replace every tensor that a load fills or computes by one on the meta device.

    Tied tensors stay tied where every module that holds them is in the tree.
    """
    if state_of(root).in_progress:
        raise RuntimeError(f"this {type(root).__name__} is being loaded")
    meta, on_cuda = torch.device("meta"), False
    asleep: dict[torch.Tensor, Any] = {}
    for module in root.modules():
        kept = module._non_persistent_buffers_set.difference(getattr(module, "computed_names", ()))
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and name not in kept:
                    on_cuda |= tensor.is_cuda
                    if tensor not in asleep:
                        asleep[tensor] = materialized(tensor, meta)
                    tensors[name] = asleep[tensor]
    for module in modules_that_load(root):
        state = state_of(module)
        state.loaded.clear()
        state.refusal = None  # the memory that a broken load left half written is gone
        guard(module)
    asleep.clear()
    if on_cuda:
        torch.cuda.empty_cache()


class GuardedModule(nn.Module):
    """A module that remembers what was loaded into it, and runs only with all of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.load_state = LoadState()
        guard(self)  # no forward pass before the weights are loaded

    def check_ready(self) -> None:
        """Raise ``ModelNotReadyError``, naming every tensor below that holds no values."""
        check_ready(self)

    def sleep(self) -> None:
        """Release the memory of all weights: back to meta, until ``load_weights`` fills them.

        So is that of buffers that layers compute from them, such as scales for a product. Buffers
        that do not depend on weights stay.
        Tied tensors stay tied if all modules that hold them are below this one. Memory that
        something else refers to, such as a captured CUDA graph, is not released.
        """
        sleep(self)

    @property
    def load_report(self) -> LoadReport | None:
        """The report of the last successful load that was called on this module."""
        return self.load_state.report

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__  # as below, for the price of one call
        for held in (own.get("_parameters"), own.get("_modules")):
            if held is not None and (found := held.get(name)) is not None:
                return found
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Python also comes here if a property raises AttributeError: let that one be seen.
            declared = getattr(type(self), name, None)
            if isinstance(declared, property) and declared.fget is not None:
                return declared.fget(self)
            raise
