"""The append-only event log of a run: the one source that reports, tracking and tests read.

Guarantee: one writer per file, one `write()` per line, the newline last and a sequence number in each line, so that a
process killed at any byte leaves at most one torn last line. Reading drops what is torn or no event, and that alone.
Writing never ends a training: what a full disk does not take is lost, with a warning, and what comes after it begins
on a line of its own. Values that JSON has no number for (`nan`, `inf`) are written as Python writes them and read back
as such.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

log = logging.getLogger(__name__)

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
        self._is_torn = False
        self._has_warned = False
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def event(self, name: str, /, *, durable: bool = False, **fields: Any) -> None:
        """Appends one event. One that cannot be written is left out; the first time this is said on the log.

        Args:
            name: What happened.
            durable: Whether the file is forced to disk before this returns, as far as the disk can.
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
        text = json.dumps(line, ensure_ascii=False, default=str)
        try:
            # a lone surrogate, as in a file name that is no UTF-8, becomes the escape that JSON has for it
            self._append(text.encode(errors="backslashreplace") + b"\n")
            if durable:
                os.fsync(self._fd)
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Forces the file to disk and closes it; closing twice does nothing."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.fsync(fd)
        except OSError as error:
            self._warn(error)
        finally:
            os.close(fd)

    def _append(self, line: bytes) -> None:
        left = b"\n" + line if self._is_torn else line
        while left:
            count = os.write(self._fd, left)  # short where the disk fills up; the next one then says so
            if count == 0:
                raise OSError(errno.EIO, "nothing was written")
            self._is_torn = left[count - 1 : count] != b"\n"
            left = left[count:]

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: an event could not be written: %s. The training goes on; reports will lack what is not written.",
                self.path, error.strerror or error,
            )  # fmt: skip


def read_file(path: Path) -> Iterator[dict[str, Any]]:
    """The events of one file, oldest first; lines that are torn or no events are left out, as is a file that cannot be read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s cannot be read: %s. Its events are left out.", path, error.strerror or error)
        return
    for line in data.split(b"\n")[:-1]:
        event = parse(line)
        if event is not None:
            yield event


def parse(line: bytes) -> dict[str, Any] | None:
    """The event of one line; none if the line is torn, or lacks what every reader relies on."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = (
        isinstance(event, dict)
        and isinstance(event.get("ev"), str)
        and type(event.get("att")) is int
        and type(event.get("t")) in (int, float)
    )
    return event if is_event else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a field of an event is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def read_run(events: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The events that one rank wrote in all attempts of a run, in the order of the attempts.

    Args:
        events: The folder `events` of the run directory.
        rank: Whose files to read.
    """
    files = sorted(events.glob(f"att-*/rank{rank}.jsonl"))
    return [event for file in files for event in read_file(file)]
