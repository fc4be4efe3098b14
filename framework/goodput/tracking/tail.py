"""Reads the journal of a run while it is being written.

Guarantee: gives every complete event of every attempt once, in order, and never a torn one; memory is bounded however
much has been written. Once a later attempt exists, what an earlier one still writes is not waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from framework.errors import ConfigError
from framework.journal import attempt_files, parse
from framework.rundir import RunDirectory

CHUNK_BYTES = 1 << 20


class JournalTail:
    """Follows `events/att-*/rank0.jsonl`.

    Args:
        events: The folder `events` of the run directory; it need not exist yet.
    """

    def __init__(self, events: Path) -> None:
        self._events = events
        self._number = -1
        self._file: Path | None = None
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The events that were completed since the last call."""
        while True:
            following = self._following()  # looked up first: whatever its predecessor wrote before is read now
            if self._file is not None:
                yield from self._rest()
            if following is None:
                return
            self._number, self._file = following
            self._offset = 0

    def _following(self) -> tuple[int, Path] | None:
        return next(((number, file) for number, file in attempt_files(self._events) if number > self._number), None)

    def _rest(self) -> Iterator[dict[str, Any]]:
        assert self._file is not None
        begun = b""
        with self._file.open("rb") as stream:
            stream.seek(self._offset)
            while chunk := stream.read(CHUNK_BYTES):
                *lines, begun = (begun + chunk).split(b"\n")
                for line in lines:
                    self._offset += len(line) + 1
                    event = parse(line)
                    if event is not None:  # as in `journal.read_file`: what is torn is left out, and that alone
                        yield event


def run_with_journal(run_dir: Path | str) -> RunDirectory:
    """Raises:
    ConfigError: No run has left a journal there."""
    run = RunDirectory(run_dir)
    if not any(run.events.glob("att-*/rank0.jsonl")):
        raise ConfigError(f"{run.shown} holds no journal (events/att-*/rank0.jsonl): no run was started there.")
    return run
