"""The append-only event log of a run: the one source that reports, tracking and tests read.

Guarantee: one writer per file, one `write()` per line, the newline last and a sequence number in each line, so that a
process killed at any byte leaves at most one torn last line. Reading drops what is torn or no event, and that alone.
Writing never ends a training: what a full disk does not take is lost, with a warning, and what comes after it begins
on a line of its own. Values that JSON has no number for (`nan`, `inf`) are written as Python writes them and read back
as such.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import orjson

log = logging.getLogger(__name__)

_AS_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS

VERSION = 1


class Journal:
    """Writes one file of the journal.

    Args:
        path: The file, `events/att-0001/rank0.jsonl`; its folder is made. It must not exist yet.
        attempt: Number of this attempt, from 1.

    Attributes:
        listeners: Called with every event, written or not. They must be quick, keep it unchanged, and raise nothing.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.attempt = attempt
        self._seq = 0
        self._is_torn = False
        self._has_warned = False
        self.listeners: list[Callable[[Mapping[str, Any]], None]] = []
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
        for listener in self.listeners:
            listener(line)
        text = _encoded(line)
        try:
            self._append(text + b"\n")
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


@dataclass(slots=True)
class Damage:
    """What one file of the journal lacks.

    Args:
        attempt: The attempt that wrote it.
        missing: Events that were written, by the sequence numbers before and after, and cannot be read.
        unreadable: Complete lines that hold no event.
        torn_bytes: Length of a last line that was never finished: the process ended, or was ended, while it wrote.
    """

    attempt: int
    missing: int = 0
    unreadable: int = 0
    torn_bytes: int = 0

    @property
    def is_any(self) -> bool:
        """Whether anything is lacking."""
        return bool(self.missing or self.unreadable or self.torn_bytes)


def read_file(path: Path, damage: Damage | None = None) -> Iterator[dict[str, Any]]:
    """The events of one file, oldest first; lines that are torn or no events are left out, as is a file that cannot be read.

    Args:
        path: The file.
        damage: Where to note what is left out; right once all events have been read.
    """
    damage = damage or Damage(0)
    expected = 0
    for line in _lines(path):
        if not line.endswith(b"\n"):
            damage.torn_bytes = len(line)
            return
        event = parse(line)
        if event is None:
            damage.unreadable += 1
            continue
        number = event.get("seq")
        if type(number) is int:
            damage.missing += max(0, number - expected)
            expected = max(expected, number + 1)
        yield event


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, one at a time: a reader that shares the interpreter with a training must not hold it for long."""
    try:
        with path.open("rb") as stream:
            yield from stream
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s cannot be read: %s. Its events are left out.", path, error.strerror or error)


def _encoded(line: Mapping[str, Any]) -> bytes:
    """A line as JSON; by the fast library where that writes what the usual one does."""
    with contextlib.suppress(TypeError):  # what it does not know
        text: bytes = orjson.dumps(line, option=_AS_JSON)
        if b"null" not in text:  # it may stand for `nan` or `inf`
            return text
    # a lone surrogate, as in a file name that is no UTF-8, becomes the escape that JSON has for it
    return json.dumps(line, ensure_ascii=False, default=str, separators=(",", ":")).encode(errors="backslashreplace")


def _decoded(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except ValueError:  # it knows neither `NaN` nor `Infinity`
        return json.loads(line)


def parse(line: bytes) -> dict[str, Any] | None:
    """The event of one line; none if the line is torn, or lacks what every reader relies on."""
    try:
        event = _decoded(line)
    except (ValueError, RecursionError):
        return None
    is_event = (
        isinstance(event, dict)
        and isinstance(event.get("ev"), str)
        and type(event.get("att")) is int
        and is_number(event.get("t"))
    )
    return event if is_event else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a field of an event is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def read_run(events: Path, rank: int = 0, damages: list[Damage] | None = None) -> list[dict[str, Any]]:
    """The events that one rank wrote in all attempts of a run, in the order of the attempts.

    Args:
        events: The folder `events` of the run directory.
        rank: Whose files to read.
        damages: Where to add, for each attempt in its order, what its file lacks.
    """
    found: list[dict[str, Any]] = []
    for number, file in attempt_files(events, rank):
        damage = Damage(number)
        found += read_file(file, damage)
        if damages is not None:
            damages.append(damage)
    return found


def attempt_files(events: Path, rank: int = 0) -> list[tuple[int, Path]]:
    """The files of one rank with the numbers of their attempts, in the order of these."""
    files = ((file.parent.name.removeprefix("att-"), file) for file in events.glob(f"att-*/rank{rank}.jsonl"))
    return sorted((int(number), file) for number, file in files if number.isdecimal())
