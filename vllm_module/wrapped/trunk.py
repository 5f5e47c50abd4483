"""The trunk of a transformers model, which computes hidden states, and its logits.

A class for causal language modelling may scale or cap logits, or normalize once more. So its own
code computes the logits, with the trunk replaced by a module that returns given hidden states.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_module.base.outside import NO_FAILURES
from vllm_module.errors import UnsupportedModelError
from vllm_module.wrapped.probe import Probe, probe_of, run_on_meta, watched


class Trunk(NamedTuple):
    """The part of a model that computes hidden states.

    Attributes:
        path: path of the module.
        output_class: class of its output.

    """

    path: str
    output_class: Any


def find_trunk(model: Any, *, takes_positions: bool = True) -> tuple[Trunk, Probe]:
    """Return the trunk of ``model``, and a probe with its attention calls.

    ``takes_positions`` is True if more than attention depends on the tokens' positions.

    Raises ``UnsupportedModelError`` if attention is called outside of the first module that the
    model calls, or if that module takes no positions.
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

    with watched(model, after, before):
        run_on_meta(model, model, found, masks=True)
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
    """A trunk that returns the output it was built with."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


def refuse_other_logits(text: Any, whole: Any) -> None:
    """Raise if the multimodal class computes other logits from hidden states than its text model.

    Scale and cap may differ. Both models are on meta; the outputs of their heads are made up.
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
        except BaseException as error:  # code from outside, which may need more arguments
            if isinstance(error, NO_FAILURES):
                raise
            return
    if not torch.equal(*made):
        raise UnsupportedModelError(
            f"transformers' {type(whole).__name__} makes other logits of what its head returns "
            f"than {type(text).__name__}, which would be run for text: their scale or cap differs"
        )


class _Output:
    """The output of a trunk, with hidden states only."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Return None for other outputs, such as the hidden states of all layers."""


def _with_given(module: Any, tensors: nn.Module, path: str, given: nn.Module) -> Any:
    """Return a copy of ``module`` with ``given`` at ``path``; all else is shared.

    The copy has the children and tensors of ``tensors``.
    """
    name, _, rest = path.partition(".")
    children = dict(tensors._modules)
    below: Any = children[name]
    children[name] = _with_given(below, below, rest, given) if rest else given
    copy = object.__new__(type(module))
    vars(copy).update(vars(module))
    vars(copy).update(_modules=children, _parameters=tensors._parameters, _buffers=tensors._buffers)
    return copy
