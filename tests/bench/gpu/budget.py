"""How a run's time is divided among its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Budget:
    """The time that is left until a deadline, shared by the parts that are not over.

    Args:
        seconds: of the whole run.
        shares: of each part, in their order. A part gets its share of what is left for it and the
            parts after it, so what one part leaves goes to the next ones.
        now: the clock, in seconds.

    """

    def __init__(
        self,
        seconds: float,
        shares: Mapping[str, float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shares = dict(shares)
        self._now = now
        self._end = now() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 after it."""
        return max(0.0, self._end - self._now())

    def limit(self, part: str) -> float:
        """Return the seconds that ``part`` may take if it begins now."""
        names = list(self._shares)
        to_come = sum(self._shares[name] for name in names[names.index(part) :])
        return self.left * self._shares[part] / to_come
