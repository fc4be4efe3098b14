"""How well saving goes: when a failed save is tried again, whether saves come late, whether one fits the grace period.

Guarantee: these are decisions. Nothing here writes, logs or waits; whoever asks brings the clock. Only the journal of
earlier attempts is read, and of that the end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from framework.checkpoint.retention import Keep
from framework.duration import SECONDS, Duration
from framework.journal import parse

RETRY_SECONDS = (0.0, 5.0)  # from a failure to the next try; after the last one it counts
LATE = 1.5  # intervals
SUPERSEDED = "superseded"  # how the error of a save begins whose run belongs to another attempt now

_TAIL_BYTES = 1 << 20
_TAIL_FILES = 3


def can_be_retried(error: str) -> bool:
    """Whether another try might go better: not if another attempt owns the run."""
    return not error.startswith(SUPERSEDED)


class Retries:
    """When a failed save is tried again, and when it is given up.

    Args:
        delays: Seconds from each failure to the next try; none for `RETRY_SECONDS`.
    """

    def __init__(self, delays: Sequence[float] | None = None) -> None:
        self._delays = tuple(RETRY_SECONDS if delays is None else delays)
        self._failures = 0
        self._next = math.inf
        self.step = 0

    def failed(self, step: int, error: str, now: float) -> float | None:
        """Counts a failure.

        Args:
            step: Of the save that failed.
            error: Its error.
            now: A monotonic clock, in seconds.

        Returns:
            After how many seconds to try again; none if that is not worth it. Then counting begins anew.
        """
        self.step = step
        if self._failures >= len(self._delays) or not can_be_retried(error):
            self.succeeded()
            return None
        delay = self._delays[self._failures]
        self._failures += 1
        self._next = now + delay
        return delay

    def succeeded(self) -> None:
        """Forgets the failures: something was saved."""
        self._failures = 0
        self._next = math.inf

    def is_due(self, now: float) -> bool:
        """Whether to try again now; true once per failure."""
        if now < self._next:
            return False
        self._next = math.inf
        return True


class Age:
    """How old the state in the last committed checkpoint is, against the interval.

    Args:
        interval: In steps or a time; none means that nothing is ever late.
    """

    def __init__(self, interval: Duration | None) -> None:
        self._interval = interval
        self._is_time = interval is not None and interval.is_time
        self._limit = math.inf if interval is None else LATE * interval.value
        self._since = 0.0
        self._is_first = True
        self._has_told = False

    def expect(self, seconds: float, persist_seconds: float) -> None:
        """Another interval in the place of one that is a time too, of saves that take so long to become durable."""
        self._interval = Duration(seconds, SECONDS)
        self._limit = LATE * seconds + persist_seconds

    def begin(self, step: int, now: float) -> None:
        """Training begins at `step`, after 0 from a checkpoint: what is lost by a crash counts from here."""
        self._is_first = step <= 0
        self._since = now if self._is_time else float(step)

    def committed(self, step: int, seconds_ago: float, now: float) -> None:
        """A save was committed, whose state was taken at `step`, `seconds_ago`."""
        was_late = self._elapsed(step, now) > self._limit
        self._since = now - seconds_ago if self._is_time else float(step)
        self._is_first = False
        self._has_told = self._has_told and was_late  # saves that are late one after the other are told of once

    def late(self, step: int, now: float) -> str | None:
        """What to say if the last checkpoint is too old; once until saves are in time again."""
        if self._has_told or self._elapsed(step, now) <= self._limit:
            return None
        self._has_told = True
        age = self._elapsed(step, now)
        amount = f"{age:.1f} s" if self._is_time else f"{age:g} steps"
        due = f"but one is due every {_words(self._interval)}"
        if self._is_first:
            return f"no checkpoint has been committed yet, {amount} after the start, {due}"
        return f"the state in the last committed checkpoint is {amount} old, {due}"

    def _elapsed(self, step: int, now: float) -> float:
        return (now if self._is_time else step) - self._since


def _words(interval: Duration | None) -> str:
    if interval is None or interval.is_time:
        return str(interval)
    return f"{interval.value:g} {interval.unit}"


class Grace:
    """Whether a save fits the time that a host leaves between a signal and the end.

    Args:
        seconds: The grace period; none if there is none.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._is_told = False

    def takes(self, seconds: float, source: str) -> str | None:
        """What to say if a save takes too long now; once until it fits again.

        Args:
            seconds: How long a save takes, as far as is known.
            source: Where that is known from: "the last save took".
        """
        is_long = seconds > self.seconds
        is_news = is_long and not self._is_told
        self._is_told = is_long
        if not is_news:
            return None
        return (
            f"{source} {seconds:.1f} s, and callbacks.async_checkpoint.grace is {self.seconds:g} s: a preemption may "
            f"lose what was trained since the last interval. Save more often, to a faster place, or ask for more grace"
        )


def never_best(keep: Keep, has_metrics: bool) -> str | None:
    """What to say if checkpoints are to be kept by a metric, and the run measures none."""
    if not keep.best or keep.metric is None or has_metrics:
        return None
    return (
        f"callbacks.async_checkpoint.keep asks for the best {keep.best} by {keep.metric!r}, but this run has no "
        f"evaluation: no checkpoint is kept as one of the best. Give data.eval, or leave best and metric out"
    )


def last_save_seconds(events: Path, attempt: int) -> float | None:
    """How long the last save of earlier attempts took, from the stall to the end of the upload, in seconds.

    Args:
        events: The folder `events` of the run.
        attempt: Number of this attempt.
    """
    for number in range(attempt - 1, max(0, attempt - 1 - _TAIL_FILES), -1):
        for line in reversed(_tail(events / f"att-{number:04d}" / "rank0.jsonl").split(b"\n")):
            event = parse(line) if b'"save_committed"' in line else None
            if event is not None and event["ev"] == "save_committed":
                parts = (event.get("stall_seconds"), event.get("persist_seconds"))
                return sum(float(part) for part in parts if isinstance(part, int | float))
    return None


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""
