"""The last step that a process has done, where kill -9 does not reach it.

Guarantee: setting it costs no call of the system and never fails. Where the file would not be on a disk of this host
there is no mark, for then memory that stands for a file can end the process.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from framework.mounts import is_on_disk

log = logging.getLogger(__name__)

_LAYOUT = struct.Struct("<qd")


@dataclass(frozen=True, slots=True)
class Mark:
    """What a mark says.

    Args:
        step: The last step that was done.
        seen: When, in seconds since the epoch.
    """

    step: int
    seen: float


class StepMark:
    """Keeps the mark of one attempt.

    Args:
        path: The file, `events/att-0001/rank0.step`; none keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._memory: mmap.mmap | None = None
        if path is None:
            return
        try:
            self._memory = _mapped(path)
        except OSError as error:
            log.debug("%s: no mark of the last step: %s", path, error)

    def set(self, step: int) -> None:
        """A step is done."""
        if self._memory is not None:
            _LAYOUT.pack_into(self._memory, 0, step, time.time())

    def close(self) -> None:
        """Gives the memory back; the file stays. Closing twice does nothing."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _mapped(path: Path) -> mmap.mmap | None:
    if not is_on_disk(path.parent):
        return None
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        # written, not only made long: where there is no room for it, that is an error here and not the end later
        os.pwrite(fd, bytes(_LAYOUT.size), 0)
        os.fsync(fd)
        return mmap.mmap(fd, _LAYOUT.size)
    finally:
        os.close(fd)


def read_mark(path: Path) -> Mark | None:
    """What a file says; none if it is not there, or no step was done."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _LAYOUT.size:
        return None
    step, seen = _LAYOUT.unpack(data)
    return Mark(step, seen) if step > 0 and math.isfinite(seen) and seen > 0 else None
