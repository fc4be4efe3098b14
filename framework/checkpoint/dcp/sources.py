"""Where the bytes of a checkpoint come from when it is read.

Guarantee: `prove` compares a piece of a file with its checksum before any byte of it is used; a piece of a remote
checkpoint comes from this host's copy only if the checksum of the remote one says that it is the same.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from framework.checkpoint import files
from framework.checkpoint.files import PIECE_BYTES, DamagedError, FileRecord
from framework.volume import Volume, VolumeError, VolumeMissing

HELD_FILES = 256  # at most, of the 1,024 that a process may have open


class Source(ABC):
    """The files of one checkpoint."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file; none if it is not there."""

    @abstractmethod
    def prove(self, name: str, record: FileRecord, piece: int) -> None:
        """Compares a piece of a file with its checksum.

        Raises:
            DamagedError: They differ, or it cannot be read.
        """

    @abstractmethod
    def read_into(self, name: str, offset: int, buffers: list[memoryview]) -> None:
        """Fills buffers, none of them empty, one after the other.

        Raises:
            DamagedError: The file ends before, or cannot be read.
        """


class Mounted(Source):
    """A folder. Files that were looked into stay open until `close`: who replaces the checkpoint meanwhile deletes them.

    Args:
        folder: Where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}
        self._holding = contextlib.ExitStack()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Lets go of the files."""
        with self._lock:
            self._held.clear()
            self._holding.close()

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        with self._lock:
            if name not in self._held and len(self._held) < HELD_FILES:
                self._held[name] = self._holding.enter_context(files.opened(self._folder / name))
            held = self._held.get(name)
        if held is not None:
            yield held
            return
        with files.opened(self._folder / name) as fd:
            yield fd

    def size(self, name: str) -> int | None:
        with contextlib.suppress(DamagedError), files.opened(self._folder / name) as fd:
            return os.fstat(fd).st_size
        return None

    def prove(self, name: str, record: FileRecord, piece: int) -> None:
        with self._opened(name):  # no other file gets this name: what is proven is what is read later
            files.check_piece(self._folder / name, record, piece)

    def read_into(self, name: str, offset: int, buffers: list[memoryview]) -> None:
        with self._opened(name) as fd:
            files.read_into(fd, buffers, offset, name)


class Direct(Source):
    """A place that is no folder, of a checkpoint without checksums.

    Args:
        volume: The place.
    """

    def __init__(self, volume: Volume) -> None:
        self._volume = volume

    def size(self, name: str) -> int | None:
        return self._volume.size(name)

    def prove(self, name: str, record: FileRecord, piece: int) -> None:
        self._piece(name, record, piece)

    def _piece(self, name: str, record: FileRecord, piece: int) -> memoryview:
        begin = piece * PIECE_BYTES
        data = memoryview(bytearray(min(PIECE_BYTES, record.size - begin)))
        self._fetch(name, begin, [data])
        if crc32(data) != record.crc32[piece]:
            end = begin + len(data)
            raise DamagedError(f"{name} is damaged between bytes {begin:,} and {end:,} (checksum differs)")
        return data

    def read_into(self, name: str, offset: int, buffers: list[memoryview]) -> None:
        self._fetch(name, offset, buffers)

    def _fetch(self, name: str, offset: int, buffers: list[memoryview]) -> None:
        for buffer in buffers:
            try:
                self._volume.read_into(name, offset, buffer)
            except VolumeMissing as error:
                raise DamagedError(f"{name} is missing") from error
            except VolumeError as error:
                raise DamagedError(f"{name} cannot be read: {error}") from error
            offset += len(buffer)


class Copied(Direct):
    """A place that is no folder, with a copy on this host that is filled as pieces are needed.

    Args:
        volume: The place.
        folder: The copy.
    """

    def __init__(self, volume: Volume, folder: Path) -> None:
        super().__init__(volume)
        self._copy = Mounted(folder)
        self._folder = folder
        self.close = self._copy.close

    def prove(self, name: str, record: FileRecord, piece: int) -> None:
        try:
            self._copy.prove(name, record, piece)
            return
        except DamagedError:
            data = self._piece(name, record, piece)
        flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._folder / name, flags, 0o600)
            try:
                os.ftruncate(fd, record.size)
                at = piece * PIECE_BYTES
                while data:
                    written = os.pwrite(fd, data, at)
                    at, data = at + written, data[written:]
            finally:
                os.close(fd)
        except OSError as error:
            raise DamagedError(
                f"{name} cannot be kept in {self._folder}: {error.strerror}; give another folder as local="
            ) from error

    def read_into(self, name: str, offset: int, buffers: list[memoryview]) -> None:
        self._copy.read_into(name, offset, buffers)
