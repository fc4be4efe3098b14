"""Reads the journal of a run while it is being written.

Guarantee: gives every complete event of every attempt once, in order, and never a torn one; memory is bounded however
much has been written. Once a later attempt exists, what an earlier one still writes is not waited for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


class JournalTail:
    """Follows `events/att-*/rank0.jsonl`.

    Args:
        events: The folder `events` of the run directory; it need not exist yet.
    """

    def __init__(self, events: Path) -> None:
        self._events = events
        self._file: Path | None = None
        self._offset = 0
        self._is_broken = False

    def read(self) -> Iterator[dict[str, Any]]:
        """The events that were completed since the last call."""
        while True:
            following = self._following()  # looked up first: whatever its predecessor wrote before is read now
            if self._file is not None:
                yield from self._rest()
            if following is None:
                return
            self._file, self._offset, self._is_broken = following, 0, False

    def _following(self) -> Path | None:
        files = [file for file in self._events.glob("att-*/rank0.jsonl") if file.parent.name[4:].isdigit()]
        number = -1 if self._file is None else _number(self._file)
        return min((file for file in files if _number(file) > number), key=_number, default=None)

    def _rest(self) -> Iterator[dict[str, Any]]:
        assert self._file is not None
        begun = b""
        with self._file.open("rb") as stream:
            stream.seek(self._offset)
            while not self._is_broken and (chunk := stream.read(CHUNK_BYTES)):
                *lines, begun = (begun + chunk).split(b"\n")
                for line in lines:
                    self._offset += len(line) + 1
                    event = _parse(line)
                    if event is None:  # as in `journal.read_file`: nothing after a torn line counts
                        self._is_broken = True
                        break
                    yield event


def _number(file: Path) -> int:
    return int(file.parent.name[4:])


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
