"""Parameters of an encoder's answers."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass
class PoolingParams:
    """Last operations on an encoder's answer; names and defaults are vLLM's.

    Attributes:
        use_activation: True if embeddings are divided by their norm, and logits of classes become
            probabilities; ``None`` means ``True``.
        dimensions: number of first entries kept of an embedding; ``None`` for all.

    Raises ``ValueError`` for a value of another type.

    """

    use_activation: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.use_activation, (bool, type(None))):
            raise ValueError(f"use_activation should be a bool, got {self.use_activation!r}")
        most = self.dimensions
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"dimensions should be an integer from 1, got {most!r}")

    def clone(self) -> PoolingParams:
        """Return a copy."""
        return replace(self)
