"""Files that are on disk when a function returns, with a checksum for each piece of them.

Guarantee: `create` never opens a file that is there already, and what it returns was written, counted and forced to
disk. No function here follows a symbolic link at the end of a path.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zlib_ng import zlib_ng

from framework.checkpoint.direct import DirectFile
from framework.errors import CheckpointError
from framework.volume.durable import LACKING, force
from framework.volume.durable import sync_folder as sync_folder

WRITE_BYTES = 8 << 20  # one os.write: long enough to be fast, short enough to let other threads in
PIECE_BYTES = 16 << 20  # one checksum
CHECK_BYTES = 512 << 10  # summed at once: what was just read is then still in the cache of the core
_IOV_MAX = 1024  # of Linux
_SYNC_FILE_RANGE_WRITE = 2

crc32 = zlib_ng.crc32  # the values of `zlib.crc32`, several times as fast, without the interpreter lock
_libc = ctypes.CDLL(None, use_errno=True)
_scratch = threading.local()


class DamagedError(CheckpointError):
    """The bytes of a checkpoint are not those that were written."""


class UnreadableError(DamagedError):
    """The bytes of a checkpoint cannot be read here and now; they may be right."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksums of one file.

    Args:
        size: Bytes.
        crc32: `zlib.crc32` of each piece of 16 MiB, in order; the last piece may be shorter.
    """

    size: int
    crc32: tuple[int, ...]


def num_pieces(size: int) -> int:
    """The number of checksums of a file of `size` bytes."""
    return -(-size // PIECE_BYTES)


def words_of(size: float) -> str:
    """A number of bytes for messages, in the unit that fits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if round(size / factor, 1) >= 1:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:.0f} bytes"


def create(path: Path, data: bytes | memoryview) -> FileRecord:
    """Writes a new file and forces it to disk. Releases the interpreter lock while it writes and sums.

    A file that could not be written in full is removed, as far as that works: on a full disk its space is needed.

    Raises:
        CheckpointError: The file exists, or the disk is full, or any other error; the message names the file.
    """
    view = memoryview(data)
    doing = "written"
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            try:
                _reserve(fd, len(view))
                sums = tuple(_write_pieces(fd, view))
                doing = "forced to disk"
                force(fd)
            finally:
                os.close(fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
    except OSError as error:
        raise CheckpointError(f"{path} could not be {doing}: {error.strerror or error}") from error
    return FileRecord(len(view), sums)


def _reserve(fd: int, size: int) -> None:
    """Takes the space at once, so that a full disk is noticed before anything is written.

    Not by `os.posix_fallocate`: where the file system cannot, that writes a byte into each block, one by one.
    """
    fallocate = getattr(_libc, "fallocate", None)
    while size and fallocate and fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in (*LACKING, errno.EPERM):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _write_pieces(fd: int, view: memoryview) -> Iterator[int]:
    start_writeback = getattr(_libc, "sync_file_range", None)
    file = DirectFile(fd, view)
    for begin in range(0, len(view), PIECE_BYTES):
        piece = view[begin : begin + PIECE_BYTES]
        crc = 0
        for at in range(0, len(piece), WRITE_BYTES):
            part = piece[at : at + WRITE_BYTES]
            file.write(part)
            crc = crc32(part, crc)
        if start_writeback:  # the disk writes while the next piece is copied; what it answers, fsync tells
            start_writeback(fd, ctypes.c_int64(begin), ctypes.c_int64(len(piece)), _SYNC_FILE_RANGE_WRITE)
        yield crc


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A regular file, open for reading, as a file descriptor.

    Raises:
        DamagedError: It is missing or no regular file.
        UnreadableError: It cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _WRONG_KIND:
            raise DamagedError(f"{path.name} {_WRONG_KIND[error.errno]}") from error
        raise UnreadableError(f"{path.name} cannot be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DamagedError(f"{path.name} is not a regular file")
        yield fd
    finally:
        os.close(fd)


_WRONG_KIND = {
    errno.ENOENT: "is missing",
    errno.ENOTDIR: "is missing",
    errno.ELOOP: "is a symbolic link",
}


def read(path: Path) -> bytes:
    """All bytes of a regular file.

    Raises:
        DamagedError: It is missing or no regular file.
        UnreadableError: It cannot be read.
    """
    with opened(path) as fd:
        parts = []
        try:
            while part := os.read(fd, WRITE_BYTES):
                parts.append(part)
        except OSError as error:
            raise UnreadableError(f"{path.name} cannot be read: {error.strerror}") from error
    return b"".join(parts)


def read_into(fd: int, buffers: list[memoryview], offset: int, name: str) -> None:
    """Fills buffers, one after the other, from an offset of an open file. Releases the interpreter lock.

    Args:
        fd: The open file.
        buffers: Writable bytes; none may be empty.
        offset: Where to start, in bytes.
        name: What the file is called in an error message.

    Raises:
        DamagedError: The file ends before.
        UnreadableError: It cannot be read.
    """
    first = 0
    while first < len(buffers):
        try:
            count = os.preadv(fd, buffers[first : first + _IOV_MAX], offset)
        except OSError as error:
            raise UnreadableError(f"{name} cannot be read at byte {offset}: {error.strerror}") from error
        if count == 0:
            raise DamagedError(f"{name} ends at byte {offset}")
        offset += count
        while first < len(buffers) and count >= len(buffers[first]):
            count -= len(buffers[first])
            first += 1
        if count:
            buffers = [buffers[first][count:], *buffers[first + 1 :]]
            first = 0


def num_threads(local_size: int = 1) -> int:
    """How many threads of a rank read at a time.

    Args:
        local_size: How many ranks run on this host and share its cores.
    """
    return max(2, min(8, len(os.sched_getaffinity(0)) // local_size))


def sums_of(data: bytes | memoryview) -> tuple[int, ...]:
    """The checksums of bytes in memory, one per piece."""
    view = memoryview(data)
    return tuple(crc32(view[at : at + PIECE_BYTES]) for at in range(0, len(view), PIECE_BYTES))


def check_size(path: Path, record: FileRecord) -> None:
    """Raises:
    DamagedError: The file is missing, no regular file, or has another size.
    UnreadableError: It cannot be opened."""
    with opened(path) as fd:
        size = os.fstat(fd).st_size
    if size != record.size:
        raise DamagedError(f"{path.name} has {size:,} bytes instead of {record.size:,}")


def check_piece(path: Path, record: FileRecord, piece: int) -> None:
    """Compares one piece of a file with its checksum. Releases the interpreter lock while it reads and sums.

    Raises:
        DamagedError: They differ; the message names file and bytes.
        UnreadableError: The piece cannot be read.
    """
    begin = piece * PIECE_BYTES
    end = min(begin + PIECE_BYTES, record.size)
    buffer = _buffer()
    crc = 0
    with opened(path) as fd:
        for at in range(begin, end, CHECK_BYTES):
            part = buffer[: min(CHECK_BYTES, end - at)]
            read_into(fd, [part], at, path.name)
            crc = crc32(part, crc)
    if crc != record.crc32[piece]:
        raise DamagedError(f"{path.name} is damaged between bytes {begin:,} and {end:,} (checksum differs)")


def _buffer() -> memoryview:
    """Memory of this thread that is used again and again: new memory costs more than reading into it."""
    if not hasattr(_scratch, "buffer"):
        _scratch.buffer = memoryview(bytearray(CHECK_BYTES))
    buffer: memoryview = _scratch.buffer
    return buffer
