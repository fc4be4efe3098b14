"""Several runs side by side in the terminal.

Guarantee: one column a run, in the order in which they were given; the figures are those of their reports.
"""

from __future__ import annotations

from collections.abc import Sequence

from framework.goodput.accounts.timeline import CATEGORIES
from framework.goodput.reporting.report import Report
from framework.goodput.reporting.words import duration
from framework.speaking import print_table, say


def compare(reports: Sequence[Report]) -> None:
    """Prints one table, and what each run lost most time with."""
    print_table("", ["", *(f">{name}" for name in _names(reports))], rows(reports))
    for name, report in zip(_names(reports), reports, strict=True):
        if report.losses:
            category, advice = report.losses[0]
            seconds = report.goodput.seconds[category]
            say(f"{name}: {category} {duration(seconds)} ({seconds / report.goodput.wall:.1%}) - {advice}")


def rows(reports: Sequence[Report]) -> list[list[str]]:
    """The lines of the table, each with its name first; categories that no run has are left out."""
    accounts = [report.goodput for report in reports]
    found = [
        ["goodput", *(f"{one.ratio:.1%}" for one in accounts)],
        ["durable", *(f"{one.ratio_durable:.1%}" for one in accounts)],
        ["without queue and pauses", *(f"{one.runtime:.1%}" for one in accounts)],
        ["of all ranks", *(f"{one.capacity:.1%}" for one in accounts)],
        ["rank-hours held", *(f"{one.rank_hours:,.3g}" for one in accounts)],
        ["wall clock", *(duration(one.wall) for one in accounts)],
        ["steps done", *(f"{one.steps_done:,}" for one in accounts)],
        ["steps done twice", *(f"{one.steps_lost:,}" for one in accounts)],
        ["attempts", *(f"{one.attempts:,}" for one in accounts)],
        ["incidents", *(f"{len(report.incidents):,}" for report in reports)],
        ["checkpoints", *(f"{one.commits:,}" for one in accounts)],
        ["save stall", *(_seconds(one.checkpoint_stall) for one in accounts)],
        ["save persist", *(_seconds(one.checkpoint_persist) for one in accounts)],
    ]
    for name in CATEGORIES:
        if any(one.seconds[name] >= 0.05 for one in accounts):
            shares = (f"{duration(one.seconds[name])} {one.seconds[name] / (one.wall or 1):6.1%}" for one in accounts)
            found.append([name, *shares])
    return found


def _names(reports: Sequence[Report]) -> list[str]:
    short = [report.path.name for report in reports]
    return short if len(set(short)) == len(short) else [str(report.path) for report in reports]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
