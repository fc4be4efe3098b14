"""The clocks of an attempt, and where their readings lie on the axis of the run.

Guarantee: where the wall clock is set, records stay in their place: inside an attempt the monotonic clock counts, and
between attempts on one boot of a host too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from framework.goodput.accounts.timeline import nanoseconds


@dataclass(slots=True)
class Clock:
    """The last reading of an attempt's clocks.

    Args:
        axis: When it was, nanoseconds since the run started.
        wall: Wall clock, seconds since the epoch.
        monotonic: Monotonic clock, seconds.
        anchor: Wall minus monotonic clock when the attempt started.
        boot: Names the boot of the host, empty if unknown.
    """

    axis: int
    wall: float
    monotonic: float
    anchor: float
    boot: str

    def at(self, monotonic: float) -> int:
        """Where a later reading of the monotonic clock lies."""
        return self.axis + round((monotonic - self.monotonic) * 1e9)

    def after(self, wall: float | None) -> int:
        """Where `wall`, a time after this reading, lies; this reading if it is none."""
        return self.axis + (0 if wall is None else nanoseconds(wall - self.wall))

    def first_of_next(self, wall: float, monotonic: float, boot: str) -> int:
        """Where the first reading of the next attempt lies; it may come out before this one if clocks differ."""
        is_same_clock = bool(boot) and boot == self.boot and monotonic >= self.monotonic
        gap = monotonic - self.monotonic if is_same_clock else wall - self.wall
        return self.axis + round(gap * 1e9)

    def place(self, event: Mapping[str, Any], length: int, at: int, high: int) -> int:
        """Where the wall clock reading `event["start"]` lies.

        If the wall clock was set since then, its reading is off. It was taken before this event, so it fits the
        offset between the clocks now, at the event before, or at the start: the one that leaves the record the room
        that it needs is right.

        Args:
            event: The record.
            length: How long what it tells of took, nanoseconds.
            at: Where the record was written.
            high: Where the records before it end.
        """
        if "start" not in event:
            return at - length
        start, monotonic = float(event["start"]), float(event["m"])
        now = float(event["t"]) - monotonic
        places = [
            at - round((monotonic - (start - offset)) * 1e9)
            for offset in (now, self.wall - self.monotonic, self.anchor)
        ]
        return min(places, key=lambda place: max(0, high - place) + max(0, place + length - at))
