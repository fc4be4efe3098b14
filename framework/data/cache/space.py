"""The files of one dataset in the cache.

Guarantee: a path that is given out leads to a whole file. A file gets its name by a rename after all of it was written,
so that a process that is killed at any moment leaves nothing that could be read short; and its size is compared each
time it is asked for, since a machine that loses power may cut it. A version of a file is never taken for another. What
is admitted stays (keep-first); when the cache is full, or its disk fails in whatever way, files are refused and the
caller goes on without. While a process uses a dataset no other process deletes it, unless a person forces that. Safe to
use from several threads and in forked processes; pickles as what it is called, not as what it holds.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.data.cache import housekeeping, living
from framework.data.cache.layout import mark_of, move, place_of, places
from framework.data.cache.locks import close_private, exclusive_byte, flock, open_private, release_private
from framework.data.cache.transit import TransitArea
from framework.errors import ConfigError, DataError
from framework.volume.durable import write_all

if TYPE_CHECKING:
    from framework.data.cache.local import LocalCache

LEASE_SECONDS = 10.0  # for whoever just looks whether a dataset is in use
LOCK_SECONDS = 120.0  # after which a file is fetched although another process may be at it
LOOK_SECONDS = 60.0  # between two notes that a dataset is in use
_RACES = 20
_numbers = itertools.count()
_starting = threading.Lock()


def _start_anew() -> None:
    global _starting
    _starting = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_start_anew)


class CacheSpace:
    """The files of one dataset. Made by `LocalCache.open`; the first use takes a lease for this process.

    A file is known by its key, its size and a stamp: pass the time of modification or the etag of the source, so that
    a file which changed there is not taken from the cache.

        path = space.path(key, size, stamp)
        if path is None:
            with space.lock(key):                       # another process may be fetching it: wait for that
                path = space.path(key, size, stamp)
                if path is None:
                    admission = space.admit(key, size, stamp)   # none: no room
                    data = ...                                  # from the volume
                    path = admission.write([data]) if admission is not None else None

    Args:
        cache: The cache.
        fingerprint: What identifies the dataset: where its files come from.
        label: The same in words, for `cache ls`.

    Attributes:
        folder: The folder of the dataset.
    """

    def __init__(self, cache: LocalCache, fingerprint: str, label: str = "") -> None:
        self.cache = cache
        self.fingerprint = fingerprint
        self.label = label
        self.folder = cache.layout.dataset(fingerprint)
        self._mine: _Lease | None = None

    def path(self, key: str, size: int, stamp: str | int = "") -> Path | None:
        """Where a file is, if it is in the cache and whole.

        Args:
            key: Its name.
            size: Its bytes.
            stamp: What tells versions of it apart.
        """
        self.lease()
        mark = mark_of(key, size, stamp)
        for place in places(self.folder, key):
            try:
                found = os.stat(place)
            except FileNotFoundError:
                return None
            except OSError:
                continue
            if found.st_size == size and int(found.st_mtime) == mark:
                return Path(place)
            if stat.S_ISREG(found.st_mode):
                return None
        return None

    def admit(self, key: str, size: int, stamp: str | int = "") -> Admission | None:
        """Leave to put a file into the cache, with its bytes counted; none if there is no room, or no file is taken.

        Use `Admission.write` or `Admission.cancel`, one of them.

        Args:
            key: Its name.
            size: Its bytes.
            stamp: What tells versions of it apart.
        """
        if not self.lease() or not self.cache.reserve(size):
            return None
        try:
            return Admission(self, key, size, mark_of(key, size, stamp))
        except OSError as error:
            self.cache.usage.add(-size)
            self._failed(error)
            return None

    @contextlib.contextmanager
    def lock(self, key: str, timeout_seconds: float = LOCK_SECONDS) -> Iterator[bool]:
        """Keeps other processes and threads from fetching the same file at once. It only saves bandwidth.

        Yields:
            Whether it is locked; if not, there are no locks here or the wait was too long. Go on in both cases.
        """
        with exclusive_byte(self.cache.layout.locks, place_of(f"{self.fingerprint}/{key}"), timeout_seconds) as locked:
            yield locked

    def lease(self) -> bool:
        """Keeps the dataset from being deleted until `close`, or until this process ends. Twice is fine.

        Returns:
            Whether files can be admitted: the folder of the dataset can be written.
        """
        mine = self._mine
        if mine is None or not mine.is_good():
            with _starting:
                mine = self._mine
                if mine is None or not mine.is_good():
                    if mine is not None:
                        mine.close()
                    mine = self._mine = _Lease(self)
        return mine.is_writable

    def transit(self, limit: int | None = None, *, parent: int | None = None, is_left: bool = False) -> TransitArea:
        """A new place of this process for files that are not kept.

        Args:
            limit: Bytes in it, above which `TransitArea.has_room` says no; default 1 GiB.
            parent, is_left: As in `TransitArea`.
        """
        self.lease()
        return TransitArea(self.folder / "transit", limit, parent=parent, is_left=is_left)

    def close(self) -> None:
        """Gives the lease back: the dataset may be deleted from then on. Using it again takes another."""
        mine, self._mine = self._mine, None
        if mine is not None:
            mine.close()

    def __enter__(self) -> CacheSpace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mine": None}

    def _failed(self, error: OSError) -> None:
        if (
            isinstance(error, FileNotFoundError) and self.cache.layout.marker.exists()
        ):  # the folder was deleted by force: it is made anew
            if self._mine is not None:
                self._mine.is_lost = True
        else:
            self.cache.refused(error)


class _Lease:
    """What one process holds while it uses a dataset."""

    def __init__(self, space: CacheSpace) -> None:
        self.pid = os.getpid()
        self.is_writable = False
        self.is_lost = False  # the folder was deleted by force
        self._fd = -1
        self._next_look = time.monotonic() + LOOK_SECONDS
        try:
            if not space.cache.layout.exists():  # it may be a disk that is not mounted any more: nothing is made there
                raise FileNotFoundError(errno.ENOENT, "its folder is gone")
            self._take(space.folder)
            self.is_writable = True
            _describe(space)
            housekeeping.sweep(space.folder, space.cache.usage)
        except (OSError, ConfigError) as error:
            self.is_writable = False
            space.cache.refused(error)

    def _take(self, folder: Path) -> None:
        for _ in range(_RACES):
            try:
                (folder / "parts").mkdir(parents=True, exist_ok=True)
                self._fd = open_private(folder / "lease", os.O_RDWR | os.O_CREAT)
            except OSError:
                with contextlib.suppress(OSError):  # what is there can be read
                    self._fd = open_private(folder / "lease", os.O_RDONLY)
                    flock(self._fd, shared=True, timeout_seconds=LEASE_SECONDS)
                raise
            flock(self._fd, shared=True, timeout_seconds=LEASE_SECONDS)
            if _is_same(folder / "lease", self._fd):
                os.utime(self._fd)
                return
            self.close()  # the dataset was deleted while this waited
        raise OSError(errno.EBUSY, "the dataset is deleted again and again", str(folder))

    def is_good(self) -> bool:
        """Whether it is this process's, and need not be taken anew; notes now and then that the dataset is in use."""
        if self.pid != os.getpid() or self.is_lost:
            return False
        if time.monotonic() < self._next_look:
            return True
        self._next_look = time.monotonic() + LOOK_SECONDS
        if not self.is_writable:  # it may be by now
            return False
        with contextlib.suppress(OSError):
            os.utime(self._fd)
        return True

    def close(self) -> None:
        """Gives it back; in a forked child there is nothing to give."""
        fd, self._fd = self._fd, -1
        if fd >= 0 and self.pid == os.getpid():
            with contextlib.suppress(OSError):
                os.utime(fd)
            release_private(fd)


def _is_same(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


class Admission:
    """Leave to put one file into the cache. Made by `CacheSpace.admit`. Not for use in another process.

    Raises:
        OSError: The disk refuses.
    """

    def __init__(self, space: CacheSpace, key: str, size: int, mark: int) -> None:
        self.key = key
        self.size = size
        self._space = space
        self._mark = mark
        self._pid = os.getpid()
        # Beside each counted file lies one that says so, from the beginning: after a kill the count can be put right.
        self._part = f"{space.folder}/parts/{living.token()}.{next(_numbers)}.{size}"
        self._fd = open_private(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with contextlib.suppress(OSError):
            flock(self._fd)  # others see that it is being written

    def write(self, parts: Iterable[bytes | memoryview]) -> Path | None:
        """Writes the file.

        Args:
            parts: Its bytes in order, in pieces of any length.

        Returns:
            Where it is; none if the disk is full or failed, which is said once: go on without the cache.

        Raises:
            DataError: The parts have another size in sum; nothing is kept.
            Exception: What `parts` raised, as it is; nothing is kept then either.
        """
        assert self._fd >= 0, "an admission is for one file"
        place = None
        try:
            self._fill(parts)
            place = self._publish()
        except _DiskFailed as failed:
            self._space._failed(failed.error)
        finally:
            if place is None:
                self.cancel()
            else:
                self._close()
        return place

    def cancel(self) -> None:
        """Gives the counted bytes back: the file is not written. Twice, or after `write`, is fine."""
        if self._fd >= 0 and self._pid == os.getpid():
            self._close()
            with contextlib.suppress(OSError):
                os.unlink(self._part)
                self._space.cache.usage.add(-self.size)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        close_private(fd)

    def _fill(self, parts: Iterable[bytes | memoryview]) -> None:
        written = 0
        for data in parts:
            written += memoryview(data).nbytes
            if written > self.size:
                break
            with _disk():
                write_all(self._fd, data)
        if written != self.size:
            more = " or more" if written > self.size else ""
            raise DataError(
                f"{self.key} has {self.size:,} bytes by its listing, and {written:,}{more} came: it was cut off, or "
                f"changed since it was listed. Nothing of it was kept."
            )
        with _disk():
            if os.fstat(self._fd).st_size != self.size:
                raise OSError(errno.EIO, "the disk keeps fewer bytes than it took")
            os.utime(self._fd, (time.time(), self._mark))

    def _publish(self) -> Path:
        targets = list(places(self._space.folder, self.key))
        with _disk():
            before = {target: _size(target) for target in targets}
            place = move(self._part, targets)
        self._space.cache.usage.add(-before[place])  # of another version
        return Path(place)


class _DiskFailed(Exception):
    """The disk of the cache failed, not the source of a file."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _DiskFailed(error) from error


def _size(place: str) -> int:
    try:
        found = os.lstat(place)
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _describe(space: CacheSpace) -> None:
    """Says beside the files where they come from."""
    about = space.folder / "about.json"
    if not about.exists():
        part = space.folder / "parts" / f"{living.token()}.{next(_numbers)}.0"
        part.write_text(json.dumps({"fingerprint": space.fingerprint, "label": space.label}))
        os.replace(part, about)
