"""The books of a run: takes the events of its journal one by one and knows at any time where the time went.

Guarantee: what it says depends on the events alone and on their order, never on when it is asked. All sums are whole
nanoseconds, so that taking a step back as lost leaves no rounding behind. An event that is not as it should be counts
for nothing and stops nothing. Inside an attempt the monotonic clock counts, and between attempts on one boot of a host
too, so that a clock that is set in between moves nothing.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from framework.goodput.accounts.clock import Clock
from framework.goodput.accounts.productive import Productive
from framework.goodput.accounts.results import Goodput, Interval
from framework.goodput.accounts.timeline import CATEGORIES, Attempt, Segment, Span, nanoseconds
from framework.journal import is_number

# what an event raises whose fields are not as they should be
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
UNHELD = ("queue", "paused")  # the time in which a run has no machines
NANOSECONDS_PER_HOUR = 3600 * 10**9
WARMUP_STEPS = 5
USUAL_STEPS = 20


@dataclass(slots=True)
class _Saves:
    commits: int = 0
    failed: int = 0
    step: int | None = None
    stall: float | None = None
    persist: float | None = None
    captured: int | None = None
    interval: float | None = None  # seconds


class Ledger:
    """Takes the events of a run one after the other and can be asked for the account at any time.

    Args:
        alive: As for `account`.
        noticed: As for `account`.
    """

    def __init__(self, alive: Mapping[int, float] | None = None, noticed: Mapping[int, float] | None = None) -> None:
        self.attempts: list[Attempt] = []
        self.step = 0
        self.steps_lost = 0
        self.started = 0.0
        self._alive = dict(alive or {})
        self._noticed = dict(noticed or {})
        self._clocks: list[Clock] = []
        self._totals = dict.fromkeys(CATEGORIES, 0)
        self._productive = Productive()
        self._durable = 0
        self._durable_step = 0
        self._overlap = 0
        self._skew = 0
        self._blocks: list[Segment] = []  # of steps, in the order of the log
        self._opening: list[tuple[Segment, int, int]] = []  # the first steps of this attempt
        self._reached = 0  # the last step that the attempt before did, where its records end before it
        self._saves = _Saves()
        self._is_measured = False

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes the next event. One of an attempt that has been superseded counts no more, a damaged one never did."""
        if type(event.get("att")) is not int or not (is_number(event.get("t")) and is_number(event.get("m"))):
            return
        # the journal of an older attempt may be damaged: what can be read of it still counts
        with contextlib.suppress(*MALFORMED):
            self._add(event["att"], event)

    def _add(self, number: int, event: Mapping[str, Any]) -> None:
        if self.attempts and number < self.attempts[-1].number:
            return
        if not self.attempts or number > self.attempts[-1].number:
            self._open(number, event)
        attempt, clock = self.attempts[-1], self._clocks[-1]
        at = max(attempt.last, clock.at(event["m"]))
        handler = _HANDLERS.get(str(event["ev"]))
        if handler is not None:
            handler(self, attempt, event, at)
        attempt.last = clock.axis = at
        clock.wall, clock.monotonic = event["t"], event["m"]

    def total(self, now: float | None = None) -> Goodput:
        """The account up to the newest event, or to `now` (seconds since the epoch) if the newest attempt runs."""
        totals, end = dict(self._totals), self._end(now)
        begins = [*(attempt.begin for attempt in self.attempts[1:]), end]
        held = sum((until - one.begin) * one.ranks for one, until in zip(self.attempts, begins, strict=False))
        for attempt, span in self.closings(now):
            totals[span.category] += span.end - span.start
            if span.category in UNHELD:
                held -= (span.end - span.start) * attempt.ranks
        working = totals["data_wait"] + totals["productive"] + totals["warmup"]
        running = end - totals["queue"] - totals["paused"]
        most = end * max((attempt.ranks for attempt in self.attempts), default=0)
        saves, last = self._saves, self.attempts[-1].end if self.attempts else None
        return Goodput(
            started=self.started,
            wall=end / 1e9,
            seconds={name: value / 1e9 for name, value in totals.items()},
            ratio=totals["productive"] / end if end else 0.0,
            ratio_durable=self._durable / end if end else 0.0,
            durable_seconds=self._durable / 1e9,
            window_1h=self._productive.ratio(end, 3600),
            window_24h=self._productive.ratio(end, 86400),
            runtime=totals["productive"] / running if running else 0.0,
            capacity=self._productive.by_ranks / most if most else 0.0,
            rank_hours=held / NANOSECONDS_PER_HOUR,
            rank_hours_productive=self._productive.by_ranks / NANOSECONDS_PER_HOUR,
            steps_done=self.step,
            steps_lost=self.steps_lost,
            attempts=len(self.attempts),
            status=None if last is None else str(last.get("status")),
            commits=saves.commits,
            failed_saves=saves.failed,
            committed_step=saves.step,
            checkpoint_stall=saves.stall,
            checkpoint_persist=saves.persist,
            checkpoint_interval=saves.interval,
            checkpoint_age=None if saves.captured is None else max(0, end - saves.captured) / 1e9,
            data_fetch_fraction=totals["data_wait"] / working if working else 0.0,
            overlap_seconds=self._overlap / 1e9,
            clock_skew_seconds=self._skew / 1e9,
            is_measured=self._is_measured,
        )

    def intervals(self, now: float | None = None) -> Iterator[Interval]:
        """The timeline; neighbours of one category and attempt are merged."""
        waiting: Interval | None = None
        for number, span in self._spans(now):
            start, end, category, step = span.start / 1e9, span.end / 1e9, span.category, span.step
            if waiting is not None:
                is_next = step == waiting.last or (None not in (step, waiting.last) and step == waiting.last + 1)  # type: ignore[operator]
                if is_next and (category, number) == (waiting.category, waiting.attempt):
                    waiting = Interval(waiting.start, end, category, number, waiting.first, step)
                    continue
                yield waiting
            waiting = Interval(start, end, category, number, step, step)
        if waiting is not None:
            yield waiting

    # -- the axis

    def _open(self, number: int, event: Mapping[str, Any]) -> None:
        wall, monotonic, boot = event["t"], event["m"], str(event.get("boot_id") or "")
        age = nanoseconds(wall - event.get("started", wall))
        begin = 0
        if self._clocks:
            self._settle()
            before = self._clocks[-1]
            begin = before.first_of_next(wall, monotonic, boot) - age
            self._hear(event.get("previous"))
            self._skew += max(0, before.axis - begin)
            begin = max(begin, before.axis)
        else:
            self.started = wall - age / 1e9
        ranks = event.get("world_size")
        if type(ranks) is not int or ranks < 1:
            ranks = self.attempts[-1].ranks if self.attempts else 1
        self.attempts.append(Attempt(number, begin, dict(event), ranks, last=begin + age, last_step=self.step))
        self._clocks.append(Clock(begin + age, wall, monotonic, wall - monotonic, boot))
        self._opening = []
        if is_number(event.get("allocated")):
            self.attempts[-1].allocated = begin + age - nanoseconds(wall - event["allocated"])

    def _hear(self, signs: Any) -> None:
        """What the attempt before left behind besides its own journal, as the next one found it."""
        if isinstance(signs, Mapping) and signs.get("attempt") == self.attempts[-1].number:
            for name, known in (("alive", self._alive), ("noticed", self._noticed)):
                if is_number(signs.get(name)):
                    known[signs["attempt"]] = signs[name]
            if type(signs.get("step")) is int:
                self._reached = signs["step"]  # its last records may not have been written
                self.attempts[-1].last_step = max(self.attempts[-1].last_step or 0, signs["step"])

    def _end(self, now: float | None) -> int:
        if not self.attempts:
            return 0
        attempt = self.attempts[-1]
        if attempt.end is not None:
            return attempt.last
        if now is not None:
            return self._clocks[-1].after(now)
        signs = (self._alive.get(attempt.number), self._noticed.get(attempt.number))
        return max(self._clocks[-1].after(wall) for wall in signs)

    def closings(self, now: float | None) -> Iterator[tuple[Attempt, Span]]:
        restored: int | None = None
        found: list[tuple[Attempt, Span]] = []
        for index in reversed(range(len(self.attempts))):
            attempt, is_last = self.attempts[index], index == len(self.attempts) - 1
            until = self._end(now) if is_last else self.attempts[index + 1].begin
            clock, allocated = self._clocks[index], 0 if is_last else self.attempts[index + 1].allocated
            alive, noticed = (clock.after(known.get(attempt.number)) for known in (self._alive, self._noticed))
            is_live = is_last and now is not None and attempt.end is None
            spans = list(attempt.closing(until, alive, noticed, allocated, is_live, restored))
            found.extend((attempt, span) for span in reversed(spans))
            restored = restored if attempt.resumed is None else attempt.resumed
        yield from reversed(found)

    def _spans(self, now: float | None) -> Iterator[tuple[int, Span]]:
        closings: dict[int, list[Span]] = {}
        for attempt, span in self.closings(now):
            closings.setdefault(attempt.number, []).append(span)
        for attempt in self.attempts:
            for segment in attempt.segments:
                for span in (*attempt.gap(segment.previous, segment.low), *segment.spans()):
                    yield attempt.number, span
            for span in closings.get(attempt.number, ()):
                yield attempt.number, span

    # -- the sums

    def _count(self, attempt: Attempt, segment: Segment, sign: int) -> None:
        for start, end, category, _ in attempt.gap(segment.previous, segment.low):
            self._totals[category] += sign * (end - start)
        self._sum(segment, sign)
        self._overlap += sign * segment.overlap

    def _sum(self, segment: Segment, sign: int) -> None:
        settled = (segment.first or 0) + segment.unsettled
        for start, end, category, step in segment.spans():
            self._totals[category] += sign * (end - start)
            if category == "productive":
                self._productive.add(start, end, segment.ranks, sign)
                if step is not None and settled <= step <= self._durable_step:
                    self._durable += sign * (end - start)

    def _insert(self, attempt: Attempt, segment: Segment) -> None:
        later = []
        while attempt.segments and attempt.segments[-1].start > segment.start:
            later.append(attempt.segments.pop())
            self._count(attempt, later[-1], -1)
        for one in (segment, *reversed(later)):
            one.lay(attempt.high)
            self._count(attempt, one, 1)
            attempt.segments.append(one)

    def _recount(self, above: int, change: Callable[[list[Segment]], None]) -> None:
        """Applies `change` to every block that has a step above `above` which counts."""
        touched = []
        for block in reversed(self._blocks):
            first, last = block.first or 0, min(block.last, block.kept)
            if last < first:
                continue  # lost as a whole, long ago
            if last <= above:
                break
            touched.append(block)
        for block in touched:
            self._sum(block, -1)
        change(touched)
        for block in touched:
            self._sum(block, 1)

    def _rewind(self, step: int) -> None:
        """Steps after `step` are done again: the ones recorded so far are lost."""

        def lose(blocks: list[Segment]) -> None:
            for block in blocks:
                self.steps_lost += min(block.last, block.kept) - max(step, (block.first or 0) - 1)
                block.kept = min(block.kept, step)

        self._recount(step, lose)
        self._cover(min(step, self._durable_step))
        self.step = step

    def _cover(self, step: int) -> None:
        """A committed checkpoint covers the steps up to `step`."""

        def move(_: list[Segment]) -> None:
            self._durable_step = step

        self._recount(min(step, self._durable_step), move)

    def _settle(self) -> None:
        """What the first steps of this attempt took beyond the usual is warm-up, if there are enough to know."""
        is_known = len(self._opening) == WARMUP_STEPS + USUAL_STEPS
        usual = statistics.median(length for _, _, length in self._opening[WARMUP_STEPS:]) if is_known else math.inf
        for segment, index, length in self._opening[:WARMUP_STEPS]:
            self._sum(segment, -1)
            segment.unsettled = 0
            if length > usual:
                segment.warmup[index] = length - round(usual)
            self._sum(segment, 1)

    # -- the events

    def _restored(self, attempt: Attempt, event: Mapping[str, Any], at: int) -> None:
        length, step = nanoseconds(event.get("seconds")), int(event["step"])
        self._insert(attempt, Segment.phase("restore", at - length, length, at))
        self._resume(attempt, step)
        self._cover(step)  # what was restored is committed, even if the journal was cut off before it could say so

    def _train_start(self, attempt: Attempt, event: Mapping[str, Any], at: int) -> None:
        step = int(event["step"])
        attempt.train_start = min(attempt.train_start, at)
        attempt.start_step = step
        self._resume(attempt, step)

    def _resume(self, attempt: Attempt, step: int) -> None:
        self.steps_lost += max(0, self._reached - max(step, self.step))
        self._reached = 0
        self._rewind(step)
        attempt.resumed = step if attempt.resumed is None else min(step, attempt.resumed)
        attempt.last_step = step

    def _steps(self, attempt: Attempt, event: Mapping[str, Any], at: int) -> None:
        first, seconds = int(event["first"]), event.get("seconds") or {}
        count = max([len(event.get("loss") or ()), *(len(values) for values in seconds.values())])
        if not count:
            return
        if first <= self.step:
            self._rewind(first - 1)
        block = Segment.steps(0, at, first, count, seconds, attempt.ranks)
        block.start = self._clocks[-1].place(event, block.length, at, attempt.high)
        self._blocks.append(block)
        self.step = attempt.last_step = block.last
        if not block.length:
            return
        self._is_measured = True
        block.unsettled = min(count, max(0, WARMUP_STEPS - len(self._opening)))
        self._insert(attempt, block)
        attempt.step_length += block.length
        attempt.step_count += count
        wanted = WARMUP_STEPS + USUAL_STEPS
        if len(self._opening) < wanted:
            productive = dict(block.columns).get("productive", [0] * count)
            self._opening += [(block, i, productive[i]) for i in range(min(count, wanted - len(self._opening)))]
            if len(self._opening) == wanted:
                self._settle()

    def _phase(self, attempt: Attempt, event: Mapping[str, Any], at: int) -> None:
        name, length = str(event.get("name")), nanoseconds(event.get("seconds"))
        start = self._clocks[-1].place(event, length, at, attempt.high)
        self._insert(attempt, Segment.phase(name if name in CATEGORIES else "other", start, length, at))

    def _committed(self, attempt: Attempt, event: Mapping[str, Any], at: int) -> None:
        saves, step = self._saves, int(event["step"])
        saves.commits += 1
        saves.step = step
        saves.stall, saves.persist = event.get("stall_seconds"), event.get("persist_seconds")
        captured = at - nanoseconds(event["t"] - event.get("captured", event["t"]))
        if is_number(event.get("interval_seconds")) and event["interval_seconds"] > 0:
            saves.interval = float(event["interval_seconds"])
        elif saves.captured is not None and captured > saves.captured:  # by steps or epochs: what that came to
            saves.interval = (captured - saves.captured) / 1e9
        saves.captured = captured
        self._cover(max(step, self._durable_step))

    def _save_failed(self, attempt: Attempt, event: Mapping[str, Any], at: int) -> None:
        self._saves.failed += 1

    def _failure(self, attempt: Attempt, event: Mapping[str, Any], at: int) -> None:
        if attempt.failure is None:
            attempt.failure = at
            attempt.failure_message = f"{event.get('type', '')}: {event.get('message', '')}"

    def _ended(self, attempt: Attempt, event: Mapping[str, Any], at: int) -> None:
        attempt.end = dict(event)
        self._settle()


_HANDLERS = {
    "restored": Ledger._restored,
    "train_start": Ledger._train_start,
    "steps": Ledger._steps,
    "phase": Ledger._phase,
    "save_committed": Ledger._committed,
    "save_failed": Ledger._save_failed,
    "failure": Ledger._failure,
    "end": Ledger._ended,
}
