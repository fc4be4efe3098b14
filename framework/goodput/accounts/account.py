"""Where the time of a run went, over all its attempts.

Guarantee: a pure function of the journal. Every instant between the start of the first attempt and the end of the run
has exactly one label, so the seconds per category sum to wall clock, by construction, across attempts and restarts.
Steps that a later attempt did again are `lost`, whole, with their waits. `other` is what nothing was recorded for: it
is computed, and if records claim more time than passed, `overlap_seconds` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from framework.goodput.accounts.ledger import Ledger
from framework.goodput.accounts.results import Goodput as Goodput
from framework.goodput.accounts.results import Interval as Interval
from framework.goodput.accounts.timeline import CATEGORIES as CATEGORIES


def account(
    events: Iterable[Mapping[str, Any]],
    *,
    now: float | None = None,
    alive: Mapping[int, float] | None = None,
    noticed: Mapping[int, float] | None = None,
) -> Goodput:
    """The account of a run.

    Args:
        events: The events of all attempts, as `journal.read_run` gives them.
        now: The present, seconds since the epoch, if the newest attempt still runs.
        alive: Per attempt the newest sign of life of its rank 0 besides its events, seconds since the epoch: when its
            journal was last written, or its lease renewed. What the next attempt found of this when it started, and
            wrote down, goes before.
        noticed: Per attempt when another rank said that something had failed; likewise.
    """
    ledger = Ledger(alive, noticed)
    for event in events:
        ledger.add(event)
    return ledger.total(now)


def timeline(
    events: Iterable[Mapping[str, Any]],
    *,
    now: float | None = None,
    alive: Mapping[int, float] | None = None,
    noticed: Mapping[int, float] | None = None,
) -> list[Interval]:
    """The contiguous intervals of a run, from 0 to its wall clock; arguments as for `account`."""
    ledger = Ledger(alive, noticed)
    for event in events:
        ledger.add(event)
    return list(ledger.intervals(now))
