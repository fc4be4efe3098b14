"""The append-only event log of a run: the one source that reports, tracking and tests read.

Guarantee: one writer per file, one `write()` per line, the newline last and a sequence number in each line, so that a
process killed at any byte leaves at most one torn last line, which reading drops. Values that JSON has no number for
(`nan`, `inf`) are written as Python writes them and read back as such.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = 1


class Journal:
    """Writes one file of the journal.

    Args:
        path: The file, `events/att-0001/rank0.jsonl`; its folder is made. It must not exist yet.
        attempt: Number of this attempt, from 1.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.attempt = attempt
        self._seq = 0
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def event(self, name: str, /, *, durable: bool = False, **fields: Any) -> None:
        """Appends one event.

        Args:
            name: What happened.
            durable: Whether the file is forced to disk before this returns.
            **fields: JSON values. The line also gets `v`, `seq`, `t` (wall clock, seconds), `m` (monotonic clock,
                seconds), `att` and `ev`.
        """
        line = {
            "v": VERSION,
            "seq": self._seq,
            "t": time.time(),
            "m": time.monotonic(),
            "att": self.attempt,
            "ev": name,
            **fields,
        }
        self._seq += 1
        os.write(self._fd, json.dumps(line, ensure_ascii=False, default=str).encode() + b"\n")
        if durable:
            os.fsync(self._fd)

    def close(self) -> None:
        """Forces the file to disk and closes it; closing twice does nothing."""
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


def read_file(path: Path) -> Iterator[dict[str, Any]]:
    """The events of one file, oldest first; a torn line and anything after it is dropped."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.split(b"\n")[:-1]:
        try:
            event = json.loads(line)
        except ValueError:
            return
        if not isinstance(event, dict):
            return
        yield event


def read_run(events: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The events that one rank wrote in all attempts of a run, in the order of the attempts.

    Args:
        events: The folder `events` of the run directory.
        rank: Whose files to read.
    """
    files = sorted(events.glob(f"att-*/rank{rank}.jsonl"))
    return [event for file in files for event in read_file(file)]
