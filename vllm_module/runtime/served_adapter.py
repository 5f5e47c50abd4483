"""Adapters that an engine serves, and the ways to ask for one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for requests, by vLLM's names.

    Attributes:
        lora_name: its name.
        lora_int_id: any number; adapters are told apart by their names.
        lora_path: the folder to load it from, if it is not loaded.

    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(eq=False)
class ServedAdapter:
    """An adapter that is loaded on every rank of an engine.

    Attributes:
        name: by which requests ask for it.
        number: by which ranks know it; never used again.
        path: the folder that it was loaded from.
        num_layers: layers that it adds to.
        num_bytes: size of A and B on rank 0.
        updates: how often its weights have been updated.

    """

    name: str
    number: int
    path: str
    num_layers: int
    num_bytes: int
    updates: int = 0

    @property
    def version(self) -> str:
        """Name and number of updates, such as ``"sql@2"``."""
        return f"{self.name}@{self.updates}"
