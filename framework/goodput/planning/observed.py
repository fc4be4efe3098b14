"""What a run has shown so far of failures and of what saving costs: read from its journal.

Guarantee: a pure function of the journal, never a guess. A failure is an attempt that was training and neither ended in
order nor by a signal after a save; the same failure at the same step again is the same one. An attempt that starts
reads the two ends of as few files as it needs: each `interval` event holds all that was known when it was written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from framework.goodput.planning.rates import DEFAULT_RATE, PRESETS, Rate, parse_rate
from framework.journal import is_number, parse

NUM_SAVES = 10  # the last ones; older ones tell of another time
HEAD_BYTES, TAIL_BYTES = 1 << 16, 1 << 18
MESSAGE_LENGTH = 200
_ORDERLY = ("finished", "killed")  # `killed` is a signal: the state was saved, or somebody wanted it lost


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What one committed save cost, in seconds.

    Args:
        stall: How long it held up the step loop, on the slowest rank.
        persist: From the end of that to the commit, an upload included.
    """

    stall: float
    persist: float


@dataclass(frozen=True, slots=True)
class Observed:
    """Failures, and the time in which they came.

    Args:
        failures: Attempts that ended in a failure while they trained.
        rank_hours: Hours of training, summed over ranks.
        saves: The last `NUM_SAVES` committed saves, the oldest first.
        last_failure: What tells the newest failure from others, as far as it could say: type, step, message.
    """

    failures: int = 0
    rank_hours: float = 0.0
    saves: tuple[SaveCost, ...] = ()
    last_failure: tuple[Any, ...] | None = None


def observe(events: Iterable[Mapping[str, Any]], live: int | None = None) -> Observed:
    """What the events of a run show.

    Args:
        events: Of rank 0, attempt by attempt; those in the middle of an attempt may be missing if an `interval` event
            comes before them.
        live: Number of the attempt that still runs, if one does.
    """
    reducer = _Reducer()
    for event in events:
        reducer.add(event)
    return reducer.total(live)


@dataclass(slots=True)
class _Attempt:
    """What is known of the newest attempt; times are its monotonic clock, in seconds."""

    number: int
    ranks: int = 1
    since: float | None = None  # it trains, and its time up to here is counted; none before
    last: float = 0.0
    status: str = ""
    failure: tuple[Any, ...] | None = None

    @property
    def rank_hours(self) -> float:
        return 0.0 if self.since is None else max(0.0, self.last - self.since) * self.ranks / 3600

    def has_failed(self, fingerprint: tuple[Any, ...] | None) -> bool:
        """Whether it ended in a failure other than the one before, which had this fingerprint."""
        if self.since is None or self.status in _ORDERLY:
            return False
        return self.failure is None or self.failure != fingerprint


class _Reducer:
    """Takes the events of a run one after the other. Damaged ones count for nothing."""

    def __init__(self) -> None:
        self._failures = 0
        self._rank_hours = 0.0
        self._saves: list[SaveCost] = []
        self._last_failure: tuple[Any, ...] | None = None
        self._attempt = _Attempt(0)

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes the next event; one of an older attempt counts no more."""
        number, now = event.get("att"), event.get("m")
        if type(number) is not int or number < self._attempt.number or not is_number(now):
            return
        if number > self._attempt.number:
            self._close(self._attempt)
            self._attempt = _Attempt(number)
        attempt = self._attempt
        attempt.last = max(attempt.last, now)
        match event.get("ev"):
            case "attempt_start":
                attempt.ranks = event["world_size"] if is_count(event.get("world_size")) else 1
            case "train_start":
                attempt.since = attempt.last = now
            case "interval":
                self._take_over(attempt, event, now)
            case "save_committed":
                self._saved(event.get("stall_seconds"), event.get("persist_seconds"))
            case "failure":
                attempt.failure = (event.get("type"), event.get("step"), str(event.get("message"))[:MESSAGE_LENGTH])
            case "end":
                attempt.status = str(event.get("status"))

    def total(self, live: int | None) -> Observed:
        """What was seen so far; the newest attempt has ended unless it is `live`."""
        if self._attempt.number != live:
            self._close(self._attempt)
            self._attempt = _Attempt(self._attempt.number)
        hours = self._rank_hours + self._attempt.rank_hours
        return Observed(self._failures, hours, tuple(self._saves), self._last_failure)

    def _close(self, attempt: _Attempt) -> None:
        self._rank_hours += attempt.rank_hours
        self._failures += attempt.has_failed(self._last_failure)
        if attempt.since is not None:
            self._last_failure = attempt.failure

    def _take_over(self, attempt: _Attempt, event: Mapping[str, Any], now: float) -> None:
        """Goes on from what was known when this event was written; what came before need not have been read."""
        failures, hours, saves, last = (event.get(n) for n in ("failures", "rank_hours", "saves", "last_failure"))
        if not (is_count(failures, 0) and is_number(hours) and hours >= 0 and isinstance(saves, list)):
            return
        self._failures, self._rank_hours, self._saves = failures, hours, []
        self._last_failure = tuple(last) if isinstance(last, list) else None
        attempt.since = attempt.last = now
        for one in saves:
            if isinstance(one, list) and len(one) == 2:
                self._saved(*one)

    def _saved(self, stall: Any, persist: Any) -> None:
        if is_number(stall) and is_number(persist) and stall >= 0 and persist >= 0:
            self._saves = [*self._saves, SaveCost(float(stall), float(persist))][-NUM_SAVES:]


def is_count(value: Any, least: int = 1) -> TypeGuard[int]:
    """Whether it is a whole number, and not a smaller one."""
    return type(value) is int and value >= least


def seen_before(events: Path, attempt: int) -> Observed:
    """What the attempts before this one have shown.

    Args:
        events: The folder `events` of the run.
        attempt: Number of this attempt.
    """
    found: list[list[dict[str, Any]]] = []
    for number in range(attempt - 1, 0, -1):
        ends = list(_ends(events / f"att-{number:04d}" / "rank0.jsonl"))
        found.append(ends)
        if any(event["ev"] == "interval" for event in ends):
            break
    return observe(event for ends in reversed(found) for event in ends)


def _ends(path: Path) -> Iterator[dict[str, Any]]:
    """The first and the last events of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEAD_BYTES)
            start = max(len(head), size - TAIL_BYTES)
            file.seek(start)
            tail = file.read()
    except OSError:
        return
    if start == len(head):
        lines = (head + tail).split(b"\n")[:-1]
    else:
        lines = [*head.split(b"\n")[:-1], *tail.split(b"\n")[1:-1]]
    for line in lines:
        event = parse(line)
        if event is not None:
            yield event


def ranks_of(events: Sequence[Mapping[str, Any]]) -> int:
    """The number of ranks of the newest attempt; 1 if it did not say."""
    sizes = (event.get("world_size") for event in reversed(events) if event["ev"] == "attempt_start")
    newest = next(sizes, None)
    return newest if is_count(newest) else 1


def last_choice(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The newest `interval` event that names an interval, if a run with `every=auto` has left one."""
    told = (event for event in reversed(events) if event["ev"] == "interval")
    return next((event for event in told if is_number(event.get("seconds")) and event["seconds"] > 0), None)


def believed_rate(told: Mapping[str, Any] | None) -> Rate:
    """The failure rate that a run was started with; where it had none, the default one.

    Args:
        told: Its `last_choice`.
    """
    if told is not None and is_number(told.get("preset_hours")) and told["preset_hours"] > 0:
        text, hours = str(told.get("preset")), float(told["preset_hours"])
        return replace(PRESETS.get(text, Rate(text, hours)), gpu_hours=hours)
    return parse_rate(DEFAULT_RATE)
