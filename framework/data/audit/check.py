"""Whether each sample was trained once per epoch, over all attempts of a run.

Guarantee: judged by what the loader said it loaded and the trainer said it trained, never by what should have been.
Steps that a restart or a rollback took back do not count; what is not in the logs is said to be not proved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from framework.data.audit.log import BACK, BEGIN, LEFT_OUT, STEP, Trained, read_log
from framework.data.receipt import Ids
from framework.errors import DataError

_STREAMS = ("shards", "stateful", "fast-forward", "epoch")


@dataclass(frozen=True, slots=True)
class Where:
    """A place at which a sample was trained."""

    attempt: int
    rank: int
    step: int


@dataclass(slots=True)
class EpochResult:
    """One epoch of one dataset.

    Args:
        epoch: Its number.
        dataset: Number of the dataset, 0 where there is one.
        samples: Samples it has.
        trained: Different samples that were trained in it.
        is_over: Whether no more of it is to come.
        repeated: Id → where it was trained, for each that was trained more than once.
        missing: Ids that should have been trained and were not.
        dropped: How many were left out by `loader.epoch_end=drop`.
        damaged: Ids that could not be loaded and were passed over or replaced.
    """

    epoch: int
    dataset: int
    samples: int
    trained: int
    is_over: bool
    repeated: dict[int, list[Where]] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    dropped: int = 0
    damaged: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Audit:
    """What the logs of a run say.

    Args:
        epochs: One result for each epoch and dataset, in order.
        attempts: Number of attempts.
        steps: Steps that count.
        taken_back: Records of steps that a restart or rollback took back.
        left_out: Steps whose update was left out.
        gaps: What is not in the logs, in words; nothing is proved where there are any.
    """

    epochs: list[EpochResult]
    attempts: int
    steps: int
    taken_back: int
    left_out: list[int]
    gaps: list[str]

    @property
    def is_clean(self) -> bool:
        """Whether it is proved that each sample was trained once per epoch."""
        return not self.gaps and not any(each.repeated or each.missing for each in self.epochs)


@dataclass(slots=True)
class _Attempt:
    number: int
    ranks: dict[int, dict[int, Trained]]  # rank → step → what it trained
    facts: dict[str, Any]
    starts_after: int  # earlier attempts count up to this step
    left_out: set[int]
    taken_back: int


def audit(events: Path) -> Audit:
    """Reads the logs of all attempts of a run.

    Args:
        events: The folder `events` of the run directory.

    Raises:
        DataError: There are no logs, or one is damaged.
    """
    attempts, gaps = _attempts(events)
    kept: dict[int, _Attempt] = {}  # step → the attempt whose records of it count
    taken_back, left_out = 0, set[int]()
    for attempt in attempts:
        for step in [step for step in kept if step > attempt.starts_after]:
            taken_back += sum(step in steps for steps in kept.pop(step).ranks.values())
        left_out = {step for step in left_out if step <= attempt.starts_after} | attempt.left_out
        taken_back += attempt.taken_back
        whole = set.intersection(*(set(steps) for steps in attempt.ranks.values()))
        newest = max((step for steps in attempt.ranks.values() for step in steps), default=0)
        is_last = attempt is attempts[-1]
        for step in sorted(set.union(*(set(steps) for steps in attempt.ranks.values()))):
            if step in whole:
                kept[step] = attempt
            elif step != newest:
                gaps.append(f"attempt {attempt.number}: step {step} is not in the log of every rank")
            elif not is_last:
                kept[step] = attempt  # counted as far as it is known, unless the next attempt takes it back
    gaps += _holes(kept)
    if not kept:
        return Audit([], len(attempts), 0, taken_back, sorted(left_out), gaps)
    return Audit(list(_results(kept, attempts[-1].facts)), len(attempts), len(kept), taken_back, sorted(left_out), gaps)


def _attempts(events: Path) -> tuple[list[_Attempt], list[str]]:
    found: dict[int, list[Path]] = {}
    for path in sorted(events.glob("att-*/rank*.audit")):
        if match := re.fullmatch(r"att-(\d+)", path.parent.name):
            found.setdefault(int(match[1]), []).append(path)
    if not found:
        raise DataError(
            f"{events} holds no audit logs (att-*/rank*.audit). Train with callbacks.data_position.audit=true; what was "
            "trained without it cannot be audited."
        )
    attempts, gaps = [], []
    for number, paths in sorted(found.items()):
        attempt = _Attempt(number, {}, {}, 0, set(), 0)
        for path in paths:
            _read(attempt, path)
        if not attempt.facts:
            continue  # killed before it began
        missing = sorted(set(range(attempt.facts["world"])) - set(attempt.ranks))
        gaps += [f"attempt {number}: the log of rank {rank} is not there" for rank in missing]
        attempts.append(attempt)
    return attempts, gaps


def _read(attempt: _Attempt, path: Path) -> None:
    steps: dict[int, Trained] = {}
    for kind, value in read_log(path):
        if kind == BEGIN:
            attempt.starts_after = value["step"] if not attempt.facts else min(attempt.starts_after, value["step"])
            attempt.facts = attempt.facts or value
            attempt.ranks[value["rank"]] = steps
        elif kind == STEP:
            steps[value.step] = value
        elif kind == LEFT_OUT:
            attempt.left_out.add(value)
        elif kind == BACK:
            attempt.starts_after = min(attempt.starts_after, value)
            attempt.left_out = {step for step in attempt.left_out if step <= value}
            for step in [step for step in steps if step > value]:
                del steps[step]
                attempt.taken_back += 1


def _holes(kept: dict[int, _Attempt]) -> Iterator[str]:
    expected = 1
    for step in sorted(kept):
        if step != expected:
            yield f"steps {expected} to {step - 1} are in no log: the audit was off, or logs were removed"
        expected = step + 1


def _results(kept: dict[int, _Attempt], facts: dict[str, Any]) -> Iterator[EpochResult]:
    table = _Table(kept)
    edges = [*facts["starts"], max(facts["samples"], facts["starts"][-1] + 1)]
    if len(facts["starts"]) > 1:
        edges = facts["starts"]
    if facts["readers"]:  # numbers that each reader gives: one that has more samples than others goes beyond the length
        edges = [0, 1 << 62]
    for dataset, (low, high) in enumerate(pairwise(edges)):
        mine = np.flatnonzero((table.ids >= low) & (table.ids < high))
        numbers = np.unique(table.epochs[mine]).tolist()
        for epoch in numbers:
            rows = mine[table.epochs[mine] == epoch]
            yield _epoch(
                table, rows, epoch, dataset, (low, high), facts, is_last=epoch == numbers[-1], last=numbers[-1]
            )


class _Table:
    """Every trained sample that counts: one row each."""

    def __init__(self, kept: dict[int, _Attempt]) -> None:
        records = [
            (attempt.number, rank, steps[step])
            for step, attempt in sorted(kept.items())
            for rank, steps in sorted(attempt.ranks.items())
            if step in steps
        ]
        self.ids = _joined([record.ids for _, _, record in records])
        self.epochs = _joined([record.epochs for _, _, record in records])
        sizes = [len(record.ids) for _, _, record in records]
        self.steps = np.repeat([record.step for _, _, record in records], sizes)
        self.attempts = np.repeat([attempt for attempt, _, _ in records], sizes)
        self.ranks = np.repeat([rank for _, rank, _ in records], sizes)
        self.is_own = np.ones(len(self.ids), dtype=bool)  # not there in place of another one
        first = 0
        for (_, _, record), size in zip(records, sizes, strict=True):
            for place, index in record.replaced.items():
                self.is_own[first + place] = False
                self.ids[first + place] = index  # the one that was due; it was not trained
            first += size

    def where(self, row: int) -> Where:
        return Where(int(self.attempts[row]), int(self.ranks[row]), int(self.steps[row]))


def _epoch(
    table: _Table, rows: Ids, epoch: int, dataset: int, bounds: tuple[int, int], facts: dict[str, Any],
    *, is_last: bool, last: int,
) -> EpochResult:  # fmt: skip
    low, high = bounds
    own = rows[table.is_own[rows]]
    unique, counts = np.unique(table.ids[own], return_counts=True)
    damaged = np.unique(table.ids[rows[~table.is_own[rows]]])
    seen = np.union1d(unique, damaged)
    samples, readers = high - low, facts["readers"]
    if readers:
        samples = facts["samples"] if facts["samples"] < 1 << 62 else len(seen) + len(_gaps(seen, readers))
    result = EpochResult(epoch, dataset, samples, len(unique), False, damaged=damaged.tolist())
    for index in unique[counts > 1].tolist():
        result.repeated[index] = [table.where(row) for row in own[table.ids[own] == index].tolist()]
    missing = max(0, samples - len(seen))
    result.is_over = missing == 0 or not is_last
    # streams pass from one epoch to the next at a step that is not the same on all ranks
    if missing and facts["strategy"] in _STREAMS and epoch == last - 1 and missing <= facts["global_batch"]:
        result.is_over = False
    if result.is_over and missing:
        if facts["epoch_end"] == "drop" and missing < facts["global_batch"]:
            result.dropped = missing
        else:
            result.missing = _unseen(seen, low, high, missing, readers)
    return result


def _unseen(seen: Ids, low: int, high: int, missing: int, readers: int) -> list[int]:
    """Ids that were not trained; of a stream's readers, those in between, and then what would come next."""
    if not readers:
        return np.setdiff1d(np.arange(low, high), seen, assume_unique=True).tolist()  # type: ignore[no-any-return]
    gaps = _gaps(seen, readers)
    beyond = int(seen.max(initial=-1)) + 1
    return [*gaps, *range(beyond, beyond + missing - len(gaps))]


def _gaps(seen: Ids, readers: int) -> list[int]:
    """What readers left out: reader `r` numbers its samples `r`, `r + readers`, …"""
    found: list[int] = []
    for reader in range(readers):
        own = seen[seen % readers == reader]
        found += np.setdiff1d(np.arange(reader, own.max(initial=-1) + 1, readers), own, assume_unique=True).tolist()
    return sorted(found)


def _joined(parts: list[Ids]) -> Ids:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
