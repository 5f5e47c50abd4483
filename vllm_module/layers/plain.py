"""Whether calling a module runs the forward pass of its class, and nothing else."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as of_all_modules


def is_plain(module: nn.Module) -> bool:
    """Return whether a call of ``module`` is one of its class's ``forward``.

    It is not with a hook of any kind, nor where the class has a ``__call__`` or the instance a
    ``forward`` of its own, or is compiled.
    """
    return not (
        type(module).__call__ is not nn.Module.__call__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or "forward" in module.__dict__
        or of_all_modules._global_forward_hooks
        or of_all_modules._global_forward_pre_hooks
        or of_all_modules._global_backward_hooks
        or of_all_modules._global_backward_pre_hooks
    )
