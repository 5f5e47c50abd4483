"""Mapping checkpoint names to the tensors of a transformers model.

Transformers publishes conversion rules: some rename, others merge tensors or split one. They are
read as declarations. Merged tensors become slots of one parameter, which the layers declare; a
tensor to be split is narrowed before it is read. So a rank reads only its part.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn

from vllm_module.base.messages import describe_error
from vllm_module.errors import UnsupportedModelError
from vllm_module.weights import Weight
from vllm_module.wrapped.library import library

_MERGING = frozenset(("MergeModulelist", "Concatenate"))
_MOST_RENAMINGS = 2  # limit on renamings of one name
_SPLITTING = frozenset(("Chunk", "Split"))

_COMPUTED = "transformers computes it when the model is built"
# Buffers that older versions of transformers stored and its loader ignores: last component of the
# name and number of dimensions. A mask and a parameter may both be named "bias".
_OLD_BUFFERS = {"inv_freq": 1, "cos_cached": 4, "sin_cached": 4, "masked_bias": 0, "bias": 4}
_FURTHER = "layers that predict further tokens are for speculative decoding"


class TransformersNames:
    """The names of one model, whose modules are still those of transformers.

    Args:
        text: a causal language model of transformers, with parameters on meta.
        whole: the multimodal model that contains it, if the checkpoint is of that.

    Raises ``UnsupportedModelError`` if ``whole`` has no such part.

    """

    def __init__(self, text: Any, whole: Any = None) -> None:
        model = text if whole is None else whole
        mapping = library("conversion_mapping")
        rules = library("core_model_loading")
        try:
            transforms = mapping.get_model_conversion_mapping(model)
        except Exception as error:  # a part's model_type may be an unknown name
            raise UnsupportedModelError(
                f"transformers has no rules for the names of {type(model).__name__}: "
                f"{describe_error(error)}"
            ) from error
        converter = rules.WeightConverter
        self._renamings = [each for each in transforms if not isinstance(each, converter)]
        self._converters = [each for each in transforms if isinstance(each, converter)]
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._prefix = f"{model.base_model_prefix}."
        self._has_base = model.base_model_prefix in model._modules
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        self._ignored = [re.compile(pattern) for pattern in ignored]
        self._rename, self._convert = rules.apply_renamings, rules.apply_converters
        self._owner = type(model).__name__
        self._parts = {"": ""}  # prefixes of names in the whole model, with ours
        if whole is not None:
            self._parts = _parts_of(text, whole)
        layers, self._further = _further_layers(text)
        self._layers = self._there(layers)
        # Names that only our tree has: from dummy weights, or from a trainer.
        ours, theirs = _beginnings(text), _beginnings(model)
        self._ours = tuple(sorted(ours - theirs))

    def stored(self, path: str) -> tuple[str, ...]:
        """Return the names of the tensors that a checkpoint stores for the parameter at ``path``.

        ``*`` stands for an expert's number. The result is empty without a rule that merges.
        """
        for converter in self._converters:
            if not _kinds(converter) <= _MERGING or len(converter.target_patterns) != 1:
                continue
            back = converter.reverse_transform()
            name, pattern = back.rename_source_key(self._there(path))
            if pattern is not None:
                first, *_ = targets = back.target_patterns
                names = (name.replace(first, target, 1) for target in targets)
                return tuple(self._here(each) or each for each in names)
        return ()

    def closest(self, path: str, known: Collection[str]) -> str | None:
        """Return the checkpoint's likely name for ``path``; ``None`` if that is ``path`` itself.

        Of the names that transformers renames to ``path``, this is the most similar to the
        checkpoint's names; ``known`` has their :func:`beginnings`. Tensors made by splitting have
        no other name.
        """
        back = [each.reverse_transform() for each in self._renamings]
        names = {path: None, self._there(path): None}
        for _ in range(_MOST_RENAMINGS):
            names |= {self._rename(name, [each]): None for name in names for each in back}
        renamed = {name: self._with_prefix(self._rename(name, self._renamings)) for name in names}
        right = [name for name in names if name == path or self._here(renamed[name]) == path]
        best = max(right, key=lambda name: sum(each in known for each in beginnings([name])))
        return best if best != path else None

    def of(self, name: str, weight: Weight) -> list[tuple[str, Weight]] | str:
        """Return our names and tensors for a checkpoint's tensor, or the reason why it is skipped.

        Raises ``UnsupportedModelError`` if a rule applies that cannot be declared.
        """
        if self._ours and name.startswith(self._ours):
            return [(name, weight)]
        pairs = self._converted(name, weight)
        if isinstance(pairs, str):
            return pairs
        return [(self._here(each) or each, part) for each, part in pairs]

    def _here(self, name: str) -> str | None:
        """Return our name for a name of the whole model; ``None`` if this part lacks it."""
        for there, here in self._parts.items():
            if name.startswith(there):
                return here + name[len(there) :]
        return None

    def _there(self, name: str) -> str:
        for there, here in self._parts.items():
            if name.startswith(here):
                return there + name[len(here) :]
        return name

    def _converted(self, name: str, weight: Weight) -> list[tuple[str, Weight]] | str:
        renamed = self._rename(name, self._renamings)
        target, pattern = self._convert(renamed, self._converters)
        whole = self._with_prefix(target)
        if self._here(whole) is None:
            return f"it is no part of the text model of {self._owner}"
        if whole not in self._shapes:
            if any(each.search(name) for each in self._ignored):
                return f"transformers' {self._owner} ignores it"
            if self._is_further(whole) or self._is_further(self._prefix + whole):
                return _FURTHER
            if _OLD_BUFFERS.get(name.rpartition(".")[2]) == len(weight.shape):
                return _COMPUTED
        if pattern is None:
            return [(whole, weight)]
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        kinds = _kinds(converter)
        if kinds <= _MERGING:
            # A slot of the parameter: the layer declares its name.
            added = len(whole) - len(target)
            return [(whole[:added] + renamed if added >= 0 else renamed[-added:], weight)]
        if kinds <= _SPLITTING and len(converter.operations) == 1:
            return list(self._split(converter, whole, weight))
        raise UnsupportedModelError(
            f"{name}: transformers converts it for {self._owner} by {converter.operations}, which "
            "cannot be done to the part of a rank: expected stacking, concatenation or splitting"
        )

    def _is_further(self, name: str) -> bool:
        """Return whether ``name`` belongs to a layer that predicts further tokens."""
        number = name.removeprefix(self._layers).partition(".")[0]
        return name.startswith(self._layers) and number.isdecimal() and int(number) in self._further

    def _split(self, converter: Any, target: str, weight: Weight) -> Iterator[tuple[str, Weight]]:
        first, *_ = patterns = converter.target_patterns
        dim, start = converter.operations[0].dim, 0
        parts = [target.replace(first, pattern, 1) for pattern in patterns]
        sizes = [self._shapes[part][dim] for part in parts]
        if len(weight.shape) <= dim or weight.shape[dim] != sum(sizes):
            yield from ((part, weight) for part in parts)  # refused later for their shapes
            return
        for part, size in zip(parts, sizes, strict=True):
            yield part, weight.narrow(dim, start, size)
            start += size

    def _with_prefix(self, name: str) -> str:
        """Return ``name`` with or without the base model's prefix, as the model has it.

        Transformers removes it also from names of the head; here a name has exactly one place.
        """
        if name in self._shapes:
            return name
        if self._prefix + name in self._shapes:
            return self._prefix + name
        short = name.removeprefix(self._prefix)
        return short if short in self._shapes and not self._has_base else name


def beginnings(names: Iterable[str]) -> set[str]:
    """Return each name and its beginnings up to each dot, with ``*`` for numbers."""
    found = set()
    for name in names:
        parts = ["*" if each.isdecimal() else each for each in name.split(".")]
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return found


def _further_layers(text: Any) -> tuple[str, range]:
    """Return the path of the layers of ``text``, and the numbers after the last layer's.

    Those layers predict further tokens. Some checkpoints have them, and transformers does not.
    """
    count = getattr(text.config, "num_nextn_predict_layers", None)
    last = getattr(text.config, "num_hidden_layers", None)
    if type(count) is int and type(last) is int:
        for path, module in text.named_modules():
            if (
                isinstance(module, nn.ModuleList)
                and path.endswith("layers")
                and len(module) == last
            ):
                return f"{path}.", range(last, last + count)
    return "", range(0)


def _kinds(converter: Any) -> set[str]:
    return {type(operation).__name__ for operation in converter.operations}


def _parts_of(text: Any, whole: Any) -> dict[str, str]:
    """Return the paths of the children of ``text`` in ``whole``, with their paths in ``text``."""
    parts = {}
    for name, child in text.named_children():
        found = [
            path
            for path, module in whole.named_modules()
            if type(module) is type(child) and _shapes(module) == _shapes(child)
        ]
        if not found:
            raise UnsupportedModelError(
                f"{type(whole).__name__} has no part like {name} of {type(text).__name__}"
            )
        parts[f"{found[0]}."] = f"{name}."
    return parts


def _shapes(module: Any) -> list[tuple[str, Any]]:
    return [(name, tensor.shape) for name, tensor in module.state_dict().items()]


def _beginnings(model: Any) -> set[str]:
    """Return the paths of the grandchildren of ``model``, each with a dot."""
    return {
        f"{name}.{below}."
        for name, child in model.named_children()
        for below, _ in child.named_children()
    }
