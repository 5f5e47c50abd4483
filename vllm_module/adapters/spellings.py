"""Other names of a module of the base, by which an adapter's settings may have it."""

from __future__ import annotations

import re

from vllm_module.core.tree import Node


def spellings(node: Node, name: str) -> list[str]:
    """Return ``name``, of a module or parameter at ``node``, and its names by aliases above it.

    A checkpoint may have one name for a module, and transformers, whose names PEFT takes, another.
    """
    found, above = [name], node.parent
    while above is not None:
        for alias, target in getattr(above.module, "weight_aliases", {}).items():
            start = f"{above.path}{target}"
            found += [
                f"{above.path}{alias}{each.removeprefix(start)}"
                for each in found
                if f"{each}.".startswith(f"{start}.")
            ]
        above = above.parent
    return found


def without_numbers(name: str) -> str:
    """Return a module's name without those of layers: the same for that module of each layer."""
    return re.sub(r"\.\d+(?=\.)", "", name)
