"""How often a run failed, and what it took until it trained again.

Guarantee: a pure function of the books. A failure is an attempt that was training and neither ended in order nor by a
signal after a save; attempts that never came to train are part of the recovery from the one before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from framework.goodput.accounts.gamma import gamma_quantile
from framework.goodput.accounts.ledger import Ledger
from framework.goodput.accounts.timeline import NEVER, Attempt, Span

ORDERLY = ("finished", "stopped", "killed")  # `killed` is a signal: the state was saved, or somebody wanted it lost
PARTS = ("recovery", "detect", "down", "queue", "restore")


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures and recoveries of a run. Lengths in seconds; means are none where there is nothing to average.

    Args:
        count: How often it failed.
        failed_starts: Attempts that ended before they trained.
        training_seconds: Time in which it trained, from the start of each attempt's training to its last record.
        rate_per_day: Failures per day of training.
        mtbf_seconds: Mean training time between failures; none before the first.
        mtbf_low_seconds: Lower end of its 90 % interval.
        mtbf_high_seconds: Upper end; none before the first failure.
        recoveries: Failures after which it trained again.
        mttr_seconds: Mean time to recovery: from the failure until it trained again.
        detect_seconds: Mean of the part of that in which nobody had noticed.
        down_seconds: Mean of the part in which nothing ran.
        queue_seconds: Mean of the part in which it waited for machines.
        restore_seconds: Mean of the part in which the checkpoint was read back.
    """

    count: int
    failed_starts: int
    training_seconds: float
    rate_per_day: float | None
    mtbf_seconds: float | None
    mtbf_low_seconds: float | None
    mtbf_high_seconds: float | None
    recoveries: int
    mttr_seconds: float | None
    detect_seconds: float | None
    down_seconds: float | None
    queue_seconds: float | None
    restore_seconds: float | None


def failures(ledger: Ledger, now: float | None = None, is_live: bool = False) -> Failures:
    """The failures of a run.

    Args:
        ledger: The books.
        now: The present, as for `Ledger.total`.
        is_live: Whether the newest attempt may still run: its silence is no failure then.
    """
    attempts = ledger.attempts
    failed = [_has_failed(one, is_live and one is attempts[-1]) for one in attempts]
    training = sum(max(0, one.high - one.train_start) for one in attempts) / 1e9
    count = sum(1 for one, has_failed in zip(attempts, failed, strict=True) if has_failed and _has_trained(one))
    found = list(_recoveries(attempts, failed, ledger.closings(now)))
    low, high = bounds(count, training)
    means = {name: sum(one[name] for one in found) / len(found) / 1e9 if found else None for name in PARTS}
    return Failures(
        count=count,
        failed_starts=sum(failed) - count,
        training_seconds=training,
        rate_per_day=count * 86400 / training if training else None,
        mtbf_seconds=training / count if count else None,
        mtbf_low_seconds=low,
        mtbf_high_seconds=high,
        recoveries=len(found),
        mttr_seconds=means["recovery"],
        detect_seconds=means["detect"],
        down_seconds=means["down"],
        queue_seconds=means["queue"],
        restore_seconds=means["restore"],
    )


def bounds(count: int, seconds: float) -> tuple[float | None, float | None]:
    """The 90 % interval of the mean time between failures that come at a constant rate.

    By chi-square, for a time of observation that did not end with a failure: NIST/SEMATECH e-Handbook of Statistical
    Methods, 8.4.5.1: `2T / chi2(0.95, 2n + 2)` and `2T / chi2(0.05, 2n)`.

    Args:
        count: How many failures came.
        seconds: In what time.

    Returns:
        Both ends in seconds; none for the upper one before the first failure, none at all if there was no time.
    """
    if seconds <= 0:
        return None, None
    low = seconds / gamma_quantile(count + 1, 0.95)
    return low, seconds / gamma_quantile(count, 0.05) if count else None


def _has_trained(attempt: Attempt) -> bool:
    return attempt.train_start < NEVER


def _has_failed(attempt: Attempt, is_live: bool) -> bool:
    if attempt.end is None:
        return attempt.failure is not None or not is_live
    return str(attempt.end.get("status")) not in ORDERLY


def _recoveries(
    attempts: Sequence[Attempt], failed: Sequence[bool], closings: Iterable[tuple[Attempt, Span]]
) -> Iterator[dict[str, int]]:
    """What each recovery took by part, nanoseconds: `recovery` the whole, `detect`, `down`, `queue`, `restore`."""
    spans: dict[int, list[Span]] = {}
    for attempt, span in closings:
        if span.category in PARTS:
            spans.setdefault(attempt.number, []).append(span)
    began: int | None = None
    parts = dict.fromkeys(PARTS, 0)
    for index, attempt in enumerate(attempts):
        if began is not None:
            parts["restore"] += _restore(attempt)
            if _has_trained(attempt):
                yield parts | {"recovery": max(0, attempt.train_start - began)}
                began, parts = None, dict.fromkeys(PARTS, 0)
        own = spans.get(attempt.number, [])
        if began is None and failed[index] and _has_trained(attempt):
            began = own[0].start if own else max(attempt.last, attempt.high)
        if began is not None:
            for span in own:
                parts[span.category] += span.end - span.start


def _restore(attempt: Attempt) -> int:
    """How long an attempt read its checkpoint, before its first step."""
    found = 0
    for segment in attempt.segments:
        if segment.first is not None:
            break
        if segment.columns[0][0] == "restore":
            found += segment.high - segment.low
    return found
