"""How often a run should save: the optimum of what saving costs and how often the run fails, within bounds.

Guarantee: pure logic; whoever asks brings the clock and the measurements. An interval is at least 1.2 times as long as a
save takes to become durable when it is chosen, and is given up as soon as it is shorter than one save. It is longer the
rarer failures are and the longer a save holds the steps up. Noise does not move it: within an attempt it changes only
when it is more than 25 % off, which costs less than a point of goodput.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from framework.goodput.planning.formulas import daly
from framework.goodput.planning.observed import NUM_SAVES, Observed, SaveCost
from framework.goodput.planning.rates import Rate, blend, mean_hours
from framework.speaking import count_text

PERSIST_MARGIN = 1.2  # times what a save takes to become durable: one is in flight at a time
STALL_SHARE = 0.03  # of the time is the most that saves may hold the steps up
LONGEST_SECONDS = 3600.0  # rates are estimates: no more than an hour is ever at stake
SHORTEST_SECONDS = 0.1  # ranks agree on a save no more often
HYSTERESIS = 1.25
FIRST_SECONDS, FIRST_SHARE = 60.0, 0.05  # before anything was measured: a minute, or less where failures are frequent

# what bounds an interval
OPTIMUM, PERSIST, STALL, LONGEST, SHORTEST, FIRST = "optimum", "persist", "stall", "longest", "shortest", "first"
BOUNDS = {
    OPTIMUM: "nothing bounds it",
    PERSIST: f"it is never shorter than {PERSIST_MARGIN:g} times what a save takes to be durable",
    STALL: f"saves hold the steps up for no more than {STALL_SHARE:.0%} of the time",
    LONGEST: "it is never longer than an hour",
    SHORTEST: f"ranks agree on a save no more often than every {SHORTEST_SECONDS:g} s",
    FIRST: "what a save costs is not known yet: the first one measures it",
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that an interval depends on.

    Args:
        rate: The failure rate that is believed before anything was seen.
        ranks: Ranks of this attempt, each of which can fail.
        failures: Failures seen in this run.
        rank_hours: Training time in which they came, summed over ranks.
        stall_seconds: How long a save holds the steps up: p90 of the last saves, each on its slowest rank; none
            before the first.
        persist_seconds: How long it then takes to become durable, p90; none before the first.
        saves: The saves that this is from, the oldest first.
    """

    rate: Rate
    ranks: int
    failures: int
    rank_hours: float
    stall_seconds: float | None
    persist_seconds: float | None
    saves: tuple[SaveCost, ...]

    @classmethod
    def of(cls, rate: Rate, ranks: int, seen: Observed) -> Inputs:
        """The inputs of a run that believes in this rate, of what was seen of it."""
        stall, persist = p90([one.stall for one in seen.saves]), p90([one.persist for one in seen.saves])
        return cls(rate, ranks, seen.failures, seen.rank_hours, stall, persist, seen.saves)

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures of the whole job: what is believed, blended with what was seen."""
        return mean_hours(self.rate, self.failures, self.rank_hours) * 3600 / self.ranks

    @property
    def mtbf_bounds_seconds(self) -> tuple[float, float]:
        """Both ends of its 90 % interval."""
        blended = blend(self.rate, self.failures, self.rank_hours)
        return blended.low * 3600 / self.ranks, blended.high * 3600 / self.ranks

    def to_json(self) -> dict[str, Any]:
        """JSON values; seconds unless a name says otherwise."""
        low, high = self.mtbf_bounds_seconds
        return {
            "preset": self.rate.text,
            "preset_hours": self.rate.gpu_hours,
            "ranks": self.ranks,
            "failures": self.failures,
            "rank_hours": self.rank_hours,
            "mtbf_seconds": self.mtbf_seconds,
            "mtbf_low_seconds": low,
            "mtbf_high_seconds": high,
            "stall_seconds": self.stall_seconds,
            "persist_seconds": self.persist_seconds,
            "saves": [[one.stall, one.persist] for one in self.saves],
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """An interval and why it is that long; all lengths in seconds.

    Args:
        seconds: From the beginning of one save to that of the next.
        optimum: What the formula gives; none before a save was measured.
        shortest: The shortest one that is allowed.
        longest: The longest one that is allowed.
        bound: `optimum` where the formula decides; else what does: `persist`, `stall`, `longest`, `shortest`, or
            `first` before a save was measured.
    """

    seconds: float
    optimum: float | None
    shortest: float
    longest: float
    bound: str


@dataclass(frozen=True, slots=True)
class Change:
    """A new interval.

    Args:
        choice: It.
        before: The one before, in seconds; none at the beginning of an attempt.
        reason: Why it changed, in words.
        inputs: What it is from.
        last_failure: What tells the newest failure from others, if it is known.
    """

    choice: Choice
    before: float | None
    reason: str
    inputs: Inputs
    last_failure: tuple[Any, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields of the journal's `interval` event."""
        last = None if self.last_failure is None else list(self.last_failure)
        why = {"before": self.before, "reason": self.reason}
        return {**asdict(self.choice), **why, **self.inputs.to_json(), "last_failure": last}


def p90(values: Sequence[float]) -> float | None:
    """The nearest-rank 90 % quantile, none of nothing: of ten values the largest but one."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1] if values else None


def choose(stall_seconds: float | None, persist_seconds: float | None, mtbf_seconds: float) -> Choice:
    """The best interval within the bounds.

    Args:
        stall_seconds: How long a save holds the steps up; none if nobody knows.
        persist_seconds: How long it then takes to become durable.
        mtbf_seconds: Mean time between failures of the job, greater than 0.
    """
    if stall_seconds is None or persist_seconds is None:
        first = max(SHORTEST_SECONDS, min(FIRST_SECONDS, FIRST_SHARE * mtbf_seconds))
        return Choice(first, None, SHORTEST_SECONDS, FIRST_SECONDS, FIRST)
    floors = {
        SHORTEST: SHORTEST_SECONDS,
        STALL: stall_seconds / STALL_SHARE,
        PERSIST: PERSIST_MARGIN * persist_seconds,
    }
    floor = max(floors, key=lambda name: floors[name])
    shortest = floors[floor]
    longest = max(LONGEST_SECONDS, shortest)
    optimum = daly(stall_seconds, mtbf_seconds)
    bound = floor if optimum < shortest or shortest >= longest else LONGEST if optimum > longest else OPTIMUM
    return Choice(min(max(optimum, shortest), longest), optimum, shortest, longest, bound)


class AutoInterval:
    """The interval of one attempt, chosen anew as the run shows what it costs and how often it fails.

    Args:
        rate: What is believed of failures before any was seen.
        ranks: Ranks of this attempt.
        seen: What the attempts before have shown.
        now: A monotonic clock, in seconds, when training begins.
    """

    def __init__(self, rate: Rate, ranks: int, seen: Observed, now: float) -> None:
        self._rate = rate
        self._ranks = ranks
        self._seen = seen
        self._began = now
        self.change = self._begin()

    @property
    def seconds(self) -> float:
        """The interval in force."""
        return self.change.choice.seconds

    def committed(self, stall: float, persist: float, now: float) -> Change | None:
        """A save was committed. The new interval, if it is time for one.

        Args:
            stall: How long it held up the steps, on the slowest rank, in seconds.
            persist: How long it then took to become durable, in seconds.
            now: The clock.
        """
        saves = (*self._seen.saves, SaveCost(stall, persist))[-NUM_SAVES:]
        self._seen = replace(self._seen, saves=saves)
        inputs = self._inputs(now)
        choice = choose(inputs.stall_seconds, inputs.persist_seconds, inputs.mtbf_seconds)
        if not is_change(self.seconds, choice, inputs.persist_seconds):
            return None
        reason = because(self.change.inputs, inputs)
        self.change = Change(choice, self.seconds, reason, inputs, self._seen.last_failure)
        return self.change

    def _begin(self) -> Change:
        inputs = self._inputs(self._began)
        choice = choose(inputs.stall_seconds, inputs.persist_seconds, inputs.mtbf_seconds)
        failures = f"{count_text(inputs.failures, 'failure')} so far"
        costs = "" if inputs.saves else ", and what a save costs is not known yet"
        return Change(choice, None, f"the attempt begins, with {failures}{costs}", inputs, self._seen.last_failure)

    def _inputs(self, now: float) -> Inputs:
        trained = max(0.0, now - self._began) * self._ranks / 3600
        seen = replace(self._seen, rank_hours=self._seen.rank_hours + trained)
        return Inputs.of(self._rate, self._ranks, seen)


def is_change(seconds: float, choice: Choice, persist_seconds: float | None) -> bool:
    """Whether an interval in force is to be given up for another.

    Args:
        seconds: The one in force.
        choice: The best one now.
        persist_seconds: How long a save takes to become durable.
    """
    if persist_seconds is not None and seconds < persist_seconds:
        return choice.seconds != seconds
    ratio = choice.seconds / seconds
    return ratio > HYSTERESIS or ratio * HYSTERESIS < 1


def because(before: Inputs, now: Inputs) -> str:
    """The input that moved most, in words."""
    if before.stall_seconds is None or before.persist_seconds is None:
        return "it is known now what a save costs"
    assert now.stall_seconds is not None and now.persist_seconds is not None
    moves = {
        f"a save holds the steps up for {now.stall_seconds:.3g} s, {before.stall_seconds:.3g} s before": (
            before.stall_seconds, now.stall_seconds,
        ),
        f"a save takes {now.persist_seconds:.3g} s to be durable, {before.persist_seconds:.3g} s before": (
            before.persist_seconds, now.persist_seconds,
        ),
        f"no failure in {now.rank_hours - before.rank_hours:.3g} more rank-hours": (
            before.mtbf_seconds, now.mtbf_seconds,
        ),
    }  # fmt: skip
    return max(moves, key=lambda text: abs(math.log(max(moves[text][1], 1e-9) / max(moves[text][0], 1e-9))))
