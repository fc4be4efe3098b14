"""Explains how often a run saves: from what, bounded by what, and what another interval would gain.

Guarantee: reads the journal and changes nothing. For a run with `every=auto` it says what is in force and what would be
chosen now; for any other run, what `auto` would choose.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from framework.goodput.accounts.results import Goodput
from framework.goodput.planning.formulas import goodput
from framework.goodput.planning.interval import BOUNDS, OPTIMUM, Choice, Inputs, choose, is_change
from framework.goodput.planning.observed import NUM_SAVES, believed_rate, last_choice, observe, ranks_of
from framework.goodput.planning.rates import PRESETS, Rate
from framework.goodput.reporting.books import open_books
from framework.goodput.reporting.words import duration
from framework.journal import is_number
from framework.speaking import count_text

DAY = 86_400.0
_START = ("init", "restore")
_BETWEEN = ("detect", "down", *_START)  # what a failure costs beside lost work


@dataclass(frozen=True, slots=True)
class Explanation:
    """All there is to say about the interval of a run. Lengths in seconds.

    Args:
        path: The run directory.
        is_auto: Whether `every=auto` is in force in the newest attempt.
        present: The interval in force; without `auto` the median of the last ones; none if there were no two saves.
        since_step: The step since which it is in force, with `auto`.
        reason: Why it was chosen, with `auto`.
        inputs: What it depends on, as of now.
        choice: What is best now.
        restart_seconds: What starting again costs beside lost work, on average.
        goodput_present: Expected share of productive time at the present interval; none if that or the cost of a save
            is not known.
        goodput_best: The same at the best interval.
    """

    path: Path
    is_auto: bool
    present: float | None
    since_step: int | None
    reason: str | None
    inputs: Inputs
    choice: Choice
    restart_seconds: float
    goodput_present: float | None
    goodput_best: float | None

    @property
    def gain(self) -> float | None:
        """Share of all time that the best interval would gain over the present one; may be 0, never less."""
        if self.goodput_present is None or self.goodput_best is None:
            return None
        return max(0.0, self.goodput_best - self.goodput_present)

    def to_json(self) -> dict[str, Any]:
        """JSON values; seconds unless a name says otherwise."""
        return {
            "path": str(self.path),
            "is_auto": self.is_auto,
            "interval_seconds": self.present,
            "since_step": self.since_step,
            "reason": self.reason,
            "inputs": self.inputs.to_json() | {"preset_source": self.inputs.rate.source},
            "best": asdict(self.choice) | {"bound_by": BOUNDS[self.choice.bound]},
            "restart_seconds": self.restart_seconds,
            "goodput_present": self.goodput_present,
            "goodput_best": self.goodput_best,
            "gain": self.gain,
        }


def explain(run_dir: Path | str, rate: Rate | None = None) -> Explanation:
    """Reads a run.

    Args:
        run_dir: The run directory.
        rate: What to believe of failures instead of what the run believes.

    Raises:
        DataError: There is no such run.
    """
    books = open_books(run_dir)
    events = books.events
    newest = books.watcher.ledger.attempts[-1].number
    told = last_choice(events)
    auto = told if told is not None and told["att"] == newest else None
    seen = observe(events, live=books.live_attempt)
    inputs = Inputs.of(rate or believed_rate(told), ranks_of(events), seen)
    choice = choose(inputs.stall_seconds, inputs.persist_seconds, inputs.mtbf_seconds)
    present = float(auto["seconds"]) if auto is not None else _measured(events)
    restart = _restart_seconds(books.goodput)

    def expected(seconds: float | None) -> float | None:
        if seconds is None or inputs.stall_seconds is None or inputs.persist_seconds is None:
            return None
        return goodput(seconds, inputs.stall_seconds, inputs.mtbf_seconds, restart, inputs.persist_seconds)

    return Explanation(
        books.run.shown, auto is not None, present, None if auto is None else auto.get("step"),
        None if auto is None else str(auto.get("reason")), inputs, choice, restart,
        expected(present), expected(choice.seconds),
    )  # fmt: skip


def _measured(events: Sequence[Mapping[str, Any]]) -> float | None:
    """The median time between the states in the last checkpoints of one attempt each."""
    saves = [(e["att"], e["captured"]) for e in events if e["ev"] == "save_committed" and is_number(e.get("captured"))]
    between = [later - earlier for (one, earlier), (other, later) in pairwise(saves) if one == other]
    positive = [seconds for seconds in between[-NUM_SAVES:] if seconds > 0]
    return statistics.median(positive) if positive else None


def _restart_seconds(account: Goodput) -> float:
    """From the failure to the first step after it, on average; before the first restart what the start took."""
    spent, restarts = account.seconds, account.attempts - 1
    names = _BETWEEN if restarts else _START
    return sum(spent.get(name, 0.0) for name in names) / max(1, restarts)


def lines_of(found: Explanation) -> Iterator[str]:
    """The explanation in words."""
    inputs, choice = found.inputs, found.choice
    if found.is_auto and found.present is not None:
        yield f"{found.path}: every=auto saves every {duration(found.present)}, since step {found.since_step}: {found.reason}"
    elif found.present is not None:
        yield f"{found.path}: saved every {duration(found.present)} of late; every=auto is not in force"
    else:
        yield f"{found.path}: every=auto is not in force, and there are no two saves to tell the interval from"
    if inputs.stall_seconds is None or inputs.persist_seconds is None:
        yield "a save       not measured yet"
    else:
        yield (
            f"a save       holds the steps up for {inputs.stall_seconds:.3g} s, is durable {inputs.persist_seconds:.3g} s "
            f"later (p90 of the last {len(inputs.saves)}, slowest rank)"
        )
    preset = PRESETS.get(inputs.rate.text)
    source = f", {preset.text}: {preset.source}" if preset is not None else ""
    yield (
        f"failures     {inputs.failures} seen in {inputs.rank_hours:.3g} rank-hours of training; believed before: "
        f"one in {inputs.rate.gpu_hours:,.5g}{source}"
    )
    low, high = inputs.mtbf_bounds_seconds
    yield (
        f"rate         on {count_text(inputs.ranks, 'rank')} one failure every {duration(inputs.mtbf_seconds)}, with 90 % probability "
        f"{duration(low)} to {duration(high)}"
    )
    if choice.optimum is not None:
        yield f"optimum      every {duration(choice.optimum)} (Daly 2006)"
    yield f"bounds       {duration(choice.shortest)} to {duration(choice.longest)}; {BOUNDS[choice.bound]}"
    yield from _verdict(found)


def _verdict(found: Explanation) -> Iterator[str]:
    choice = found.choice
    bounded = "" if choice.bound == OPTIMUM else " within the bounds"
    if found.present is None or found.gain is None:
        yield f"best         every {duration(choice.seconds)}{bounded}"
        return
    assert found.goodput_present is not None and found.goodput_best is not None
    yield (
        f"best         every {duration(choice.seconds)}{bounded}: goodput {found.goodput_best:.2%} instead of "
        f"{found.goodput_present:.2%}, {duration(found.gain * DAY)} a day "
        f"(a restart costs {duration(found.restart_seconds)} beside lost work)"
    )
    is_kept = not is_change(found.present, choice, found.inputs.persist_seconds)
    if found.is_auto and is_kept:
        yield "It stays as it is while that is less than 25 % away; the next attempt begins with the best one."
    elif not found.is_auto and not is_kept:
        yield "callbacks.async_checkpoint.every=auto would save that often."
