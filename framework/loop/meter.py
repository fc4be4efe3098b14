"""Where the main thread's time goes, by category.

Guarantee: laps are contiguous, so that each instant between `begin` and the last lap is charged to exactly one
category. Nobody measuring costs one empty call a lap. On CUDA a wait for data counts only as far as the device had
nothing to do meanwhile; that is read from events once the device has passed them, and never waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

PRODUCTIVE = "productive"
DATA_WAIT = "data_wait"
CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"

Laps = list[tuple[str, float]]  # category, seconds


class Event(Protocol):
    """What is used of `torch.cuda.Event`, with timing."""

    def record(self) -> Any: ...
    def query(self) -> Any: ...
    def elapsed_time(self, end_event: Any) -> Any: ...


class DataWait(float):
    """Seconds for which the main thread waited for a batch, while the device may have had work left.

    Args:
        seconds: The wait of the main thread.
        drained: Behind all that was queued on the device when the wait began.
        fed: The same when it ended, before anything new was queued.
    """

    _drained: Event
    _fed: Event

    def __new__(cls, seconds: float, drained: Event, fed: Event) -> DataWait:
        wait = super().__new__(cls, seconds)
        wait._drained, wait._fed = drained, fed
        return wait

    def idle_seconds(self) -> float:
        """The part of it in which the device had nothing to do; all of it while the device is not that far."""
        if not self._fed.query():
            return float(self)
        return min(float(self), max(0.0, float(self._drained.elapsed_time(self._fed)) / 1e3))


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
        event: Makes an event of the device's current stream; none where work is not queued.
    """

    is_on = True

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, event: Callable[[], Event] | None = None
    ) -> None:
        self._clock = clock
        self._event = event
        self._drained: Event | None = None
        self._last = clock()
        self._laps: Laps = []

    def begin(self) -> None:
        self._last = self._clock()
        self._laps = []

    def lap(self, category: str) -> None:
        now = self._clock()
        seconds = now - self._last
        if self._event is not None:
            marked = self._event()
            marked.record()
            if category == DATA_WAIT and self._drained is not None:
                seconds = DataWait(seconds, self._drained, marked)
            self._drained = marked
        self._laps.append((category, seconds))
        self._last = now

    def take(self) -> Laps:
        laps, self._laps = self._laps, []
        return laps


def timing_event() -> Event:
    """An event of the current CUDA stream that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,no-any-return]
