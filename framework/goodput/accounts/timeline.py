"""Where the time of one attempt went: recorded pieces of time, laid on one axis without overlap.

Guarantee: the axis counts whole nanoseconds since the run started, so lengths add up exactly. Pieces are laid in the
order in which they began; where two claim the same instant the earlier one has it, and what is left over is a gap with
a label of its own. Every instant of an attempt therefore has exactly one label.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CATEGORIES = (
    "productive", "lost", "data_wait", "checkpoint", "evaluation", "warmup", "init", "restore", "detect", "down",
    "queue", "paused", "other",
)  # fmt: skip
STEP_ORDER = ("data_wait", "productive", "evaluation", "checkpoint", "other")
NEVER = 2**62  # nanoseconds; later than any instant of a run


def nanoseconds(seconds: Any) -> int:
    """Whole nanoseconds of a recorded length; 0 for what is no positive, finite number."""
    if isinstance(seconds, (int, float)) and seconds > 0 and math.isfinite(seconds):
        return round(seconds * 1e9)
    return 0


class Span(NamedTuple):
    """One labelled stretch of the axis, `[start, end)` in nanoseconds; `step` is none outside of steps."""

    start: int
    end: int
    category: str
    step: int | None


@dataclass(slots=True, eq=False)
class Segment:
    """A block of steps that follow each other without a break, or one phase outside of steps.

    Args:
        start: Where its record begins on the axis, nanoseconds.
        limit: When it was written: it cannot have ended later.
        columns: Per category the length of each step in nanoseconds, in the order inside a step.
        count: Number of steps, 1 for a phase.
        first: Number of its first step, none for a phase.
        ranks: How many ranks worked in it.
    """

    start: int
    limit: int
    columns: list[tuple[str, Sequence[int]]]
    count: int
    first: int | None = None
    ranks: int = 1
    kept: int = NEVER  # later steps of this block were done again by a later attempt
    unsettled: int = 0  # so many of its first steps may still turn out to be warm-up in part
    warmup: dict[int, int] = field(default_factory=dict)  # index of a step -> nanoseconds above the usual
    length: int = 0
    previous: int = 0  # end of the segment before it, once laid
    low: int = 0
    high: int = 0

    def __post_init__(self) -> None:
        self.length = sum(sum(values) for _, values in self.columns)

    @classmethod
    def phase(cls, category: str, start: int, length: int, limit: int) -> Segment:
        return cls(start, limit, [(category, [length])], 1)

    @classmethod
    def steps(
        cls, start: int, limit: int, first: int, count: int, seconds: Mapping[str, Sequence[Any]], ranks: int = 1
    ) -> Segment:
        columns: list[tuple[str, Sequence[int]]] = []
        for category in (*STEP_ORDER, *(name for name in seconds if name not in STEP_ORDER)):
            values = [nanoseconds(value) for value in seconds.get(category, ())][:count]
            if any(values):
                label = category if category in CATEGORIES else "other"
                # packed: a trainer keeps its own account, and may do millions of steps
                columns.append((label, array("q", values + [0] * (count - len(values)))))
        return cls(start, limit, columns, count, first, ranks)

    @property
    def last(self) -> int:
        """Number of the last step, lost ones included; -1 for a phase."""
        return -1 if self.first is None else self.first + self.count - 1

    @property
    def overlap(self) -> int:
        """Nanoseconds of this record for which there was no time left."""
        return self.length - (self.high - self.low)

    def lay(self, previous: int) -> None:
        """Puts the segment behind one that ends at `previous`."""
        self.previous = previous
        self.low = max(previous, min(self.start, self.limit))
        self.high = max(self.low, min(self.start + self.length, self.limit))

    def spans(self) -> Iterator[Span]:
        """The labelled parts, cut to the room there is."""
        for span in self._parts():
            start, end = max(span.start, self.low), min(span.end, self.high)
            if start < end:
                yield Span(start, end, span.category, span.step)

    def _parts(self) -> Iterator[Span]:
        at = self.start
        for index in range(self.count):
            step = None if self.first is None else self.first + index
            is_lost = step is not None and step > self.kept
            for category, values in self.columns:
                if not values[index]:
                    continue
                end = at + values[index]
                if is_lost:
                    yield Span(at, end, "lost", step)
                elif category == "productive" and index in self.warmup:
                    usual = at + self.warmup[index]
                    yield Span(at, usual, "warmup", step)
                    yield Span(usual, end, category, step)
                else:
                    yield Span(at, end, category, step)
                at = end


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt of a run on the axis (all times in nanoseconds since the run started).

    Args:
        number: Number of the attempt, from 1.
        begin: When its process started.
        facts: Its `attempt_start` event, as far as it was recorded.
        ranks: Its world size; that of the attempt before if it is not recorded.
    """

    number: int
    begin: int
    facts: Mapping[str, Any]
    ranks: int = 1
    last: int = 0  # its newest event
    train_start: int = NEVER
    start_step: int | None = None
    last_step: int | None = None
    resumed: int | None = None  # the step that it restored, or started at
    allocated: int = 0  # when it was given its machines
    failure: int | None = None
    failure_message: str = ""
    end: Mapping[str, Any] | None = None
    segments: list[Segment] = field(default_factory=list)
    step_length: int = 0
    step_count: int = 0

    @property
    def high(self) -> int:
        """The end of the last thing recorded."""
        return self.segments[-1].high if self.segments else self.begin

    def gap(self, start: int, end: int) -> Iterator[Span]:
        """Labels time in which nothing was recorded: `init` before the first step, `other` after it."""
        ready = min(max(self.train_start, start), end)
        if start < ready:
            yield Span(start, ready, "init", None)
        if ready < end:
            yield Span(ready, end, "other", None)

    def closing(
        self, until: int, alive: int, noticed: int, allocated: int, is_live: bool, restored: int | None
    ) -> Iterator[Span]:
        """Labels the time from the last record to `until`, the start of the next attempt or the end of the run.

        Args:
            until: Where this attempt's share of the axis ends.
            alive: The newest sign of life of this attempt's rank 0 besides its events; 0 if there is none.
            noticed: When another rank said that something had failed; 0 if none did.
            allocated: Since when the next attempt had its machines: if it got them after the end of this one, the run
                stood in a queue until then.
            is_live: Whether the attempt still runs.
            restored: The step that the next attempt which restored began from, if there is one.
        """
        at, last = self.high, min(max(self.last, self.high), until)
        alive, noticed = min(max(alive, last), until), min(max(noticed, last), until)
        outage = [(min(allocated, until), "queue"), (until, "down")]
        was_training = self.train_start < NEVER
        if self.failure is not None:
            failed = min(max(self.failure, at), until)
            # The step in flight is gone; whatever it took beyond a usual step was spent on noticing the failure.
            usual = self.step_length // self.step_count if self.step_count else 0
            lost = min(at + usual, failed) if was_training else at
            cuts = [(lost, "lost"), (failed, "detect" if was_training else "init"), *outage]
        elif self.end is not None:
            yield from self.gap(at, last)
            # Nobody wanted a finished run to go on: that is no outage, even if it is extended later.
            at, cuts = last, [(until, "paused")] if self.end.get("status") == "finished" else outage
        elif is_live:
            yield from self.gap(at, until)
            return
        elif was_training and restored is not None and restored <= (self.last_step or 0):
            # steps that were never logged, and are done again; none was finished after another rank had failed
            worked = min(alive, noticed) if noticed > last else alive
            cuts = [(worked, "lost"), (noticed, "detect"), *outage]
        else:
            yield from self.gap(at, last)
            at, cuts = last, [(noticed if was_training else last, "detect"), *outage]
        for end, category in cuts:
            if at < end:
                yield Span(at, end, category, None)
                at = end
