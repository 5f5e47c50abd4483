"""The part of a model of transformers that computes hidden states, and what it does after it.

A class for causal language modelling may scale or cap logits, or normalize once more. So logits are
computed by the class itself, with its trunk replaced by a module that returns hidden states.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_module.errors import UnsupportedModelError
from vllm_module.wrapped.probe import Probe, probe_of, run_on_meta


class Trunk(NamedTuple):
    """The part of a model that computes hidden states.

    Attributes:
        path: of the module.
        output_class: of what it returns.

    """

    path: str
    output_class: Any


def find_trunk(model: Any, *, takes_positions: bool = True) -> tuple[Trunk, Probe]:
    """Return the trunk of ``model``, and what it asks of attention.

    ``takes_positions`` says whether more than attention depends on the positions of tokens.

    Raises ``UnsupportedModelError`` if the model attends outside of the first part that it calls,
    or that part takes no positions.
    """
    name, found = type(model).__name__, probe_of(model)
    called: list[Any] = []
    running: list[Any] = []
    returned: list[tuple[Any, int]] = []

    def before(module: nn.Module, args: Any) -> None:
        if module is not model and not running:
            called.append(module)
            running.append(module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if running and module is running[0]:
            running.clear()
            returned.append((output, len(found.order)))

    modules = list(model.modules())
    hooks = [module.register_forward_pre_hook(before) for module in modules]
    hooks += [module.register_forward_hook(after) for module in modules]
    try:
        run_on_meta(model, model, found, masks=True)
    finally:
        for hook in hooks:
            hook.remove()
    if not returned:
        raise UnsupportedModelError(
            f"transformers' {name} calls no module that computes hidden states"
        )
    trunk, (output, attended) = called[0], returned[0]
    path = found.paths[trunk]
    hidden = getattr(output, "last_hidden_state", None)
    once = called.count(trunk) == 1 and attended == len(found.order)
    if not once or not isinstance(hidden, torch.Tensor) or hidden.ndim != 3:
        raise UnsupportedModelError(
            f"transformers' {name} computes hidden states in itself, or in several parts: the "
            f"first one that it calls is {path}"
        )
    parameters = inspect.signature(trunk.forward).parameters
    if takes_positions and "position_ids" not in parameters:
        raise UnsupportedModelError(
            f"{path} of {name} takes no position_ids, so sequences of one batch would get wrong "
            "positions"
        )
    return Trunk(path, type(output)), found


def logits_of(model: nn.Module, library: Any, trunk: Trunk, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits ``[1, tokens, vocab_size]`` of ``hidden``, ``[1, tokens, hidden_size]``.

    ``library`` is transformers' model, whose children and tensors are now those of ``model``.
    """
    given = _Given(trunk.output_class(last_hidden_state=hidden))
    head = _with_given(library, model, trunk.path, given)
    ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    logits: torch.Tensor = head.forward(input_ids=ids, use_cache=False).logits
    return logits


class _Given(nn.Module):
    """Stands for a trunk: returns what it was built with."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


def refuse_other_logits(text: Any, whole: Any) -> None:
    """Raise ``UnsupportedModelError`` if ``whole`` makes logits otherwise than its model of text.

    Such as without a scale. Both are on meta; what their heads return is made up for it.
    """
    numbers = torch.linspace(-50, 50, 8, device="cpu").expand(1, 2, 8)
    made = []
    for model in (text, whole):
        head, trunk = model.get_output_embeddings(), model.base_model
        paths = {module: path for path, module in model.named_modules()}
        if head is None or trunk is model or not paths.get(trunk) or not paths.get(head):
            return
        copy = _with_given(model, model, paths[trunk], _Given(_Output(numbers)))
        copy = _with_given(copy, copy, paths[head], _Given(numbers))
        try:
            ids = torch.zeros(1, 2, dtype=torch.int64, device="cpu")
            made.append(copy.forward(input_ids=ids, use_cache=False).logits)
        except Exception:  # code from outside, which may need more than this
            return
    if not torch.equal(*made):
        raise UnsupportedModelError(
            f"transformers' {type(whole).__name__} makes other logits of what its head returns "
            f"than {type(text).__name__}, which would be run for text: their scale or cap differs"
        )


class _Output:
    """Stands for what a trunk returns."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Return nothing for what is not asked for, such as hidden states of all layers."""


def _with_given(module: Any, tensors: nn.Module, path: str, given: nn.Module) -> Any:
    """Return a copy of ``module`` with ``given`` at ``path``; all else is shared.

    Its children and tensors are those of ``tensors``.
    """
    name, _, rest = path.partition(".")
    children = dict(tensors._modules)
    below: Any = children[name]
    children[name] = _with_given(below, below, rest, given) if rest else given
    copy = object.__new__(type(module))
    vars(copy).update(vars(module))
    vars(copy).update(_modules=children, _parameters=tensors._parameters, _buffers=tensors._buffers)
    return copy
