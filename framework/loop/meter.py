"""Where the main thread's time goes, by category.

Guarantee: laps are contiguous, so that each instant between `begin` and the last lap is charged to exactly one
category. Nobody measuring costs one empty call a lap.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PRODUCTIVE = "productive"
DATA_WAIT = "data_wait"
CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"
RESTORE = "restore"
OTHER = "other"


class Meter:
    """Charges the time since the last lap to a category, if somebody measures.

    Attributes:
        is_on: Whether time is measured at all.
        totals: Seconds per category in this attempt, for live figures.
    """

    is_on = False

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}

    def begin(self) -> None:
        """The timeline starts now."""

    def lap(self, category: str) -> None:
        """What passed since the last lap belongs to `category`."""

    def take(self) -> dict[str, float]:
        """Seconds per category since the last `take`."""
        return {}


class LapMeter(Meter):
    """A meter that measures.

    Args:
        clock: Monotonic clock in seconds.
    """

    is_on = True

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._last = clock()
        self._record: dict[str, float] = {}

    def begin(self) -> None:
        self._last = self._clock()
        self._record = {}

    def lap(self, category: str) -> None:
        now = self._clock()
        record = self._record
        record[category] = record.get(category, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        record, self._record = self._record, {}
        for category, seconds in record.items():
            self.totals[category] = self.totals.get(category, 0.0) + seconds
        return record
