"""Files on their way: what the cache does not keep, as local paths for as long as they are in use.

Guarantee: a path is valid until it was released as often as it was written. Each process has a folder of its own, which
goes with it, or with its parent, if that one uses the paths; what a killed process left is removed by the next one.
Where the disk of the cache is full or fails, the folder for temporary files is used. Safe to use from several threads; a
forked process begins with nothing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path

from framework.data.cache import housekeeping, living
from framework.data.cache.layout import move, places
from framework.data.cache.locks import close_private, flock, open_private, release_private
from framework.errors import DataError
from framework.volume.durable import write_all

LIMIT = 1 << 30  # bytes
_numbers = itertools.count()


@dataclass(slots=True)
class _File:
    path: str
    size: int
    uses: int = 0


class TransitArea:
    """Files of one process that are not kept. Making this object touches nothing.

    Args:
        folder: Where the processes of a dataset have their folders.
        limit: Bytes, above which `has_room` says no; default 1 GiB.
        parent: Pid of the process that uses the paths: what is left when this one is killed stays as long as that lives.
        is_left: Whether that is so at a regular end of this one, too; then what earlier children of the parent left is
            removed when this one begins.
    """

    def __init__(
        self, folder: Path, limit: int | None = None, *, parent: int | None = None, is_left: bool = False
    ) -> None:
        self.folder = folder
        self._parent = parent
        self._is_left = is_left
        self.limit = LIMIT if limit is None else limit
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards all below
        self._areas: dict[Path, _Area] = {}
        self._files: dict[str, _File] = {}  # by key
        self._keys: dict[str, str] = {}  # by path
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes of the files that are in use."""
        self._check_process()
        return self._used

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more stay within the limit. Ask before fetching ahead; what is needed now is written."""
        return self.used + size <= self.limit

    def write(self, key: str, size: int, parts: Sequence[bytes | memoryview]) -> Path:
        """Writes a file; if one of that key is in use already, that one is used once more.

        Args:
            key: Its name; the path ends with it where a file system allows that.
            size: Its bytes.
            parts: Its bytes in order, in pieces of any length.

        Raises:
            DataError: The parts have another size in sum, or no disk has room.
        """
        if (got := sum(memoryview(part).nbytes for part in parts)) != size:
            raise DataError(
                f"{key} has {size:,} bytes by its listing, and {got:,} came: it was cut off, or changed since it was "
                f"listed."
            )
        self._check_process()
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                file.uses += 1
                return Path(file.path)
        failures = []
        for folder in (self.folder, Path(tempfile.gettempdir()) / f"goodput-transit-{os.geteuid()}"):
            try:
                return Path(self._write(self._area(folder), key, size, parts))
            except OSError as error:
                failures.append(f"{folder}: {error.strerror or error}")
        raise DataError(
            f"{key} cannot be given as a local path: {'; '.join(failures)}. "
            f"Free some space, or set TMPDIR or cache.root to a disk with room."
        )

    def release(self, path: Path | str) -> None:
        """Says that a path is not in use any more; one that was not written here is left alone."""
        self._check_process()
        with self._lock:
            key = self._keys.get(os.fspath(path))
            if key is None:
                return
            file = self._files[key]
            file.uses -= 1
            if file.uses == 0:
                del self._files[key], self._keys[file.path]
                self._used -= file.size
                with contextlib.suppress(OSError):
                    os.unlink(file.path)

    def close(self) -> None:
        """Removes all files, in use or not. Using it again is fine."""
        if self._pid == os.getpid():
            for area in self._areas.values():
                area.remove()
        self._start()

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self.folder, "limit": self.limit, "_parent": None, "_is_left": False}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._start()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._start()

    def _area(self, folder: Path) -> _Area:
        with self._lock:
            if folder not in self._areas:
                self._areas[folder] = _Area(folder, self._parent, self._is_left)
            return self._areas[folder]

    def _write(self, area: _Area, key: str, size: int, parts: Sequence[bytes | memoryview]) -> str:
        part = area.write(parts)
        try:
            with self._lock:
                file = self._files.get(key)
                if file is None:  # no other thread was faster
                    file = self._files[key] = _File(move(part, places(area.path, key)), size)
                    self._keys[file.path] = key
                    self._used += size
                file.uses += 1
                return file.path
        finally:
            with contextlib.suppress(OSError):  # most often it has its name by now
                os.unlink(part)


class _Area:
    """The folder of one process on one disk."""

    def __init__(self, folder: Path, parent: int | None, is_left: bool) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(errno.EACCES, "it is another user's")
        housekeeping.sweep_transit(folder)
        owner = living.token(parent)
        if is_left:
            _remove_left(folder, owner)
        self.path = folder / f"{owner}.{os.getpid()}.{next(_numbers)}"
        self.path.mkdir(mode=0o700)
        fd = open_private(self.path / "lease", os.O_RDWR | os.O_CREAT)
        with contextlib.suppress(OSError):
            flock(fd)
        self._end: Callable[[], object] = functools.partial(_remove, str(self.path), fd)
        if not is_left:  # not atexit, which worker processes do not run
            self._end = util.Finalize(self, _remove, (str(self.path), fd), exitpriority=10)

    def write(self, parts: Sequence[bytes | memoryview]) -> str:
        """Writes a file that has no name yet. Returns its path.

        Raises:
            OSError: The disk is full or failed.
        """
        place = f"{self.path}/part.{next(_numbers)}"
        fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for part in parts:
                write_all(fd, part)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(place)
            raise
        finally:
            os.close(fd)
        return place

    def remove(self) -> None:
        """Removes all of it; twice is fine."""
        self._end()


def _remove(folder: str, fd: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    release_private(fd)


def _remove_left(folder: Path, owner: str) -> None:
    """Removes what children of a process left that have ended."""
    with os.scandir(folder) as found:
        left = [entry.path for entry in found if entry.name.startswith(f"{owner}.")]
    for path in left:
        with contextlib.suppress(OSError):  # TimeoutError: its process runs
            fd = open_private(f"{path}/lease", os.O_RDWR)
            try:
                if flock(fd):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                close_private(fd)
