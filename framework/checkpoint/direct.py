"""Writing past the page cache: what goes to the disk is not copied once more by a core that the training shares.

Guarantee: the file holds the same bytes either way. What the memory, the file system or the disk does not allow goes
through the cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

from framework.mounts import is_on_disk
from framework.volume.durable import write_all

BLOCK = 4096  # addresses, lengths and places in the file are multiples of it: no disk asks for more
LEAST_BYTES = 8 << 20  # of a file; a small one costs nothing either way


class DirectFile:
    """An open file that is written from its start, past the page cache where that works.

    Args:
        fd: The file, open for writing and empty.
        data: All that will be written; `write` is given parts of it in order.
    """

    def __init__(self, fd: int, data: memoryview) -> None:
        self._fd = fd
        self.is_direct = False
        # of other mounts it is not known what it costs: on a network each write may wait for an answer
        if len(data) >= LEAST_BYTES and _is_aligned(data) and is_on_disk(f"/proc/self/fd/{fd}"):
            self._switch(on=True)

    def write(self, part: memoryview) -> None:
        """Writes all bytes of a part; the lengths of all but the last are multiples of `BLOCK`.

        Raises:
            OSError: The disk failed, is full, or took none.
        """
        left = part
        while self.is_direct and len(left) >= BLOCK:
            try:
                written = os.write(self._fd, left[: len(left) // BLOCK * BLOCK])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._switch(on=False)  # a disk that asks for more than `BLOCK`
                break
            if written <= 0:
                break  # the way through the cache says what is wrong
            left = left[written:]
            if written % BLOCK:
                self._switch(on=False)  # from here on nothing lies where it would have to
        if left:
            self._switch(on=False)
            write_all(self._fd, left)

    def _switch(self, *, on: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError:
            if not on:
                raise
            return  # this file system has no such thing
        self.is_direct = on


def _is_aligned(data: memoryview) -> bool:
    if data.readonly:  # its address is hard to come by, and no memory of a snapshot
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) % BLOCK == 0
