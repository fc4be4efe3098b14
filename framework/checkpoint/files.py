"""Files that are on disk when a function returns, with a checksum for each piece of them.

Guarantee: `create` never opens a file that is there already, and what it returns was written, counted and forced to
disk. No function here follows a symbolic link at the end of a path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from framework.errors import CheckpointError

WRITE_BYTES = 8 << 20  # one os.write: long enough to be fast, short enough to let other threads in
PIECE_BYTES = 16 << 20  # one checksum


class DamagedError(CheckpointError):
    """The bytes of a checkpoint are not those that were written."""


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


def create(path: Path, data: bytes | memoryview) -> FileRecord:
    """Writes a new file and forces it to disk. Releases the interpreter lock while it writes and sums.

    Raises:
        CheckpointError: The file exists, or the disk is full, or any other error; the message names the file.
    """
    view = memoryview(data)
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            _reserve(fd, len(view))
            sums = tuple(_write_pieces(fd, view))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}") from error
    return FileRecord(len(view), sums)


def _reserve(fd: int, size: int) -> None:
    """Takes the space at once, so that a full disk is noticed before anything is written."""
    if not size:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):  # some file systems cannot
            raise


def _write_pieces(fd: int, view: memoryview) -> Iterator[int]:
    for begin in range(0, len(view), PIECE_BYTES):
        end = min(begin + PIECE_BYTES, len(view))
        crc = 0
        while begin < end:
            written = os.write(fd, view[begin : min(begin + WRITE_BYTES, end)])
            crc = zlib.crc32(view[begin : begin + written], crc)
            begin += written
        yield crc


def sync_folder(path: Path) -> None:
    """Forces the names in a folder to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some mounts cannot force a folder
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A regular file, open for reading, as a file descriptor.

    Raises:
        DamagedError: It is missing, no regular file, or cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = {errno.ENOENT: "is missing", errno.ELOOP: "is a symbolic link"}.get(error.errno or 0)
        raise DamagedError(f"{path.name} {reason or f'cannot be opened: {error.strerror}'}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DamagedError(f"{path.name} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def read(path: Path) -> bytes:
    """All bytes of a regular file.

    Raises:
        DamagedError: It is missing, no regular file, or cannot be read.
    """
    with opened(path) as fd:
        parts = []
        try:
            while part := os.read(fd, WRITE_BYTES):
                parts.append(part)
        except OSError as error:
            raise DamagedError(f"{path.name} cannot be read: {error.strerror}") from error
    return b"".join(parts)


def read_into(fd: int, buffers: list[memoryview], offset: int, name: str) -> None:
    """Fills buffers, one after the other, from an offset of an open file.

    Args:
        fd: The open file.
        buffers: Writable bytes; none may be empty.
        offset: Where to start, in bytes.
        name: What the file is called in an error message.

    Raises:
        DamagedError: The file ends before, or cannot be read.
    """
    while buffers:
        try:
            count = os.preadv(fd, buffers, offset)
        except OSError as error:
            raise DamagedError(f"{name} cannot be read at byte {offset}: {error.strerror}") from error
        if count == 0:
            raise DamagedError(f"{name} ends at byte {offset}")
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers[0])
            buffers = buffers[1:]
        if buffers and count:
            buffers = [buffers[0][count:], *buffers[1:]]


def sums_of(data: bytes) -> tuple[int, ...]:
    """The checksums of bytes in memory, one per piece."""
    return tuple(zlib.crc32(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES))


def check_size(path: Path, record: FileRecord) -> None:
    """Raises:
    DamagedError: The file is missing, no regular file, or has another size."""
    with opened(path) as fd:
        size = os.fstat(fd).st_size
    if size != record.size:
        raise DamagedError(f"{path.name} has {size:,} bytes instead of {record.size:,}")


def check_piece(path: Path, record: FileRecord, piece: int) -> None:
    """Compares one piece of a file with its checksum.

    Raises:
        DamagedError: They differ, or the piece cannot be read; the message names file and bytes.
    """
    begin = piece * PIECE_BYTES
    left = min(PIECE_BYTES, record.size - begin)
    end = begin + left
    buffer = memoryview(bytearray(min(left, WRITE_BYTES)))
    crc = 0
    with opened(path) as fd:
        for at in range(begin, end, WRITE_BYTES):
            part = buffer[: min(WRITE_BYTES, end - at)]
            read_into(fd, [part], at, path.name)
            crc = zlib.crc32(part, crc)
    if crc != record.crc32[piece]:
        raise DamagedError(f"{path.name} is damaged between bytes {begin:,} and {end:,} (checksum differs)")
