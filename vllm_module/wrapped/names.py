"""What a checkpoint calls the tensors of a transformers' model.

transformers publishes rules for it: some rename, others merge tensors or split one. They are read
as declarations. What is merged is stored in slots of one parameter, which the layers declare; what
is split is narrowed before it is read. So a rank reads its part only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from vllm_module.errors import UnsupportedModelError
from vllm_module.weights import Weight
from vllm_module.wrapped.library import library

_MERGING = frozenset(("MergeModulelist", "Concatenate"))
_SPLITTING = frozenset(("Chunk", "Split"))


class Names:
    """The names of one model, whose modules are transformers' own yet.

    Args:
        model: of transformers, with parameters on meta.

    """

    def __init__(self, model: Any) -> None:
        mapping = library("conversion_mapping")
        self._rules = library("core_model_loading")
        transforms = mapping.get_model_conversion_mapping(model)
        converter = self._rules.WeightConverter
        self._renamings = [each for each in transforms if not isinstance(each, converter)]
        self._converters = [each for each in transforms if isinstance(each, converter)]
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._prefix = f"{model.base_model_prefix}."
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        self._ignored = [re.compile(pattern) for pattern in ignored]
        self._owner = type(model).__name__

    def stored(self, path: str) -> tuple[str, ...]:
        """Return the names that a checkpoint has in place of the parameter at ``path``.

        ``*`` stands for the number of an expert. Without a rule that merges, there are none.
        """
        for converter in self._converters:
            if not _kinds(converter) <= _MERGING or len(converter.target_patterns) != 1:
                continue
            back = converter.reverse_transform()
            name, pattern = back.rename_source_key(path)
            if pattern is not None:
                first, *_ = targets = back.target_patterns
                return tuple(name.replace(first, target, 1) for target in targets)
        return ()

    def of(self, name: str, weight: Weight) -> Iterator[tuple[str, Weight]] | None:
        """Return what the tensor ``name`` of a checkpoint is here; ``None`` if it is not loaded.

        Raises ``UnsupportedModelError`` if a rule applies that is no declaration.
        """
        renamed = self._rules.apply_renamings(name, self._renamings)
        target, pattern = self._rules.apply_converters(renamed, self._converters)
        if pattern is None:
            target = self._with_prefix(renamed)
            if target not in self._shapes and any(each.search(name) for each in self._ignored):
                return None
            return iter([(target, weight)])
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        kinds = _kinds(converter)
        if kinds <= _MERGING:
            # A slot of the parameter: the layer declares the name.
            whole = self._with_prefix(target)
            added = len(whole) - len(target)
            return iter([(whole[:added] + renamed if added >= 0 else renamed[-added:], weight)])
        if kinds <= _SPLITTING and len(converter.operations) == 1:
            return self._split(converter, self._with_prefix(target), weight)
        raise UnsupportedModelError(
            f"{name}: transformers converts it for {self._owner} by {converter.operations}, which "
            "cannot be done to the part of a rank: expected stacking, concatenation or splitting"
        )

    def _split(self, converter: Any, target: str, weight: Weight) -> Iterator[tuple[str, Weight]]:
        first, *_ = patterns = converter.target_patterns
        dim, start = converter.operations[0].dim, 0
        for pattern in patterns:
            part = target.replace(first, pattern, 1)
            size = self._shapes[part][dim]
            yield part, weight.narrow(dim, start, size)
            start += size

    def _with_prefix(self, name: str) -> str:
        """Return ``name`` with or without the prefix of the base model, as the model has it."""
        if name in self._shapes:
            return name
        if self._prefix + name in self._shapes:
            return self._prefix + name
        short = name.removeprefix(self._prefix)
        return short if short in self._shapes else name


def _kinds(converter: Any) -> set[str]:
    return {type(operation).__name__ for operation in converter.operations}
