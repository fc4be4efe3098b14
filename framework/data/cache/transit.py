"""Files on their way: what the cache does not keep, as local paths for as long as they are in use.

Guarantee: a path is valid until it was released as often as it was written. Each process has a folder of its own, which
goes with it; what a killed process left is removed by the next one. Where the disk of the cache is full the folder for
temporary files is used. Safe to use from several threads; a forked process begins with nothing.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path

from framework.data.cache import housekeeping, living
from framework.data.cache.layout import hashed, named
from framework.data.cache.locks import close_private, flock, open_private
from framework.errors import DataError
from framework.volume.durable import write_all

LIMIT = 1 << 30  # bytes
_numbers = itertools.count()


class TransitArea:
    """Files of one process that are not kept. Making this object touches nothing.

    Args:
        folder: Where the processes of a dataset have their folders.
        limit: Bytes, above which `has_room` says no; default 1 GiB.
    """

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self.limit = LIMIT if limit is None else limit
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._areas: dict[Path, _Area] = {}
        self._uses: dict[str, list[int]] = {}  # path: how often it is in use, its bytes
        self._paths: dict[str, str] = {}  # key: path
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
                f"{key} has {size:,} bytes by its listing, and {got:,} came: it was cut off, or changed since it was listed."
            )
        self._check_process()
        with self._lock:
            path = self._paths.get(key)
            if path is None:
                path = self._paths[key] = self._written(key, parts)
                self._uses[path] = [0, size]
                self._used += size
            self._uses[path][0] += 1
        return Path(path)

    def release(self, path: Path | str) -> None:
        """Says that a path is not in use any more; one that was not written here is left alone."""
        self._check_process()
        place = os.fspath(path)
        with self._lock:
            uses = self._uses.get(place)
            if uses is None:
                return
            uses[0] -= 1
            if uses[0] == 0:
                del self._uses[place]
                self._paths = {key: other for key, other in self._paths.items() if other != place}
                self._used -= uses[1]
                with contextlib.suppress(OSError):
                    os.unlink(place)

    def close(self) -> None:
        """Removes all files, in use or not. Using it again is fine."""
        if self._pid == os.getpid():
            for area in self._areas.values():
                area.remove()
        self._start()

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self.folder, "limit": self.limit}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._start()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._start()

    def _written(self, key: str, parts: Sequence[bytes | memoryview]) -> str:
        failures = []
        for folder in (self.folder, Path(tempfile.gettempdir()) / f"goodput-transit-{os.geteuid()}"):
            try:
                if folder not in self._areas:
                    self._areas[folder] = _Area(folder)
                return self._areas[folder].write(key, parts)
            except OSError as error:
                failures.append(f"{folder}: {error.strerror or error}")
        raise DataError(
            f"{key} cannot be given as a local path: {'; '.join(failures)}. "
            f"Free some space, or set TMPDIR or cache.root to a disk with room."
        )


class _Area:
    """The folder of one process on one disk."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(errno.EACCES, "it is another user's")
        housekeeping.sweep_transit(folder)
        self._path = folder / f"{living.token()}.{next(_numbers)}"
        self._path.mkdir(mode=0o700)
        fd = open_private(self._path / "lease", os.O_RDWR | os.O_CREAT)
        with contextlib.suppress(OSError):
            flock(fd)
        # not atexit, which worker processes do not run
        self._end = util.Finalize(self, _remove, (str(self._path), fd), exitpriority=10)

    def write(self, key: str, parts: Sequence[bytes | memoryview]) -> str:
        """Writes a file under its own name, or where that cannot be had under another."""
        place = named(self._path, key)
        if place is not None:
            try:
                return _write(place, parts)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                    raise
        return _write(hashed(self._path, key), parts)

    def remove(self) -> None:
        self._end()


def _write(place: str, parts: Sequence[bytes | memoryview]) -> str:
    os.makedirs(os.path.dirname(place), exist_ok=True)
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            for part in parts:
                write_all(fd, part)
        finally:
            os.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(place)
        raise
    return place


def _remove(folder: str, fd: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    close_private(fd)
