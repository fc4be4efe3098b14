"""A cache of volumes' files on the local disk, shared by all processes and jobs of a user on a host.

Guarantee: it never holds more than its limit, nor takes the disk below its floor, except for a moment by what is being
written at once. What is admitted stays as long as its dataset is in use (keep-first: with a cache of half the data
half of the reads hit, where evicting the least recently used would keep almost nothing); datasets that nobody uses make
room, the one that was used longest ago first. A disk that is full or fails slows and never stops: files are refused,
which is said once. A folder that is no cache, or another user's, is refused and left as it is.
"""

from __future__ import annotations

import inspect
import logging
import mmap
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.data.cache.amounts import Amount
from framework.data.cache.housekeeping import Housekeeping
from framework.data.cache.layout import Layout, default_roots
from framework.data.cache.locks import exclusive
from framework.data.cache.space import CacheSpace
from framework.data.cache.usage import Usage
from framework.errors import ConfigError, suggest

log = logging.getLogger(__name__)

SLICE_SECONDS = 0.05  # how long an admission may tidy up
RETRY_SECONDS = 5.0  # after the cache was found full
PAUSE_SECONDS = 30.0  # after its disk failed
PREPARE_SECONDS = 30.0  # for another process to count an unknown cache


class LocalCache:
    """The cache. Making this object touches nothing; `open` makes the folder.

    Args:
        root: Its folder, on a local disk; default one of this user below $XDG_CACHE_HOME, ~/.cache or /tmp, not on a
            network mount.
        limit: How much it may hold: bytes, `200GB`, or a part of the disk, `80%`.
        min_free: How much of the disk it leaves free for others: bytes, `20GB`, or a part of the disk, `10%`.

    Attributes:
        root: The folder.

    Raises:
        ConfigError: An amount cannot be read.
    """

    def __init__(
        self, root: Path | str | None = None, limit: float | str = "80%", min_free: float | str = "10%"
    ) -> None:
        self.limit = Amount.parse(limit, key="cache.limit")
        self.min_free = Amount.parse(min_free, key="cache.min_free")
        self.root = Path(root).absolute() if root is not None else default_root()
        self.layout = Layout(self.root)
        self.usage = Usage(self.layout.usage)
        self.housekeeping = Housekeeping(self.layout, self.usage)
        self._refused_size = 0  # files of that size and more have no room
        self._refused_until = 0.0  # by the monotonic clock
        self._once = _Once()

    def open(self, fingerprint: str, label: str = "") -> CacheSpace:
        """The files of one dataset. Cheap for a cache that exists.

        Args:
            fingerprint: What identifies the dataset. Since files are known by key, size and stamp, that should be where
                they come from: then a dataset that grew finds what it had.
            label: The same in words, for `cache ls`.

        Raises:
            ConfigError: The folder cannot be made, is another user's, or is used for something else.
        """
        self.prepare()
        return CacheSpace(self, fingerprint, label)

    def prepare(self) -> None:
        """Makes the folder.

        Raises:
            ConfigError: It cannot be made, is another user's, or is used for something else.
        """
        self.layout.prepare()
        if self.usage.read() is None:
            try:
                self.layout.data.mkdir(exist_ok=True)
                with exclusive(self.layout.chores, PREPARE_SECONDS):
                    self.housekeeping.recount_if_due()
            except OSError as error:
                self.refused(error)

    def reserve(self, size: int) -> bool:
        """Counts the bytes of a file that is about to be written. Returns false if there is no room for it."""
        if size >= self._refused_size and time.monotonic() < self._refused_until:
            return False
        try:
            if self._take(size):
                return True
            if size > self.limit.of(_Disk(self.root).total):  # nothing that goes would make room for it
                return False
            may_change = self.housekeeping.make_room(lambda: self._has_room(size), SLICE_SECONDS)
            if self._take(size):
                return True
            if not may_change:
                self._say_full()
                self._refuse(size, RETRY_SECONDS)
        except TimeoutError:  # a process holds the counter, and is stopped perhaps
            self._refuse(0, RETRY_SECONDS)
        except OSError as error:
            self.refused(error)
        return False

    def refused(self, error: OSError | ConfigError) -> None:
        """Takes no more files for a while, since the disk failed; says so once."""
        self._refuse(0, PAUSE_SECONDS)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if self._once.is_first(reason):
            log.warning(
                "the cache %s takes no files for now: %s. What is not in it is read from the volume each time, so this "
                "is slower, not wrong. Free some space, lower cache.limit, or give another folder with cache.root.",
                self.root,
                reason,
            )

    def _refuse(self, size: int, seconds: float) -> None:
        self._refused_size = size
        self._refused_until = time.monotonic() + seconds

    def _say_full(self) -> None:
        if self._once.is_first("full"):
            disk = _Disk(self.root)
            count = self.usage.read()
            log.warning(
                "the cache %s is full: it holds %s (cache.limit: %s), and the disk has %s free (cache.min_free: %s). "
                "What is not in it is read from the volume each time.",
                self.root,
                _text(count.total if count is not None else 0),
                _text(self.limit.of(disk.total)),
                _text(disk.free),
                _text(self.min_free.of(disk.total)),
            )

    def _take(self, size: int) -> bool:
        disk = _Disk(self.root)
        is_above_floor = disk.free - size >= self.min_free.of(disk.total)
        return is_above_floor and self.usage.reserve(size, self.limit.of(disk.total))

    def _has_room(self, size: int) -> bool:
        disk, count = _Disk(self.root), self.usage.read()
        is_above_floor = disk.free - size >= self.min_free.of(disk.total)
        return is_above_floor and count is not None and count.total + size <= self.limit.of(disk.total)


class _Disk:
    """Bytes of the disk that a folder is on, and how many of them are free."""

    def __init__(self, folder: Path) -> None:
        found = os.statvfs(folder)
        self.total = found.f_blocks * found.f_frsize
        self.free = found.f_bavail * found.f_frsize


class _Once:
    """What was said already, by this process and those that it forked."""

    def __init__(self) -> None:
        self._said = mmap.mmap(-1, mmap.PAGESIZE)

    def is_first(self, text: str) -> bool:
        """Whether it was not said before."""
        place = zlib.crc32(text.encode(errors="replace")) % len(self._said)
        was_said, self._said[place] = self._said[place], 1
        return not was_said

    def __reduce__(self) -> tuple[type[_Once], tuple[()]]:
        return _Once, ()


def _text(size: int) -> str:
    for unit, length in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size} bytes"


def default_root() -> Path:
    """Where a cache lies by default: the best place that this process may write. Nothing is made."""
    places = default_roots()
    return next((place for place in places if _is_writable(place)), places[0])


def open_cache(value: LocalCache | Mapping[str, Any] | Path | str | bool | None) -> LocalCache | None:
    """The cache that an option names.

    Args:
        value: A cache; its arguments as a mapping; its folder; none or true: the default one, if it can be had; false:
            none.

    Raises:
        ConfigError: There is no such argument, or the cache cannot be used.
    """
    if value is False or isinstance(value, LocalCache):
        return value or None
    if value is None or value is True:
        cache = LocalCache()
        try:
            cache.prepare()
        except ConfigError as error:
            log.warning("there is no cache, so files are read from the volume each time: %s", error)
            return None
        return cache
    if isinstance(value, (str, Path)):
        value = {"root": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"cache={value!r}: give a folder, false, or a mapping such as {{root: ..., limit: 200GB}}.")
    known = list(inspect.signature(LocalCache).parameters)
    for name in value:
        if name not in known:
            raise ConfigError(
                f"cache.{name}: there is no such option.{suggest(str(name), known)} Known: {', '.join(known)}."
            )
    cache = LocalCache(**value)
    cache.prepare()
    return cache


def _is_writable(place: Path) -> bool:
    while not place.exists():
        if place == place.parent:
            return False
        place = place.parent
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)
