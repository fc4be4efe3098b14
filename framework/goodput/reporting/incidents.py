"""What went wrong in a run: failures, kills, stops, saves that failed, and what starting again cost.

Guarantee: a pure function of the journal. The steps lost by all incidents are those of the account that had to be done
again; an attempt that is still running, or ended as it should, is no incident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framework.goodput.accounts.ledger import Ledger
from framework.goodput.accounts.results import Interval
from framework.goodput.accounts.timeline import Attempt
from framework.goodput.reporting.words import first_line
from framework.journal import is_number

KILLED = "ended without a word: kill -9, out of memory, a power cut, or a host lost"


@dataclass(frozen=True, slots=True)
class Incident:
    """One thing that went wrong. Times in seconds since the run started, lengths in seconds.

    Args:
        at: When.
        attempt: In which attempt.
        kind: `failed`, `killed` (without a word), `stopped` (by a signal, in order), or `save failed`.
        cause: The message, one line.
        step: The last step that was recorded before, none if it had not begun.
        resumed: The step that the next attempt went on from, none if there was none or it never came so far.
        lost_steps: Steps that had to be done again.
        lost_seconds: What these took.
        detect_seconds: How long nobody noticed.
        down_seconds: How long nothing ran, until the next attempt started.
    """

    at: float
    attempt: int
    kind: str
    cause: str
    step: int | None
    resumed: int | None = None
    lost_steps: int = 0
    lost_seconds: float = 0.0
    detect_seconds: float = 0.0
    down_seconds: float = 0.0


class Watcher:
    """Feeds a ledger with events, and notes what only shows while they come in.

    Args:
        ledger: The books.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.saves: list[dict[str, Any]] = []
        self.failed_saves: list[Incident] = []
        self.lost: dict[int, int] = {}  # by the attempt that did steps again
        self._captured: float | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes the next event."""
        before = self.ledger.steps_lost
        self.ledger.add(event)
        attempt = self.ledger.attempts[-1] if self.ledger.attempts else None
        if attempt is None or attempt.number != event["att"]:
            return  # superseded: the ledger does not count it either
        if self.ledger.steps_lost > before:
            self.lost[attempt.number] = self.lost.get(attempt.number, 0) + self.ledger.steps_lost - before
        step = event.get("step")
        if event["ev"] == "save_committed" and type(step) is int:
            self._committed(event, step, attempt.last / 1e9)
        elif event["ev"] == "save_failed":
            cause = first_line(event.get("error") or "unknown")
            at = attempt.last / 1e9
            self.failed_saves.append(
                Incident(at, attempt.number, "save failed", cause, step if type(step) is int else None)
            )

    def _committed(self, event: Mapping[str, Any], step: int, at: float) -> None:
        captured = _number(event.get("captured"))
        age = None if self._captured is None else max(0.0, at - self._captured)
        self._captured = at if captured is None else at - max(0.0, event["t"] - captured)
        self.saves.append(
            {
                "step": step,
                "stall": _number(event.get("stall_seconds")),
                "persist": _number(event.get("persist_seconds")),
                "age": age,
            }
        )

    def incidents(self, timeline: Sequence[Interval], is_live: bool) -> list[Incident]:
        """Everything that went wrong, in the order in which it did."""
        spent: dict[int, dict[str, float]] = {}
        for one in timeline:
            of = spent.setdefault(one.attempt, {})
            of[one.category] = of.get(one.category, 0.0) + one.end - one.start
        found = list(self.failed_saves)
        attempts = self.ledger.attempts
        for index, attempt in enumerate(attempts):
            following = attempts[index + 1] if index + 1 < len(attempts) else None
            if following is None and is_live:
                continue
            kind, cause = _what(attempt)
            lost = self.lost.get(following.number, 0) if following is not None else 0
            if kind == "finished" and not lost:
                continue
            seconds = spent.get(attempt.number, {})
            found.append(
                Incident(
                    max(attempt.last, attempt.high) / 1e9, attempt.number, kind, cause,
                    attempt.last_step if attempt.start_step is not None else None,
                    None if following is None else following.resumed, lost, seconds.get("lost", 0.0),
                    seconds.get("detect", 0.0), seconds.get("down", 0.0),
                )
            )  # fmt: skip
        return sorted(found, key=lambda one: one.at)


def _what(attempt: Attempt) -> tuple[str, str]:
    if attempt.failure_message:
        return "failed", first_line(attempt.failure_message)
    if attempt.end is None:
        return "killed", KILLED
    status = str(attempt.end.get("status"))
    return ("stopped" if status == "killed" else status), first_line(attempt.end.get("reason"))


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None
