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

Laps = list[tuple[str, float]]  # category, seconds


class Meter:
    """Charges the time since the last lap to a category, if somebody measures.

    Attributes:
        is_on: Whether time is measured at all.
    """

    is_on = False

    def begin(self) -> None:
        """The timeline starts now."""

    def lap(self, category: str) -> None:
        """What passed since the last lap belongs to `category`."""

    def take(self) -> Laps:
        """The laps since the last `take`, in order."""
        return []


class LapMeter(Meter):
    """A meter that measures.

    Args:
        clock: Monotonic clock in seconds.
    """

    is_on = True

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last = clock()
        self._laps: Laps = []

    def begin(self) -> None:
        self._last = self._clock()
        self._laps = []

    def lap(self, category: str) -> None:
        now = self._clock()
        self._laps.append((category, now - self._last))
        self._last = now

    def take(self) -> Laps:
        laps, self._laps = self._laps, []
        return laps
