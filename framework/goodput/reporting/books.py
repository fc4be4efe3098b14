"""A run as its journal tells it: the events, and the account of them up to now.

Guarantee: reads and changes nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.errors import DataError
from framework.goodput.accounts.failures import Failures, failures
from framework.goodput.accounts.ledger import Ledger
from framework.goodput.accounts.results import Goodput
from framework.goodput.accounts.signs import newest_signs
from framework.goodput.reporting.incidents import Watcher
from framework.journal import Damage, read_run
from framework.rundir import RunDirectory


@dataclass(frozen=True, slots=True)
class Books:
    """What is known of a run.

    Args:
        run: The run directory.
        events: The journal of rank 0, attempt by attempt.
        watcher: What went wrong; its ledger has all events.
        now: The time up to which the account goes, seconds since the epoch; none for a run that does not go on.
        goodput: The account.
        failures: How often it failed, and what recovering took.
        damages: What the journals of attempts lack, of those that are not whole.
    """

    run: RunDirectory
    events: list[dict[str, Any]]
    watcher: Watcher
    now: float | None
    goodput: Goodput
    failures: Failures
    damages: list[Damage]

    @property
    def is_live(self) -> bool:
        """Whether the run goes on at this moment."""
        return self.now is not None

    @property
    def live_attempt(self) -> int | None:
        """Number of the attempt that runs now, if one does."""
        return self.watcher.ledger.attempts[-1].number if self.is_live else None


def open_books(run_dir: Path | str) -> Books:
    """Reads a run.

    Raises:
        DataError: There is no such directory, or no run has left a journal in it.
    """
    run = RunDirectory(run_dir)
    if not run.path.is_dir():
        raise DataError(
            f"{run.shown} is no directory. Give a run directory, by default runs/<run.name>.{_nearby(run.shown)}"
        )
    damages: list[Damage] = []
    events = read_run(run.events, damages=damages)
    owner = run.owner()
    signs = newest_signs(run, owner)
    alive = {signs.attempt: signs.alive} if signs is not None and signs.alive is not None else {}
    noticed = {signs.attempt: signs.noticed} if signs is not None and signs.noticed is not None else {}
    watcher = Watcher(Ledger(alive, noticed))
    for event in events:
        watcher.add(event)
    if not watcher.ledger.attempts:
        raise DataError(
            f"{run.shown} holds no events (events/att-*/rank0.jsonl): no run was started there, or it ended before its "
            f"first event.{_nearby(run.shown)}"
        )
    newest = watcher.ledger.attempts[-1]
    is_owned = owner is not None and owner.attempt == newest.number and owner.is_live and owner.owns(run.path)
    now = time.time() if newest.end is None and is_owned else None
    if now is not None:
        damages[-1].torn_bytes = 0  # the process may be about to finish this line
    ledger = watcher.ledger
    lacking = [one for one in damages if one.is_any]
    return Books(run, events, watcher, now, ledger.total(now), failures(ledger, now, now is not None), lacking)


def _nearby(path: Path) -> str:
    """Names run directories that may have been meant."""
    found = {p.parent for place in (path, path.parent, Path("runs")) for p in place.glob("*/events") if p.is_dir()}
    names = ", ".join(str(p) for p in sorted(found)[:5])
    return f" There are runs at: {names}." if names else ""
