"""Locks between processes on files of the cache, which only save work: what is right never depends on them.

Guarantee: no wait is unbounded. A process that dies gives its locks back, also when it has children: no child keeps a
lock that it inherited. Where a file system has no locks, this is told and nothing is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LACKING = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EPERM}
_BUSY = {errno.EAGAIN, errno.EACCES}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02  # seconds
_RANGE = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: kind, whence, start, length, pid
_held: set[int] = set()  # open descriptors that a forked child must not keep; never holds one that is closed


def open_private(path: Path | str, flags: int, mode: int = 0o666) -> int:
    """Opens a file that no child keeps, neither a forked one nor another program.

    Raises:
        OSError: It cannot be opened.
    """
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    _held.add(fd)
    return fd


def close_private(fd: int) -> None:
    """Closes what `open_private` opened; in a forked child, where it is closed already, nothing happens."""
    if fd in _held:
        _held.discard(fd)  # first: the number may belong to another file once it is closed
        os.close(fd)


def release_private(fd: int) -> None:
    """Like `close_private` for what nothing was written to: a file system that is gone or fails is no error then."""
    with contextlib.suppress(OSError):
        close_private(fd)


def _close_in_child() -> None:
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def flock(fd: int, *, shared: bool = False, timeout_seconds: float = 0.0) -> bool:
    """Locks an open file as a whole.

    Args:
        fd: The file.
        shared: Whether others may hold it too, if they share it.
        timeout_seconds: Longest wait; 0: one try.

    Returns:
        Whether it is locked; false: the file system has no locks.

    Raises:
        TimeoutError: Another process holds it.
        OSError: The file system failed.
    """
    kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    return _wait(lambda: fcntl.flock(fd, kind), timeout_seconds)


def unlock(fd: int) -> None:
    """Gives the lock of `flock` back at once, whoever else has the file open."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


@contextlib.contextmanager
def exclusive(path: Path, timeout_seconds: float = 0.0) -> Iterator[int]:
    """Opens and locks a file, which is made if it is not there; where the file system has no locks it is only opened.

    Yields:
        The open file.

    Raises:
        TimeoutError: Another process holds it.
        OSError: It cannot be opened.
    """
    fd = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        is_locked = flock(fd, timeout_seconds=timeout_seconds)
        try:
            yield fd
        finally:
            if is_locked:
                unlock(fd)  # at once: closing alone would leave it to a child that was forked meanwhile
    finally:
        release_private(fd)


@contextlib.contextmanager
def exclusive_byte(path: Path, place: int, timeout_seconds: float) -> Iterator[bool]:
    """Locks one byte of a file, which need not have it: one file serves for any number of locks.

    Yields:
        Whether it is locked; if not, it could not be had in time, or there are no such locks here.
    """
    fd, is_locked = -1, False
    with contextlib.suppress(OSError):  # TimeoutError too
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        is_locked = _wait(lambda: _lock_byte(fd, place, fcntl.F_WRLCK), timeout_seconds)
    try:
        yield is_locked
    finally:
        if is_locked:
            with contextlib.suppress(OSError):
                _lock_byte(fd, place, fcntl.F_UNLCK)
        if fd >= 0:
            release_private(fd)


def _lock_byte(fd: int, place: int, kind: int) -> None:
    # of the open file, not of the process as POSIX locks are: threads exclude each other too
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.fcntl(fd, command, _RANGE.pack(kind, os.SEEK_SET, place, 1, 0))


def _wait(lock: Callable[[], object], timeout_seconds: float) -> bool:
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE
    while True:
        try:
            lock()
            return True
        except OSError as error:
            if error.errno in LACKING:
                return False
            if error.errno not in _BUSY:
                raise
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock")
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
