"""Bytes and names that are on the disk when a function returns.

Guarantee: nothing is taken for written that the disk did not take. Where a file system has no way to force a file or a
folder, as some network mounts, that is no error.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

LACKING = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)  # the file system has no such thing


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Writes all bytes where the file stands; a call may take only some of them.

    Raises:
        OSError: The disk failed, is full, or took none.
    """
    left = memoryview(data).cast("B")
    while left:
        written = os.write(fd, left)
        if written <= 0:
            raise OSError(errno.EIO, f"the file system took none of the last {len(left):,} bytes")
        left = left[written:]


def force(fd: int) -> None:
    """Forces an open file or folder to disk.

    Raises:
        OSError: The disk failed.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in LACKING:
            raise


def sync_folder(path: Path) -> None:
    """Forces the names in a folder to disk.

    Raises:
        OSError: The disk failed, or the folder is gone.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # whoever may write into a folder need not be allowed to read it
        return
    try:
        force(fd)
    except OSError as error:
        if error.errno == errno.EBADF:  # some mounts force only what was opened for writing, which no folder can be
            return
        raise OSError(error.errno, f"could not be forced to disk: {error.strerror}", str(path)) from error
    finally:
        os.close(fd)
