"""The last signs of life of an attempt whose rank 0 ended without a word: what its own journal cannot tell.

Guarantee: reads and changes nothing, and little of many ranks. A file's time counts only in the directory in which it was
written: in a copy it is that of the copying. What the files of other ranks hold counts anywhere.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from framework.journal import attempt_files, parse
from framework.rundir import Owner, RunDirectory
from framework.stepmark import read_mark

MAX_FILES = 64  # of other ranks; when one rank dies, all others notice
TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Signs:
    """Seconds since the epoch, none where there is no sign.

    Args:
        attempt: Whose.
        alive: When rank 0 was last seen: it did a step, its journal was written, or its lease renewed.
        noticed: When another rank first said that something had failed; else, the last that another rank wrote.
        step: The last step that rank 0 did, in the journal or not.
    """

    attempt: int
    alive: float | None
    noticed: float | None
    step: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def newest_signs(run: RunDirectory, owner: Owner | None) -> Signs | None:
    """Those of the newest attempt that left a journal, none if there is none.

    Args:
        run: The run directory.
        owner: Its owner, from before another attempt took it over.
    """
    files = attempt_files(run.events)
    if not files:
        return None
    attempt, file = files[-1]
    mark = read_mark(run.mark_file(attempt))
    alive = None if mark is None else mark.seen
    if owner is not None and owner.owns(run.path):
        alive = max(alive or 0.0, _modified(file), owner.renewed if owner.attempt == attempt else 0.0) or None
    return Signs(attempt, alive, _noticed(file), None if mark is None else mark.step)


def _noticed(file: Path) -> float | None:
    """What the other ranks of an attempt say."""
    others = sorted(one for one in file.parent.glob("rank*.jsonl") if one.name != file.name)[:MAX_FILES]
    events = [event for other in others for event in _tail(other)]
    failed = [event["t"] for event in events if event["ev"] == "failure"]
    return min(failed) if failed else max((event["t"] for event in events), default=None)


def _tail(file: Path) -> list[dict[str, Any]]:
    """The last events of a file; none if it cannot be read."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
            lines = stream.read().split(b"\n")[:-1]
    except OSError:
        return []
    return [event for event in map(parse, lines) if event is not None]


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
