"""The exceptions, by kind. Messages name the path, what was expected, what came and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class WeightLoadError(ValueError):
    """A checkpoint was refused.

    ``report`` is the ``LoadReport`` with every name of the load. It is ``None`` where the error was
    raised before or after names were compared.
    """

    # Any: the class of reports is on a higher floor, because it raises these errors.
    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class MissingWeightError(WeightLoadError):
    """A slot of the model has no tensor in the checkpoint."""


class UnexpectedWeightError(WeightLoadError):
    """A name of the checkpoint leads to no tensor of the model, and no skip rule covers it."""


class DuplicateWeightError(WeightLoadError):
    """Two checkpoint tensors fill one slot, or a tied tensor is stored twice with two values."""


class MisshapenWeightError(WeightLoadError):
    """The shape or dtype of a checkpoint tensor is not what its slot expects."""


class CheckpointFormatError(WeightLoadError):
    """A folder, index, configuration or file breaks the rules of its format."""


class WeightReadError(WeightLoadError):
    """Bytes could not be read, or the parameter's dtype cannot hold their values."""


class ShardingError(WeightLoadError):
    """A size cannot be divided among the tensor-parallel ranks; the message has the numbers."""


class UnsupportedModelError(WeightLoadError):
    """An architecture, or a setting of it, is not implemented here."""


class MissingPackageError(UnsupportedModelError, ImportError):
    """A package is needed that is not installed; the message has the command that installs it."""


class ModelNotReadyError(RuntimeError):
    """Whole weights are needed, and a load is not complete, broke midway, or the engine sleeps."""


class RankError(RuntimeError):
    """Ranks of the process group ended, hang, refused or differ.

    Attributes:
        ranks: their numbers in the group.
        recoverable: whether every rank is alive and raised, so that the group can be used again.

    """

    def __init__(
        self, message: str, ranks: Iterable[int] = (), *, recoverable: bool = False
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))
        self.recoverable = recoverable


class EngineBusyError(RuntimeError):
    """An engine has as many requests as it accepts; the message has the numbers."""


# Not failures of a source from outside that raises them: they are about a checkpoint, or this host.
NOT_THEIRS = WeightLoadError, RankError, MemoryError
