"""What can go wrong, by kind. Messages name the path, what was expected, what came, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_module.report import LoadReport


class WeightLoadError(ValueError):
    """A checkpoint was refused. ``report`` holds the whole account when names were compared."""

    def __init__(self, message: str, report: LoadReport | None = None) -> None:
        super().__init__(message)
        self.report = report


class MissingWeightError(WeightLoadError):
    """Slots of the model that no checkpoint tensor filled."""


class UnexpectedWeightError(WeightLoadError):
    """Checkpoint tensors that no module, parameter, alias or skip rule knows."""


class DuplicateWeightError(WeightLoadError):
    """A slot that two checkpoint tensors claim, or a tied tensor stored twice with two values."""


class MisshapenWeightError(WeightLoadError):
    """A checkpoint tensor whose shape or dtype is not what its slot expects."""


class CheckpointFormatError(WeightLoadError):
    """A folder, index, configuration or file that is not what its format says."""


class WeightReadError(WeightLoadError):
    """Bytes that could not be read, or values that the parameter's dtype cannot hold."""


class ShardingError(WeightLoadError):
    """A size that the tensor-parallel size does not divide; the message has the numbers."""


class UnsupportedModelError(WeightLoadError):
    """An architecture or a setting of one that no module here implements."""


class ModelNotReadyError(RuntimeError):
    """A module was run before its weights were complete, or after an update broke midway."""


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
