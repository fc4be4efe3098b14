"""Says in plain words where the time of a run went, and what to do about it.

Guarantee: reads the journal and changes nothing. The seconds of the table sum to the wall clock shown above it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from framework.data.stats import DataStats
from framework.goodput.accounts.failures import Failures
from framework.goodput.accounts.ledger import Ledger
from framework.goodput.accounts.results import Goodput
from framework.goodput.accounts.timeline import Attempt
from framework.goodput.reporting import loading, series
from framework.goodput.reporting.advice import facts, losses
from framework.goodput.reporting.books import open_books
from framework.goodput.reporting.incidents import Incident
from framework.goodput.reporting.words import biggest_losses, duration, first_line, ranked
from framework.journal import Damage, read_run
from framework.rundir import RunDirectory
from framework.speaking import count_text

OVERLAP_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class AttemptLine:
    """One attempt in the report.

    Args:
        attempt: Its number.
        host: Where it ran.
        world_size: Number of ranks, none if unknown.
        first: The first step it was to run, none if it never got there.
        last: The last step it recorded.
        seconds: From its process start to its last event.
        ended: `finished`, `stopped`, `failed`, `killed` or `running`.
        message: The failure, if there was one.
    """

    attempt: int
    host: str
    world_size: int | None
    first: int | None
    last: int | None
    seconds: float
    ended: str
    message: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the report shows.

    Args:
        path: The run directory.
        goodput: The account.
        attempts: One line each.
        is_live: Whether the run goes on at this moment.
        losses: The biggest losses: category and what to do, the biggest first.
        data: What loading did.
        incidents: What went wrong, in the order in which it did.
        pictures: What the pictures show: `timeline`, `steps`, `checkpoints`, as JSON values.
        failures: How often it failed, and what recovering took.
        journal: What the journals of attempts lack, of those that are not whole.
    """

    path: Path
    goodput: Goodput
    attempts: list[AttemptLine]
    is_live: bool
    losses: list[tuple[str, str]]
    data: DataStats
    incidents: list[Incident]
    pictures: dict[str, Any]
    failures: Failures
    journal: list[Damage]

    def to_json(self) -> dict[str, Any]:
        """JSON values; seconds unless a name says otherwise."""
        return {
            "path": str(self.path),
            "is_live": self.is_live,
            **asdict(self.goodput),
            "age_over_interval": self.goodput.age_over_interval,
            "history": [asdict(line) for line in self.attempts],
            "losses": [{"category": name, "advice": advice} for name, advice in self.losses],
            "data": loading.to_json(self.data, self.goodput),
            "incidents": [asdict(one) for one in self.incidents],
            "pictures": self.pictures,
            "failures": asdict(self.failures),
            "journal": [asdict(one) for one in self.journal],
        }


def build(run_dir: Path | str) -> Report:
    """Reads a run.

    Raises:
        DataError: There is no such directory, or no run has left a journal in it.
    """
    books = open_books(run_dir)
    run, events, watcher, goodput, is_live = books.run, books.events, books.watcher, books.goodput, books.is_live
    timeline = list(watcher.ledger.intervals(books.now))
    incidents = watcher.incidents(timeline, is_live)
    newest = watcher.ledger.attempts[-1]
    known = facts(run, events, goodput, incidents, books.live_attempt)
    pictures = {
        "timeline": series.cells(timeline),
        "steps": series.steps(events),
        "checkpoints": series.checkpoints(watcher.saves),
    }
    return Report(
        run.shown, goodput, [_line(a, is_live and a is newest) for a in watcher.ledger.attempts], is_live, losses(known),
        loading.collected(events), incidents, pictures, books.failures, books.damages,
    )  # fmt: skip


def summary_line(run: RunDirectory | Path | str) -> str:
    """One line for the end of a run; it never raises for a run without a usable journal, but says so."""
    run = run if isinstance(run, RunDirectory) else RunDirectory(run)
    path = run.shown
    ledger = Ledger()
    for event in read_run(run.events):
        ledger.add(event)
    result = ledger.total()
    if not result.is_measured:
        return f"goodput was not measured · {count_text(result.steps_done, 'step')} · {path}"
    parts = [f"goodput {result.ratio:.1%} of {duration(result.wall)}"]
    parts += biggest_losses(result)
    lost = f" ({result.steps_lost} done twice)" if result.steps_lost else ""
    parts.append(f"{count_text(result.steps_done, 'step')}{lost}")
    if result.attempts > 1:
        parts.append(f"{result.attempts} attempts")
    if result.committed_step is not None:
        parts.append(f"checkpoint at step {result.committed_step}")
    return " · ".join([*parts, str(path)])


def show(report: Report) -> None:
    """Prints the report to the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    goodput = report.goodput
    for sentence in _head(report):
        console.print(Text(sentence))
    table = Table("category", box=box.SIMPLE_HEAD)
    table.add_column("time", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in ranked(goodput):
        if seconds >= 0.05:
            share = seconds / goodput.wall
            table.add_row(
                name,
                duration(seconds),
                f"{seconds:.1f}",
                f"{share:.1%}",
                style="green" if name == "productive" else None,
            )
    table.add_section()
    table.add_row("wall clock", duration(goodput.wall), f"{goodput.wall:.1f}", "100.0%")
    console.print(table)
    attempts = Table("attempt", "host", "ranks", "steps", "time", "ended", box=box.SIMPLE_HEAD)
    for line in report.attempts:
        steps = "-" if line.first is None else f"{line.first} - {line.last}"
        ranks, ended = str(line.world_size or "?"), f"{line.ended} {line.message}".strip()
        attempts.add_row(str(line.attempt), Text(line.host), ranks, steps, duration(line.seconds), Text(ended))
    console.print(attempts)
    for number, (category, advice) in enumerate(report.losses, 1):
        seconds = goodput.seconds[category]
        console.print(Text(f"{number}. {category}: {duration(seconds)} ({seconds / goodput.wall:.1%}) - {advice}"))
    for sentence in loading.sentences(report.data, goodput):
        console.print(Text(sentence))
    for sentence in remarks(report):
        console.print(Text(sentence, style="yellow"))


def _head(report: Report) -> Iterator[str]:
    goodput = report.goodput
    yield f"{report.path}{' (running)' if report.is_live else ''}"
    yield (
        f"goodput {goodput.ratio:.1%}, durable {goodput.ratio_durable:.1%} (covered by a checkpoint), "
        f"of {duration(goodput.wall)} since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(goodput.started))}"
    )
    yield ", ".join(f"{name} {value}" for name, value in ratios(report))
    yield f"{count_text(goodput.steps_done, 'step')} done, {goodput.steps_lost:,} done twice, {count_text(goodput.attempts, 'attempt')}"
    yield from failure_words(report.failures)
    failed = f", {goodput.failed_saves} failed" if goodput.failed_saves else ""
    if goodput.committed_step is None:
        yield f"no checkpoint committed{failed}"
        return
    costs = [
        f"{text} {value:.2f} s"
        for text, value in (
            ("it held up the steps for", goodput.checkpoint_stall),
            ("durable after", goodput.checkpoint_persist),
        )
        if value is not None
    ]
    age = "" if goodput.checkpoint_age is None else f", its state is {duration(goodput.checkpoint_age)} old"
    if goodput.age_over_interval is not None and goodput.checkpoint_interval is not None:
        age += f", {goodput.age_over_interval:.1f} intervals of {duration(goodput.checkpoint_interval)}"
    yield f"{count_text(goodput.commits, 'checkpoint')} committed{failed}; the newest at step {goodput.committed_step}{age} ({', '.join(costs)})"


def ratios(report: Report) -> Iterator[tuple[str, str]]:
    """Goodput otherwise than of the whole run, as far as it differs; and the rank-hours. Each with its name."""
    goodput = report.goodput
    if goodput.wall > 3600:
        yield "goodput of the last hour", f"{goodput.window_1h:.1%}"
    if goodput.wall > 86400:
        yield "goodput of the last 24 h", f"{goodput.window_24h:.1%}"
    if goodput.seconds["queue"] + goodput.seconds["paused"] > 0:
        yield "without queue and pauses", f"{goodput.runtime:.1%}"
    if len({line.world_size for line in report.attempts}) > 1:
        yield "of what the most ranks could have done", f"{goodput.capacity:.1%}"
    yield "rank-hours", _hours(goodput.rank_hours)
    yield "of these productive", _hours(goodput.rank_hours_productive)


def _hours(value: float) -> str:
    """Three digits of a small number, all of a large one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def failure_words(found: Failures) -> Iterator[str]:
    """How often a run failed and what recovering took, as lines; none for one that never failed."""
    if not found.count or found.mtbf_seconds is None:
        return
    low, high = (duration(value or 0.0) for value in (found.mtbf_low_seconds, found.mtbf_high_seconds))
    yield (
        f"{count_text(found.count, 'failure')}, one every {duration(found.mtbf_seconds)} of training "
        f"(90 % interval {low} to {high})"
    )
    if found.recoveries and found.mttr_seconds is not None:
        parts = (
            ("noticing", found.detect_seconds), ("down", found.down_seconds), ("queue", found.queue_seconds),
            ("restore", found.restore_seconds),
        )  # fmt: skip
        named = ", ".join(f"{name} {duration(value)}" for name, value in parts if value)
        yield f"it trained again after {duration(found.mttr_seconds)} on average{f' ({named})' if named else ''}"


def remarks(report: Report) -> Iterator[str]:
    """What makes the figures doubtful."""
    goodput = report.goodput
    if not goodput.is_measured:
        yield "The lengths of steps were not recorded (callbacks.goodput is off): productive time is unknown."
    if goodput.overlap_seconds > OVERLAP_SHARE * goodput.wall:
        yield f"The records claim {duration(goodput.overlap_seconds)} more than passed: the shares above are unreliable."
    if goodput.clock_skew_seconds > 1:
        yield f"Clocks went back by {duration(goodput.clock_skew_seconds)} between attempts: time down is too short by that."
    if report.journal:
        words = [_words(one) for one in report.journal]
        more = f"; {len(words) - 3} more attempts in report --json" if len(words) > 3 else ""
        yield f"The journal is not whole, and what it lacks is in none of these figures: {'; '.join(words[:3])}{more}."


def _words(damage: Damage) -> str:
    parts = (
        (damage.missing, f"{count_text(damage.missing, 'event')} missing"),
        (damage.unreadable, f"{count_text(damage.unreadable, 'line')} that cannot be read"),
        (damage.torn_bytes, f"{count_text(damage.torn_bytes, 'byte')} of a last line that was never finished"),
    )
    return f"attempt {damage.attempt}: {', '.join(words for count, words in parts if count)}"


def _line(attempt: Attempt, is_live: bool) -> AttemptLine:
    facts: Mapping[str, Any] = attempt.facts
    ended = str(attempt.end.get("status")) if attempt.end is not None else "running" if is_live else "killed"
    is_ready = attempt.start_step is not None
    first, last = (attempt.start_step or 0) + 1 if is_ready else None, attempt.last_step if is_ready else None
    seconds = (max(attempt.last, attempt.high) - attempt.begin) / 1e9
    host, world = str(facts.get("host", "?")), facts.get("world_size")
    return AttemptLine(attempt.number, host, world, first, last, seconds, ended, first_line(attempt.failure_message))
