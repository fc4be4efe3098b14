"""How many bytes the cache holds: one counter that all processes share.

Guarantee: what is counted is at least what lies there, except for what was put there by others; a process that is killed
between counting and writing leaves the counter too high, never too low. Counting anew puts it right. A counter that is
damaged or missing is unknown, not zero.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from framework.data.cache.locks import exclusive

LOCK_SECONDS = 5.0  # a lock is held for some microseconds, unless its holder is stopped
_FORMAT = struct.Struct("<8sqd")
_MAGIC = b"usage/1\n"


@dataclass(frozen=True, slots=True)
class Count:
    """What the counter says.

    Args:
        total: Bytes.
        counted: When all files were last counted, in seconds since the epoch.
    """

    total: int
    counted: float


class Usage:
    """The counter. Making this object touches nothing.

    Args:
        path: Its file, in a folder that exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Count | None:
        """What it says; none: it is not known."""
        try:
            return _decoded(self.path.read_bytes())
        except OSError:
            return None

    def reserve(self, size: int, limit: int) -> bool:
        """Counts `size` more bytes if the sum stays within `limit`. Returns whether they were counted."""
        with exclusive(self.path, LOCK_SECONDS) as fd:
            count = _decoded(os.pread(fd, _FORMAT.size, 0))
            if count is None or count.total + size > limit:
                return False
            os.pwrite(fd, _encoded(Count(count.total + size, count.counted)), 0)
            return True

    def add(self, change: int) -> None:
        """Counts bytes that came or, negative, went. If that fails the counter stays too high until it is made anew."""
        if change == 0:
            return
        try:
            with exclusive(self.path, LOCK_SECONDS) as fd:
                count = _decoded(os.pread(fd, _FORMAT.size, 0))
                if count is not None:
                    os.pwrite(fd, _encoded(Count(max(0, count.total + change), count.counted)), 0)
        except OSError:
            return

    def recount(self, count: Callable[[], int]) -> int:
        """Counts anew, while other processes go on.

        Args:
            count: Looks at all files and returns their bytes; what is being written must be in it.

        Returns:
            The new total: what was counted, and what came or went meanwhile.

        Raises:
            OSError: The files or the counter cannot be reached.
        """
        before = self.read()
        counted = count()
        with exclusive(self.path, LOCK_SECONDS) as fd:
            now = _decoded(os.pread(fd, _FORMAT.size, 0))
            meanwhile = now.total - before.total if now is not None and before is not None else 0
            total = counted + max(0, meanwhile)  # rather too high: some of it was counted already
            os.pwrite(fd, _encoded(Count(total, time.time())), 0)
            return total


def _encoded(count: Count) -> bytes:
    return _FORMAT.pack(_MAGIC, count.total, count.counted)


def _decoded(data: bytes) -> Count | None:
    if len(data) < _FORMAT.size:
        return None
    magic, total, counted = _FORMAT.unpack(data[: _FORMAT.size])
    return Count(total, counted) if magic == _MAGIC and total >= 0 and counted == counted else None
