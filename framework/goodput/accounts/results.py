"""What the accounting of a run gives: the intervals of its timeline, and its figures.

Guarantee: plain immutable records; the seconds of all categories of a `Goodput` sum to its `wall`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of the timeline.

    Args:
        start: Seconds since the run started.
        end: Seconds since the run started; the `start` of the next interval.
        category: One of `CATEGORIES`.
        attempt: Number of the attempt; time between two attempts belongs to the earlier one.
        first: First step of a stretch of steps, else none.
        last: Last step of a stretch of steps, else none.
    """

    start: float
    end: float
    category: str
    attempt: int
    first: int | None
    last: int | None


@dataclass(frozen=True, slots=True)
class Goodput:
    """The account of a run, up to the end of the run or to now. All lengths in seconds.

    Args:
        started: When the first attempt's process started, seconds since the epoch.
        wall: Length of the run.
        seconds: Seconds of each of `CATEGORIES`; they sum to `wall`.
        ratio: Productive share of `wall`, as if nothing failed from now on.
        ratio_durable: Share of `wall` that was productive and is covered by a committed checkpoint. The seconds that
            it counts (`durable_seconds`) never fall unless a run goes on from before that checkpoint: a restart takes
            nothing back from them, as it does from `ratio`. The first 5 steps of an attempt are counted once it is
            known how much of them was warm-up: after 25 steps, or when the attempt has ended.
        durable_seconds: See `ratio_durable`.
        window_1h: Productive share of the last hour, or of the whole run if it is shorter. A window begins on a whole
            minute of the run.
        window_24h: The same of the last 24 hours.
        runtime: Productive share of the time in which the run had machines: of `wall` without `queue` and `paused`.
        capacity: Productive share of what the most ranks that any attempt had could have done: productive time, each
            second weighted by the ranks of its attempt over the most there were.
        rank_hours: Hours for which machines were held, times ranks; one rank is one GPU where there are GPUs. Without
            `queue` and `paused`.
        rank_hours_productive: The productive ones of these.
        steps_done: Completed steps of the state that counts.
        steps_lost: Recorded steps that had to be done again.
        attempts: Number of attempts.
        status: `status` of the newest attempt's `end` event; none while it runs or if it was killed.
        commits: Committed checkpoints.
        failed_saves: Saves that failed.
        committed_step: Step of the newest committed checkpoint, none without one.
        checkpoint_stall: How long the last committed save held up the steps, none without one.
        checkpoint_persist: How long it took until it was durable, none without one.
        checkpoint_age: Time since the state in it was captured, none without one.
        checkpoint_interval: How often saves are due; where that is not a time, how far apart the last two states were
            captured. None before it is known.
        data_fetch_fraction: Share of the time of the steps (without evaluation and saves) spent waiting for data.
        overlap_seconds: Recorded time for which there was no room; more than 1 % of `wall` means broken records.
        clock_skew_seconds: How far clocks went back between attempts.
        is_measured: Whether the journal holds the lengths of steps at all (GoodputMeter was on).
    """

    started: float
    wall: float
    seconds: Mapping[str, float]
    ratio: float
    ratio_durable: float
    durable_seconds: float
    window_1h: float
    window_24h: float
    runtime: float
    capacity: float
    rank_hours: float
    rank_hours_productive: float
    steps_done: int
    steps_lost: int
    attempts: int
    status: str | None
    commits: int
    failed_saves: int
    committed_step: int | None
    checkpoint_stall: float | None
    checkpoint_persist: float | None
    checkpoint_age: float | None
    checkpoint_interval: float | None
    data_fetch_fraction: float
    overlap_seconds: float
    clock_skew_seconds: float
    is_measured: bool

    @property
    def age_over_interval(self) -> float | None:
        """The age of the newest checkpoint over the interval: over 1.5 saves come late. None without either."""
        if self.checkpoint_age is None or not self.checkpoint_interval:
            return None
        return self.checkpoint_age / self.checkpoint_interval
