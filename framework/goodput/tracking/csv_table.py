"""The metrics of a run as a CSV file: one row a step, one column a metric.

Guarantee: whoever reads the file, and whatever is killed when, it holds whole rows only, each step once, in order. Rows
are appended in one write; where a value belongs to a row that is written already, or to a new column, the file is
replaced in one piece.
"""

from __future__ import annotations

import csv
import errno
import io
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from framework.goodput.tracking.points import Point

REPLACE_EVERY_SECONDS = 5.0
REPLACE_SHARE = 0.05  # the part of the time that may be spent on replacing a file that has become large
PENDING_ROWS = 10_000


class CsvTable:
    """Writes one file anew, beside the one that is there until `publish`.

    Args:
        file: The file; its folder is made.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._path = file.with_name(f".{file.name}.new")
        self._columns: list[str] = []
        self._rows: dict[int, dict[str, float]] = {}
        self._late: dict[int, dict[str, float]] = {}
        self._last = -1  # the last step that is in the file
        self._width = 0  # columns that its header has
        self._replace_at = 0.0
        self._complete = -1
        self._replace_whole()

    def add(self, points: Iterable[Point], complete: int) -> None:
        """Takes points; rows up to the step `complete` are to be written."""
        for point in points:
            if point.key not in self._columns:
                self._columns.append(point.key)
            rows = self._late if point.step <= self._last else self._rows
            rows.setdefault(point.step, {})[point.key] = point.value
        self._complete = max(self._complete, complete)
        if len(self._rows) > PENDING_ROWS:
            self._append()

    def publish(self) -> None:
        """Puts the file in the place of the one that was there, with all that has been added."""
        self._append()
        self._replace_whole()
        os.replace(self._path, self._file)
        self._path = self._file

    def flush(self) -> None:
        """Writes what is complete.

        Raises:
            OSError: It cannot be written, or somebody else has changed the file.
        """
        self._append()
        if (self._late or self._width < len(self._columns)) and time.monotonic() >= self._replace_at:
            self._replace_whole()

    def close(self) -> None:
        """Writes the rest."""
        self._complete = max([self._complete, *self._rows])
        self._append()
        self._replace_whole()

    def _append(self) -> None:
        steps = sorted(step for step in self._rows if step <= self._complete)
        if not steps:
            return
        if self._width < len(self._columns):
            self._replace_whole()
        text = io.StringIO()
        self._write(text, ((step, self._rows[step]) for step in steps))
        content = text.getvalue().encode()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != self._size:
                raise OSError(errno.ESTALE, "somebody else has written to it", str(self._path))
            if os.write(descriptor, content) != len(content):
                os.ftruncate(descriptor, self._size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        finally:
            os.close(descriptor)
        self._size += len(content)
        self._last = steps[-1]
        for step in steps:
            del self._rows[step]

    def _replace_whole(self) -> None:
        """Writes the file once more, with the late values and all columns. Only the columns and they need memory."""
        begun = time.monotonic()
        temporary = self._file.with_name(f".{self._file.name}.tmp")
        with temporary.open("w", encoding="utf-8", newline="") as stream:
            _writer(stream).writerow(["step", *self._columns])
            self._write(stream, self._merged())
            stream.flush()
            os.fsync(stream.fileno())
            self._size = os.fstat(stream.fileno()).st_size
        os.replace(temporary, self._path)
        self._late.clear()
        self._width = len(self._columns)
        now = time.monotonic()
        self._replace_at = now + max(REPLACE_EVERY_SECONDS, (now - begun) / REPLACE_SHARE)

    def _merged(self) -> Iterable[tuple[int, Mapping[str, float | str]]]:
        """The rows of the file with the late values, and the rows that only late values make."""
        late = sorted(self._late)
        if self._width or self._last >= 0:
            with self._path.open(encoding="utf-8", newline="") as stream:
                for row in csv.DictReader(stream):
                    step = int(row.pop("step"))
                    while late and late[0] < step:
                        yield late[0], self._late[late.pop(0)]
                    if late and late[0] == step:
                        late.pop(0)
                    yield step, row | self._late.get(step, {})
        for step in late:
            yield step, self._late[step]

    def _write(self, stream: io.TextIOBase, rows: Iterable[tuple[int, Mapping[str, float | str]]]) -> None:
        _writer(stream).writerows([step, *(_text(row.get(name)) for name in self._columns)] for step, row in rows)


def _writer(stream: io.TextIOBase) -> Any:
    return csv.writer(stream, lineterminator="\n")


def _text(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else repr(value)
